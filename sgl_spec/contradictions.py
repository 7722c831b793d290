"""Combinations of options that cannot work together: one pure function each."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, cast

from sgl_spec.draft_shape import (
    EMBEDDED_DRAFTS,
    EMBEDDED_MODEL,
    MAX_DRAFT_COLUMNS,
    MAX_NODES,
    MODEL_DRAFTERS,
    grown_shape,
    is_open,
    round_slots,
    sampled_shape,
    sampling_flag,
    tree_nodes,
)
from sgl_spec.options import SoundOptions, Unsound, flag_of, is_given, near

if TYPE_CHECKING:
    from sgl_spec.args import ServerArgs

BUILT_IN_DRAFTERS = ("NGRAM", *MODEL_DRAFTERS)
# Algorithms of SGLang that this version does not have. A plug-in may not take their names: a launch
# line written for SGLang would then mean something else.
ABSENT_DRAFTERS = ("NEXTN", "FROZEN_KV_MTP", "DFLASH", "DSPARK", "UNO")
MODEL_DRAFTER_OPTIONS = (
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_load_format",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_draft_sampling",
    "speculative_token_map",
)

THRESHOLD_OPTIONS = (
    "speculative_accept_threshold_single",
    "speculative_accept_threshold_acc",
)


GRAPH_SIZES = ("cuda_graph_max_bs", "cuda_graph_bs")


def contradictions(args: ServerArgs, unsound: Collection[str] = ()) -> list[str]:
    """The sentences for what cannot work. unsound: options that stand refused already. A check is
    left out if it reads one of these, or an option that an earlier check spoke of: what it says
    may no longer be true once that is mended."""
    found, sound = [], SoundOptions(args, unsound)
    for check in _CHECKS:
        sound.read.clear()
        with contextlib.suppress(Unsound):
            refusal = check(cast("ServerArgs", sound))
            if refusal is not None:
                found.append(refusal)
                sound.refuse_read()
    return found


def _no_gpu(args: ServerArgs) -> str | None:
    """What only a GPU does, before any clash among such flags: a CPU is what is wrong with them."""
    if args.device != "cpu":
        return None
    if args.attention_backend == "flashinfer":
        return "--attention-backend flashinfer needs a GPU; allowed on a CPU: torch."
    drafting = args.speculative_algorithm == "NGRAM" and args.attention_backend != "triton"
    if drafting and args.speculative_ngram_index == "device":
        return "--speculative-ngram-index device needs a GPU; allowed on a CPU: trie."
    return None


def _algorithm(args: ServerArgs) -> str | None:
    name = args.speculative_algorithm
    if name is None or name in BUILT_IN_DRAFTERS:
        return None
    if name in ABSENT_DRAFTERS:
        instead = "use EAGLE, which is what it means; " if name == "NEXTN" else ""
        return (
            f"--speculative-algorithm {name} is not supported by this version; {instead}"
            f"allowed are none, {', '.join(BUILT_IN_DRAFTERS)} and names that "
            "--speculative-drafter-module registers."
        )
    if args.speculative_drafter_module is not None:
        return None
    hint = near(name, BUILT_IN_DRAFTERS)
    return (
        f"--speculative-algorithm must be one of none, {', '.join(BUILT_IN_DRAFTERS)}, got "
        f"{name!r}{hint}; a drafter of your own needs --speculative-drafter-module."
    )


def _model_options(args: ServerArgs) -> str | None:
    if args.speculative_algorithm != "NGRAM":
        return None
    return _lines(
        f"{flag_of(name)} {getattr(args, name)} cannot be used with "
        "--speculative-algorithm NGRAM, which has no draft model; leave it out."
        for name in MODEL_DRAFTER_OPTIONS
        if is_given(args, name)
    )


def _lines(sentences: Iterable[str]) -> str | None:
    return "\n".join(sentences) or None


def _ngram_options(args: ServerArgs) -> str | None:
    if args.speculative_algorithm not in MODEL_DRAFTERS:
        return None
    return _lines(
        f"{flag_of(name)} {getattr(args, name)} cannot be used with "
        f"--speculative-algorithm {args.speculative_algorithm}, which matches no n-grams; "
        "leave it out."
        for name in args.__dataclass_fields__
        if name.startswith("speculative_ngram_") and is_given(args, name)
    )


_TRIE_OPTIONS = tuple(
    f"speculative_ngram_{name}"
    for name in ("max_trie_depth", "min_bfs_breadth", "max_bfs_breadth", "match_type")
)


def trie_option(args: ServerArgs) -> str | None:
    """A given option that only the host's trie has."""
    return next((name for name in _TRIE_OPTIONS if is_given(args, name)), None)


def _ngram_index(args: ServerArgs) -> str | None:
    name = trie_option(args)
    if args.speculative_ngram_index != "device" or name is None:
        return None
    return (
        f"{flag_of(name)} {getattr(args, name)} is for --speculative-ngram-index trie, got device; "
        "leave one of them out."
    )


def _draft_path(args: ServerArgs) -> str | None:
    name, path = args.speculative_algorithm, args.speculative_draft_model_path
    if name not in MODEL_DRAFTERS:
        return None
    if path is None and not (args.model_path == EMBEDDED_MODEL and name in EMBEDDED_DRAFTS):
        kinds = " and ".join(EMBEDDED_DRAFTS)
        own = f"only {EMBEDDED_MODEL} has draft models of its own, for {kinds}"
        if args.model_path == EMBEDDED_MODEL:
            own = f"{EMBEDDED_MODEL} brings none for {name}, only for {kinds}"
        return (
            f"--speculative-algorithm {name} needs --speculative-draft-model-path: a directory or "
            f"a hub id ({own})."
        )
    revision, fixed = args.speculative_draft_model_revision, (None, *EMBEDDED_DRAFTS.values())
    if revision is not None and path in (*fixed, EMBEDDED_MODEL):
        return (
            f"--speculative-draft-model-revision {revision} names a version on a hub; the draft "
            "models that come with this server have only one, leave it out."
        )
    return None


