"""Each head against a plain form of its formulas: whole sequences, cached steps, tree rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_variants import CHANGES, with_own_embedding
from heads import (
    DraftRun,
    Weights,
    capture,
    eagle3_config,
    eagle3_weights,
    eagle_weights,
    head_config,
    make_eagle,
    noise,
    normed,
    plain_eagle,
    plain_eagle3,
    plain_fuse,
    read_target,
    write_head,
)
from model_runs import Piece, Run
from safetensors.torch import load_file, save_file
from tiny import make_tiny
from torch import Tensor

from sgl_spec.models.decoder import Decoder
from sgl_spec.models.draft import DraftModel
from sgl_spec.models.draft_loader import load_draft
from sgl_spec.models.loader import load_model

LENGTH = 120  # rows; the heads' configs allow 48 positions
NEAR = {"atol": 1e-4, "rtol": 0.0}


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("target"), layers=4)


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Decoder:
    return load_model(target_dir)


def text(seed: int = 3, length: int = LENGTH) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 512, (length + 1,), generator=generator).tolist()


def load(algorithm: str, directory: Path, target: Decoder, target_dir: Path) -> DraftModel:
    return load_draft(algorithm, directory, target, tokenizer_dir=target_dir)


def run_in_pieces(model: DraftModel, tokens: list[int], features: Tensor) -> Tensor:
    """Hidden rows of a text whose KV grows by chunks and by single rows."""
    run, rows, start = DraftRun(model, 1, len(tokens)), [], 0
    for size in (1, 70, 1, 1, 30, len(tokens)):
        end = min(start + size, len(tokens))
        piece = Piece(0, start, tokens[start:end], [-1] if size == 1 else None)
        rows.append(run.hidden(piece, features[start:end]))
        start = end
    return torch.cat(rows)


# --- EAGLE3 ---


def expected_eagle3(
    config: dict[str, Any], weights: Weights, target_dir: Path, tokens: Tensor, features: Tensor
) -> tuple[Tensor, Tensor]:
    """(what goes back into the head, logits)."""
    _, theirs = read_target(target_dir)
    embedding = weights.get("embed_tokens.weight", theirs["model.embed_tokens.weight"])
    hidden = plain_eagle3(config, weights, embedding, tokens, features)
    out = normed(hidden, weights["norm.weight"], config["rms_norm_eps"])
    logits = out @ weights.get("lm_head.weight", theirs["lm_head.weight"]).T
    again = config["eagle_config"].get("norm_output", False)
    return out if again else hidden, logits


def eagle3_of(name: str, directory: Path, target_dir: Path) -> tuple[dict[str, Any], Weights, Path]:
    config = eagle3_config(read_target(target_dir)[0])
    weights = eagle3_weights(config)
    CHANGES[name](config, weights)
    return config, weights, write_head(directory, config, weights)


@pytest.mark.parametrize("name", CHANGES)
def test_eagle3_over_a_text(name: str, tmp_path: Path, target: Decoder, target_dir: Path) -> None:
    config, weights, directory = eagle3_of(name, tmp_path, target_dir)
    model = load("EAGLE3", directory, target, target_dir)
    ids = text()
    layers = tuple(i + 1 for i in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    assert model.capture == layers
    _, captured = capture(Run(target, 1, 200), ids[:-1], layers)
    features = plain_fuse(config, weights, captured)
    torch.testing.assert_close(model.fuse(captured), features, **NEAR)
    back, logits = expected_eagle3(config, weights, target_dir, torch.tensor(ids[1:]), features)
    hidden = run_in_pieces(model, ids[1:], features)
    assert (model.width, model.logit_width) == (hidden.shape[1], logits.shape[1])
    torch.testing.assert_close(hidden, back, **NEAR)
    torch.testing.assert_close(model.logits(hidden), logits, **NEAR)
    ids_of = model.token_ids
    if "d2t" in weights:
        expected = weights["d2t"] + torch.arange(len(weights["d2t"]))
        assert ids_of is not None
        assert torch.equal(ids_of, expected)
    else:
        assert ids_of is None


@pytest.mark.parametrize("name", ["plain", "norm output", "two layers"])
def test_eagle3_tree_rows(name: str, tmp_path: Path, target: Decoder, target_dir: Path) -> None:
    """Rows of a tree see the text and their ancestors; their features are their parents' rows."""
    config, weights, directory = eagle3_of(name, tmp_path, target_dir)
    model = load("EAGLE3", directory, target, target_dir)
    ids, parents = text(), [-1, -1, 0, 0, 1, 2, 5]
    _, captured = capture(Run(target, 1, 200), ids[:-1], model.capture)
    fused = plain_fuse(config, weights, captured)

    def along(path: list[int]) -> Tensor:
        """The row of the last node, grown along its path one row at a time."""
        tokens, rows = torch.tensor(ids[1:]), fused
        back, logits = expected_eagle3(config, weights, target_dir, tokens, rows)
        for node in path:
            tokens = torch.cat((tokens, torch.tensor([100 + node])))
            rows = torch.cat((rows, back[-1:]))
            back, logits = expected_eagle3(config, weights, target_dir, tokens, rows)
        return torch.cat((back[-1], logits[-1]))

    run = DraftRun(model, 1, LENGTH + len(parents))
    root = run.hidden(Piece(0, 0, ids[1:]), model.fuse(captured))[-1:]
    rows, fed = (
        root,
        list[Tensor](),
    )  # a feature is known once the parent's row is: grow level by level
    for count in (2, 5, 6, 7):
        for node in range(len(fed), count):
            parent = parents[node]
            fed.append(root[0] if parent < 0 else rows[parent])
        tree = Piece(0, LENGTH, [100 + node for node in range(count)], parents[:count])
        rows = run.hidden(tree, torch.stack(fed))
    for node, path in {1: [1], 3: [0, 3], 4: [1, 4], 6: [0, 2, 5, 6]}.items():
        found = torch.cat((rows[node], model.logits(rows[node : node + 1])[0]))
        torch.testing.assert_close(found, along(path), **NEAR)


