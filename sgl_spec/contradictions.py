"""Combinations of options that cannot work together: one pure function each, first one wins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sgl_spec.options import flag_of, near

if TYPE_CHECKING:
    from sgl_spec.args import ServerArgs

EMBEDDED_MODEL = "smollm2"
DRAFT_TOKENS = 12
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


def contradiction(args: ServerArgs) -> str | None:
    """The sentence for the first thing that cannot work, or None."""
    for check in (_algorithm, _drafter_options, _breadth, _pages, _pool, _policy, _revision):
        refusal = check(args)
        if refusal is not None:
            return refusal
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
        nodes = args.speculative_num_draft_tokens or DRAFT_TOKENS
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
