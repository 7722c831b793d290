"""Kernels in a row without the gaps between them: programmatic dependent launch.

A kernel that is launched so may start while the one before it still runs; it first lets the next
one start too, and then waits until everything before it is done and visible. What it does before it
waits must not touch what other kernels write. On devices before Hopper, and for a kernel behind
work of another kind, it is an ordinary launch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

ENABLED = True
"""False: every kernel is launched when the one before it has ended."""


@triton.jit
def let_follow(CHAINED: tl.constexpr):
    """The next kernel may start."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_before(CHAINED: tl.constexpr):
    """What was launched before is done."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def chain(CHAINED: tl.constexpr):
    """Both, for a kernel that has nothing to do before it waits. Comes first in it."""
    let_follow(CHAINED)
    wait_before(CHAINED)


@cache
def _is_able(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def chained(device: torch.device) -> dict[str, Any]:
    """The options with which every kernel here is launched: of its parameter CHAINED, too."""
    if ENABLED and _is_able(device):
        return {"CHAINED": True, "launch_pdl": True}
    return {"CHAINED": False}
