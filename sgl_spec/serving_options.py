"""The options of the model, the server and the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_spec.options import NOT_EMPTY, Check, all_at_least, at_least, between, option, share

RUNNING_REQUESTS = 256
RUNNING_REQUESTS_WITH_SPECULATION = 48
# A chunk is a pause for every running request: about 1.5 s of a 135M model on two CPU cores, 50 ms
# of an 8B model on a GPU that computes 600 TFLOP/s.
CHUNK_TOKENS = 256
CHUNK_TOKENS_CUDA = 2048
# Of a GPU's memory: what is left over is for CUDA itself and what the shapes do not tell.
MEM_FRACTION_CUDA = 0.88

_DTYPES = {
    "half": "float16",
    "fp16": "float16",
    "float": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
}


def _backend(name: str) -> str | None:
    return None if name.lower() == "auto" else name


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Options in the order of --help and docs/flags.md; `args.ServerArgs` adds what they mean."""

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
    attention_backend: str | None = option(
        None,
        help="What computes: plain torch, our Triton kernels, or these with FlashInfer's attention "
        "(`pip install .[flashinfer]`; no CUDA graphs).",
        group="model",
        choices=("torch", "triton", "flashinfer"),
        spellings={"torch_native": "torch"},
        normalize=_backend,
        unset="triton on a GPU, torch on a CPU",
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
        1,
        help="Tokens between two chunks of a stream, unless the request says it.",
        group="server",
        check=at_least(1),
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
        help="Share of the memory for weights, KV pools, work space and CUDA graphs together: of "
        "all that a GPU has, or of what is free at start on a CPU.",
        group="scheduler",
        check=share(),
        unset=f"{MEM_FRACTION_CUDA} on a GPU; on a CPU the pool gets a quarter of what is free "
        "beside the weights",
    )
    max_prefill_tokens: int = option(
        16384, help="Most prompt tokens in one prefill batch.", group="scheduler", check=at_least(1)
    )
    chunked_prefill_size: int | None = option(
        None,
        help="Longest piece of a prompt in one forward; -1 turns chunking off.",
        group="scheduler",
        check=Check("-1 (off) or an integer >= 1", lambda n: n == -1 or n >= 1),
        unset=f"{CHUNK_TOKENS_CUDA} on a GPU, {CHUNK_TOKENS} on a CPU",
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
    disable_overlap_schedule: bool = option(
        False,
        help="On a GPU: launch a round only when the one before it was read.",
        group="scheduler",
    )
    disable_cuda_graph: bool = option(
        False, help="On a GPU: launch every kernel of a round by itself.", group="scheduler"
    )
    cuda_graph_max_bs: int | None = option(
        None,
        help="Most requests of a round that is captured as a CUDA graph.",
        group="scheduler",
        aliases=("--cuda-graph-max-bs-decode",),
        check=at_least(1),
        unset="all that may run, at most 256",
    )
    cuda_graph_bs: tuple[int, ...] | None = option(
        None,
        help="Batch sizes that are captured; a batch is filled up to the next of them.",
        group="scheduler",
        aliases=("--cuda-graph-bs-decode",),
        check=all_at_least(1),
        unset="1, 2, 4, 8 and on in growing steps",
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
