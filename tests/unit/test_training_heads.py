"""The drafts in training compute what serving computes, and what plain autograd would."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from training_data import VOCAB, load_target, make_data, make_target

from sgl_spec.layers.context import ForwardBatch
from sgl_spec.models.config import ModelConfig
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.draft_loader import load_draft
from sgl_spec.models.loader import load_model
from sgl_spec.training import eagle3, standalone
from sgl_spec.training.chain_attention import chain_attention
from sgl_spec.training.eagle3_head import Head, HeadInputs
from sgl_spec.training.losses import LOSSES, soft_label_loss
from sgl_spec.training.target import Target

LENGTH, STEPS = 21, 5


def slow_chain_attention(
    q: Tensor, k0: Tensor, v0: Tensor, chain_k: list[Tensor], chain_v: list[Tensor]
) -> Tensor:
    """Row by row: the keys of step 0 up to the row, then the chain's at the row."""
    out = torch.empty_like(q)
    for row in range(q.shape[2]):
        keys = torch.cat((k0[:, :, : row + 1], *(k[:, :, row : row + 1] for k in chain_k)), dim=2)
        values = torch.cat((v0[:, :, : row + 1], *(v[:, :, row : row + 1] for v in chain_v)), 2)
        scores = (keys * q[:, :, row : row + 1]).sum(-1) / q.shape[-1] ** 0.5
        out[:, :, row] = (scores.softmax(dim=-1)[..., None] * values).sum(dim=2)
    return out


