"""Decoders on the fused path against the same on plain torch: small in the interpreter, in every
dtype and inside a CUDA graph on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_runs import NEAR, assert_same_kv, batch_of, both, compare, on, with_fillers
from kernel_runs import INTERPRETED, relative_error
from model_runs import Piece, Run
from tiny import make_tiny
from torch import Tensor

from sgl_spec.layers import linear, skinny
from sgl_spec.models.decoder import Decoder
from sgl_spec_kernels import gated_gemm, skinny_gemm, tree_attn

PARENTS = [-1, 0, 0, 1, 2, 4]
STEPS = [
    [Piece(0, 0, range(5, 14)), Piece(2, 0, [9])],  # prompts
    [Piece(1, 0, range(30, 35)), Piece(0, 9, range(60, 64)), Piece(2, 1, [8, 3])],  # chunks
    [Piece(0, 13, [7]), Piece(2, 3, [6]), Piece(1, 5, [5])],  # decoding
    [Piece(0, 14, [3, 4, 5, 6, 7, 8], PARENTS), Piece(2, 4, [7], [-1])],  # trees
]
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
        }
    },
    "qwen2": {"arch": "qwen2"},
    "qwen3": {"arch": "qwen3", "kv_heads": 1, "head_dim": 24},
}


@pytest.fixture(autouse=True)
def _small_blocks(
    request: pytest.FixtureRequest, few_programs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.node.get_closest_marker("gpu") is None:  # the interpreter is slow
        monkeypatch.setattr(tree_attn, "_tile", lambda *_: (16, 4, 2))
        monkeypatch.setattr(tree_attn, "MIN_SPLIT", 16)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def models(tiny: Path) -> tuple[Decoder, Decoder]:
    return both(tiny)


@INTERPRETED
@pytest.mark.parametrize("name", SHAPES)
def test_equals_plain_torch(name: str, tmp_path: Path) -> None:
    compare(*both(make_tiny(tmp_path, **SHAPES[name])), STEPS)


@INTERPRETED
def test_float16(tiny: Path) -> None:
    """Against float32: half precision is off by its own rounding and no more."""
    (plain, _), (_, half) = both(tiny), both(tiny, dtype="float16")
    runs = [Run(model, 3, 60) for model in (plain, half)]
    for pieces in STEPS[:2]:
        expected, found = (torch.cat(run.logits(*pieces)) for run in runs)
        assert found.dtype is torch.float32
        assert 1e-5 < relative_error(found, expected) < 5e-3
    with torch.inference_mode():
        assert half.raw_logits(torch.ones(2, 64, dtype=torch.float16)).dtype is torch.float16


@INTERPRETED
def test_a_tree_in_two_forwards(models: tuple[Decoder, Decoder]) -> None:
    """Columns of a tree that an earlier forward wrote."""
    text, tokens = Piece(0, 0, range(5, 17)), [3, 4, 5, 6, 7, 8]
    whole = Run(models[0], 1, 40)
    whole.logits(text)
    expected = whole.logits(Piece(0, 12, tokens, PARENTS))[0]
    run = Run(models[1], 1, 40)
    run.logits(text)
    batch, found = batch_of(run, Piece(0, 12, tokens, PARENTS)), []
    for start, stop in ((0, 2), (2, 5), (5, 6)):
        rows = {
            name: getattr(batch, name)[start:stop]
            for name in ("tokens", "positions", "slots", "mask_words")
        }
        part = replace(
            batch,
            **rows,
            q_starts=torch.tensor([0, stop - start]),
            tree_lens=torch.tensor([start]),
            max_q_len=3,
        )
        with torch.inference_mode():
            found.append(models[1].logits(models[1].forward(part, run.kv)))
    torch.testing.assert_close(torch.cat(found), expected, **NEAR)


@INTERPRETED
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows of nobody hold anything
def test_fillers_change_nothing(models: tuple[Decoder, Decoder]) -> None:
    """A filler request and rows of nobody: neither KV nor other rows know of them."""
    fused = models[1]
    trees = Piece(0, 9, [3, 4, 5, 6], PARENTS[:4]), Piece(1, 0, [7, 1, 1], [-1, -1, -1])
    runs = [Run(fused, 2, 40), Run(fused, 2, 40)]
    for run in runs:
        run.logits(STEPS[0][0])
        run.kv.k[:, run.table[1, :3].long()] = 0  # what a filler may read is finite
        run.kv.v[:, run.table[1, :3].long()] = 0
    expected = runs[0].logits(trees[0])[0]
    batch = with_fillers(batch_of(runs[1], *trees), 5)
    batch.slots[4:7] = -1
    with torch.inference_mode():
        found = fused.logits(fused.forward(batch, runs[1].kv))
    assert found.shape[0] == 12
    torch.testing.assert_close(found[:4], expected, atol=1e-5, rtol=0)
    assert_same_kv(runs[1].kv, runs[0].kv)


@INTERPRETED
@pytest.mark.parametrize("layers", [(0, 1, 2), (2, 0, 1, 0), (2,), (1,)])
def test_features(layers: tuple[int, ...], models: tuple[Decoder, Decoder]) -> None:
    found = []
    for model in models:
        run = Run(model, 3, 60)
        run.logits(*STEPS[0])
        with torch.inference_mode():
            found.append(model.forward_features(batch_of(run, *STEPS[1]), run.kv, layers))
    for mine, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, expected, **NEAR)


@INTERPRETED
def test_work_space_is_reserved_and_stays(tiny: Path) -> None:
    """After `reserve` a forward makes none; a larger shape gets its own, which graphs of the
    smaller never see."""
    model = both(tiny)[1]
    run, fused = Run(model, 3, 60), model.stack.fused
    assert fused is not None
    model.reserve(3, 9, positions=100)

    def space() -> list[Tensor]:
        works = fused._attention._works
        parts = [part for work in works for part in (work.part, work.stats)]
        return [*parts, *(table for tables in fused._tables for table in tables)]

    before = space()
    assert before[-1].shape == (2048, 8)  # the context
    for pieces in STEPS:
        with torch.inference_mode():
            model.forward(batch_of(run, *pieces), run.kv)
    assert [t.data_ptr() for t in space()] == [t.data_ptr() for t in before]
    model.reserve(64, 64, positions=3000)
    after = space()
    assert len(after) == len(before) + 4
    assert {t.data_ptr() for t in before} < {t.data_ptr() for t in after}
    assert all(t.shape == (3000, 8) for t in fused._tables[-1])


@INTERPRETED
def test_positions_beyond_the_models_context(tmp_path: Path) -> None:
    """A short context is no bound where the slot table is wider."""
    directory = make_tiny(tmp_path, max_position_embeddings=8)
    compare(*both(directory), [[Piece(0, 0, range(5, 25))], [Piece(0, 20, [7])]])


@INTERPRETED
def test_tuned_products(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the table says so our own product runs, with its work space; for more rows torch's."""
    shape = skinny_gemm.GemmShape(32, 16, 2)
    table = {(64, 64): ((2, shape),), (64, 128): ((1, None), (3, shape)), (512, 64): ((9, shape),)}
    monkeypatch.setattr(skinny_gemm, "TUNED", table)
    monkeypatch.setattr("sgl_spec.layers.skinny.TUNED", table)
    ran: list[tuple[int, ...]] = []

    def product(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        ran.append((len(x), *weight.shape))
        return skinny_gemm.skinny_gemm(x, weight, *rest)

    monkeypatch.setattr("sgl_spec.layers.skinny.skinny_gemm", product)
    plain, fused = both(tiny, dtype="float16")
    for rows, expected in (
        (1, {(64, 64), (512, 64)}),
        (3, {(64, 128), (512, 64)}),
        (11, set()),
    ):
        found = []
        for model in (plain, fused):
            found.append(Run(model, 1, 60).logits(Piece(0, 0, range(5, 5 + rows)))[0])
        assert {at[1:] for at in ran} == expected
        assert {at[0] for at in ran} <= {rows}
        assert relative_error(found[1], found[0]) < 5e-3
        ran.clear()


@INTERPRETED
def test_adding_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """`add_into` by torch and by our product, with and without a bias."""
    monkeypatch.setattr(
        "sgl_spec.layers.skinny.wins",
        lambda rows, n, k: skinny_gemm.GemmShape(16, 16, 1) if rows < 3 else None,
    )
    weight, bias = torch.randn(40, 24).half(), torch.randn(40).half()
    for rows, with_bias in ((2, False), (2, True), (3, False), (3, True)):
        layer = linear.Linear(weight, bias if with_bias else None)
        linear.use_tuned([layer], torch.device("cpu"))
        x, stream = torch.randn(rows, 24).half(), torch.randn(rows, 40).half()
        expected = stream.float() + x.float() @ weight.float().T + with_bias * bias.float()
        before = stream.clone()
        assert relative_error(layer.add_to(stream, x), expected) < 2e-3
        assert torch.equal(stream, before)
        layer.add_into(stream, x)
        assert relative_error(stream, expected) < 2e-3


@INTERPRETED
def test_gated_products(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the table says so one kernel is the gate-up product and its activation."""
    shape = gated_gemm.GatedShape(16, 16, 4, 3)
    monkeypatch.setattr(gated_gemm, "TUNED", {(256, 64): ((1, None), (3, shape))})
    ran: list[int] = []

    def product(x: Tensor, *rest: Any) -> Tensor:
        ran.append(len(x))
        return found(x, *rest)

    found = gated_gemm.gated_gemm
    monkeypatch.setattr(gated_gemm, "gated_gemm", product)
    plain, fused = both(tiny, dtype="float16")
    for rows, layers in ((1, 0), (3, fused.config.num_layers), (4, 0)):
        pair = [
            Run(model, 1, 60).logits(Piece(0, 0, range(5, 5 + rows)))[0] for model in (plain, fused)
        ]
        assert ran == [rows] * layers
        assert relative_error(pair[1], pair[0]) < 5e-3
        ran.clear()


def test_rows_of_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(skinny.LT_ROWS, (40, 24), ((3, 4), (7, 7)))
    assert [rows for rows in range(10) if skinny.lt_wins(rows, 40, 24)] == [3, 4, 7]
    assert not skinny.lt_wins(3, 24, 40)


@pytest.mark.gpu
def test_cublaslt_for_its_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is left with the library that it had."""
    monkeypatch.setitem(skinny.LT_ROWS, (512, 256), ((3, 4),))
    weight = torch.randn(512, 256, device="cuda").bfloat16()
    layer = linear.Linear(weight)
    linear.use_tuned([layer], weight.device)
    before, chosen = torch.backends.cuda.preferred_blas_library(), []
    real = skinny.F.linear

    def product(*args: Any) -> Tensor:
        chosen.append(torch.backends.cuda.preferred_blas_library() != before)
        return real(*args)

    monkeypatch.setattr(skinny.F, "linear", product)
    for rows in (2, 3, 4, 5):
        x = torch.randn(rows, 256, device="cuda").bfloat16()
        assert relative_error(layer(x), x.float() @ weight.float().T) < 1e-2
    assert chosen == [False, True, True, False]
    assert torch.backends.cuda.preferred_blas_library() == before


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Launches by name: our kernels, and torch's operations that are no view and no allocation."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from sgl_spec.layers import device_attention
    from sgl_spec.models import fused

    names: list[str] = []
    free = {"empty", "empty_like", "new_empty", "slice", "view", "select", "split", "unbind", "t"}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            name = func.overloadpacket.__name__
            if name not in free:
                names.append(name)
            return func(*args, **(kwargs or {}))

    def stub(name: str, make: Any) -> Any:
        def launch(*args: Any) -> Tensor:
            names.append(name)
            return make(*args)

        return launch

    stubs = {
        (fused, "rms_norm"): lambda x, w, e, r, *rest: torch.empty_like(x),
        (fused, "embed_norm"): lambda table, t, *rest: torch.empty(2, len(t), 64).unbind(),
        (fused, "silu_mul"): lambda x: torch.empty_like(x[:, : x.shape[1] // 2]),
        (fused, "rope_kv"): lambda x, *rest: x.view(len(x), -1, 16)[:, :4],
        (device_attention, "tree_attn"): lambda q, *rest: torch.empty(len(q), 64),
    }
    for (module, name), make in stubs.items():
        monkeypatch.setattr(module, name, stub(name, make))
    with Count():
        yield names


@INTERPRETED
def test_launches(models: tuple[Decoder, Decoder], counted: list[str]) -> None:
    """Nine a layer, the first norm with the embedding, and the last; a feature costs none but
    where the embedding itself is one. Nothing is read back."""
    run = Run(models[1], 2, 40)
    batch = batch_of(run, Piece(0, 0, [3, 4, 5], [-1, 0, 0]), Piece(1, 0, [3], [-1]))
    with torch.inference_mode():
        models[1].forward(batch, run.kv)  # work space
        counted.clear()
        models[1].forward(batch, run.kv)
        plain = list(counted)
        counted.clear()
        models[1].forward_features(batch, run.kv, (1, 1, 0))
    product = "_linear_pointwise"
    layer = ["rms_norm", product, "rope_kv", "tree_attn", product]
    layer += ["rms_norm", product, "silu_mul", product]
    assert plain == ["embed_norm", *layer[1:], *layer, "rms_norm"]
    again = ["rms_norm", "copy_", *layer[1:]]  # twice the same
    assert counted == ["embed_norm", "copy_", *layer[1:], *again, "rms_norm"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_float32_on_the_gpu(name: str, tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **SHAPES[name])
    compare(*both(directory, device="cuda", dtype="float32"), STEPS)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "error"), [("float16", 5e-3), ("bfloat16", 4e-2)])
def test_half_precision_on_the_gpu(dtype: str, error: float, tiny: Path) -> None:
    exact, half = both(tiny, "cuda", dtype="float32")[0], both(tiny, "cuda", dtype=dtype)[1]
    runs = [Run(model, 3, 60) for model in (exact, half)]
    for pieces in STEPS:
        found = []
        for run in runs:
            with torch.inference_mode():
                found.append(run.model.logits(run.model.forward(batch_of(run, *pieces), run.kv)))
        assert relative_error(found[1], found[0]) < error


@pytest.mark.gpu
def test_in_a_graph(tiny: Path) -> None:
    """A captured forward is replayed on other tokens, other lengths and other slots."""
    plain, fused = both(tiny, "cuda", dtype="float32")
    runs = [Run(model, 3, 60) for model in (plain, fused)]
    fused.reserve(2, 4, positions=60)
    trees = Piece(0, 9, [3, 4, 5, 6], PARENTS[:4]), Piece(1, 5, [7, 8, 9, 1], PARENTS[:4])
    static = batch_of(runs[1], *trees)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.inference_mode():
        with torch.cuda.stream(stream):
            fused.forward_features(static, runs[1].kv, (0, 1))
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            hidden, features = fused.forward_features(static, runs[1].kv, (0, 1))
        for prefixes in ((9, 5), (13, 0), (40, 33)):
            pieces = [replace(piece, prefix=n) for piece, n in zip(trees, prefixes, strict=True)]
            for run in runs:
                run.kv.k.normal_(generator=torch.Generator("cuda").manual_seed(sum(prefixes)))
                run.kv.v.copy_(run.kv.k).mul_(2)
            batch = batch_of(runs[1], *pieces)
            for field in ("tokens", "positions", "slots", "prefix_lens", "mask_words"):
                getattr(static, field).copy_(getattr(batch, field))
            graph.replay()
            expected = plain.forward_features(on(static.tokens.device, batch), runs[0].kv, (0, 1))
            for mine, theirs in zip((hidden, features), expected, strict=True):
                torch.testing.assert_close(mine, theirs, **NEAR)
            assert_same_kv(runs[1].kv, runs[0].kv)
