"""Every option of the server, declared once; command line, checks, help and docs/flags.md follow.

`ServerArgs` is what the user said; `resolve()` returns a new object in which everything that is
decided before the model is seen is decided, or raises `ConfigError` with one sentence.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sgl_spec import __version__
from sgl_spec.contradictions import contradiction, overruled, unused
from sgl_spec.draft_shape import (
    DRAFT_TOKENS,
    EMBEDDED_DRAFTS,
    EMBEDDED_MODEL,
    MODEL_DRAFTERS,
    SampledShape,
    automatic_shape,
    grown_shape,
    is_open,
    round_slots,
    sampled_shape,
    tree_nodes,
)
from sgl_spec.errors import ConfigError
from sgl_spec.options import (
    NOT_EMPTY,
    Check,
    at_least,
    between,
    build_parser,
    convert,
    declared,
    flag_table,
    fraction,
    option,
    share,
)
from sgl_spec.sglang_flags import foreign_tables, read_foreign, take_foreign, unknown_keyword

logger = logging.getLogger(__name__)

RUNNING_REQUESTS = 256
RUNNING_REQUESTS_WITH_SPECULATION = 48
# A chunk is a pause for every running request: about 1.5 s of a 135M model on two CPU cores.
CHUNK_TOKENS = 256
CHUNK_TOKENS_CUDA = 8192

_ABOUT = "Serve a language model with exact tree speculation."
_DTYPES = {
    "half": "float16",
    "fp16": "float16",
    "float": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
}


def _algorithm(name: str) -> str | None:
    return None if name.upper() == "NONE" else name.upper()


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """What the user asked for. Each field is checked when the object is made; see `resolve`."""

    if not TYPE_CHECKING:

        def __new__(cls, **given: Any) -> ServerArgs:
            """Refuse unknown keywords with a suggestion, before the generated `__init__` would."""
            for name in given.keys() - cls.__dataclass_fields__.keys():
                raise unknown_keyword(name, declared(ServerArgs))
            return super().__new__(cls)

    model_path: str = option(
        help="The model: `smollm2` (embedded), a Hugging Face directory, or a hub id.",
        group="model",
        aliases=("--model",),
        check=NOT_EMPTY,
    )
    tokenizer_path: str | None = option(
        None, help="Where the tokenizer is.", group="model", check=NOT_EMPTY, unset="the model path"
    )
    revision: str | None = option(
        None,
        help="Branch, tag or commit of a hub id.",
        group="model",
        check=NOT_EMPTY,
        unset="main",
    )
    load_format: str = option(
        "auto",
        help="`dummy` gives random weights in the shape of the model's config.",
        group="model",
        choices=("auto", "safetensors", "dummy"),
    )
    dtype: str = option(
        "auto",
        help="Type of weights and KV cache. `auto`: float32 on a CPU, else the checkpoint's.",
        group="model",
        choices=("auto", "float32", "bfloat16", "float16"),
        spellings=_DTYPES,
    )
    device: str = option(
        "auto",
        help="Where the model runs. `auto`: the GPU when torch sees one.",
        group="model",
        choices=("auto", "cpu", "cuda"),
    )
    context_length: int | None = option(
        None,
        help="Most tokens of prompt and output together.",
        group="model",
        check=at_least(2),
        unset="the model's",
    )

    host: str = option("127.0.0.1", help="Address to listen on.", group="server", check=NOT_EMPTY)
    port: int = option(30000, help="Port to listen on.", group="server", check=between(1, 65535))
    api_key: str | None = option(
        None,
        secret=True,
        help="Bearer token that requests must carry.",
        group="server",
        check=NOT_EMPTY,
    )
    served_model_name: str | None = option(
        None,
        help="Model name that the API shows.",
        group="server",
        check=NOT_EMPTY,
        unset="the model path",
    )
    chat_template: str | None = option(
        None,
        help="Jinja chat template: a file, or the template itself.",
        group="server",
        check=NOT_EMPTY,
        unset="the model's",
    )
    sampling_defaults: str = option(
        "model",
        help="Absent sampling parameters come from generation_config.json, or are OpenAI's.",
        group="server",
        choices=("model", "openai"),
    )
    stream_interval: int = option(
        1, help="Tokens between two chunks of a stream.", group="server", check=at_least(1)
    )
    incremental_streaming_output: bool = option(
        False,
        help="Native streams send new text only, not all text so far.",
        group="server",
        aliases=("--stream-output",),
    )
    allow_auto_truncate: bool = option(
        False, help="Cut prompts and budgets that are too long instead of a 400.", group="server"
    )
    skip_server_warmup: bool = option(
        False, help="Do not send a request to itself before reporting ready.", group="server"
    )
    enable_metrics: bool = option(
        False, help="Serve Prometheus metrics at /metrics.", group="server"
    )
    enable_cache_report: bool = option(
        False, help="Report cached prompt tokens in OpenAI usage.", group="server"
    )
    log_level: str = option(
        "info",
        help="Least severe messages to log.",
        group="server",
        choices=("debug", "info", "warning", "error", "critical"),
        spellings={"warn": "warning"},
    )
    decode_log_interval: int = option(
        40, help="Decode rounds between two log lines.", group="server", check=at_least(1)
    )

    max_running_requests: int | None = option(
        None,
        help="Most requests that decode at once.",
        group="scheduler",
        check=at_least(1),
        unset=f"{RUNNING_REQUESTS}; {RUNNING_REQUESTS_WITH_SPECULATION} with speculation",
    )
    max_queued_requests: int | None = option(
        None,
        help="Most requests that wait; one more gets a 503.",
        group="scheduler",
        check=at_least(1),
        unset="no bound",
    )
    max_total_tokens: int | None = option(
        None,
        help="Slots of the KV pool.",
        group="scheduler",
        check=at_least(1),
        unset="from the memory that is free",
    )
    mem_fraction_static: float | None = option(
        None,
        help="Share of the memory free at start for weights and KV pool together, on a CPU.",
        group="scheduler",
        check=share(),
        unset="a quarter of what is free beside the weights, for the pool",
    )
    max_prefill_tokens: int = option(
        16384, help="Most prompt tokens in one prefill batch.", group="scheduler", check=at_least(1)
    )
    chunked_prefill_size: int | None = option(
        None,
        help="Longest piece of a prompt in one forward; -1 turns chunking off.",
        group="scheduler",
        check=Check("-1 (off) or an integer >= 1", lambda n: n == -1 or n >= 1),
        unset=f"{CHUNK_TOKENS}; {CHUNK_TOKENS_CUDA} with --device cuda",
    )
    page_size: int = option(
        1, help="KV slots per page of the prefix cache.", group="scheduler", check=between(1, 1024)
    )
    disable_radix_cache: bool = option(
        False, help="Do not reuse the KV of prompts seen before.", group="scheduler"
    )
    schedule_policy: str = option(
        "fcfs",
        help="Order of waiting requests: as they came, or longest cached prefix first.",
        group="scheduler",
        choices=("fcfs", "lpm"),
    )
    grammar_backend: str = option(
        "llguidance",
        help="What keeps output to a JSON schema, regex or EBNF; `none` refuses such requests.",
        group="scheduler",
        choices=("llguidance", "none"),
    )
    random_seed: int | None = option(
        None,
        help="Seed of the seeds drawn for requests without one.",
        group="scheduler",
        check=between(0, 2**63 - 1),
        unset="drawn at start",
    )

    speculative_algorithm: str | None = option(
        None,
        help="Who drafts: `none`, `NGRAM`, `EAGLE`, `EAGLE3`, `STANDALONE` (a whole model), or a "
        "name that --speculative-drafter-module registers.",
        group="speculation",
        aliases=("--speculative-algo",),
        normalize=_algorithm,
        metavar="NAME",
    )
    speculative_drafter_module: str | None = option(
        None,
        help="Python module or .py file, imported at start, that registers drafters.",
        group="speculation",
        check=NOT_EMPTY,
    )
    speculative_draft_model_path: str | None = option(
        None,
        help="The draft model: `smollm2-eagle3` and `smollm2-draft` (for the embedded target), a "
        "directory, or a hub id.",
        group="speculation",
        aliases=("--speculative-draft-model",),
        check=NOT_EMPTY,
        unset="the one of `smollm2`, for EAGLE3 and STANDALONE",
    )
    speculative_draft_model_revision: str | None = option(
        None,
        help="Branch, tag or commit of the draft model's hub id.",
        group="speculation",
        check=NOT_EMPTY,
        unset="main",
    )
    speculative_draft_load_format: str | None = option(
        None,
        help="As --load-format, for the draft model.",
        group="speculation",
        choices=("auto", "safetensors", "dummy"),
        unset="that of --load-format",
    )
    speculative_num_steps: int | None = option(
        None,
        help="Steps of a draft model, the depth of its trees.",
        group="speculation",
        check=at_least(1),
        unset="with topk and draft tokens 5, 4, 8 for EAGLE and EAGLE3 on Llama, else 3, 1, 4; "
        "sampled chains: 5 and 3",
    )
    speculative_eagle_topk: int | None = option(
        None,
        help="Branches that a draft model keeps per step; 1 drafts chains of steps + 1 nodes.",
        group="speculation",
        check=between(1, 64),
        unset="1 beside --speculative-num-steps",
    )
    speculative_num_draft_tokens: int | None = option(
        None,
        help="Most nodes of a draft tree, the root included.",
        group="speculation",
        check=between(2, 64),
        unset=f"{DRAFT_TOKENS} for NGRAM and your own drafters; for chains steps + 1",
    )
    speculative_draft_sampling: str = option(
        "shared-noise",
        help="Which tokens a draft model proposes at temperature > 0: those that the target's own "
        "noise favours, or simply its most probable ones. The text is the same.",
        group="speculation",
        choices=("shared-noise", "topk"),
    )
    speculative_verify_whole_trees: bool = option(
        False,
        help="Verify every drafted node, also those that do not pay for their rows; to measure "
        "acceptance.",
        group="speculation",
    )
    speculative_token_map: str | None = option(
        None,
        help="For EAGLE: a .pt file with the ids of the frequent tokens, the only ones drafted.",
        group="speculation",
        check=NOT_EMPTY,
    )
    speculative_ngram_max_trie_depth: int = option(
        18, help="Longest n-gram that NGRAM keeps.", group="speculation", check=between(2, 64)
    )
    speculative_ngram_min_bfs_breadth: int = option(
        1, help="Fewest children NGRAM follows per node.", group="speculation", check=at_least(1)
    )
    speculative_ngram_max_bfs_breadth: int = option(
        10, help="Most children NGRAM follows per node.", group="speculation", check=at_least(1)
    )
    speculative_ngram_match_type: str = option(
        "BFS",
        help="Which continuations NGRAM takes: recent ones breadth first, or probable ones.",
        group="speculation",
        choices=("BFS", "PROB"),
    )
    speculative_ngram_capacity: int = option(
        10_000_000,
        help="Most nodes of the NGRAM trie; memory grows with use.",
        group="speculation",
        check=at_least(1024),
    )
    speculative_accept_threshold_single: float = option(
        1.0,
        help="Below 1 LOSSY: accept every draft that the target gives at least this probability.",
        group="speculation",
        check=fraction(),
    )
    speculative_accept_threshold_acc: float = option(
        1.0,
        help="Below 1 LOSSY: divide the target's chance of accepting drafts by this.",
        group="speculation",
        check=fraction(),
    )
    speculative_use_rejection_sampling: bool = option(
        False,
        help="Sample the drafts and judge them by p/q, on chains and trees; refused with NGRAM.",
        group="speculation",
    )
    speculative_use_block_verification: bool = option(
        False,
        help="Rejection sampling that judges a chain of drafts as a whole; refused with NGRAM.",
        group="speculation",
    )

    without_effect: tuple[str, ...] = dataclasses.field(default=(), repr=False, compare=False)
    """Sentences about accepted flags that change nothing; `resolve` logs them."""

    def __post_init__(self) -> None:
        for name, opt in declared(type(self)).items():
            object.__setattr__(self, name, convert(opt, getattr(self, name)))

    @classmethod
    def from_cli(cls, argv: Sequence[str]) -> ServerArgs:
        """Parse `argv` (without the program name); `ConfigError` names the flag that is wrong.

        --help and --version print and exit as argparse does.
        """
        options = declared(cls)
        parser = build_parser(options, "sgl-spec", _ABOUT, __version__)
        known, leftover = parser.parse_known_args(list(argv))
        notes = read_foreign(leftover, options)
        if "model_path" not in known:
            raise ConfigError("--model-path is required: smollm2, a directory or a hub id.")
        return cls(**vars(known), without_effect=tuple(notes))

    @classmethod
    def from_keywords(cls, **given: Any) -> ServerArgs:
        """The options by field name, among which SGLang's other flags may stand as on the command
        line; `ConfigError` as in `from_cli`."""
        own, notes = take_foreign(given, declared(cls))
        return cls(**own, without_effect=tuple(notes))

    def resolve(self) -> ResolvedArgs:
        """A new object with what was left open filled in; `ConfigError` on a contradiction.

        Open until the model is seen: `context_length`, `max_total_tokens`, `dtype` and `device`
        "auto", and the shape of EAGLE's trees where no flag gives it (see `for_target`). None stays
        None where it means "none", as in `api_key`, `max_queued_requests` and
        `speculative_algorithm`.
        Resolving a resolved object changes nothing.
        """
        refusal = contradiction(self)
        if refusal is not None:
            raise ConfigError(refusal)
        for note in (*self.without_effect, *unused(self), *overruled(self)):
            logger.warning("%s", note)
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        filled = {name: value for name, value in _decide(self).items() if values[name] is None}
        done = values | filled | _shape(self) | {"without_effect": ()}
        return ResolvedArgs(**done)

    def public(self) -> dict[str, Any]:
        """All options by field name, without the API key."""
        names = [name for name in declared(type(self)) if name != "api_key"]
        return {name: getattr(self, name) for name in names}

    def drafter_options(self) -> dict[str, object]:
        """The `speculative_*` options without that prefix, for a drafter to pick its own from."""
        taken = ("speculative_algorithm", "speculative_drafter_module")
        names = [n for n in declared(type(self)) if n.startswith("speculative_") and n not in taken]
        return {name.removeprefix("speculative_"): getattr(self, name) for name in names}


class ResolvedArgs(ServerArgs):
    """`ServerArgs` after `resolve`: these fields are no longer None."""

    if TYPE_CHECKING:
        tokenizer_path: str
        served_model_name: str
        max_running_requests: int
        chunked_prefill_size: int
        random_seed: int

    def for_target(self, architecture: str) -> ResolvedArgs:
        """The same options for a target of this architecture, which decides the shape of EAGLE's
        trees where no flag gives it. `ConfigError` as in `resolve`."""
        if not is_open(self):
            return self
        shape = automatic_shape(str(self.speculative_algorithm), architecture)
        return dataclasses.replace(
            self,
            speculative_num_steps=shape.steps,
            speculative_eagle_topk=shape.topk,
            speculative_num_draft_tokens=shape.nodes,
        ).resolve()

    @property
    def tree_nodes(self) -> int:
        """Most nodes that one request verifies in a round: 1 (the root) without speculation."""
        assert not is_open(self), "for_target comes first"
        return tree_nodes(self)

    @property
    def round_slots(self) -> int:
        """Most KV slots that one request's round may write behind its text: the larger of the
        tree's nodes and the rows of a draft model's steps."""
        assert not is_open(self), "for_target comes first"
        return round_slots(self)

    @property
    def sampled_shape(self) -> SampledShape | None:
        """The shape of trees whose tokens are sampled; None where the drafter chooses its trees."""
        return sampled_shape(self)


def _decide(args: ServerArgs) -> dict[str, Any]:
    drafting = args.speculative_algorithm is not None
    if drafting and args.max_running_requests is None:
        logger.warning(
            "--max-running-requests is not set; with speculation it is %d.",
            RUNNING_REQUESTS_WITH_SPECULATION,
        )
    return {
        "tokenizer_path": args.model_path,
        "served_model_name": args.model_path,
        "max_running_requests": RUNNING_REQUESTS_WITH_SPECULATION if drafting else RUNNING_REQUESTS,
        "chunked_prefill_size": CHUNK_TOKENS_CUDA if args.device == "cuda" else CHUNK_TOKENS,
        "random_seed": secrets.randbits(31),
        "speculative_draft_model_path": _draft_model(args),
        "speculative_draft_load_format": _draft_load_format(args),
    }


def _draft_model(args: ServerArgs) -> str | None:
    embedded = args.model_path == EMBEDDED_MODEL
    return EMBEDDED_DRAFTS.get(args.speculative_algorithm or "") if embedded else None


def _draft_load_format(args: ServerArgs) -> str | None:
    return args.load_format if args.speculative_algorithm in MODEL_DRAFTERS else None


def _shape(args: ServerArgs) -> dict[str, int]:
    """The tree's shape as far as it is known; a chain's nodes follow from its steps, whatever was
    given."""
    shape = grown_shape(args) or sampled_shape(args)
    if shape is not None:
        return {
            "speculative_num_steps": shape.steps,
            "speculative_eagle_topk": shape.topk,
            "speculative_num_draft_tokens": shape.nodes,
        }
    name = args.speculative_algorithm
    if name is None or name in MODEL_DRAFTERS:
        return {}
    return {"speculative_num_draft_tokens": args.speculative_num_draft_tokens or DRAFT_TOKENS}


def flags_page() -> str:
    """The text of docs/flags.md."""
    return _PAGE_HEAD + flag_table(declared(ServerArgs)) + foreign_tables()


_PAGE_HEAD = """\
# Flags

Generated from `sgl_spec/args.py` by `python -m sgl_spec.args > docs/flags.md`.
From Python the same options are keywords of `sgl_spec.args.ServerArgs`, with `_` for `-`.

"""

if __name__ == "__main__":
    sys.stdout.write(flags_page())
