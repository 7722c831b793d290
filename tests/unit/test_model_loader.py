"""Every weight is accounted for: stored in one file or several, and refused by name otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from model_runs import Piece, Run, reference_logits
from safetensors.torch import load_file, save_file
from torch import Tensor

from sgl_spec.errors import ConfigError, SglSpecError, UnsupportedModelError
from sgl_spec.models.config import ModelConfig
from sgl_spec.models.loader import expected_shapes, load_model
from sgl_spec.models.upload import Upload
from tests.tiny import make_tiny

IDS = [5, 80, 200, 7, 31]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "model", "qwen3", head_dim=16)


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def set_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def logits(directory: Path, **options: str) -> Tensor:
    return Run(load_model(directory, **options), 1, 5).logits(Piece(0, 0, IDS))[0]


@pytest.mark.parametrize("chunk_bytes", [6, 64, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uploads_in_chunks(chunk_bytes: int, dtype: torch.dtype) -> None:
    """Sizes off the edge of a chunk, a part of a larger tensor, another dtype."""
    upload = Upload(torch.device("cpu"), chunk_bytes)
    torch.manual_seed(0)
    whole, sources = torch.full((9, 7), torch.nan, dtype=dtype), torch.randn(2, 4, 7)
    for source, part in zip(sources, whole.split((4, 5)), strict=True):
        upload.copy(source, part[:4])
    assert torch.equal(whole[:8], sources.view(8, 7).to(dtype))
    assert whole[8].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_on_a_gpu(dtype: str, tmp_path: Path) -> None:
    """The same as on the CPU, each tensor once, and nothing else left there."""
    directory = make_tiny(tmp_path, hidden=512, layers=3)
    before = torch.cuda.memory_allocated()
    there = load_model(directory, device="cuda", dtype=dtype)
    extra = torch.cuda.memory_allocated() - before - there.weight_bytes
    assert extra < 1 << 20
    here = load_model(directory, dtype="float16")  # in plain layout, but for the values
    for mine, other in zip(there.stack.tensors(), here.stack.tensors(), strict=True):
        torch.testing.assert_close(mine.cpu().half(), other, atol=1e-2, rtol=1e-2)
    stored = load_file(directory / "model.safetensors")
    q = stored["model.layers.1.self_attn.q_proj.weight"].to(getattr(torch, dtype))
    assert torch.equal(there.stack.layers[1].qkv.weight[: len(q)].cpu(), q)


def test_sharded(tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    files = list((tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 2
    torch.testing.assert_close(
        logits(tmp_path / "shards"), reference_logits(tiny, IDS), atol=1e-4, rtol=0
    )
    files[0].unlink()
    with pytest.raises(ConfigError, match=f"Cannot read the weights in .*{files[0].name}"):
        logits(tmp_path / "shards")


def test_missing_and_unexpected_and_misshapen(tiny: Path) -> None:
    def fails(named: str, change: Callable[[dict[str, Tensor]], None]) -> None:
        whole = load_file(tiny / "model.safetensors")
        rewrite(tiny, change)
        with pytest.raises(UnsupportedModelError) as refusal:
            load_model(tiny)
        assert named in refusal.value.message
        save_file(whole, tiny / "model.safetensors")

    lost = "model.layers.1.self_attn.k_proj.weight"
    fails(f"misses weights: {lost}.", lambda weights: weights.pop(lost))
    fails("misses weights: lm_head.weight.", lambda weights: weights.pop("lm_head.weight"))
    extra = "model.layers.1.self_attn.q_proj.bias"
    fails(
        f"has unexpected weights: {extra}.",
        lambda weights: weights.update({extra: torch.zeros(64)}),
    )
    fails(
        "model.norm.weight has shape [32], config.json implies [64]",
        lambda weights: weights.update({"model.norm.weight": torch.ones(32)}),
    )
    fails(
        "model.norm.weight is stored as I8; allowed: F32, BF16, F16",
        lambda weights: weights.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
    )
    fails("misses weights: lm_head.weight, model.embed_tokens.weight, ", dict.clear)
    fails(" more.", dict.clear)
    logits(tiny)


def test_a_head_beside_tied_embeddings_must_be_their_copy(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, "llama", tie_word_embeddings=True)
    plain = logits(directory)
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(directory, lambda weights: weights.update({"lm_head.weight": embedding.clone()}))
    assert torch.equal(logits(directory), plain)
    rewrite(directory, lambda weights: weights.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight differs"):
        load_model(directory)


def test_stored_rotary_frequencies_are_passed_over(tiny: Path) -> None:
    plain = logits(tiny)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tiny, lambda weights: weights.update({name: torch.ones(8)}))
    assert torch.equal(logits(tiny), plain)


def test_dtypes(tiny: Path) -> None:
    rewrite(tiny, lambda weights: weights.update({k: v.bfloat16() for k, v in weights.items()}))
    for said in ("bfloat16", None):
        set_config(tiny, dtype=said)
        assert load_model(tiny).dtype is torch.float32
        assert load_model(tiny, dtype="bfloat16").dtype is torch.bfloat16
        assert load_model(tiny, device="meta").dtype is torch.bfloat16
    with pytest.raises(ConfigError, match="--dtype int8 is unknown; allowed: auto, float32"):
        load_model(tiny, dtype="int8")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e5])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_every_weight_is_finite_in_the_dtype_it_is_used_in(
    name: str, value: float, tiny: Path
) -> None:
    rewrite(tiny, lambda weights: weights[name].view(-1)[3].fill_(value))
    dtype = "float32" if value != 1e5 else "float16"
    with pytest.raises(UnsupportedModelError, match=rf"{name} holds NaN or .* in {dtype};"):
        load_model(tiny, dtype=dtype)
    if value == 1e5:
        load_model(tiny, dtype="bfloat16")


def test_the_log_says_which_model_was_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "sgl_spec.models.loader")
    names = {
        "mine": "mine",
        "models--own--small-of-it/snapshots/0af1": "own/small-of-it",
        "smollm2-draft-c9b2c069a8af2253-of-smollm2-0.1.2-c1-u1": "smollm2-draft",
    }
    for path, shown in names.items():
        load_model(make_tiny(tmp_path / path), role="draft")
        assert f"Loaded the draft {shown} (LlamaForCausalLM) in" in caplog.messages[-1]
    load_model(tmp_path / "mine")
    assert "Loaded the target mine (LlamaForCausalLM)" in caplog.messages[-1]


def test_a_pool_on_the_host_is_zeros_that_take_no_memory_yet(tiny: Path) -> None:
    model, process = load_model(tiny), psutil.Process()
    before = process.memory_info().rss
    slots = (1 << 30) // model.kv_bytes_per_token
    kv = model.new_kv_cache(slots)
    assert process.memory_info().rss - before < 1 << 26
    assert kv.k.is_contiguous()
    assert kv.v.shape == kv.k.shape
    assert kv.k.data_ptr() != kv.v.data_ptr()
    for tensor in (kv.k, kv.v):
        assert not tensor[:, ::4096].any()
        tensor[-1, -1] = 1.0
        assert tensor[-1, -1].all()
    assert not kv.k[:-1, -1].any()


def test_dummy_weights(tiny: Path) -> None:
    (tiny / "model.safetensors").unlink()
    first, second = logits(tiny, load_format="dummy"), logits(tiny, load_format="dummy")
    assert torch.equal(first, second)
    assert first.std() > 1e-3
    with pytest.raises(ConfigError, match=r"has neither model.safetensors nor .*load-format dummy"):
        load_model(tiny)
    with pytest.raises(SglSpecError, match="allowed: auto, safetensors, dummy"):
        load_model(tiny, load_format="gguf")


def test_broken_file(tiny: Path) -> None:
    path = tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"Cannot read the weights in .*model.safetensors"):
        load_model(tiny)
    (tiny / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"index\.json has no weight_map"):
        load_model(tiny)


def test_sizes(tiny: Path) -> None:
    model = load_model(tiny, dtype="bfloat16")
    shapes = expected_shapes(ModelConfig.from_hf(tiny))
    assert model.weight_bytes == 2 * sum(torch.Size(shape).numel() for shape in shapes.values())
    kv = model.new_kv_cache(10)
    assert kv.k.nbytes + kv.v.nbytes == 10 * model.kv_bytes_per_token
    assert load_model(tiny, context_length=9).config.context_length == 9