SPELLINGS: dict[str, Callable[[str], str]] = {
    "layers.0": lambda name: name.replace("midlayer.", "layers.0."),
    "model prefix": lambda name: (
        name if name in ("lm_head.weight", "d2t", "t2d") else f"model.{name}"
    ),
    "legacy norms": lambda name: {
        "fc_norm.0.weight": "aux_norm_low.weight",
        "fc_norm.1.weight": "aux_norm_mid.weight",
        "fc_norm.2.weight": "aux_norm_high.weight",
    }.get(name, name),
}


@pytest.mark.parametrize("spelling", [*SPELLINGS, "bin"])
def test_eagle3_spellings(spelling: str, tmp_path: Path, target: Decoder, target_dir: Path) -> None:
    """The same weights under other names, or in another file format, are the same head."""
    config, weights, directory = eagle3_of("feature norms", tmp_path / "one", target_dir)
    other = tmp_path / "other"
    if spelling == "bin":
        write_head(other, config, {})
        (other / "model.safetensors").unlink()
        torch.save(weights, other / "pytorch_model.bin")
    else:
        write_head(other, config, {SPELLINGS[spelling](n): w for n, w in weights.items()})
    ids = text(length=20)
    _, captured = capture(Run(target, 1, 50), ids[:-1], (1, 2, 3))

    def logits(directory: Path) -> Tensor:
        model = load("EAGLE3", directory, target, target_dir)
        with torch.inference_mode():
            hidden = DraftRun(model, 1, 20).hidden(Piece(0, 0, ids[1:]), model.fuse(captured))
            return model.logits(hidden)

    assert torch.equal(logits(other), logits(directory))


def test_eagle3_tied_to_its_own_embedding(
    tmp_path: Path, target: Decoder, target_dir: Path
) -> None:
    config = eagle3_config(read_target(target_dir)[0], tie_word_embeddings=True)
    config["draft_vocab_size"] = None
    weights = eagle3_weights(config)
    with_own_embedding(config, weights)
    model = load("EAGLE3", write_head(tmp_path, config, weights), target, target_dir)
    rows = noise(torch.Generator().manual_seed(1), 5, 64)
    expected = normed(rows, weights["norm.weight"], 1e-4) @ weights["embed_tokens.weight"].T
    torch.testing.assert_close(model.logits(rows), expected, **NEAR)


# --- EAGLE ---


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": False},
        {"num_hidden_layers": 2},
        {"architectures": ["Qwen2ForCausalLMEagle"], "model_type": "qwen2", "qkv_bias": True},
        {"architectures": ["LlamaForCausalLMEagle"], "qkv_bias": True},
    ],
    ids=str,
)
def test_eagle_over_a_text(
    changes: dict[str, Any], tmp_path: Path, target: Decoder, target_dir: Path
) -> None:
    theirs_config, theirs = read_target(target_dir)
    config = head_config(theirs_config, **changes)
    weights = eagle_weights(config)
    unread = {"embed_tokens.weight": torch.zeros(512, 64), "lm_head.weight": torch.zeros(512, 64)}
    directory = write_head(tmp_path, config, weights | unread)
    model = load("EAGLE", directory, target, target_dir)
    assert (model.capture, model.width, model.logit_width) == ((4,), 64, 512)
    ids = text()
    final, features = capture(Run(target, 1, 200), ids[:-1], model.capture)
    assert torch.equal(model.fuse(features), final)
    embedding = theirs["model.embed_tokens.weight"]
    expected = plain_eagle(config, weights, embedding, torch.tensor(ids[1:]), features)
    hidden = run_in_pieces(model, ids[1:], features)
    torch.testing.assert_close(hidden, expected, **NEAR)
    torch.testing.assert_close(model.logits(hidden), expected @ theirs["lm_head.weight"].T, **NEAR)


