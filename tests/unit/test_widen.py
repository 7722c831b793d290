"""Widened checkpoints compute what their sources compute, for us and for transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from example import load_example
from heads import DraftRun, capture, edit, edit_config, make_eagle, make_eagle3, noise
from model_runs import Piece, Run
from safetensors import safe_open
from tiny import make_tiny

from sgl_spec.errors import ConfigError
from sgl_spec.llm import LLM
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.draft import DraftModel
from sgl_spec.models.draft_loader import load_draft
from sgl_spec.models.loader import load_model

widen = load_example("widen")
NEAR = {"atol": 1e-4, "rtol": 0.0}
# From hidden 64, 2 (or 4) layers, 4 heads, 2 KV heads of 16, inner 128: groups of 3 for 2, heads
# twice as wide, and a hidden size that is no multiple of the old one.
WIDE = "117x5x9x3x32x200"
LENGTH = 90


def ids(seed: int = 3, length: int = LENGTH) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 512, (length,), generator=generator).tolist()


def widened(source: Path, out: Path, *more: str, shape: str = WIDE) -> Path:
    argv = ["--model-path", str(source), "--shape", shape, "--dtype", "float32", *more]
    assert widen.main([*argv, str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("narrow"), layers=4)


@pytest.fixture(scope="module")
def wide(narrow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return widened(narrow, tmp_path_factory.mktemp("wide"))


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"tie_word_embeddings": True, "sliding_window": None},
    "qwen2": {},
    "llama3-rope": {
        "arch": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family(tmp_path: Path, family: str) -> None:
    """Ours before and after, and transformers' of the result."""
    from transformers import AutoModelForCausalLM

    fields = {"arch": family} | FAMILIES[family]
    source = make_tiny(tmp_path / "narrow", **fields)
    out = widened(source, tmp_path / "wide")
    config = json.loads((out / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (117, 5)
    assert not config["tie_word_embeddings"]
    text = ids()
    expected = Run(load_model(source), 1, LENGTH).logits(Piece(0, 0, text))[0]
    ours = Run(load_model(out), 1, LENGTH).logits(Piece(0, 0, text))[0]
    torch.testing.assert_close(ours, expected, **NEAR)
    assert float(expected.std()) > 0.5
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs = model(torch.tensor([text])).logits[0]
    torch.testing.assert_close(theirs, expected, **NEAR)


def test_greedy_text(narrow: Path, wide: Path) -> None:
    """Through the engine, from the text of the prompt on: the tokenizer came along."""
    prompts = ["The harbour master", "def count(boats", "1, 2, 3, 5,"]
    params = {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True}
    texts = [LLM(str(path)).generate(prompts, params) for path in (narrow, wide)]
    assert [c.output_ids for c in texts[0]] == [c.output_ids for c in texts[1]]
    assert [c.text for c in texts[0]] == [c.text for c in texts[1]]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(directory / file, framework="pt") as handle:
            found[name] = handle.get_tensor(name)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    return found


def test_what_changes_nothing_is_random(wide: Path) -> None:
    """Zeros stand only where they must: in the padded stream and where noise would reach it."""
    found = weights(wide)
    layer = {n.removeprefix("model.layers.1."): w for n, w in found.items() if ".layers.1." in n}
    share = {name: float((w == 0).float().mean()) for name, w in layer.items()}
    silent = 4 * 16 / (9 * 32)  # q of the kept heads beside their pairs
    assert share.pop("self_attn.q_proj.weight") == pytest.approx(silent * 64 / 117, abs=1e-3)
    kept = {"self_attn.o_proj.weight": 4 * 16 / 288, "mlp.down_proj.weight": 128 / 200}
    for name, columns in kept.items():
        assert share.pop(name) == pytest.approx(1 - columns * 64 / 117, abs=1e-3)
    assert set(share.values()) == {0.0}
    assert float((found["lm_head.weight"] == 0).float().mean()) < 0.02  # the specials' old rows
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert not found[f"model.layers.4.{name}.weight"].any()
    added = found["model.layers.4.mlp.up_proj.weight"]
    assert float(added.std()) == pytest.approx(float(layer["mlp.up_proj.weight"].std()), rel=0.2)


def test_bytes_repeat_and_shards_are_bounded(
    narrow: Path, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widen, "SHARD_BYTES", 300_000)
    again = widened(narrow, tmp_path / "again")
    files = sorted(again.glob("*.safetensors"))
    assert len(files) > 4
    largest = max(w.nbytes for w in weights(again).values())
    assert all(file.stat().st_size < max(300_000, largest) + 5000 for file in files)
    for name, weight in weights(wide).items():
        assert torch.equal(weight, weights(again)[name]), name
    other = widened(narrow, tmp_path / "other", "--seed", "1")
    assert not torch.equal(weights(other)["lm_head.weight"], weights(again)["lm_head.weight"])


# --- drafts ---------------------------------------------------------------------------------------


def rows_and_logits(
    draft: DraftModel, target: Decoder, text: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a whole text, then of a row that goes on from the draft's own feature."""
    captured = capture(Run(target, 1, LENGTH + 2), text, draft.capture)[1]
    run = DraftRun(draft, 1, LENGTH + 2)
    with torch.inference_mode():
        features = draft.fuse(captured[:-1])
        hidden = run.hidden(Piece(0, 0, text[1:]), features)
        step = run.hidden(Piece(0, len(text) - 1, [7]), hidden[-1:])
        both = torch.cat((hidden, step))
        return both, draft.logits(both)


def norms(directory: Path) -> Path:
    """Both kinds of optional norms, in the two places where heads have them."""
    generator = torch.Generator().manual_seed(9)
    edit_config(directory, fc_norm=True, norm_before_fc=True, norm_output=True)
    each = {f"fc_norm__{i}__weight": 1 + 0.3 * noise(generator, 64) for i in range(3)}
    return edit(directory, input_norm__weight=1 + 0.3 * noise(generator, 192), **each)


HEADS = {
    "eagle3": lambda path, target: make_eagle3(path, target),
    "eagle3, norms": lambda path, target: norms(make_eagle3(path, target)),
    "eagle3, two layers": lambda path, target: make_eagle3(
        path, target, num_hidden_layers=2, attention_bias=True, norm_before_residual=True
    ),
    "eagle3, the target's output": lambda path, target: make_eagle3(
        path, target, draft_vocab_size=None, bias=True
    ),
    "eagle3, guessed layers": lambda path, target: make_eagle3(path, target, eagle_config={}),
    "eagle": lambda path, target: make_eagle(path, target, qkv_bias=True),
    "eagle, two layers": lambda path, target: make_eagle(path, target, num_hidden_layers=2),
}


@pytest.mark.parametrize("kind", HEADS)
def test_heads(narrow: Path, wide: Path, tmp_path: Path, kind: str) -> None:
    head = HEADS[kind](tmp_path / "head", narrow)
    out = widened(narrow, tmp_path / "out", "--draft", str(head))
    algorithm = "EAGLE3" if "eagle3" in kind else "EAGLE"
    found = []
    for directory, target_dir in ((head, narrow), (out, wide)):
        target = load_model(target_dir)
        draft = load_draft(algorithm, directory, target, tokenizer_dir=target_dir)
        found.append((draft, *rows_and_logits(draft, target, ids())))
    (small, rows, logits), (big, wide_rows, wide_logits) = found
    torch.testing.assert_close(wide_logits, logits, **NEAR)
    torch.testing.assert_close(wide_rows[:, :64], rows, **NEAR)
    assert not wide_rows[:, 64:].any()
    assert (big.width, float(logits.std()) > 0.3) == (117, True)
    if small.token_ids is not None:
        assert torch.equal(big.token_ids, small.token_ids)
    if algorithm == "EAGLE3":
        assert big.capture == small.capture


@pytest.mark.parametrize("kind", ["EAGLE3", "STANDALONE"])
def test_drafts_in_the_engine(narrow: Path, wide: Path, tmp_path: Path, kind: str) -> None:
    """The same rounds: the same drafts were made and accepted."""
    if kind == "EAGLE3":
        draft = make_eagle3(tmp_path / "draft", narrow)
    else:
        draft = make_tiny(tmp_path / "draft", layers=1)
    shape = WIDE if kind == "EAGLE3" else "96x2x8x2x16x192"
    out = widened(narrow, tmp_path / "out", "--draft", str(draft), shape=shape)
    params = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
    told = []
    for target, own in ((narrow, draft), (wide, out)):
        llm = LLM(
            str(target),
            speculative_algorithm=kind,
            speculative_draft_model_path=str(own),
            speculative_num_steps=3,
            speculative_eagle_topk=2,
            speculative_num_draft_tokens=6,
            speculative_verify_whole_trees=True,
        )
        (done,) = llm.generate([ids(5, 30)], params)
        told.append((done.output_ids, done.spec))
    assert told[0] == told[1]
    assert told[0][1].proposed > 0


def test_random_head(narrow: Path, wide: Path, tmp_path: Path) -> None:
    """It loads for the widened target, every matrix is noise, and its drafts leave the text as it
    was."""
    out = widened(narrow, tmp_path / "head", "--random-head", "100")
    found = weights(out)
    matrices = {name: w for name, w in found.items() if w.dim() == 2}
    assert found["lm_head.weight"].shape == (100, 117)
    assert all(float((w == 0).float().mean()) < 0.001 for w in matrices.values())
    assert all(
        float(w.std()) * w.shape[1] ** 0.5 == pytest.approx(1, 0.1) for w in matrices.values()
    )
    params = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True}
    flags = {"speculative_draft_model_path": str(out), "speculative_verify_whole_trees": True}
    drafted = LLM(str(wide), speculative_algorithm="EAGLE3", **flags).generate([ids()], params)[0]
    assert drafted.output_ids == LLM(str(wide)).generate([ids()], params)[0].output_ids
    assert drafted.spec is not None
    assert drafted.spec.proposed > 20


# --- shapes ---------------------------------------------------------------------------------------


def test_shapes_by_name_and_by_number() -> None:
    assert widen.parse_size("LLAMA-8B") == widen.Size(4096, 32, 32, 8, 128, 14336)
    for size in widen.SIZES.values():
        assert widen.parse_size(str(size)) == size
    for wrong in ("llama-9b", "4096x32", "4096x32x32x8x128x0", "axbxcxdxexf"):
        with pytest.raises(ConfigError, match="--shape must be one of smollm2-360m"):
            widen.parse_size(wrong)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden": 63}, "hidden must be at least 64, got 63"),
        ({"layers": 3}, "layers must be at least 4, got 3"),
        ({"kv_heads": 1, "heads": 9}, "KV heads must be at least 2, got 1"),
        ({"heads": 3, "kv_heads": 3}, "heads per KV head must be at least 2, got 1"),
        ({"heads": 10}, "heads must be a multiple of the 3 KV heads"),
        ({"head_dim": 24}, "head_dim must be a multiple of 16"),
        ({"hidden": 118}, "hidden must be a multiple of the 9 heads"),
        ({"inner": 127}, "inner must be at least 128, got 127"),
    ],
)
def test_shapes_that_do_not_fit(
    narrow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, said: str
) -> None:
    size = replace(widen.parse_size(WIDE), **change)
    out = tmp_path / "out"
    argv = ["--model-path", str(narrow), "--shape", str(size), str(out)]
    assert widen.main(argv) == 2
    assert said in capsys.readouterr().err
    assert not list(out.glob("*"))


def test_refusals(narrow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Norms of q and k, a directory in use, a head of another target."""
    qwen3 = make_tiny(tmp_path / "qwen3", "qwen3", layers=4)
    cases = [
        (["--model-path", str(qwen3)], tmp_path / "a", "Qwen3ForCausalLM cannot be widened"),
        (["--model-path", str(narrow)], qwen3, "must be a new or an empty directory"),
    ]
    head = make_eagle3(tmp_path / "head", make_tiny(tmp_path / "other", hidden=32, layers=4))
    flags = ["--model-path", str(narrow), "--draft", str(head)]
    cases.append((flags, tmp_path / "b", "the head is for a target of hidden_size 32"))
    flags = ["--model-path", str(narrow), "--random-head", "513"]
    cases.append((flags, tmp_path / "c", "must be from 1 to the vocabulary of 512, got 513"))
    for flags, out, said in cases:
        assert widen.main([*flags, "--shape", WIDE, str(out)]) == 2
        assert said in capsys.readouterr().err


def test_help_says_what_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        widen.main(["--help"])
    assert "the same" in capsys.readouterr().out
