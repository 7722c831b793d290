"""Forwards of which one row a request is read give that row as if all were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from head_variants import CHANGES
from heads import (
    DraftRun,
    eagle3_config,
    eagle3_weights,
    eagle_weights,
    head_config,
    read_target,
    write_head,
)
from model_runs import Piece, Run
from tiny import make_tiny
from wanted_runs import check_wanted, features_of

from sgl_spec.models.decoder import Decoder
from sgl_spec.models.draft import DraftModel
from sgl_spec.models.draft_loader import load_draft
from sgl_spec.models.layer import DecoderLayer
from sgl_spec.models.loader import load_model
from sgl_spec.models.standalone import StandaloneDraft

LAYERS = 4


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("target"), layers=LAYERS)


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Decoder:
    return load_model(target_dir)


def two(target: Decoder) -> tuple[Run, Run]:
    return Run(target, 3, 60), Run(target, 3, 60)


def check_draft(draft: DraftModel) -> None:
    runs = DraftRun(draft, 3, 60), DraftRun(draft, 3, 60)
    features = features_of(draft.width)
    check_wanted(
        runs,
        lambda batch, kv: [draft.forward(batch, features(batch) if draft.capture else None, kv)],
    )


def test_of_the_target(target: Decoder) -> None:
    check_wanted(two(target), lambda batch, kv: [target.forward(batch, kv)])


def test_features_are_of_all_rows(target: Decoder) -> None:
    layers = (0, LAYERS - 1, 1)
    check_wanted(two(target), lambda batch, kv: target.forward_features(batch, kv, layers))


def test_the_final_hidden_cannot_be_a_feature_then(target: Decoder) -> None:
    run = Run(target, 3, 60)
    batch = run._batch([Piece(0, 0, [5, 6, 7])])
    with pytest.raises(AssertionError, match="the features are of all rows"):
        target.forward_features(replace(batch, wanted=torch.tensor([2])), run.kv, (LAYERS,))


def test_the_last_layer_multiplies_no_other_rows(
    target: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    whole = DecoderLayer.mix

    def watched(self: DecoderLayer, *args: object) -> torch.Tensor:
        hidden: torch.Tensor = whole(self, *args)  # type: ignore[arg-type]
        seen.append(len(hidden))
        return hidden

    monkeypatch.setattr(DecoderLayer, "mix", watched)
    run = Run(target, 3, 60)
    batch = run._batch([Piece(0, 0, range(5, 14)), Piece(1, 0, [3, 4])])
    with torch.inference_mode():
        target.forward(replace(batch, wanted=torch.tensor([8, 10])), run.kv)
    assert seen == [11] * (LAYERS - 1) + [2]


@pytest.mark.parametrize("name", ["plain", "norm output", "two layers", "norm before residual"])
def test_of_an_eagle3_head(name: str, tmp_path: Path, target: Decoder, target_dir: Path) -> None:
    config = eagle3_config(read_target(target_dir)[0])
    weights = eagle3_weights(config)
    CHANGES[name](config, weights)
    directory = write_head(tmp_path, config, weights)
    check_draft(load_draft("EAGLE3", directory, target, tokenizer_dir=target_dir))


@pytest.mark.parametrize("layers", [1, 2])
def test_of_an_eagle_head(layers: int, tmp_path: Path, target: Decoder, target_dir: Path) -> None:
    config = head_config(read_target(target_dir)[0], num_hidden_layers=layers)
    directory = write_head(tmp_path, config, eagle_weights(config))
    check_draft(load_draft("EAGLE", directory, target, tokenizer_dir=target_dir))


def test_of_a_standalone_draft(target: Decoder) -> None:
    check_draft(StandaloneDraft("draft", target, 500, 520))
