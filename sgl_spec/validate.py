"""What options say beside each other: combinations that cannot work, and those without effect.

Every sentence is yielded where its condition holds, in the order in which a user would mend them:
a later check may count on the earlier ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_spec.errors import ConfigError
from sgl_spec.options import flag_of, is_given, near

if TYPE_CHECKING:
    from sgl_spec.args import ServerArgs

EMBEDDED_MODEL = "smollm2"
# Draft models of the embedded target that come with the package.
EMBEDDED_DRAFTS = {"EAGLE3": "smollm2-eagle3", "STANDALONE": "smollm2-draft"}
MODEL_DRAFTERS = ("EAGLE", "EAGLE3", "STANDALONE")
BUILT_IN_DRAFTERS = ("NGRAM", *MODEL_DRAFTERS)
# Algorithms of SGLang that this version does not have. A plug-in may not take their names: a launch
# line written for SGLang would then mean something else.
ABSENT_DRAFTERS = ("FROZEN_KV_MTP", "DFLASH", "DSPARK", "UNO")
MAX_NODES = 64  # of a tree, root included: an ancestor set is one 64-bit word
MAX_DRAFT_COLUMNS = 64  # KV columns that draft steps see beside the text, for the same reason

_NAMES = f"none, {', '.join(BUILT_IN_DRAFTERS)}"
_MODEL_OPTIONS = (
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_load_format",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_draft_sampling",
    "speculative_token_map",
)
_THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
_GRAPH_SIZES = ("cuda_graph_max_bs", "cuda_graph_bs")
_GPU_OPTIONS = ("disable_overlap_schedule", "disable_cuda_graph", *_GRAPH_SIZES)


def check(args: ServerArgs, drafters: Collection[str] = ()) -> None:
    """Raise `ConfigError` with the first sentence of `contradictions` and `lost_paths`. drafters:
    names that are registered in this process."""
    for sentence in chain(contradictions(args, drafters), lost_paths(args)):
        raise ConfigError(sentence)


def lost_paths(args: ServerArgs) -> Iterator[str]:
    """Directories that are not there, as far as they cannot be meant as hub ids: told at once, and
    not when torch has been loaded."""
    for name in ("model_path", "tokenizer_path", "speculative_draft_model_path"):
        text = getattr(args, name) or ""
        path = Path(text).expanduser()
        if is_local(text) and not path.is_dir():
            problem = (
                " is a file; it must be a directory" if path.exists() else ": no such directory"
            )
            yield f"{flag_of(name)} {text}{problem}."
    for name in ("ssl_keyfile", "ssl_certfile"):
        text = getattr(args, name)
        if text is not None and not Path(text).is_file():
            yield f"{flag_of(name)} {text}: no such file."


def is_local(path: str) -> bool:
    """Whether this can only be a path on this machine: a hub id is NAME or OWNER/NAME."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def contradictions(args: ServerArgs, drafters: Collection[str] = ()) -> Iterator[str]:
    """The sentences for what cannot work."""
    yield from _device(args)
    yield from _algorithm(args, drafters)
    for rule in (_ngram, _draft_model, _shape, _judging, _memory, _rest):
        yield from rule(args)


def _device(args: ServerArgs) -> Iterator[str]:
    """Before any clash among flags of a GPU: a CPU is what is wrong with them."""
    if args.device != "cpu":
        return
    if args.attention_backend == "flashinfer":
        yield "--attention-backend flashinfer needs a GPU; allowed on a CPU: torch."


def _algorithm(args: ServerArgs, drafters: Collection[str]) -> Iterator[str]:
    name = args.speculative_algorithm
    if name in ABSENT_DRAFTERS:
        yield (
            f"--speculative-algorithm {name} is not supported by this version; allowed are "
            f"{_NAMES} and names that --speculative-drafter-module registers."
        )
    known = name in (None, *BUILT_IN_DRAFTERS, *drafters)
    if known or args.speculative_drafter_module is not None:
        return
    yield (
        f"--speculative-algorithm must be one of {_NAMES}, got {name!r}"
        f"{near(str(name), BUILT_IN_DRAFTERS)}; a drafter of your own needs "
        "--speculative-drafter-module."
    )


def _ngram(args: ServerArgs) -> Iterator[str]:
    algorithm = f"--speculative-algorithm {args.speculative_algorithm}"
    unfit: tuple[str, ...] = ()
    reason = ""
    if args.speculative_algorithm == "NGRAM":
        unfit, reason = _MODEL_OPTIONS, "has no draft model"
    elif args.speculative_algorithm in MODEL_DRAFTERS:
        names = type(args).__dataclass_fields__
        unfit = tuple(name for name in names if name.startswith("speculative_ngram_"))
        reason = "matches no n-grams"
    for name in unfit:
        if is_given(args, name):
            seen = f"{flag_of(name)} {getattr(args, name)}"
            yield f"{seen} cannot be used with {algorithm}, which {reason}; leave it out."
    low, high = args.speculative_ngram_min_bfs_breadth, args.speculative_ngram_max_bfs_breadth
    if low > high:
        yield (
            "--speculative-ngram-min-bfs-breadth must be at most "
            f"--speculative-ngram-max-bfs-breadth ({high}), got {low}."
        )


