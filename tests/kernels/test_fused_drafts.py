"""Draft models on the fused path against the same on plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_runs import NEAR, assert_same_kv, batch_of, both
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
from kernel_runs import INTERPRETED, relative_error
from model_runs import Piece
from tiny import make_tiny
from torch import Tensor

from sgl_spec.errors import ConfigError
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.draft import DraftModel
from sgl_spec.models.draft_loader import load_draft
from sgl_spec.models.standalone import StandaloneDraft

TEXT, BRANCHES = Piece(0, 0, range(5, 17)), [-1, -1, 0]
pytestmark = pytest.mark.usefixtures("few_programs")


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("target"), layers=4)


@pytest.fixture(scope="module")
def targets(target_dir: Path) -> tuple[Decoder, Decoder]:
    return both(target_dir)


def compare_drafts(drafts: list[DraftModel], captured: Tensor | None, near: Any = NEAR) -> None:
    """The text, then the rows of a tree that follow from it. captured: rows of the target."""
    found: list[list[Tensor]] = []
    runs = [DraftRun(draft, 1, 60) for draft in drafts]
    for draft, run in zip(drafts, runs, strict=True):
        features = None if captured is None else draft.fuse(captured)
        kept = None if features is None else features.clone()
        with torch.inference_mode():
            hidden = draft.forward(batch_of(run, TEXT), features, run.kv)  # type: ignore[arg-type]
            above = None if features is None else hidden[[-1, -1, -2]]
            tree = batch_of(run, Piece(0, 12, [40, 41, 42], BRANCHES))  # type: ignore[arg-type]
            tree = replace(tree, positions=torch.tensor([12, 12, 13]).to(tree.slots.device))
            rows = draft.forward(tree, above, run.kv)
            raw = draft.raw_logits(rows)
        assert features is None or torch.equal(features, kept), "the caller's features were changed"
        assert rows.is_contiguous()
        assert raw.dtype is run.kv.k.dtype
        assert torch.equal(draft.logits(rows), raw.float())
        found.append([hidden, rows, raw, *([] if features is None else [features])])
    for mine, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, expected, **near)
    assert_same_kv(runs[1].kv, runs[0].kv, near["atol"])


def loaded(algorithm: str, directory: Path, targets: tuple[Decoder, Decoder]) -> list[DraftModel]:
    return [load_draft(algorithm, directory, one, tokenizer_dir=directory) for one in targets]


def check_eagle3(name: str, directory: Path, targets: tuple[Decoder, Decoder], where: Path) -> None:
    config = eagle3_config(read_target(where)[0])
    weights = eagle3_weights(config)
    CHANGES[name](config, weights)
    if name == "other geometry":  # the kernel's heads have 16 columns or more
        config["head_dim"] = 20
        weights = eagle3_weights(config)
    drafts = loaded("EAGLE3", write_head(directory, config, weights), targets)
    width = len(drafts[0].capture) * 64
    captured = torch.randn(12, width, generator=torch.Generator().manual_seed(1))
    compare_drafts(drafts, captured.to(targets[0].device))


def check_eagle(
    changes: dict[str, Any], directory: Path, targets: tuple[Decoder, Decoder], where: Path
) -> None:
    config = head_config(read_target(where)[0], **changes)
    drafts = loaded("EAGLE", write_head(directory, config, eagle_weights(config)), targets)
    captured = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    compare_drafts(drafts, captured.to(targets[0].device))


EAGLES: list[dict[str, Any]] = [
    {},
    {"bias": False, "num_hidden_layers": 2},
    {"architectures": ["Qwen2ForCausalLMEagle"], "model_type": "qwen2", "qkv_bias": True},
]


@INTERPRETED
@pytest.mark.parametrize("name", CHANGES)
def test_eagle3(
    name: str, tmp_path: Path, targets: tuple[Decoder, Decoder], target_dir: Path
) -> None:
    check_eagle3(name, tmp_path, targets, target_dir)


@INTERPRETED
@pytest.mark.parametrize("changes", EAGLES, ids=str)
def test_eagle(
    changes: dict[str, Any], tmp_path: Path, targets: tuple[Decoder, Decoder], target_dir: Path
) -> None:
    check_eagle(changes, tmp_path, targets, target_dir)


@INTERPRETED
def test_standalone(tmp_path: Path) -> None:
    """With rows of padding in its output layer, and without a row for some of the target's."""
    models = both(make_tiny(tmp_path))
    compare_drafts([StandaloneDraft("draft", model, 500, 520) for model in models], None)


@INTERPRETED
def test_a_draft_reserves_beyond_its_own_positions(
    tmp_path: Path, targets: tuple[Decoder, Decoder], target_dir: Path
) -> None:
    config = eagle3_config(read_target(target_dir)[0])  # 48 positions
    draft = loaded("EAGLE3", write_head(tmp_path, config, eagle3_weights(config)), targets)[1]
    draft.reserve(2, 4, positions=500)
    fused = draft._stack.fused  # type: ignore[attr-defined]
    assert [tuple(table.shape) for table in fused._tables[-1]] == [(500, 8)] * 2


@INTERPRETED
def test_small_heads_are_refused_by_name(
    tmp_path: Path, targets: tuple[Decoder, Decoder], target_dir: Path
) -> None:
    config = eagle3_config(read_target(target_dir)[0], num_attention_heads=8, head_dim=10)
    directory = write_head(tmp_path, config, eagle3_weights(config))
    message = "triton needs an even head_dim of 16 to 256, not 10; --attention-backend torch"
    with pytest.raises(ConfigError, match=message):
        load_draft("EAGLE3", directory, targets[1], tokenizer_dir=target_dir)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHANGES)
def test_eagle3_on_the_gpu(name: str, tmp_path: Path, target_dir: Path) -> None:
    check_eagle3(name, tmp_path, both(target_dir, "cuda", dtype="float32"), target_dir)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", EAGLES, ids=str)
def test_eagle_on_the_gpu(changes: dict[str, Any], tmp_path: Path, target_dir: Path) -> None:
    check_eagle(changes, tmp_path, both(target_dir, "cuda", dtype="float32"), target_dir)


@pytest.mark.gpu
def test_eagle3_in_bfloat16_on_the_gpu(tmp_path: Path, target_dir: Path) -> None:
    config = eagle3_config(read_target(target_dir)[0])
    directory = write_head(tmp_path, config, eagle3_weights(config))
    exact, half = (both(target_dir, "cuda", dtype=dtype) for dtype in ("float32", "bfloat16"))
    drafts = loaded("EAGLE3", directory, (exact[0], half[1]))
    captured = torch.randn(12, 192, device="cuda")
    found = []
    for draft in drafts:
        run = DraftRun(draft, 1, 60)
        with torch.inference_mode():
            fused = draft.fuse(captured.to(run.kv.k.dtype))
            batch = batch_of(run, TEXT)  # type: ignore[arg-type]
            found.append(draft.logits(draft.forward(batch, fused, run.kv)))
    assert relative_error(found[1], found[0]) < 4e-2


@pytest.mark.gpu
def test_standalone_on_the_gpu(tmp_path: Path) -> None:
    models = both(make_tiny(tmp_path), "cuda", dtype="float32")
    compare_drafts([StandaloneDraft("draft", model, 500, 520) for model in models], None)
