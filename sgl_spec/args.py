"""Every option of the server, declared once: command line, checks, help and docs/flags.md follow.

`ServerArgs` is what the user said; `resolve()` returns a new object in which everything that is
decided before the model is seen is decided, or raises `ConfigError`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import secrets
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING, Any, Self

from sgl_spec import __version__
from sgl_spec import sglang_compat as sglang
from sgl_spec.errors import ConfigError
from sgl_spec.options import (
    FRACTION,
    SHARE,
    Check,
    FlagParser,
    all_at_least,
    at_least,
    between,
    convert,
    declared,
    flag_table,
    gather,
    option,
    raise_all,
)
from sgl_spec.validate import (
    EMBEDDED_DRAFTS,
    EMBEDDED_MODEL,
    MAX_NODES,
    MODEL_DRAFTERS,
    check,
    without_effect,
    without_gpu,
)

logger = logging.getLogger(__name__)

RUNNING_REQUESTS = 256
RUNNING_REQUESTS_WITH_SPECULATION = 48
# A chunk is a pause for every running request: about 1.5 s of a 135M model on two CPU cores, 50 ms
# of an 8B model on a GPU that computes 600 TFLOP/s.
CHUNK_TOKENS = {"cpu": 256, "cuda": 2048}
# Of a GPU's memory: what is left over is for CUDA itself and what the shapes do not tell.
MEM_FRACTION_CUDA = 0.88
DRAFT_TOKENS = 12  # of drafters that choose the shape of their trees

_DTYPES = {
    "half": "float16",
    "fp16": "float16",
    "float": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
}
_LOAD_FORMATS = ("auto", "safetensors", "dummy")


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Depth, branches and nodes (root included) of draft trees. sampled: their tokens are drawn and
    every node has `topk` children; else a draft model keeps the `topk` best nodes of each step."""

    steps: int
    topk: int
    nodes: int
    sampled: bool = False

    @property
    def capacity(self) -> int:
        """Most nodes that steps and topk can give, at most just above `MAX_NODES` if sampled."""
        if not self.sampled:
            return 1 + self.topk + (self.steps - 1) * self.topk**2
        held = level = 1
        for _ in range(min(self.steps, MAX_NODES)):
            level = min(level * self.topk, MAX_NODES)
            held += level
        return held

    @property
    def columns(self) -> int:
        """Draft KV columns that the last draft forward sees beside the text."""
        return (self.steps - 1) * self.topk


_TREE = TreeShape(steps=5, topk=4, nodes=8)
_CHAIN = TreeShape(steps=3, topk=1, nodes=4)


def automatic_shape(algorithm: str | None, architecture: str) -> TreeShape:
    """The shape where no flag gives one: SGLang's."""
    tree = algorithm != "STANDALONE" and architecture == "LlamaForCausalLM"
    return _TREE if tree else _CHAIN


