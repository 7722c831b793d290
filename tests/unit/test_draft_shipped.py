"""Shipped drafts: found by name, unfolded once, and never a stale copy. Weights are the test's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from heads import make_eagle3, noise, read_target
from model_runs import Piece, Run
from safetensors.torch import load_file, save_file
from tiny import make_tiny

import sgl_spec.models.shipped as shipped
from sgl_spec.errors import ConfigError, UnsupportedModelError
from sgl_spec.models.checkpoint import resolve_draft
from sgl_spec.models.draft_loader import load_draft
from sgl_spec.models.loader import load_model
from sgl_spec.validate import EMBEDDED_DRAFTS


@pytest.fixture
def drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the package's, a tiny target in place of the embedded model."""
    target = make_tiny(tmp_path / "target-1.0", hidden=32, tie_word_embeddings=True)
    monkeypatch.setattr(shipped, "_DRAFTS", tmp_path / "drafts")
    monkeypatch.setattr(shipped, "embedded_directory", lambda: target)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "drafts"


def target_of(drafts: Path) -> Path:
    return drafts.parent / "target-1.0"


def fold(directory: Path, seed: int) -> Path:
    """A draft of hidden size 24 in the shipped form, in bfloat16."""
    make_tiny(directory, hidden=24, heads=3, kv_heads=3, seed=seed)
    weights = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        del weights[name]
    for name in ("embed_projection.weight", "lm_head_projection.weight"):
        weights[name] = noise(generator, 24, 32) / 32**0.5
    stored = {name: weight.bfloat16() for name, weight in weights.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    for path in directory.glob("*token*"):
        path.unlink()
    (directory / "generation_config.json").unlink()
    return directory


def test_the_standalone_draft_is_unfolded_into_an_ordinary_checkpoint(drafts: Path) -> None:
    source = fold(drafts / "smollm2-draft", seed=3)
    target = load_model(target_of(drafts))
    directory = resolve_draft("smollm2-draft")
    model = load_draft("STANDALONE", directory, target, tokenizer_dir=target_of(drafts))
    assert model.logit_width == 512
    folded, unfolded = load_file(source / "model.safetensors"), load_model(directory)
    for name, found in (
        ("embed_projection.weight", unfolded.embedding),
        ("lm_head_projection.weight", unfolded.lm_head.plain_weight()),
    ):
        expected = target.embedding.double() @ folded[name].double().T
        torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=0)
    first = unfolded.stack.layers[0].post_norm
    stored = folded["model.layers.0.post_attention_layernorm.weight"]
    assert torch.equal(first, stored.float())
    run = Run(unfolded, 1, 10)
    assert run.logits(Piece(0, 0, [5, 6, 7]))[0].isfinite().all()


def test_transformers_reads_the_unfolded_checkpoint_as_we_do(drafts: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    fold(drafts / "smollm2-draft", seed=3)
    directory = resolve_draft("smollm2-draft")
    ids = AutoTokenizer.from_pretrained(directory)("The harbour master")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    found = Run(load_model(directory), 1, 50).logits(Piece(0, 0, ids))[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_it_is_unfolded_once_for_each_content(
    drafts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, calls = fold(drafts / "smollm2-draft", seed=3), []
    unfold = shipped.unfold_standalone

    def counted(source: Path, target: Path, into: Path) -> None:
        calls.append(into)
        unfold(source, target, into)

    monkeypatch.setattr(shipped, "unfold_standalone", counted)
    first = resolve_draft("smollm2-draft")
    assert resolve_draft("SmolLM2-draft") == first
    assert len(calls) == 1
    fold(source, seed=4)
    second = resolve_draft("smollm2-draft")
    assert second != first
    config = json.loads((source / "config.json").read_text()) | {"rms_norm_eps": 1e-3}
    (source / "config.json").write_text(json.dumps(config))
    assert resolve_draft("smollm2-draft") not in (first, second)
    assert len(calls) == 3
    target = make_tiny(drafts.parent / "target-2.0", hidden=32, tie_word_embeddings=True)
    monkeypatch.setattr(shipped, "embedded_directory", lambda: target)
    assert "target-2.0" in resolve_draft("smollm2-draft").name


def test_the_head_is_used_where_it_lies(drafts: Path) -> None:
    target_dir = target_of(drafts)
    head = make_eagle3(drafts / "smollm2-eagle3", target_dir)
    directory = resolve_draft("smollm2-eagle3")
    assert directory == head
    target = load_model(target_dir)
    model = load_draft("EAGLE3", directory, target, tokenizer_dir=target_dir)
    assert model.logit_width == read_target(target_dir)[0]["vocab_size"] // 4


def test_missing_and_misshapen_weights_are_refused_by_name(drafts: Path) -> None:
    for name in shipped.SHIPPED:
        with pytest.raises(ConfigError) as refusal:
            resolve_draft(name)
        message = refusal.value.message
        assert message.startswith(f"--speculative-draft-model-path {name}: {drafts / name}")
        assert "ships no weights for it. Train some (python -m sgl_spec.training)" in message
    source = fold(drafts / "smollm2-draft", seed=3)
    path = source / "model.safetensors"
    weights = load_file(path)
    projection = weights.pop("lm_head_projection.weight")
    save_file(weights, path)
    with pytest.raises(UnsupportedModelError, match=r"lm_head_projection\.weight is missing"):
        resolve_draft("smollm2-draft")
    save_file(weights | {"lm_head_projection.weight": projection.T.contiguous()}, path)
    with pytest.raises(
        UnsupportedModelError, match=r"_projection.weight has shape \[32, 24\].* 32"
    ):
        resolve_draft("smollm2-draft")
    root = drafts.parent / "cache" / "sgl-spec" / "models"
    assert {entry.suffix for entry in root.iterdir()} == {".lock"}


def test_a_folded_draft_given_as_a_directory_is_named(drafts: Path) -> None:
    source, target = fold(drafts / "smollm2-draft", seed=3), load_model(target_of(drafts))
    with pytest.raises(UnsupportedModelError) as refusal:
        load_draft("STANDALONE", source, target, tokenizer_dir=target_of(drafts))
    message = refusal.value.message
    assert f"{source} holds a draft in folded form (embed_projection.weight, lm_head_" in message
    assert "--speculative-draft-model-path smollm2-draft, by name," in message
    assert "the folder `model`" in message


def test_flags_and_files_agree_on_the_names() -> None:
    assert {name: kind for kind, name in EMBEDDED_DRAFTS.items()} == shipped.SHIPPED
