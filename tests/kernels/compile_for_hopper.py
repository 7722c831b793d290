"""Compile every kernel for compute capability 9.0 on a machine without a GPU, and print registers,
spilled bytes and shared memory of each variant: `python tests/kernels/compile_for_hopper.py`."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / "kernels"), str(_ROOT / "tests")]
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class _Driver:
    """Just what the compiler asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only() -> list[Any]:
    """From here on launches compile and do nothing; the list collects what they compiled."""
    driver.set_active(_Driver())
    real, compiled = JITFunction.run, []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled.append(real(self, *args, grid=grid, warmup=True, **options))
        return compiled[-1]

    JITFunction.run = run
    return compiled


def resources(kernel: Any) -> dict[str, int]:
    """Registers of a thread, spilled bytes, shared bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return found | {"SHARED": kernel.metadata.shared}


def attention(dtype: torch.dtype) -> None:
    from sgl_spec_kernels.tree_attn import attn_work, plan_tree_attn, tree_attn

    for heads, kv_heads, dim, longest, tree in (
        (32, 8, 128, 1, True),
        (32, 8, 128, 8, True),
        (32, 8, 128, 64, True),
        (9, 3, 64, 8, True),
        (32, 8, 128, 64, False),
        (8, 4, 256, 64, True),
    ):
        group = heads // kv_heads
        ints = torch.zeros(3, dtype=torch.int64)
        plan = plan_tree_attn(
            torch.zeros(3, 64, dtype=torch.int32),
            ints[:2],
            ints[:2],
            ints,
            torch.zeros(2, dtype=torch.int64) if tree else None,
            ints[:2] if tree else None,
            heads_per_kv=group,
            kv_heads=kv_heads,
            max_q_len=longest,
            work=attn_work(2, kv_heads, longest, group, dim, "cpu"),
        )
        q, kv = torch.zeros(2, heads, dim, dtype=dtype), torch.zeros(2, 9, kv_heads, dim)
        tree_attn(q, kv[0].to(dtype), kv[1].to(dtype), plan, 1.0)


CALLS: dict[str, Callable[[torch.dtype], None]] = {"attention": attention}


def main(names: list[str]) -> None:
    compiled = compile_only()
    for name in names or CALLS:
        for dtype in (torch.bfloat16, torch.float32):
            CALLS[name](dtype)
            for kernel in compiled:
                print(f"{name:12} {str(dtype):15} {kernel.name:20} {resources(kernel)}")
            compiled.clear()


if __name__ == "__main__":
    main(sys.argv[1:])
