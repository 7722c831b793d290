"""Compile every kernel for compute capability 9.0 on a machine without a GPU, and print registers,
spilled bytes and shared memory of each variant: `python tests/kernels/compile_for_hopper.py`."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
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
READS_WEIGHTS = ("_rms_norm", "_embed")  # before it waits
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
    from sgl_spec_kernels import chain

    driver.set_active(_Driver())
    chain._is_able = lambda device: True
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


def widths(kernel: Any) -> dict[str, int]:
    """How many loads, stores and asynchronous copies of device memory there are, by bytes."""
    found: Counter[str] = Counter()
    for op, vector, bits in re.findall(
        r"\b(ld|st)\.global\S*?(?:\.v(\d))?\.[bufs](\d+)\b", kernel.asm["ptx"]
    ):
        found[f"{op} {int(vector or 1) * int(bits) // 8}"] += 1
    for size in re.findall(r"cp\.async\.c[ag]\.\S+ .*?, 0x?(\w+)", kernel.asm["ptx"]):
        found[f"cp {int(size, 16)}"] += 1
    return dict(found)


def waits_first(kernel: Any) -> bool:
    """Whether no memory is read or written before what was launched earlier is done, weights
    excepted."""
    before, wait, _ = kernel.asm["ptx"].partition("griddepcontrol.wait")
    before = re.sub(r"\S*prefetch\S*", "", before)
    touches = "st|atom|red" if kernel.name in READS_WEIGHTS else "ld|st|atom|red|cp\\.async"
    touched = re.search(rf"\b({touches})(\.\w+)*\.global", before)
    return bool(wait) and touched is None


def attention(dtype: torch.dtype) -> None:
    from sgl_spec_kernels.tree_attn import attn_work, plan_tree_attn, tree_attn

    for heads, kv_heads, dim, longest, tree in (
        (32, 8, 128, 1, True),
        (32, 8, 128, 8, True),
        (32, 8, 128, 64, True),
        (9, 3, 64, 8, True),
        (32, 8, 128, 64, False),
        (32, 8, 128, 2048, False),
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


def ordered(dtype: torch.dtype) -> None:
    from sgl_spec_kernels import ordered_attn
    from sgl_spec_kernels.tree_attn import AttnWork

    for heads, kv_heads, dim, batch, longest, tree in (
        (32, 8, 128, 1, 1, True),
        (32, 8, 128, 1, 8, True),
        (32, 8, 128, 48, 1, True),
        (32, 8, 128, 48, 8, True),
        (32, 8, 128, 48, 32, True),
        (9, 3, 64, 48, 8, True),
        (32, 8, 128, 2, 2048, False),
    ):
        ints, words = torch.zeros(batch + 1, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
        rows = ordered_attn.ordered_work_rows(batch, kv_heads, longest, heads // kv_heads, 9)
        plan = ordered_attn.plan_ordered_attn(
            torch.zeros(batch, 64, dtype=torch.int32),
            ints[:batch],
            ints[:batch],
            ints,
            words if tree else None,
            heads_per_kv=heads // kv_heads,
            kv_heads=kv_heads,
            head_dim=dim,
            dtype=dtype,
            max_q_len=longest,
            work=AttnWork.of(max(rows, 64), dim, "cpu"),
        )
        q, kv = torch.zeros(2, heads, dim, dtype=dtype), torch.zeros(2, 9, kv_heads, dim)
        ordered_attn.ordered_attn(q, kv[0].to(dtype), kv[1].to(dtype), plan, 1.0)


def fused(dtype: torch.dtype) -> None:
    from sgl_spec_kernels.embed import embed_beside, embed_norm
    from sgl_spec_kernels.rms_norm import rms_norm
    from sgl_spec_kernels.rope_kv import rope_kv
    from sgl_spec_kernels.silu_mul import silu_mul

    x, ints = torch.zeros(2, 6144, dtype=dtype), torch.zeros(2, dtype=torch.int64)
    hidden = x[:, :4096].contiguous()
    rms_norm(x[:, :4096], x[0, :4096], 1e-5, hidden)
    rms_norm(x[:, :4096], x[0, :4096], 1e-5, hidden, None, x[:, :4096])
    embed_norm(hidden, ints, x[0, :4096], 1e-5)
    embed_beside(hidden, ints, x[:, :4096], (x[0, :4096], x[0, :4096]), 1e-5, hidden)
    embed_beside(hidden, ints, x[:, :4096], None, 1e-5)
    rms_norm(x[:, :576], x[0, :576], 1e-5)
    kv, table = torch.zeros(2, 9, 8, 128, dtype=dtype), torch.zeros(9, 64)
    rope_kv(x, kv[0], kv[1], table, table, ints, ints)
    rope_kv(x, kv[0], kv[1], table, table, ints, ints, (x[0, :128], x[0, :128]), 1e-6)
    silu_mul(x)


def skinny(dtype: torch.dtype) -> None:
    from sgl_spec_kernels import gated_gemm
    from sgl_spec_kernels.skinny_gemm import gemm_work, skinny_gemm

    for outputs, inputs in ((4096, 4096), (28672, 4096)):
        weight, work = (
            torch.zeros(outputs, inputs, dtype=dtype),
            gemm_work([(outputs, 1)], 64, "cpu"),
        )
        for rows in (1, 32):
            x, stream = torch.zeros(rows, inputs, dtype=dtype), torch.zeros(rows, outputs).to(dtype)
            skinny_gemm(x, weight, work, None, stream, stream)
    for rows, shape in gated_gemm.TUNED[28672, 4096]:
        if shape is not None:
            gated_gemm.gated_gemm(torch.zeros(rows, 4096, dtype=dtype), weight, shape)


def draft(dtype: torch.dtype) -> None:
    from sgl_spec_kernels import compact, tree_build
    from sgl_spec_kernels.draft_topk import draft_topk, topk_work

    ints, table = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 99, dtype=torch.int32)
    for width, topk in ((32000, 8), (128256, 4)):
        values, tokens = torch.zeros(2, topk), torch.zeros(2, topk, dtype=torch.int64)
        draft_topk(
            torch.zeros(2, width, dtype=dtype),
            values,
            tokens,
            topk_work(2, width, topk, "cpu"),
            error=0.7,
            depth=1,
            lengths=ints,
            seed=ints,
            temperature=values[:, 0].contiguous(),
            ids=torch.zeros(width, dtype=torch.int64),
        )
    for steps, topk, nodes in ((5, 4, 8), (7, 8, 64)):
        state, tree = (
            tree_build.grow_state(2, steps, topk, "cpu"),
            tree_build.device_tree(2, nodes, "cpu"),
        )
        found = torch.zeros(2 * topk, topk), torch.zeros(2 * topk, topk, dtype=torch.int64)
        where = {"rows": ints, "req_to_token": table}
        tree_build.grow_tree(state, *found, 2, prefix_lens=ints, **where, last=False)
        tree_build.build_tree(tree, state, ints, steps, committed_lens=ints, **where)
    kv, path = torch.zeros(2, 32, 9, 8, 128, dtype=dtype), torch.zeros(2, 6, dtype=torch.int64)
    compact.move_path(kv[0], kv[1], table, ints, ints, path, ints)


def sampling(dtype: torch.dtype) -> None:
    from sgl_spec_kernels import filters, reject, sample
    from sgl_spec_kernels.simulate import force_path

    ints, vocab = torch.zeros(2, dtype=torch.int64), 128256
    nodes, floats, logits = ints[:, None].repeat(1, 8), torch.zeros(2), torch.zeros(16, vocab)
    cuts = nodes.clone()
    heads = filters.cut_heads(16, "cpu")
    for t, *cut in ((None,), (floats,), (floats, cuts), (floats, cuts, heads)):
        out = sample.walked(2, 8, vocab, "cpu")
        trees = sample.Trees(nodes, nodes, nodes, ints, logits, ints, ints, ints, t, *cut)
        sample.draw_all(trees, out)
        sample.draw_walk(trees, out, 2)
    force_path(trees, nodes, ints, out)
    probs, space = torch.zeros(16, 32000), reject.reject_space(2, vocab, "cpu")
    reject.reject_and_follow(trees, probs, nodes, out, space, torch.zeros(32000, dtype=torch.int64))
    settings = (floats, ints, floats.double(), floats)
    for kind in (torch.float32, dtype):
        rows = logits.to(kind)
        filters.token_cuts(rows, ints, ints, *settings, cuts, heads)


def settings(dtype: torch.dtype) -> None:
    from sgl_spec_kernels import sample
    from sgl_spec_kernels.logprobs import Asked, emitted_logprobs, found_space
    from sgl_spec_kernels.settings import (
        Masks,
        RowSettings,
        adjust_logits,
        adjusted_space,
        count_tokens,
    )

    ints, floats, vocab = torch.zeros(2, dtype=torch.int64), torch.zeros(2), 128256
    wide = torch.zeros(2, vocab)
    rows = RowSettings(ints, ints, floats, floats, floats, wide.byte(), wide.int(), wide)
    words = torch.zeros(1, vocab // 32, dtype=torch.int32)
    for nodes in (1, 8, 64):
        tree = torch.zeros(2, nodes, dtype=torch.int64)
        logits, out = (
            torch.zeros(2 * nodes, vocab, dtype=dtype),
            sample.walked(2, nodes, vocab, "cpu"),
        )
        space = adjusted_space(2 * nodes, vocab, "cpu")
        for masks in (None, Masks(words, tree)):
            where = (ints, ints, ints, ints, tree, tree, tree)
            adjust_logits(logits, space, rows, *where, masks)
        count_tokens(rows, ints, out, 1)
        asked = Asked(ints, ints, torch.zeros(2, 1024, dtype=torch.int32))
        found = found_space(2 * nodes, vocab, 128, 1024, "cpu")
        emitted_logprobs(logits, ints, ints, asked, out, found, nodes)


def rounds(dtype: torch.dtype) -> None:
    from sgl_spec_kernels import round_state, sample
    from sgl_spec_kernels.tree_rows import tree_rows

    ints, floats = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    kinds = (ints, ints, ints, floats, ints, floats.double(), floats, ints)
    state, out = round_state.RowState(*kinds), sample.walked(2, 8, 99, "cpu")
    round_state.begin_round(state, ints, state)
    round_state.end_round(ints, ints, ints, out, torch.zeros(2, 9, dtype=torch.int32), 1)
    rows, table = round_state.extend_buffers(2, 5, "cpu"), torch.zeros(2, 9, dtype=torch.int32)
    where = {"committed": ints, "roots": ints, "rows": ints, "req_to_token": table}
    for kind in round_state.KINDS:
        round_state.extend_rows(rows, out, kind, **where)
    tree_rows(ints, ints, ints, ints, ints, table, ints, ints)
    round_state.gather_features(torch.zeros(16, 12288, dtype=dtype), rows.features)


def ngrams(dtype: torch.dtype) -> None:
    from sgl_spec_kernels import ngram, ngram_rows
    from sgl_spec_kernels.ngram_ref import ngram_drafts, token_index

    ints, table = torch.zeros(48, dtype=torch.int64), torch.zeros(49, 99, dtype=torch.int32)
    for nodes, by_count in ((8, False), (16, True), (64, False)):
        index = token_index(5000, 5000, 49, nodes, "cpu", by_count=by_count)
        emitted = torch.zeros(48, nodes, dtype=torch.int64)
        new = [torch.zeros(48 * nodes, dtype=torch.int64) for _ in range(2)]
        ngram.keep(index, ints, ints, emitted, ints, *new, 48)
        ngram.enter(index, *new)
        trees, rows = ngram_drafts(48, nodes, "cpu"), ngram_rows.tree_rows_buffers(48, 128, "cpu")
        ngram.propose(index, ints, ints, ints, ints, trees)
        ngram.judge(index, trees, ints, emitted, ints, 48)
        ngram_rows.share_rows(trees, rows)
        ngram_rows.tree_rows(trees, ints, ints, table, rows)


CALLS: dict[str, Callable[[torch.dtype], None]] = {
    "attention": attention,
    "ordered": ordered,
    "fused": fused,
    "skinny": skinny,
    "draft": draft,
    "sampling": sampling,
    "settings": settings,
    "rounds": rounds,
    "ngrams": ngrams,
}


def main(names: list[str]) -> None:
    compiled = compile_only()
    for name in names or CALLS:
        CALLS[name](torch.bfloat16)
        for kernel in compiled:
            print(f"{name:12} {kernel.name:20} {resources(kernel)} {widths(kernel)}", flush=True)
            if not waits_first(kernel):
                sys.exit(f"{kernel.name} touches memory before it waits for the kernel before it")
        compiled.clear()


if __name__ == "__main__":
    main(sys.argv[1:])
