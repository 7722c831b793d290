"""The shape of draft trees that the flags ask for. Pure functions of options, no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sgl_spec.args import ServerArgs

EMBEDDED_MODEL = "smollm2"
EMBEDDED_ARCHITECTURE = "LlamaForCausalLM"
MODEL_DRAFTERS = ("EAGLE", "EAGLE3", "STANDALONE")
# Draft models of the embedded target that come with the package.
EMBEDDED_DRAFTS = {"EAGLE3": "smollm2-eagle3", "STANDALONE": "smollm2-draft"}

DRAFT_TOKENS = 12  # of drafters that choose the shape of their trees
MAX_NODES = 64  # of a tree, root included: an ancestor set is one 64-bit word
MAX_DRAFT_COLUMNS = 64  # KV columns that draft steps see beside the text, for the same reason


@dataclass(frozen=True, slots=True)
class SampledShape:
    """Levels below the root, children per node, and nodes (root included) of sampled trees."""

    steps: int
    topk: int
    nodes: int

    @property
    def capacity(self) -> int:
        """Nodes that the levels can hold."""
        held = level = 1
        for _ in range(min(self.steps, MAX_NODES)):
            level = min(level * self.topk, MAX_NODES)
            held += level
        return held


@dataclass(frozen=True, slots=True)
class GrownShape:
    """Draft steps, branches kept per step, and nodes (root included) of trees that a draft model
    grows."""

    steps: int
    topk: int
    nodes: int

    @property
    def candidates(self) -> int:
        """Nodes that the steps look at, of which the best become the tree."""
        return self.topk + (self.steps - 1) * self.topk**2

    @property
    def columns(self) -> int:
        """Draft KV columns that the last draft forward sees beside the text."""
        return (self.steps - 1) * self.topk


_TREE = GrownShape(steps=5, topk=4, nodes=8)
_CHAIN = GrownShape(steps=3, topk=1, nodes=4)


def automatic_shape(algorithm: str, architecture: str) -> GrownShape:
    """The shape where no flag gives one: SGLang's."""
    tree = algorithm != "STANDALONE" and architecture == "LlamaForCausalLM"
    return _TREE if tree else _CHAIN


def grown_shape(args: ServerArgs) -> GrownShape | None:
    """The shape of the trees that a draft model grows; None for other drafters, and while it
    depends on the target's architecture. Flags that give half a shape are refused before."""
    name = args.speculative_algorithm
    if name not in MODEL_DRAFTERS or sampling_flag(args) is not None:
        return None
    steps, topk = args.speculative_num_steps, args.speculative_eagle_topk or 1
    if steps is None:
        known = name == "STANDALONE" or args.model_path == EMBEDDED_MODEL
        return automatic_shape(name, EMBEDDED_ARCHITECTURE) if known else None
    nodes = steps + 1 if topk == 1 else args.speculative_num_draft_tokens
    assert nodes is not None
    return GrownShape(steps=steps, topk=topk, nodes=nodes)


def is_open(args: ServerArgs) -> bool:
    """Whether the shape depends on the target's architecture."""
    grows = args.speculative_algorithm in MODEL_DRAFTERS and sampling_flag(args) is None
    return grows and grown_shape(args) is None


def sampled_shape(args: ServerArgs) -> SampledShape | None:
    """The shape that the flags ask for where drafts are sampled, else None: a chain unless topk
    says otherwise, as deep as steps or the number of nodes allow."""
    if args.speculative_algorithm is None or sampling_flag(args) is None:
        return None
    topk, steps = args.speculative_eagle_topk or 1, args.speculative_num_steps
    nodes = args.speculative_num_draft_tokens
    if nodes is None:
        deep = steps or _sampled_steps(args.speculative_algorithm)
        full = SampledShape(steps=deep, topk=topk, nodes=MAX_NODES).capacity
        nodes = full if topk == 1 else min(full, DRAFT_TOKENS)
    return SampledShape(steps=steps or nodes - 1, topk=topk, nodes=nodes)


def _sampled_steps(algorithm: str) -> int:
    if algorithm == "STANDALONE":
        return _CHAIN.steps
    return _TREE.steps if algorithm in MODEL_DRAFTERS else DRAFT_TOKENS - 1


def sampling_flag(args: ServerArgs) -> str | None:
    """The flag that asks for sampled drafts, or None."""
    if args.speculative_use_block_verification:
        return "--speculative-use-block-verification"
    if args.speculative_use_rejection_sampling:
        return "--speculative-use-rejection-sampling"
    return None


def tree_nodes(args: ServerArgs) -> int:
    """Most nodes that one request verifies in a round: 1 (the root) without speculation. The shape
    must not be open."""
    if args.speculative_algorithm is None:
        return 1
    shape = grown_shape(args) or sampled_shape(args)
    return shape.nodes if shape else args.speculative_num_draft_tokens or DRAFT_TOKENS


def round_slots(args: ServerArgs) -> int:
    """Most KV slots that one request's round may write behind its text: the tree's nodes, or the
    rows of the draft steps where these are more. The shape must not be open."""
    nodes = tree_nodes(args)
    shape = grown_shape(args)
    return max(nodes, shape.steps * shape.topk) if shape else nodes
