"""What the engine said about itself when it was ready, typed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from sgl_spec.args import ResolvedArgs


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`Ready.info`. Lengths and pool sizes are in tokens; `memory` is in GB by purpose. device is
    cpu or cuda, device_name what the card calls itself.

    max_request_tokens: most tokens of prompt and output together: the context, or less where the
    pool is smaller. generation_defaults: sampling values of the checkpoint's generation_config.
    acceptance_rule: how drafted tokens are accepted. strict: whether a text depends on its own
    request alone.
    """

    model_dir: str
    tokenizer_dir: str
    model_path: str
    vocab_size: int
    context_length: int
    max_req_input_len: int
    max_request_tokens: int
    max_total_tokens: int
    max_running_requests: int
    eos_token_ids: list[int]
    generation_defaults: dict[str, Any]
    architectures: list[str]
    model_type: str
    dtype: str
    device: str
    device_name: str
    attention_backend: str
    strict: bool
    chunked_prefill_size: int
    page_size: int
    speculative_algorithm: str | None
    draft_tokens: int | None
    acceptance_rule: str
    memory: dict[str, Any]


def summary(args: ResolvedArgs, info: ModelInfo) -> Iterator[str]:
    """What a start is told to its operator in the log."""
    where = f"{info.device} ({info.device_name})" if info.device_name else info.device
    yield (
        f"Model {args.model_path}: {', '.join(info.architectures)}, {info.dtype} on {where}, "
        f"weights {_gib(info.memory.get('weight'))}, attention {info.attention_backend}"
        f"{', strict' if info.strict else ''}."
    )
    yield (
        f"KV pool: {info.max_total_tokens} tokens, {_gib(info.memory.get('kvcache'))}. Limits: "
        f"context {info.context_length} tokens, {info.max_request_tokens} for one request; "
        f"{info.max_running_requests} requests at once; prefill chunks of "
        f"{info.chunked_prefill_size} tokens; pages of {info.page_size}."
    )
    if info.speculative_algorithm is None:
        yield "Speculation: off."
    else:
        yield (
            f"Speculation: {info.speculative_algorithm}, trees of up to {info.draft_tokens} tokens,"
            f" acceptance rule {info.acceptance_rule}."
        )


def _gib(gigabytes: float | None) -> str:
    return "unknown" if gigabytes is None else f"{gigabytes * 1e9 / 2**30:.2f} GiB"
