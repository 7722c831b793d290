"""Forwards of which one row a request is read, on the fused path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fused_runs import assert_same_kv, batch_of
from head_variants import CHANGES
from heads import DraftRun, eagle3_config, eagle3_weights, read_target, write_head
from kernel_runs import INTERPRETED
from model_runs import Piece, Run
from tiny import make_tiny
from wanted_runs import check_wanted, features_of

from sgl_spec.engine.cuda import round
from sgl_spec.engine.cuda.round import DraftParts, Extension, Parts, Requests, RoundKind, Space
from sgl_spec.engine.cuda.state import DeviceRows
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.draft import DraftModel
from sgl_spec.models.draft_loader import load_draft
from sgl_spec.models.loader import load_model
from sgl_spec_kernels.sample import walked

LAYERS = 3
pytestmark = pytest.mark.usefixtures("few_programs")


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("target"), layers=LAYERS)


def load(directory: Path, device: str) -> Decoder:
    return load_model(directory, device=device, attention_backend="triton", dtype="float32")


def check_target(target: Decoder) -> None:
    runs = Run(target, 3, 60), Run(target, 3, 60)
    layers = (0, LAYERS - 1, 1)
    check_wanted(runs, lambda batch, kv: target.forward_features(batch, kv, layers))


def check_head(name: str, directory: Path, target: Decoder, target_dir: Path) -> None:
    config = eagle3_config(read_target(target_dir)[0])
    weights = eagle3_weights(config)
    CHANGES[name](config, weights)
    directory = write_head(directory, config, weights)
    draft = load_draft("EAGLE3", directory, target, tokenizer_dir=target_dir)
    runs, features = (DraftRun(draft, 3, 60), DraftRun(draft, 3, 60)), features_of(draft.width)
    check_wanted(runs, lambda batch, kv: [draft.forward(batch, features(batch), kv)])


def check_requests_without_rows(target: Decoder) -> None:
    """As where a batch is filled up: what they give is anything, the others' rows stay right."""
    run, device = Run(target, 3, 60), target.device
    batch = batch_of(run, Piece(0, 0, range(5, 12)))
    row = torch.tensor([0, 2, 2], device=device)  # nobody has written the last table row
    filled = replace(
        batch,
        rows=row,
        prefix_lens=torch.zeros_like(row),
        q_starts=torch.tensor([0, 7, 7, 7], device=device),
        wanted=torch.tensor([6, 6, 6], device=device),
    )
    with torch.inference_mode():
        (expected, *_) = target.forward(batch, run.kv)[6:]
        found = target.forward(filled, run.kv)
    assert len(found) == 3
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=0)


@INTERPRETED
def test_of_the_target(target_dir: Path) -> None:
    check_target(load(target_dir, "cpu"))


@INTERPRETED
def test_requests_without_rows(target_dir: Path) -> None:
    check_requests_without_rows(load(target_dir, "cpu"))


HEADS = ["plain", "two layers", "norm before residual"]


@INTERPRETED
@pytest.mark.parametrize("name", HEADS)
def test_of_a_head(name: str, tmp_path: Path, target_dir: Path) -> None:
    check_head(name, tmp_path, load(target_dir, "cpu"), target_dir)


@pytest.mark.gpu
def test_of_the_target_on_the_gpu(target_dir: Path) -> None:
    target = load(target_dir, "cuda")
    check_target(target)
    check_requests_without_rows(target)


@pytest.mark.gpu
@pytest.mark.parametrize("name", HEADS)
def test_of_a_head_on_the_gpu(name: str, tmp_path: Path, target_dir: Path) -> None:
    check_head(name, tmp_path, load(target_dir, "cuda"), target_dir)


def check_extension(
    target_dir: Path, directory: Path, target: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft follows rounds of 1 to 3 accepted tokens alike, whether the rows behind the last are
    left out of its last layer or not. The third request fills the batch up."""
    config = eagle3_config(read_target(target_dir)[0])
    path = write_head(directory, config, eagle3_weights(config))
    draft = load_draft("EAGLE3", path, target, tokenizer_dir=target_dir)
    features = torch.randn(9, 64 * len(draft.capture), generator=torch.Generator().manual_seed(2))
    found = []
    for most in (0, 99):
        monkeypatch.setattr(round, "_PRODUCT_ROWS", most)
        run = DraftRun(draft, 4, 30)
        parts = draft_parts_of(run, target, draft)
        extension, accepted = extension_of(parts), walked(3, 3, 512, target.device)
        accepted.tokens.copy_(torch.tensor([[9, 8, 7], [6, 0, 0], [0, 0, 0]]))
        accepted.path.copy_(torch.tensor([[0, 2, 1], [0, 0, 0], [0, 0, 0]]))
        accepted.counts.copy_(torch.tensor([3, 1, 1]))
        with torch.inference_mode():
            extension.extend(accepted, features.to(target.device))
        assert parts.draft is not None
        found.append((parts.draft.hidden[:2], run.kv))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-4, rtol=0)
    assert bool(found[0][0].any(dim=1).all()), "both requests have moved on"
    assert_same_kv(found[0][1], found[1][1])


def draft_parts_of(run: DraftRun, target: Decoder, draft: DraftModel) -> Parts:
    """Three requests, the last table row is the filler; their texts begin now."""
    device = target.device
    hidden = torch.zeros(4, draft.width, device=device)
    vocab = target.config.vocab_size
    rows, space = DeviceRows(3, vocab, [], device), Space(vocab, device)
    own = DraftParts(draft, run.kv, hidden)
    return Parts(target, target.new_kv_cache(8), run.table.to(device), rows, space, own)


def extension_of(parts: Parts) -> Extension:
    """Of requests 0 and 1 and a filler."""
    assert parts.draft is not None
    requests = Requests(parts, 3, RoundKind())
    requests.load(np.array([0, 1]))
    requests.begin(texts=True)
    return Extension(parts, parts.draft, requests, levels=2)


@INTERPRETED
def test_a_draft_follows_alike(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_extension(target_dir, tmp_path, load(target_dir, "cpu"), monkeypatch)


@pytest.mark.gpu
def test_a_draft_follows_alike_on_the_gpu(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_extension(target_dir, tmp_path, load(target_dir, "cuda"), monkeypatch)