_model = functools.partial(option, group="model")
_parallel = functools.partial(option, group="parallelism")
_server = functools.partial(option, group="server")
_scheduler = functools.partial(option, group="scheduler")
_drafting = functools.partial(option, group="speculation")


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """What the user asked for, in the order of --help. Each field is checked when the object is
    made; see `resolve`."""

    model_path: str = _model(
        MISSING,
        "The model: `smollm2` (embedded), a Hugging Face directory, or a hub id.",
        aliases=("--model",),
    )
    tokenizer_path: str | None = _model(None, "Where the tokenizer is.", unset="the model path")
    revision: str | None = _model(None, "Branch, tag or commit of a hub id.", unset="main")
    load_format: str = _model(
        "auto",
        "`dummy` gives random weights in the shape of the model's config.",
        choices=_LOAD_FORMATS,
    )
    dtype: str = _model(
        "auto",
        "Type of weights and KV cache. `auto`: float32 on a CPU, else the checkpoint's.",
        choices=("auto", "float32", "bfloat16", "float16"),
        spellings=_DTYPES,
    )
    device: str = _model(
        "auto",
        "Where the model runs. `auto`: the GPU when torch sees one.",
        choices=("auto", "cpu", "cuda"),
    )
    attention_backend: str | None = _model(
        None,
        "What computes: plain torch, our Triton kernels, or these with FlashInfer's attention "
        "(`pip install .[flashinfer]`; no CUDA graphs).",
        choices=("torch", "triton", "flashinfer"),
        spellings={"torch_native": "torch", "auto": None},
        other_names="fa3 fa4 flashmla cutlass_mla trtllm_mha trtllm_mla flex_attention aiter wave "
        "ascend intel_amx intel_xpu dual_chunk_flash_attn",
        unset="triton on a GPU, torch on a CPU",
    )
    strict: bool | None = _model(
        None,
        "A text depends on its own request alone, to the last bit: not on drafts, the batch, "
        "chunks or what is cached (docs/strict.md). Checked at start. Needs a GPU and our Triton "
        "kernels.",
        aliases=("--enable-deterministic-inference",),
        unset="off",
    )
    check_strict: bool = _model(
        False, "With --strict: check many shapes at start, not a few, and log each."
    )
    context_length: int | None = _model(
        None, "Most tokens of prompt and output together.", check=at_least(2), unset="the model's"
    )

    tp_size: int = _parallel(
        1,
        "GPUs (on a CPU: processes) that share the model: each has its part of every layer.",
        aliases=("--tensor-parallel-size", "--tp"),
        check=Check("1, 2, 4 or 8", lambda size: size in (1, 2, 4, 8)),
    )
    check_ranks: bool = _parallel(
        False,
        "With --tp-size: compare what the ranks decided after each step, and end if it differs.",
    )

    host: str = _server("127.0.0.1", "Address to listen on.")
    port: int = _server(30000, "Port to listen on.", check=between(1, 65535))
    api_key: str | None = _server(None, "Bearer token that requests must carry.", secret=True)
    max_requests_per_key: int | None = _server(
        None,
        "Most requests that one Authorization header may have open at once, or those without one "
        "together; one more gets a 429.",
        check=at_least(1),
        unset="no bound",
    )
    ssl_keyfile: str | None = _server(None, "Private key for HTTPS, a PEM file.")
    ssl_certfile: str | None = _server(None, "Certificate (and chain) for HTTPS, a PEM file.")
    ssl_keyfile_password: str | None = _server(None, "Password of the key.", secret=True)
    timeout_keep_alive: int = _server(
        60,
        "Seconds that an idle connection stays open; more than clients keep theirs, or they meet a "
        "closed one.",
        check=at_least(1),
    )
    drain_timeout: int = _server(
        30,
        "Seconds that running requests have to end after Ctrl-C or SIGTERM; then they are aborted.",
        check=at_least(0),
    )
    stop_timeout: int = _server(
        5, "Seconds that the engine then has to end; after them it is killed.", check=at_least(1)
    )
    watchdog_timeout: int = _server(
        300,
        "Seconds without a sign of life after which the engine is taken for hung: its stacks go to "
        "stderr, it is killed, every open request gets a 503, and the server ends. 0: never.",
        check=at_least(0),
    )
    served_model_name: str | None = _server(
        None, "Model name that the API shows.", unset="the model path"
    )
    chat_template: str | None = _server(
        None,
        "Jinja chat template: a file, or the template itself.",
        other_names="chatml llama-2 llama-3-instruct qwen qwen2 mistral",
        unset="the model's",
    )
    tool_call_parser: str | None = _server(
        None,
        "How the model writes calls of tools.",
        choices=("hermes", "qwen", "qwen25", "llama3", "mistral"),
        unset="what the chat template shows",
    )
    reasoning_parser: str | None = _server(
        None,
        "Take `<think>...</think>` out of chat answers, into reasoning_content.",
        choices=("deepseek-r1", "qwen3"),
    )
    sampling_defaults: str = _server(
        "model",
        "Absent sampling parameters come from generation_config.json, or are OpenAI's.",
        choices=("model", "openai"),
    )
    stream_interval: int = _server(
        1, "Tokens between two chunks of a stream, unless the request says it.", check=at_least(1)
    )
    incremental_streaming_output: bool = _server(
        False,
        "Native streams send new text only, not all text so far.",
        aliases=("--stream-output",),
    )
    allow_auto_truncate: bool = _server(
        False, "Cut prompts and budgets that are too long instead of a 400."
    )
    skip_server_warmup: bool = _server(
        False, "Do not send a request to itself before reporting ready."
    )
    log_requests: bool = _server(False, "Log each request when it comes and when it has ended.")
    log_requests_level: int = _server(
        0,
        "What is logged: 0 counts and times, 1 sampling parameters too, 2 the beginning of prompt "
        "and output, 3 all of them.",
        check=between(0, 3),
    )
    spec_trace: str | None = _server(
        None,
        "Directory to which the rounds of every request are written: a file for each start, a line "
        "for each request, for `sgl-spec trace`.",
    )
    enable_metrics: bool = _server(False, "Serve Prometheus metrics at /metrics.")
    enable_cache_report: bool = _server(False, "Report cached prompt tokens in OpenAI usage.")
    log_level: str = _server(
        "info",
        "Least severe messages to log.",
        choices=("debug", "info", "warning", "error", "critical"),
        spellings={"warn": "warning"},
    )
    decode_log_interval: int = _server(
        40, "Decode rounds between two log lines.", check=at_least(1)
    )

    max_running_requests: int | None = _scheduler(
        None,
        "Most requests that decode at once.",
        check=at_least(1),
        unset=f"{RUNNING_REQUESTS}; {RUNNING_REQUESTS_WITH_SPECULATION} with speculation",
    )
    max_queued_requests: int | None = _scheduler(
        None, "Most requests that wait; one more gets a 503.", check=at_least(1), unset="no bound"
    )
    max_total_tokens: int | None = _scheduler(
        None, "Slots of the KV pool.", check=at_least(1), unset="from the memory that is free"
    )
    mem_fraction_static: float | None = _scheduler(
        None,
        "Share of the memory for weights, KV pools, work space and CUDA graphs together: of "
        "all that a GPU has, or of what is free at start on a CPU.",
        check=SHARE,
        unset=f"{MEM_FRACTION_CUDA} on a GPU; on a CPU the pool gets a quarter of what is free "
        "beside the weights",
    )
    max_prefill_tokens: int = _scheduler(
        16384, "Most prompt tokens in one prefill batch.", check=at_least(1)
    )
    chunked_prefill_size: int | None = _scheduler(
        None,
        "Longest piece of a prompt in one forward; -1 turns chunking off.",
        check=Check("-1 (off) or an integer >= 1", lambda n: n == -1 or n >= 1),
        unset=f"{CHUNK_TOKENS['cuda']} on a GPU, {CHUNK_TOKENS['cpu']} on a CPU",
    )
    max_prefill_pause_ms: float = _scheduler(
        14.0,
        "How long running streams may wait for prompts between two of their rounds, on a GPU with "
        "CUDA graphs: longer chunks are cut unless more requests wait than stream. 0: no bound.",
        check=at_least(0),
    )
    page_size: int = _scheduler(1, "KV slots per page of the prefix cache.", check=between(1, 1024))
    disable_radix_cache: bool = _scheduler(False, "Do not reuse the KV of prompts seen before.")
    schedule_policy: str = _scheduler(
        "fcfs",
        "Order of waiting requests: as they came, or longest cached prefix first.",
        choices=("fcfs", "lpm"),
        other_names="dfs-weight lof random hrrn shortest-prefill-first routing-key",
    )
    disable_overlap_schedule: bool = _scheduler(
        False, "On a GPU: launch a round only when the one before it was read."
    )
    disable_cuda_graph: bool = _scheduler(
        False, "On a GPU: launch every kernel of a round by itself."
    )
    cuda_graph_max_bs: int | None = _scheduler(
        None,
        "Most requests of a round that is captured as a CUDA graph.",
        aliases=("--cuda-graph-max-bs-decode",),
        check=at_least(1),
        unset="all that may run, at most 256",
    )
    cuda_graph_bs: tuple[int, ...] | None = _scheduler(
        None,
        "Batch sizes that are captured; a batch is filled up to the next of them.",
        aliases=("--cuda-graph-bs-decode",),
        check=all_at_least(1),
        unset="1, 2, 4, 8 and on in growing steps",
    )
    grammar_backend: str = _scheduler(
        "llguidance",
        "What keeps output to a JSON schema, regex or EBNF; `none` refuses such requests.",
        choices=("llguidance", "none"),
        other_names="xgrammar outlines",
    )
    open_json_schemas: bool = _scheduler(
        False,
        "Objects of JSON schemas may hold keys that they do not declare, as JSON Schema says; else "
        "only where they say so.",
    )
    random_seed: int | None = _scheduler(
        None,
        "Seed of the seeds drawn for requests without one.",
        check=between(0, 2**63 - 1),
        unset="drawn at start",
    )

    speculative_algorithm: str | None = _drafting(
        None,
        "Who drafts: `none`, `NGRAM`, `EAGLE`, `EAGLE3`, `STANDALONE` (a whole model), or a "
        "name that --speculative-drafter-module registers. `NEXTN` is `EAGLE`.",
        aliases=("--speculative-algo",),
        spellings={"none": None, "nextn": "EAGLE"},
        normalize=str.upper,
        metavar="NAME",
    )
    speculative_drafter_module: str | None = _drafting(
        None, "Python module or .py file, imported at start, that registers drafters."
    )
    speculative_draft_model_path: str | None = _drafting(
        None,
        "The draft model: `smollm2-eagle3` and `smollm2-draft` (for the embedded target), a "
        "directory, or a hub id.",
        aliases=("--speculative-draft-model",),
        unset="the one of `smollm2`, for EAGLE3 and STANDALONE",
    )
    speculative_draft_model_revision: str | None = _drafting(
        None, "Branch, tag or commit of the draft model's hub id.", unset="main"
    )
    speculative_draft_load_format: str | None = _drafting(
        None,
        "As --load-format, for the draft model.",
        choices=_LOAD_FORMATS,
        unset="that of --load-format",
    )
    speculative_num_steps: int | None = _drafting(
        None,
        "Steps of a draft model, the depth of its trees.",
        check=at_least(1),
        unset="with topk and draft tokens 5, 4, 8 for EAGLE and EAGLE3 on Llama, else 3, 1, 4; "
        "sampled chains: 5 and 3",
    )
    speculative_eagle_topk: int | None = _drafting(
        None,
        "Branches that a draft model keeps per step; 1 drafts chains of steps + 1 nodes.",
        check=between(1, 64),
        unset="1 beside --speculative-num-steps",
    )
    speculative_num_draft_tokens: int | None = _drafting(
        None,
        "Most nodes of a draft tree, the root included.",
        check=between(2, MAX_NODES),
        unset=f"{DRAFT_TOKENS} for NGRAM and your own drafters; for chains steps + 1",
    )
    speculative_draft_sampling: str = _drafting(
        "shared-noise",
        "Which tokens a draft model proposes at temperature > 0: those that the target's own "
        "noise favours, or simply its most probable ones. The text is the same.",
        choices=("shared-noise", "topk"),
    )
    speculative_verify_whole_trees: bool = _drafting(
        False,
        "Verify every drafted node, also those that do not pay for their rows; to measure "
        "acceptance.",
    )
    speculative_token_map: str | None = _drafting(
        None, "For EAGLE: a .pt file with the ids of the frequent tokens, the only ones drafted."
    )
    speculative_ngram_index: str | None = _drafting(
        None,
        "Changes nothing: NGRAM has one trie, which lies where the target does.",
        choices=("trie", "device"),
    )
    speculative_ngram_max_trie_depth: int = _drafting(
        18,
        "Longest match that NGRAM tells from shorter ones, and the token behind it (at most 17).",
        check=between(2, 64),
    )
    speculative_ngram_min_bfs_breadth: int = _drafting(
        1, "Most children NGRAM follows behind the longest match.", check=at_least(1)
    )
    speculative_ngram_max_bfs_breadth: int = _drafting(
        10,
        "Most children NGRAM follows behind the shortest match; linear between.",
        check=at_least(1),
    )
    speculative_ngram_match_type: str = _drafting(
        "BFS",
        "Which continuations of equal matches NGRAM prefers: recent ones, or frequent ones.",
        choices=("BFS", "PROB"),
    )
    speculative_ngram_capacity: int = _drafting(
        10_000_000,
        "Most n-grams that NGRAM keeps, at 5 to 9 bytes each; new ones replace old ones.",
        check=at_least(1024),
    )
    speculative_accept_threshold_single: float = _drafting(
        1.0,
        "Below 1 LOSSY: accept every draft that the target gives at least this probability.",
        check=FRACTION,
    )
    speculative_accept_threshold_acc: float = _drafting(
        1.0,
        "Below 1 LOSSY: divide the target's chance of accepting drafts by this.",
        check=FRACTION,
    )
    speculative_use_rejection_sampling: bool = _drafting(
        False, "Sample the drafts and judge them by p/q, on chains and trees; refused with NGRAM."
    )
    speculative_use_block_verification: bool = _drafting(
        False, "Rejection sampling that judges a chain of drafts as a whole; refused with NGRAM."
    )
    simulate_acc_len: float | None = _drafting(
        None,
        "To measure rounds, NOT for text: give out this many tokens a round on average, "
        "whatever the target says of the drafts. Replies and metrics are marked.",
        check=Check("a number from 1 to 64", lambda value: bool(1 <= value <= 64)),
    )

    without_effect: tuple[str, ...] = dataclasses.field(default=(), repr=False, compare=False)
    """Sentences about accepted flags that change nothing; `resolve` logs them."""

    def __post_init__(self) -> None:
        refused: list[ConfigError] = []
        notes = list(self.without_effect)
        for name, opt in declared(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, str) and value.lower() in opt.other_names.split():
                default = f"the default stands, {opt.default_text}"
                notes.append(f"{opt.flags[0]} {value} changes nothing here: {default}.")
                value = opt.default
            with gather(refused):
                object.__setattr__(self, name, convert(opt, value))
        object.__setattr__(self, "without_effect", tuple(notes))
        raise_all(refused)

    @classmethod
    @functools.cache
    def parser(cls) -> FlagParser:
        """What reads a command line: these options, and SGLang's other flags."""
        parser = FlagParser(
            prog="sgl-spec",
            usage="%(prog)s --model-path MODEL [flags]",
            description="Serve a model with exact tree speculation.",
        )
        version = f"sgl-spec {__version__}"
        parser.add_argument("--version", action="version", version=version)
        parser.add_options(declared(cls).values())
        sglang.add_foreign(parser)
        return parser

    @classmethod
    def from_cli(cls, argv: Sequence[str]) -> Self:
        """Parse `argv` (without the program name); `ConfigError` has a line for each flag that is
        unknown, not supported or has a value that is not allowed.

        --help and --version print and exit as argparse does.
        """
        read, rest = cls.parser().parse_known_args(argv)
        refused = sglang.unknown_words(rest, declared(cls))
        if not hasattr(read, "model_path") and not any("--model-path" in str(e) for e in refused):
            message = "--model-path is required: smollm2, a directory or a hub id."
            refused.append(ConfigError(message, param="model_path"))
        return cls._made({"model_path": EMBEDDED_MODEL} | vars(read), refused)

    @classmethod
    def from_keywords(cls, **given: Any) -> Self:
        """The options by field name, among which SGLang's other flags may stand as on the command
        line; `ConfigError` as in `from_cli`."""
        return cls._made(given, [])

    @classmethod
    def _made(cls, given: dict[str, Any], refused: list[ConfigError]) -> Self:
        """An object of these options, or all that is `refused`: before, and of their values."""
        options, notes, own = declared(cls), [], {}
        for name, value in given.items():
            with gather(refused):
                if name in options:
                    own[name] = value
                elif sglang.find(name):
                    notes.append(sglang.judge(name, value))
                else:
                    raise sglang.unknown_keyword(name, options)
        said = tuple(note for note in notes if note is not None)
        with gather(refused):
            made = cls(**own, without_effect=said)
        raise_all(refused)
        return made

    @property
    def sampling_flag(self) -> str | None:
        """The flag that asks for sampled drafts, or None."""
        if self.speculative_use_block_verification:
            return "--speculative-use-block-verification"
        if self.speculative_use_rejection_sampling:
            return "--speculative-use-rejection-sampling"
        return None

    @property
    def shape(self) -> TreeShape | None:
        """The shape that the flags ask for; None where the drafter chooses, and while it depends
        on the target's architecture."""
        name, topk = self.speculative_algorithm, self.speculative_eagle_topk or 1
        if name is not None and self.sampling_flag is not None:
            return self._sampled_shape(name, topk)
        if name not in MODEL_DRAFTERS:
            return None
        steps, nodes = self.speculative_num_steps, self.speculative_num_draft_tokens
        if steps is None:
            known = name == "STANDALONE" or self.model_path == EMBEDDED_MODEL
            return automatic_shape(name, "LlamaForCausalLM") if known else None
        nodes = steps + 1 if topk == 1 else nodes
        assert nodes is not None, "checked before"
        return TreeShape(steps, topk, nodes)

    def _sampled_shape(self, name: str, topk: int) -> TreeShape:
        """A chain unless topk says otherwise, as deep as steps or the number of nodes allow."""
        steps, nodes = self.speculative_num_steps, self.speculative_num_draft_tokens
        if nodes is None:
            own = _CHAIN if name == "STANDALONE" else _TREE
            deep = steps or (own.steps if name in MODEL_DRAFTERS else DRAFT_TOKENS - 1)
            full = TreeShape(deep, topk, MAX_NODES, sampled=True).capacity
            nodes = full if topk == 1 else min(full, DRAFT_TOKENS)
        return TreeShape(steps or nodes - 1, topk, nodes, sampled=True)

    @property
    def shape_is_open(self) -> bool:
        """Whether the shape depends on the target's architecture."""
        return self.speculative_algorithm in MODEL_DRAFTERS and self.shape is None

    @property
    def tree_nodes(self) -> int:
        """Most nodes that one request verifies in a round: 1 (the root) without speculation."""
        assert not self.shape_is_open, "for_target comes first"
        if self.speculative_algorithm is None:
            return 1
        return self.shape.nodes if self.shape else self.speculative_num_draft_tokens or DRAFT_TOKENS

    @property
    def round_slots(self) -> int:
        """Most KV slots that one request's round may write behind its text: the larger of the
        tree's nodes and the rows of a draft model's steps."""
        shape = self.shape
        rows = 0 if shape is None or shape.sampled else shape.steps * shape.topk
        return max(self.tree_nodes, rows)

    def resolve(self, drafters: Collection[str] = ()) -> ResolvedArgs:
        """A new object with what was left open filled in; `ConfigError` on a contradiction.
        drafters: names that are registered in this process.

        Open until the device is known: `device` "auto" and then `chunked_prefill_size` (see
        `for_device`). Open until the model is seen: `context_length`, `max_total_tokens`, `dtype`
        "auto", and the shape of EAGLE's trees where no flag gives it (see `for_target`). None stays
        None where it means "none", as in `api_key`, `max_queued_requests` and
        `speculative_algorithm`.
        """
        check(self, drafters)
        _warn((*self.without_effect, *without_effect(self), *without_gpu(self)))
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        filled = {name: value for name, value in self._decided().items() if values[name] is None}
        return ResolvedArgs(**values | filled | self._shape_fields() | {"without_effect": ()})

    def _decided(self) -> dict[str, Any]:
        """What becomes of None."""
        name, running = self.speculative_algorithm, RUNNING_REQUESTS
        if name is not None:
            running = RUNNING_REQUESTS_WITH_SPECULATION
        if name is not None and self.max_running_requests is None:
            note = "--max-running-requests is not set; with speculation it is %d."
            logger.info(note, running)
        embedded = EMBEDDED_DRAFTS if self.model_path == EMBEDDED_MODEL else {}
        return {
            "tokenizer_path": self.model_path,
            "served_model_name": self.model_path,
            "max_running_requests": running,
            "chunked_prefill_size": CHUNK_TOKENS.get(self.device),
            "random_seed": secrets.randbits(31),
            "speculative_draft_model_path": embedded.get(name or ""),
            "speculative_draft_load_format": self.load_format if name in MODEL_DRAFTERS else None,
        }

    def _shape_fields(self) -> dict[str, int]:
        """The tree's shape as far as it is known; a chain's nodes follow from its steps, whatever
        was given."""
        shape, name = self.shape, self.speculative_algorithm
        if shape is not None:
            return {
                "speculative_num_steps": shape.steps,
                "speculative_eagle_topk": shape.topk,
                "speculative_num_draft_tokens": shape.nodes,
            }
        if name is None or name in MODEL_DRAFTERS:
            return {}
        return {"speculative_num_draft_tokens": self.tree_nodes}

    def public(self) -> dict[str, Any]:
        """All options by field name, without secrets."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.repr}

    def drafter_options(self) -> dict[str, object]:
        """The `speculative_*` options without that prefix, for a drafter to pick its own from."""
        taken = ("speculative_algorithm", "speculative_drafter_module")
        names = [n for n in declared(type(self)) if n.startswith("speculative_") and n not in taken]
        return {name.removeprefix("speculative_"): getattr(self, name) for name in names}


class ResolvedArgs(ServerArgs):
    """`ServerArgs` after `resolve`: these fields are no longer None."""

    @property
    def drafters(self) -> tuple[str, ...]:
        """The drafter's name, which was found to be known."""
        return () if self.speculative_algorithm is None else (self.speculative_algorithm,)

    if TYPE_CHECKING:
        tokenizer_path: str
        served_model_name: str
        max_running_requests: int
        random_seed: int

    def resolve(self, drafters: Collection[str] = ()) -> ResolvedArgs:
        """This object: it is resolved."""
        return self

    def for_device(self, device: str) -> ResolvedArgs:
        """The same options for this device, cpu or cuda, which "auto" stands for. `ConfigError` as
        in `resolve`."""
        if device == self.device:
            return self
        chunk = self.chunked_prefill_size or CHUNK_TOKENS[device]
        done = dataclasses.replace(self, device=device, chunked_prefill_size=chunk)
        check(done, done.drafters)
        _warn(without_gpu(done))
        return done

    def for_target(self, architecture: str) -> ResolvedArgs:
        """The same options for a target of this architecture, which decides the shape of EAGLE's
        trees where no flag gives it. `ConfigError` as in `resolve`."""
        if not self.shape_is_open:
            return self
        shape = automatic_shape(self.speculative_algorithm, architecture)
        done = dataclasses.replace(
            self,
            speculative_num_steps=shape.steps,
            speculative_eagle_topk=shape.topk,
            speculative_num_draft_tokens=shape.nodes,
        )
        check(done, done.drafters)
        return done


def _warn(notes: Iterable[str]) -> None:
    for note in notes:
        logger.warning("%s", note)


def flags_page() -> str:
    """The text of docs/flags.md."""
    return _PAGE_HEAD + flag_table(declared(ServerArgs).values()) + sglang.foreign_table()


_PAGE_HEAD = """\
# Flags

Every option of the server, with its default and what it takes; then SGLang's other flags, and what
becomes of them here. On a command line they follow `launch_server.py` or `sgl-spec serve`; from
Python they are keywords of `sgl_spec.LLM` ([From Python](python.md)), with `_` for `-`:
`--page-size 16` is `page_size=16`, a switch is `True`.

<!-- Made by `python -m sgl_spec.args > docs/flags.md`; `tests/unit/test_args.py` compares. -->

"""

if __name__ == "__main__":
    sys.stdout.write(flags_page())