@pytest.mark.parametrize("chain", [0, 1, 4])
def test_chain_attention_and_its_gradients(chain: int) -> None:
    torch.manual_seed(chain)
    shape = (2, 3, 37, 16)  # 37 rows: no multiple of any block
    tensors = [torch.randn(shape, requires_grad=True) for _ in range(3 + 2 * chain)]
    tensors = [2 * tensor for tensor in tensors]  # so that some rows prefer one key
    for tensor in tensors:
        tensor.retain_grad()

    def run(function: object) -> list[Tensor]:
        q, k0, v0, *rows = tensors
        out = function(q, k0, v0, rows[:chain], rows[chain:])  # type: ignore[operator]
        torch.manual_seed(9)
        found = torch.autograd.grad((out * torch.randn(shape)).sum(), tensors, retain_graph=True)
        return [out, *found]

    for fast, slow in zip(run(chain_attention), run(slow_chain_attention), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("kind", LOSSES)
def test_soft_label_loss_and_its_gradients(kind: str) -> None:
    """Labels that do not sum to one, unequal weights, a last chunk that is short, hits."""
    torch.manual_seed(0)
    hidden = torch.randn(23, 8, requires_grad=True)
    head = torch.randn(11, 8, requires_grad=True)
    probs = torch.rand(23, 11).softmax(dim=-1) * torch.rand(23, 1)
    best = torch.where(torch.arange(23) % 5 == 0, -1, probs.argmax(dim=-1))
    weights = torch.rand(23)
    found = soft_label_loss(hidden, head, lambda a, b: (probs[a:b], best[a:b]), weights, 10, kind)
    scores = F.log_softmax(hidden @ head.t(), dim=-1)
    accepted = torch.minimum(probs, scores.exp()).sum(dim=-1)
    each = {"kl": -(probs * scores).sum(dim=-1), "tv": 1 - accepted, "lk": -accepted.log()}
    plain = (weights * each[kind]).sum()
    torch.testing.assert_close(found.loss, plain)
    expected = torch.autograd.grad(3 * plain, (hidden, head))
    for fast, slow in zip(
        torch.autograd.grad(3 * found.loss, (hidden, head)), expected, strict=True
    ):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=5e-5)
    assert found.hits.tolist() == (scores.argmax(dim=-1) == best).tolist()
    assert found.hits.any()


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_target_equals_transformers(arch: str, tmp_path: Path) -> None:
    """Hidden rows, final and captured, with padding on the right of the shorter sequence."""
    from transformers import AutoModelForCausalLM

    directory = make_target(tmp_path, arch)
    tokens = torch.randint(3, VOCAB, (2, LENGTH))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    target = load_target(directory)
    found = target.forward(tokens, (2, 4, 5))
    padded = target.forward(F.pad(tokens[:, :13], (0, 8)))
    with torch.no_grad():
        theirs = model(tokens, output_hidden_states=True).hidden_states
    torch.testing.assert_close(found.final, theirs[-1], rtol=1e-4, atol=1e-4)
    captured = torch.cat([theirs[layer] for layer in (2, 4, 5)], dim=-1)
    torch.testing.assert_close(found.captured, captured, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(padded.final[:, :13], theirs[-1][:, :13], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A target, its data, and both drafts after a few steps."""
    root = tmp_path_factory.mktemp("training")
    directory = make_target(root / "target")
    target = load_target(directory)
    data = make_data(root / "data", target)
    common = ["--model-path", str(directory), "--data", str(data), "--steps", "4"]
    common += ["--batch-tokens", "512", "--max-len", "64", "--held-out", "0.3", "--lr", "0.02"]
    head = [*common, "--draft-vocab", "100"]
    eagle3.main([*head, "--out", str(root / "eagle3")])
    eagle3.main([*head, "--out", str(root / "eagle3.1"), "--shape", "eagle3.1", "--loss", "lk"])
    sizes = "--hidden 32 --intermediate 48 --num-layers 2 --heads 2 --kv-heads 1 --head-dim 16"
    standalone.main([*common, "--out", str(root / "small"), *sizes.split()])
    return SimpleNamespace(root=root, directory=directory, target=target, data=data, common=common)


@pytest.fixture(scope="module")
def decoder(world: SimpleNamespace) -> Decoder:
    return load_model(world.directory, dtype="float32")


def rows_at(
    tokens: Tensor, positions: Tensor, prefix: int, word: int | None = None, tree: int = 0
) -> ForwardBatch:
    """One request whose slots are its logical positions."""
    first = prefix + tree
    return ForwardBatch(
        tokens=tokens,
        positions=positions,
        slots=torch.arange(first, first + len(tokens)),
        req_to_token=torch.arange(64, dtype=torch.int32)[None],
        rows=torch.zeros(1, dtype=torch.int64),
        prefix_lens=torch.tensor([prefix]),
        q_starts=torch.tensor([0, len(tokens)]),
        mask_words=None if word is None else torch.tensor([word]),
        tree_lens=None if word is None else torch.tensor([tree]),
    )


@pytest.mark.parametrize("kind", ["eagle3", "eagle3.1"])
@torch.inference_mode()
def test_head_in_training_equals_the_serving_head(
    world: SimpleNamespace, decoder: Decoder, kind: str
) -> None:
    """Step 0 over a whole text, and a chain of draft steps from a root inside it."""
    served = load_draft("EAGLE3", world.root / kind, decoder, tokenizer_dir=world.directory)
    tokens = torch.from_numpy(np.random.default_rng(1).integers(3, VOCAB, LENGTH))
    trained = training_rows(world, tokens, kind)
    captured = world.target.forward(tokens[None], served.capture).captured
    kv = served.new_kv_cache(64)
    batch = rows_at(tokens[1:], torch.arange(LENGTH - 1), 0)
    hidden = served.forward(batch, served.fuse(captured[0, :-1]), kv)
    torch.testing.assert_close(
        served.logits(hidden), trained[0][: LENGTH - 1], rtol=1e-4, atol=1e-4
    )
    root = 9  # a row whose text ends with the token of position 10
    feature = hidden[root : root + 1]
    for step in range(1, STEPS):
        token = tokens[root + 1 + step][None]
        word = (1 << step) - 1
        position = torch.tensor([root + step])
        batch = rows_at(token, position, root + 1, word, step - 1)
        feature = served.forward(batch, feature, kv)
        torch.testing.assert_close(
            served.logits(feature)[0], trained[step][root], rtol=1e-4, atol=1e-4
        )
    assert not torch.allclose(trained[1][root], trained[0][root + 1], atol=1e-2)


def training_rows(world: SimpleNamespace, tokens: Tensor, kind: str) -> list[Tensor]:
    """Logits [S, W] of every step, by root, from the weights as they are stored."""
    from safetensors.torch import load_file

    stored = load_file(world.root / kind / "model.safetensors")
    assert stored["d2t"].dtype == torch.int64
    assert stored["t2d"].sum() == 100
    weights = {name: value.float() for name, value in stored.items() if name not in ("d2t", "t2d")}
    head = Head(head_shape(world, len(stored["d2t"]), normed=kind == "eagle3.1"))
    target: Target = world.target
    inputs = HeadInputs(
        tokens=tokens[None],
        captured=target.forward(tokens[None], (2, 4, 5)).captured,
        embedding=target.embedding,
        rotary=target.rotary(LENGTH + STEPS),
    )
    return [row[0] @ weights["lm_head.weight"].t() for row in head.steps(weights, inputs, STEPS)]


def head_shape(world: SimpleNamespace, vocab: int, *, normed: bool) -> eagle3.HeadShape:
    config = ModelConfig.from_hf(world.directory)
    return eagle3.HeadShape.beside(config, vocab, None, normed=normed)


@torch.inference_mode()
def test_small_llama_in_training_equals_transformers(world: SimpleNamespace) -> None:
    """The stored projections multiplied out are an ordinary Llama with the same logits."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    small, target = world.root / "small", world.target
    stored = {name: value.float() for name, value in load_file(small / "model.safetensors").items()}
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(small)).float()
    weights = dict(stored)
    for name, full in (("embed", "model.embed_tokens"), ("lm_head", "lm_head")):
        projection = weights.pop(f"{name}_projection.weight")
        weights[f"{full}.weight"] = target.embedding @ projection.t()
    model.load_state_dict(weights, strict=True)
    tokens = torch.randint(3, VOCAB, (1, LENGTH))
    shape = standalone.DraftShape(32, 48, 2, 2, 1, 16, 1e-6, 48)
    config = ModelConfig.from_hf(small)
    rotary = standalone.Rotary.build(config, LENGTH, torch.float32, torch.device("cpu"))
    hidden = standalone.Student(shape).forward(stored, tokens, target.embedding, rotary)
    ours = hidden @ standalone.output_layer(stored, target.embedding).t()
    torch.testing.assert_close(ours, model(tokens).logits, rtol=1e-4, atol=1e-4)
