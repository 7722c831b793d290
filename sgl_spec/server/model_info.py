"""What the engine said about itself when it was ready, typed."""

from __future__ import annotations

from typing import Any

import msgspec


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`Ready.info`. Lengths and pool sizes are in tokens; `memory` is in GB by purpose. device is
    cpu or cuda, device_name what the card calls itself.

    max_request_tokens: most tokens of prompt and output together: the context, or less where the
    pool is smaller. generation_defaults: sampling values of the checkpoint's generation_config.
    acceptance_rule: how drafted tokens are accepted.
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
    chunked_prefill_size: int
    page_size: int
    speculative_algorithm: str | None
    draft_tokens: int | None
    acceptance_rule: str
    memory: dict[str, Any]