def _token_map(args: ServerArgs) -> str | None:
    path, name = args.speculative_token_map, args.speculative_algorithm
    if path is None or name not in ("EAGLE3", "STANDALONE"):
        return None
    own = "brings its own vocabulary" if name == "EAGLE3" else "uses the whole vocabulary"
    return (
        f"--speculative-token-map {path} needs --speculative-algorithm EAGLE, got {name}, whose "
        f"draft {own}; leave it out."
    )


def _draft_sampling(args: ServerArgs) -> str | None:
    flag = sampling_flag(args)
    if flag is None or not is_given(args, "speculative_draft_sampling"):
        return None
    return (
        f"{flag} samples the drafts and has no use for --speculative-draft-sampling "
        f"{args.speculative_draft_sampling}; leave one of them out."
    )


def _half_a_shape(args: ServerArgs) -> str | None:
    if args.speculative_algorithm not in MODEL_DRAFTERS:
        return None
    if args.speculative_num_steps is None:
        for name in ("speculative_eagle_topk", "speculative_num_draft_tokens"):
            if is_given(args, name):
                return (
                    f"{flag_of(name)} {getattr(args, name)} needs --speculative-num-steps beside "
                    "it; give both or neither."
                )
        return None
    topk, grows = args.speculative_eagle_topk or 1, sampling_flag(args) is None
    if topk > 1 and grows and args.speculative_num_draft_tokens is None:
        return (
            f"--speculative-eagle-topk {topk} needs --speculative-num-draft-tokens beside it, the "
            f"nodes of the tree, from 2 to {MAX_NODES}."
        )
    return None


def _grown_tree(args: ServerArgs) -> str | None:
    shape = grown_shape(args)
    if shape is None:
        return None
    if shape.columns > MAX_DRAFT_COLUMNS:
        return (
            "--speculative-num-steps and --speculative-eagle-topk must keep (steps - 1) * topk at "
            f"most {MAX_DRAFT_COLUMNS}, got ({shape.steps} - 1) * {shape.topk} = {shape.columns}."
        )
    if shape.nodes > MAX_NODES:
        return (
            f"--speculative-num-steps must be at most {MAX_NODES - 1} for a chain "
            f"(--speculative-eagle-topk 1), got {shape.steps}."
        )
    if shape.nodes > shape.candidates + 1:
        return (
            f"--speculative-num-draft-tokens must be at most {shape.candidates + 1}, the root and "
            f"the {shape.candidates} candidates of --speculative-num-steps {shape.steps} with "
            f"--speculative-eagle-topk {shape.topk}, got {shape.nodes}."
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


def _simulated(args: ServerArgs) -> str | None:
    mean, name = args.simulate_acc_len, args.speculative_algorithm
    if mean is None:
        return None
    flag = f"--simulate-acc-len {mean:g}"
    if name is None:
        return f"{flag} needs --speculative-algorithm: without drafts a round gives one token."
    judging = [flag_of(n) for n in THRESHOLD_OPTIONS if getattr(args, n) != 1]
    judging += [sampling_flag(args) or ""]
    if any(judging):
        return (
            f"{flag} settles what is accepted, so {next(filter(None, judging))} has nothing to "
            "decide; leave one of them out."
        )
    shape = None if is_open(args) else grown_shape(args)
    most = MAX_NODES if is_open(args) else tree_nodes(args)
    most = most if shape is None else min(most, shape.steps + 1)
    if mean > most:
        return f"--simulate-acc-len must be at most {most}, the levels of the trees, got {mean:g}."
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
    if args.max_total_tokens is None or is_open(args):
        return None
    nodes, most = tree_nodes(args), round_slots(args)
    # A token in and one out, and the reserve of two rounds that every running request holds.
    needed = -(-(2 + 2 * most) // args.page_size) * args.page_size
    if args.max_total_tokens >= needed:
        return None
    rows = f"{nodes} tree node{'s' * (nodes > 1)}"
    if most > nodes:
        rows = f"{most} rows of draft steps"
    return (
        f"--max-total-tokens must be at least {needed} to hold one request with {rows} "
        f"at --page-size {args.page_size}, got {args.max_total_tokens}."
    )


def _graphs(args: ServerArgs) -> str | None:
    given = [name for name in GRAPH_SIZES if is_given(args, name)]
    backend = args.attention_backend
    if given and args.disable_cuda_graph:
        return f"{flag_of(given[0])} sizes what --disable-cuda-graph turns off; leave one out."
    if given and backend not in (None, "triton"):
        return (
            f"{flag_of(given[0])} needs --attention-backend triton, whose forwards can be "
            f"captured in a CUDA graph, got {backend}; leave one of them out."
        )
    most, sizes = args.cuda_graph_max_bs, args.cuda_graph_bs
    if most is not None and sizes is not None and max(sizes) > most:
        return (
            f"--cuda-graph-bs must be at most --cuda-graph-max-bs ({most}), got {max(sizes)}; "
            "leave one of them out."
        )
    return None


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
    _no_gpu,
    _algorithm,
    _model_options,
    _ngram_options,
    _ngram_index,
    _draft_path,
    _token_map,
    _draft_sampling,
    _half_a_shape,
    _grown_tree,
    _sampled_drafter,
    _sampled_rule,
    _sampled_nodes,
    _simulated,
    _breadth,
    _pages,
    _pool,
    _graphs,
    _policy,
    _revision,
)