def _draft_model(args: ServerArgs) -> Iterator[str]:
    name, path = args.speculative_algorithm, args.speculative_draft_model_path
    if name not in MODEL_DRAFTERS:
        return
    embedded = args.model_path == EMBEDDED_MODEL
    if path is None and not (embedded and name in EMBEDDED_DRAFTS):
        kinds = " and ".join(EMBEDDED_DRAFTS)
        own = f"only {EMBEDDED_MODEL} has draft models of its own, for {kinds}"
        own = f"{EMBEDDED_MODEL} brings none for {name}, only for {kinds}" if embedded else own
        heads = "; prediction layers in the target's own checkpoint (NEXTN) are not loaded"
        yield (
            f"--speculative-algorithm {name} needs --speculative-draft-model-path: a directory or "
            f"a hub id ({own}{heads if name == 'EAGLE' else ''})."
        )
    revision = args.speculative_draft_model_revision
    if revision is not None and path in (None, *EMBEDDED_DRAFTS.values(), EMBEDDED_MODEL):
        yield (
            f"--speculative-draft-model-revision {revision} names a version on a hub; the draft "
            "models that come with this server have only one, leave it out."
        )
    if args.speculative_token_map is not None and name != "EAGLE":
        own = "brings its own vocabulary" if name == "EAGLE3" else "uses the whole vocabulary"
        yield (
            f"--speculative-token-map {args.speculative_token_map} needs --speculative-algorithm "
            f"EAGLE, got {name}, whose draft {own}; leave it out."
        )
    flag = args.sampling_flag
    if flag is not None and is_given(args, "speculative_draft_sampling"):
        yield (
            f"{flag} samples the drafts and has no use for --speculative-draft-sampling "
            f"{args.speculative_draft_sampling}; leave one of them out."
        )


def _shape(args: ServerArgs) -> Iterator[str]:
    steps, topk = args.speculative_num_steps, args.speculative_eagle_topk or 1
    grows = args.speculative_algorithm in MODEL_DRAFTERS and args.sampling_flag is None
    if args.speculative_algorithm in MODEL_DRAFTERS and steps is None:
        for name in ("speculative_eagle_topk", "speculative_num_draft_tokens"):
            if is_given(args, name):
                yield (
                    f"{flag_of(name)} {getattr(args, name)} needs --speculative-num-steps beside "
                    "it; give both or neither."
                )
    if grows and steps is not None and topk > 1 and args.speculative_num_draft_tokens is None:
        yield (
            f"--speculative-eagle-topk {topk} needs --speculative-num-draft-tokens beside it, the "
            f"nodes of the tree, from 2 to {MAX_NODES}."
        )
    shape = args.shape
    if shape is None:
        return
    if grows and shape.columns > MAX_DRAFT_COLUMNS:
        yield (
            "--speculative-num-steps and --speculative-eagle-topk must keep (steps - 1) * topk at "
            f"most {MAX_DRAFT_COLUMNS}, got ({shape.steps} - 1) * {shape.topk} = {shape.columns}."
        )
    if shape.nodes > MAX_NODES:
        yield (
            f"--speculative-num-steps must be at most {MAX_NODES - 1} for a chain "
            f"(--speculative-eagle-topk 1), got {shape.steps}."
        )
    if shape.nodes > shape.capacity:
        yield (
            f"--speculative-num-draft-tokens must be at most {shape.capacity}, the root and what "
            f"--speculative-num-steps {shape.steps} with --speculative-eagle-topk {shape.topk} "
            f"can draft, got {shape.nodes}."
        )


def _judging(args: ServerArgs) -> Iterator[str]:
    flag, topk = args.sampling_flag, args.speculative_eagle_topk
    if flag is not None and args.speculative_algorithm == "NGRAM":
        yield (
            f"{flag} cannot be used with --speculative-algorithm NGRAM, which copies its drafts "
            "and has no distribution to sample them from; leave it out."
        )
    lowered = [name for name in _THRESHOLDS if getattr(args, name) != 1]
    if flag is not None and lowered:
        yield (
            f"{flag} judges drafts by p/q and has no use for {flag_of(lowered[0])} "
            f"{getattr(args, lowered[0])}; leave one of them out."
        )
    if args.speculative_use_block_verification and topk not in (None, 1):
        yield (
            "--speculative-use-block-verification judges chains: --speculative-eagle-topk must be "
            f"1, got {topk}."
        )
    mean = args.simulate_acc_len
    if mean is None:
        return
    simulated = f"--simulate-acc-len {mean:g}"
    if args.speculative_algorithm is None:
        yield f"{simulated} needs --speculative-algorithm: without drafts a round gives one token."
    for judge in (*map(flag_of, lowered), *([flag] if flag else [])):
        yield (
            f"{simulated} settles what is accepted, so {judge} has nothing to decide; leave one of "
            "them out."
        )
    most = MAX_NODES if args.shape_is_open else args.tree_nodes
    most = most if args.shape is None else min(most, args.shape.steps + 1)
    if mean > most:
        yield f"--simulate-acc-len must be at most {most}, the levels of the trees, got {mean:g}."


