"""A whole model drafts for a target with the same vocabulary, and for no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import DROP, edit, edit_config
from model_runs import Piece, Run
from safetensors.torch import load_file, save_file
from tiny import make_tiny

from sgl_spec.models.decoder import Decoder
from sgl_spec.models.draft_loader import load_draft
from sgl_spec.models.loader import load_model


def draft_of(directory: Path, **changes: Any) -> Path:
    """A smaller model with the target's tokenizer."""
    return make_tiny(directory, hidden=48, heads=3, kv_heads=3, seed=5, **changes)


def test_a_whole_model_drafts(tmp_path: Path, target: Decoder, target_dir: Path) -> None:
    directory = draft_of(tmp_path)
    model, alone = (
        load_draft("STANDALONE", directory, target, tokenizer_dir=target_dir),
        load_model(directory),
    )
    assert (model.capture, model.token_ids, model.width, model.logit_width) == ((), None, 48, 512)
    ids = list(range(7, 60))
    run = Run(alone, 1, 60)
    batch = run._batch([Piece(0, 0, ids)])
    with torch.inference_mode():
        expected = alone.logits(alone.forward(batch, run.kv))
        found = model.logits(model.forward(batch, None, model.new_kv_cache(67)))
    assert torch.equal(found, expected)
    assert model.weight_bytes == alone.weight_bytes
    assert model.kv_bytes_per_token == alone.kv_bytes_per_token
    (directory / "model.safetensors").unlink()
    dummy = load_draft(
        "STANDALONE", directory, target, tokenizer_dir=target_dir, load_format="dummy"
    )
    assert dummy.logit_width == 512


@pytest.mark.parametrize("rows", [520, 640])
def test_vocabularies_may_differ_by_padding(rows: int, tmp_path: Path) -> None:
    """512 tokens; the target has 576 rows, the draft fewer or more."""
    target_dir = padded(make_tiny(tmp_path / "target", hidden=32), 576)
    target = load_model(target_dir)
    directory = padded(make_tiny(tmp_path / "draft", hidden=48, heads=3, kv_heads=3), rows)
    model = load_draft("STANDALONE", directory, target, tokenizer_dir=target_dir)
    assert model.logit_width == 512
    run = Run(load_model(directory), 1, 8)
    batch = run._batch([Piece(0, 0, [5, 575, 511])])  # 575: padding that a client may send
    with torch.inference_mode():
        logits = model.logits(model.forward(batch, None, run.kv))
    assert logits.shape == (3, 512)
    assert logits.isfinite().all()


def padded(directory: Path, rows: int) -> Path:
    """Give the checkpoint's vocabulary that many rows, the added ones with huge logits."""
    extra = torch.full((rows - 512, 1), 50.0)
    stored = load_file(directory / "model.safetensors")
    grown = {
        name: torch.cat((weight, extra.expand(-1, weight.shape[1])))
        for name, weight in stored.items()
        if name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    save_file(stored | grown, directory / "model.safetensors", metadata={"format": "pt"})
    return edit_config(directory, vocab_size=rows)


def edit_tokenizer(directory: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return directory


def swap(content: dict[str, Any]) -> None:
    """Two tokens trade ids: same size, another vocabulary."""
    vocab = content["model"]["vocab"]
    first, second = (token for token, id_ in vocab.items() if id_ in (300, 301))
    vocab[first], vocab[second] = vocab[second], vocab[first]


def unmark(content: dict[str, Any]) -> None:
    content["added_tokens"][2]["special"] = False


def test_another_vocabulary_is_refused_by_name(
    tmp_path: Path, target_dir: Path, refuses: Callable[..., None]
) -> None:
    smaller = make_tiny(tmp_path / "smaller", vocab=400, hidden=32)
    refuses("STANDALONE", smaller, "vocabulary of", "another than the target's", "token 400 is no")
    larger = make_tiny(tmp_path / "larger", vocab=520, hidden=32)
    refuses("STANDALONE", larger, "vocabulary of", "and no token in", "8 tokens differ")
    swapped = edit_tokenizer(make_tiny(tmp_path / "swapped", hidden=32), swap)
    refuses("STANDALONE", swapped, "vocabulary of", "token 300 is", "2 tokens differ")
    unmarked = edit_tokenizer(make_tiny(tmp_path / "unmarked", hidden=32), unmark)
    refuses("STANDALONE", unmarked, "token 2 is '<|im_end|>' there and '<|im_end|>' (special)")
    short = make_tiny(tmp_path / "short", vocab=512, hidden=32)
    stored = load_file(short / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        stored[name] = stored[name][:500].clone()
    save_file(stored, short / "model.safetensors", metadata={"format": "pt"})
    edit_config(short, vocab_size=500)
    refuses("STANDALONE", short, "the draft has vocab_size 500, its tokenizer 512 tokens")
    (short / "tokenizer.json").write_text("{")
    refuses("STANDALONE", short, "Cannot read", "tokenizer.json")
    (short / "tokenizer.json").unlink()
    refuses("STANDALONE", short, "tokenizer.json is needed to compare the vocabularies")


def test_whole_models_that_cannot_be_served(
    tmp_path: Path, target_dir: Path, refuses: Callable[..., None]
) -> None:
    other = edit_config(draft_of(tmp_path / "a"), architectures=["GemmaForCausalLM"])
    refuses("STANDALONE", other, "architectures = ['GemmaForCausalLM']")
    lost = edit(draft_of(tmp_path / "b"), model__norm__weight=DROP)
    refuses("STANDALONE", lost, "misses weights: model.norm.weight")
    pickled = draft_of(tmp_path / "c")
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    refuses("STANDALONE", pickled, "only safetensors weights are read")
