"""The scheduler's bounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Resolved from the flags.

    max_request_tokens: prompt + output tokens that one request can hold when it runs alone.
    prefill_budget: prompt tokens of one forward; chunked: whether a prompt may be cut to fit it;
    prefill_requests: most prompts of one forward, None for any number; prefills_in_a_row: most such
    forwards between two rounds; pause_tokens: see `policy.prefill_tokens`.
    draft_tokens: most nodes of a tree, root included (1: no speculation). round_slots: most slots
    behind the committed tokens that one round writes. overlap: whether a batch may be under way
    while the host does anything else than wait for it.
    """

    max_running: int
    max_queued: int | None
    max_request_tokens: int
    prefill_budget: int
    chunked: bool
    draft_tokens: int
    round_slots: int
    schedule_policy: str = "fcfs"
    stream_interval: int = 1
    overlap: bool = True
    prefill_requests: int | None = None
    prefills_in_a_row: int = 1
    pause_tokens: int | None = None
    check_every_step: bool = False