def _memory(args: ServerArgs) -> Iterator[str]:
    chunk, page, total = args.chunked_prefill_size, args.page_size, args.max_total_tokens
    if chunk not in (None, -1) and chunk % page != 0:
        yield (
            f"--chunked-prefill-size must be -1 or a multiple of --page-size ({page}), got {chunk}."
        )
    if total is None or args.shape_is_open:
        return
    nodes, most = args.tree_nodes, args.round_slots
    # A token in and one out, and the reserve of two rounds that every running request holds.
    needed = -(-(2 + 2 * most) // page) * page
    if total < needed:
        rows = f"{most} rows of draft steps" if most > nodes else f"{nodes} tree nodes"
        rows = "1 tree node" if most == 1 else rows
        yield (
            f"--max-total-tokens must be at least {needed} to hold one request with {rows} "
            f"at --page-size {page}, got {total}."
        )


def _rest(args: ServerArgs) -> Iterator[str]:
    sizes = [flag_of(name) for name in _GRAPH_SIZES if is_given(args, name)]
    if sizes and args.disable_cuda_graph:
        yield f"{sizes[0]} sizes what --disable-cuda-graph turns off; leave one out."
    if sizes and args.attention_backend not in (None, "triton"):
        yield (
            f"{sizes[0]} needs --attention-backend triton, whose forwards can be captured in a "
            f"CUDA graph, got {args.attention_backend}; leave one of them out."
        )
    most, batches = args.cuda_graph_max_bs, args.cuda_graph_bs
    if most is not None and batches is not None and max(batches) > most:
        yield (
            f"--cuda-graph-bs must be at most --cuda-graph-max-bs ({most}), got {max(batches)}; "
            "leave one of them out."
        )
    if (args.ssl_keyfile is None) != (args.ssl_certfile is None):
        yield "--ssl-keyfile and --ssl-certfile need each other; give both or neither."
    if args.ssl_keyfile_password is not None and args.ssl_keyfile is None:
        yield "--ssl-keyfile-password needs --ssl-keyfile, the file that it opens."
    if args.schedule_policy == "lpm" and args.disable_radix_cache:
        yield (
            "--schedule-policy lpm orders requests by their cached prefix and needs the cache; "
            "use fcfs or drop --disable-radix-cache."
        )
    if args.revision is not None and args.model_path == EMBEDDED_MODEL:
        yield (
            f"--revision {args.revision} names a version on a hub; the embedded model "
            f"{EMBEDDED_MODEL} has only one, leave it out."
        )


def without_effect(args: ServerArgs) -> Iterator[str]:
    """Sentences about options that change nothing beside the others, or are replaced."""
    if args.speculative_algorithm is None:
        for name in type(args).__dataclass_fields__:
            if name.startswith("speculative_") and is_given(args, name):
                yield f"{flag_of(name)} changes nothing without --speculative-algorithm."
    if args.speculative_ngram_index is not None and args.speculative_algorithm == "NGRAM":
        yield "--speculative-ngram-index changes nothing: NGRAM has one, where the target lies."
    if args.check_ranks and args.tp_size == 1:
        yield "--check-ranks changes nothing without --tp-size."
    if args.mem_fraction_static is not None and args.max_total_tokens is not None:
        yield "--mem-fraction-static changes nothing beside --max-total-tokens."
    shape, nodes = args.shape, args.speculative_num_draft_tokens
    if shape is not None and not shape.sampled and nodes not in (None, shape.nodes):
        yield (
            f"--speculative-num-draft-tokens {nodes} becomes {shape.nodes}: a chain "
            f"(--speculative-eagle-topk 1) of --speculative-num-steps {shape.steps} has one node "
            "per step and the root."
        )


def without_gpu(args: ServerArgs) -> Iterator[str]:
    """Sentences about options that change nothing on this device."""
    if args.device != "cpu" or args.attention_backend == "triton":  # which is how it is tested
        return
    for name in _GPU_OPTIONS:
        if is_given(args, name):
            yield f"{flag_of(name)} changes nothing on a CPU."
