"""Combinations of options that cannot work together: one pure function each, first one wins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sgl_spec.options import flag_of, near

if TYPE_CHECKING:
    from sgl_spec.args import ServerArgs

EMBEDDED_MODEL = "smollm2"
DRAFT_TOKENS = 12
MAX_NODES = 64  # of a tree, root included
BUILT_IN_DRAFTERS = ("NGRAM",)
# Algorithms of SGLang that this version does not have. A plug-in may not take their names: a launch
# line written for SGLang would then mean something else.
ABSENT_DRAFTERS = (
    "EAGLE",
    "EAGLE3",
    "NEXTN",
    "STANDALONE",
    "FROZEN_KV_MTP",
    "DFLASH",
    "DSPARK",
    "UNO",
)
MODEL_DRAFTER_OPTIONS = (
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
)


THRESHOLD_OPTIONS = (
    "speculative_accept_threshold_single",
    "speculative_accept_threshold_acc",
)


def contradiction(args: ServerArgs) -> str | None:
    """The sentence for the first thing that cannot work, or None."""
    for check in _CHECKS:
        refusal = check(args)
        if refusal is not None:
            return refusal
    return None


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


def sampled_shape(args: ServerArgs) -> SampledShape | None:
    """The shape that the flags ask for where drafts are sampled, else None: a chain unless topk
    says otherwise, as deep as steps or the number of nodes allow."""
    if args.speculative_algorithm is None or sampling_flag(args) is None:
        return None
    topk, steps = args.speculative_eagle_topk or 1, args.speculative_num_steps
    nodes = args.speculative_num_draft_tokens
    if nodes is None:
        full = SampledShape(steps=steps or DRAFT_TOKENS - 1, topk=topk, nodes=MAX_NODES).capacity
        nodes = full if topk == 1 else min(full, DRAFT_TOKENS)
    return SampledShape(steps=steps or nodes - 1, topk=topk, nodes=nodes)


def sampling_flag(args: ServerArgs) -> str | None:
    """The flag that asks for sampled drafts, or None."""
    if args.speculative_use_block_verification:
        return "--speculative-use-block-verification"
    if args.speculative_use_rejection_sampling:
        return "--speculative-use-rejection-sampling"
    return None


def unused(args: ServerArgs) -> Iterator[str]:
    """Sentences about options that were given and change nothing beside the others."""
    if args.speculative_algorithm is not None:
        return
    for name, field in type(args).__dataclass_fields__.items():
        is_drafting = name.startswith("speculative_") and name != "speculative_algorithm"
        if is_drafting and getattr(args, name) != field.default:
            yield f"{flag_of(name)} changes nothing without --speculative-algorithm."


def _algorithm(args: ServerArgs) -> str | None:
    name = args.speculative_algorithm
    if name is None or name in BUILT_IN_DRAFTERS:
        return None
    if name in ABSENT_DRAFTERS:
        return (
            f"--speculative-algorithm {name} is not supported by this version; "
            "allowed are none, NGRAM and names that --speculative-drafter-module registers."
        )
    if args.speculative_drafter_module is not None:
        return None
    hint = near(name, BUILT_IN_DRAFTERS)
    return (
        f"--speculative-algorithm must be none or NGRAM, got {name!r}{hint}; "
        "a drafter of your own needs --speculative-drafter-module."
    )


def _drafter_options(args: ServerArgs) -> str | None:
    if args.speculative_algorithm != "NGRAM":
        return None
    for name in MODEL_DRAFTER_OPTIONS:
        value = getattr(args, name)
        if value is not None:
            return (
                f"{flag_of(name)} {value} cannot be used with --speculative-algorithm NGRAM, "
                "which has no draft model; leave it out."
            )
    return None


def _sampled_drafter(args: ServerArgs) -> str | None:
    flag = sampling_flag(args)
    if flag is None or args.speculative_algorithm != "NGRAM":
        return None
    return (
        f"{flag} cannot be used with --speculative-algorithm NGRAM, which copies its drafts and "
        "has no distribution to sample them from; leave it out."
    )


def _sampled_rule(args: ServerArgs) -> str | None:
    flag = sampling_flag(args)
    if flag is None:
        return None
    for name in THRESHOLD_OPTIONS:
        if getattr(args, name) != 1:
            return (
                f"{flag} judges drafts by p/q and has no use for {flag_of(name)} "
                f"{getattr(args, name)}; leave one of them out."
            )
    topk = args.speculative_eagle_topk
    if args.speculative_use_block_verification and topk not in (None, 1):
        return (
            "--speculative-use-block-verification judges chains: --speculative-eagle-topk must be "
            f"1, got {topk}."
        )
    return None


def _sampled_nodes(args: ServerArgs) -> str | None:
    shape = sampled_shape(args)
    if shape is None:
        return None
    if shape.nodes > MAX_NODES:
        return (
            f"--speculative-num-steps must be at most {MAX_NODES - 1} for a sampled chain, got "
            f"{shape.steps}."
        )
    if shape.nodes <= shape.capacity:
        return None
    return (
        f"--speculative-num-draft-tokens must be at most {shape.capacity}, what "
        f"--speculative-num-steps {shape.steps} levels of --speculative-eagle-topk {shape.topk} "
        f"hold, got {shape.nodes}."
    )


def _breadth(args: ServerArgs) -> str | None:
    low, high = args.speculative_ngram_min_bfs_breadth, args.speculative_ngram_max_bfs_breadth
    if low <= high:
        return None
    return (
        "--speculative-ngram-min-bfs-breadth must be at most --speculative-ngram-max-bfs-breadth "
        f"({high}), got {low}."
    )


def _pages(args: ServerArgs) -> str | None:
    chunk, page = args.chunked_prefill_size, args.page_size
    if chunk is None or chunk == -1 or chunk % page == 0:
        return None
    return f"--chunked-prefill-size must be -1 or a multiple of --page-size ({page}), got {chunk}."


def _pool(args: ServerArgs) -> str | None:
    if args.max_total_tokens is None:
        return None
    nodes = 1
    if args.speculative_algorithm is not None:
        shape = sampled_shape(args)
        nodes = shape.nodes if shape else args.speculative_num_draft_tokens or DRAFT_TOKENS
    # One prompt token, and the reserve of two rounds that every running request holds.
    needed = -(-(1 + 2 * nodes) // args.page_size) * args.page_size
    if args.max_total_tokens >= needed:
        return None
    return (
        f"--max-total-tokens must be at least {needed} to hold one request with {nodes} tree nodes "
        f"at --page-size {args.page_size}, got {args.max_total_tokens}."
    )


def _policy(args: ServerArgs) -> str | None:
    if args.schedule_policy == "lpm" and args.disable_radix_cache:
        return (
            "--schedule-policy lpm orders requests by their cached prefix and needs the cache; "
            "use fcfs or drop --disable-radix-cache."
        )
    return None


def _revision(args: ServerArgs) -> str | None:
    if args.revision is not None and args.model_path == EMBEDDED_MODEL:
        return (
            f"--revision {args.revision} names a version on a hub; "
            f"the embedded model {EMBEDDED_MODEL} has only one, leave it out."
        )
    return None


_CHECKS = (
    _algorithm,
    _drafter_options,
    _sampled_drafter,
    _sampled_rule,
    _sampled_nodes,
    _breadth,
    _pages,
    _pool,
    _policy,
    _revision,
)
