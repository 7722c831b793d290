"""Options that were given and change nothing, or are replaced: a sentence each, for the log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sgl_spec.contradictions import GRAPH_SIZES
from sgl_spec.draft_shape import grown_shape
from sgl_spec.options import flag_of, is_given

if TYPE_CHECKING:
    from sgl_spec.args import ServerArgs

GPU_OPTIONS = ("disable_overlap_schedule", "disable_cuda_graph", *GRAPH_SIZES)


def unused(args: ServerArgs) -> Iterator[str]:
    """Sentences about options that were given and change nothing beside the others."""
    yield from _without_a_gpu(args)
    if args.speculative_algorithm is not None:
        return
    for name, field in type(args).__dataclass_fields__.items():
        is_drafting = name.startswith("speculative_") and name != "speculative_algorithm"
        if is_drafting and getattr(args, name) != field.default:
            yield f"{flag_of(name)} changes nothing without --speculative-algorithm."


def _without_a_gpu(args: ServerArgs) -> Iterator[str]:
    if args.device != "cpu" or args.attention_backend == "triton":  # which is how it is tested
        return
    for name in GPU_OPTIONS:
        if is_given(args, name):
            yield f"{flag_of(name)} changes nothing on a CPU."


def overruled(args: ServerArgs) -> Iterator[str]:
    """Sentences about values that others replace."""
    if args.mem_fraction_static is not None and args.max_total_tokens is not None:
        yield "--mem-fraction-static changes nothing beside --max-total-tokens."
    shape, nodes = grown_shape(args), args.speculative_num_draft_tokens
    if shape is not None and nodes not in (None, shape.nodes):
        yield (
            f"--speculative-num-draft-tokens {nodes} becomes {shape.nodes}: a chain "
            f"(--speculative-eagle-topk 1) of --speculative-num-steps {shape.steps} has one node "
            "per step and the root."
        )
