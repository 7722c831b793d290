"""A head saved by the package `speculators` gives the same logits in our loader as in theirs; so
does one in EAGLE's layout, which the package converts."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import DraftRun
from model_runs import Piece
from safetensors.torch import load_file
from speculators_heads import CAPTURE, EAGLE_LAYOUT, HEADS, ROWS, VOCAB, save_head
from tiny import make_tiny
from torch import Tensor

from sgl_spec.errors import ConfigError
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.draft_loader import load_draft
from sgl_spec.models.loader import load_model

RECORDED = Path(__file__).parents[1] / "data" / "speculators"


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    return make_tiny(directory, vocab=VOCAB, hidden=16, heads=2, kv_heads=1, layers=4)


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Decoder:
    return load_model(target_dir)


def check(directory: Path, expected: dict[str, Tensor], target: Decoder, target_dir: Path) -> None:
    model = load_draft("EAGLE3", directory, target, tokenizer_dir=target_dir)
    assert model.capture == tuple(CAPTURE)  # an id is a layer whose input is read
    stored = load_file(directory / "model.safetensors")
    assert model.token_ids is not None
    assert torch.equal(model.token_ids, stored["d2t"] + torch.arange(len(stored["d2t"])))
    tokens, run = expected["tokens"].tolist(), DraftRun(model, 1, ROWS + 1)
    rows = run.hidden(Piece(0, 0, tokens), model.fuse(expected["captured"]))
    near = {"atol": 1e-4, "rtol": 0.0}
    torch.testing.assert_close(model.logits(rows), expected["first"], **near)
    for row in (ROWS - 2, 20, 0):  # from the end, so that no slot below is overwritten
        child = run.hidden(Piece(0, row + 1, [tokens[row + 1]], [-1]), rows[row : row + 1])
        torch.testing.assert_close(model.logits(child)[0], expected["second"][row], **near)


@pytest.mark.parametrize("name", [*HEADS, EAGLE_LAYOUT])
def test_recorded_heads(name: str, target: Decoder, target_dir: Path) -> None:
    expected = load_file(RECORDED / name / "expected.safetensors")
    check(RECORDED / name, expected, target, target_dir)


def test_values_left_out_are_the_defaults_of_their_class(
    tmp_path: Path, target: Decoder, target_dir: Path
) -> None:
    """Older versions save only what differs from them, and the rotary base by itself."""
    expected = load_file(RECORDED / "llama" / "expected.safetensors")
    shutil.copytree(RECORDED / "llama", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    layer = content["transformer_layer_config"]
    for key in ("attention_bias", "hidden_act", "mlp_bias", "rms_norm_eps", "rope_parameters"):
        del layer[key]
    path.write_text(json.dumps(content))
    check(tmp_path, expected, target, target_dir)
    layer["rope_theta"] = 10000.0
    path.write_text(json.dumps(content))
    check(tmp_path, expected, target, target_dir)
    layer["rope_theta"] = 77.0
    path.write_text(json.dumps(content))
    with pytest.raises(AssertionError, match="not close"):
        check(tmp_path, expected, target, target_dir)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"norm_before_residual": None}, "norm_before_residual = 'absent'"),
        ({"draft_vocab_size": None}, "draft_vocab_size = 'absent'"),
        ({"transformer_layer_config": None}, "transformer_layer_config = None"),
        ({"transformer_layer_config": {"model_type": "gemma3"}}, "model_type = 'gemma3'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = 'present'"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "layer_ids = [1, 2, 4]"),
        ({"fc_norm": True}, "misses weights: fc_norm.0.weight, fc_norm.1.weight"),
        ({"norm_before_fc": True}, "misses weights: input_norm.weight"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_refused_by_name(
    changes: dict[str, Any], named: str, tmp_path: Path, target: Decoder, target_dir: Path
) -> None:
    shutil.copytree(RECORDED / "llama", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError) as refusal:
        load_draft("EAGLE3", tmp_path, target, tokenizer_dir=target_dir)
    assert named in refusal.value.message


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.skipif(
    importlib.util.find_spec("speculators") is None,
    reason="the package speculators is not installed (its requirements weigh 300 MB); "
    "the recorded heads stand in for it",
)
@pytest.mark.parametrize("name", [*HEADS, EAGLE_LAYOUT])
def test_heads_saved_now(name: str, tmp_path: Path, target: Decoder, target_dir: Path) -> None:
    check(tmp_path, save_head(name, tmp_path), target, target_dir)