def test_eagle_tree_rows(tmp_path: Path, target: Decoder, target_dir: Path) -> None:
    config = head_config(read_target(target_dir)[0])
    weights = eagle_weights(config)
    model = load("EAGLE", write_head(tmp_path, config, weights), target, target_dir)
    embedding, ids = read_target(target_dir)[1]["model.embed_tokens.weight"], text()
    _, features = capture(Run(target, 1, 200), ids[:-1], model.capture)
    run, parents = DraftRun(model, 1, LENGTH + 4), [-1, -1, 1, 2]
    run.hidden(Piece(0, 0, ids[1:]), features)
    fed = noise(torch.Generator().manual_seed(4), 4, 64)
    rows = run.hidden(Piece(0, LENGTH, [7, 8, 9, 10], parents), fed)
    path = [1, 2, 3]
    expected = plain_eagle(
        config,
        weights,
        embedding,
        torch.tensor([*ids[1:], 8, 9, 10]),
        torch.cat((features, fed[path])),
    )
    torch.testing.assert_close(rows[path], expected[-3:], **NEAR)


@pytest.mark.parametrize("form", ["list", "tensor"])
def test_a_token_map_picks_rows_of_the_targets_head(
    form: str, tmp_path: Path, target: Decoder, target_dir: Path
) -> None:
    ids = [400, 3, 77, 511, 12]
    directory = make_eagle(tmp_path / "head", target_dir)
    torch.save(ids if form == "list" else torch.tensor(ids), tmp_path / "hot.pt")
    whole = load("EAGLE", directory, target, target_dir)
    model = load_draft(
        "EAGLE", directory, target, tokenizer_dir=target_dir, token_map=tmp_path / "hot.pt"
    )
    assert model.token_ids is not None
    assert (model.token_ids.tolist(), model.logit_width) == (ids, 5)
    rows = noise(torch.Generator().manual_seed(1), 6, 64)
    torch.testing.assert_close(model.logits(rows), whole.logits(rows)[:, ids], **NEAR)
    assert model.weight_bytes == whole.weight_bytes + 5 * 64 * 4


# --- both ---


def test_sizes(tmp_path: Path, target: Decoder, target_dir: Path) -> None:
    config, weights, directory = eagle3_of("own embedding", tmp_path / "own", target_dir)
    model = load("EAGLE3", directory, target, target_dir)
    read = {name: weight for name, weight in weights.items() if name not in ("d2t", "t2d")}
    assert model.weight_bytes == sum(weight.nbytes for weight in read.values())
    kv = model.new_kv_cache(10)
    assert kv.k.shape == (1, 10, 2, 16)
    assert kv.k.nbytes + kv.v.nbytes == 10 * model.kv_bytes_per_token
    weights["embed_tokens.weight"] = target.embedding.clone()
    other = load("EAGLE3", write_head(tmp_path / "copy", config, weights), target, target_dir)
    assert other.weight_bytes == model.weight_bytes - target.embedding.nbytes
    eagle = load("EAGLE", make_eagle(tmp_path / "eagle", target_dir), target, target_dir)
    stored = load_file(tmp_path / "eagle" / "model.safetensors")
    assert eagle.weight_bytes == sum(weight.nbytes for weight in stored.values())


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_heads_are_converted_to_the_targets_dtype(
    algorithm: str, tmp_path: Path, target_dir: Path
) -> None:
    """A head stored in half precision runs beside a target in another."""
    half = load_model(target_dir, dtype="bfloat16")
    _, _, directory = eagle3_of("norm before fc", tmp_path, target_dir)
    if algorithm == "EAGLE":
        directory = make_eagle(tmp_path / "eagle", target_dir)
    path = directory / "model.safetensors"
    stored = load_file(path)
    floats = {n: w.half() if w.is_floating_point() else w for n, w in stored.items()}
    save_file(floats, path, metadata={"format": "pt"})
    model = load(algorithm, directory, half, target_dir)
    ids = text(length=20)
    _, captured = capture(Run(half, 1, 50), ids[:-1], model.capture)
    run = DraftRun(model, 1, 20)
    hidden = run.hidden(Piece(0, 0, ids[1:]), model.fuse(captured))
    assert (hidden.dtype, run.kv.k.dtype) == (torch.bfloat16, torch.bfloat16)
    logits = model.logits(hidden)
    assert logits.dtype is torch.float32
    whole = load(algorithm, directory, load_model(target_dir), target_dir)
    exact_run = DraftRun(whole, 1, 20)
    exact = whole.logits(exact_run.hidden(Piece(0, 0, ids[1:]), whole.fuse(captured.float())))
    error = (logits - exact).square().mean().sqrt() / exact.std()
    assert 1e-5 < error < 0.05


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_dummy_heads(algorithm: str, tmp_path: Path, target: Decoder, target_dir: Path) -> None:
    _, _, directory = eagle3_of("plain", tmp_path / "eagle3", target_dir)
    if algorithm == "EAGLE":
        directory = make_eagle(tmp_path / "eagle", target_dir)
    (directory / "model.safetensors").unlink()
    model = load_draft(algorithm, directory, target, tokenizer_dir=target_dir, load_format="dummy")
    ids = text(length=20)
    _, captured = capture(Run(target, 1, 50), ids[:-1], model.capture)
    hidden = DraftRun(model, 1, 20).hidden(Piece(0, 0, ids[1:]), model.fuse(captured))
    assert model.logits(hidden).std() > 1e-3
