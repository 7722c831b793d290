"""The tiny checkpoint is what the end-to-end tests take it for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import SPECIALS, make_tiny, make_tokenizer
from tokenizers import Tokenizer

PROMPTS, PROMPT_LEN, NEW = 24, 24, 200


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()


@pytest.fixture(scope="module")
def run(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy runs: ids [PROMPTS, PROMPT_LEN + NEW] and logits [PROMPTS, NEW, vocab]."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 512, (PROMPTS, PROMPT_LEN), generator=generator)
    ids = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW, do_sample=False
    )
    with torch.no_grad():
        return ids, model(ids).logits[:, PROMPT_LEN - 1 : -1]


def test_greedy_runs_are_far_from_ties(run: tuple[torch.Tensor, torch.Tensor]) -> None:
    top = run[1].topk(2).values
    assert (top[..., 0] - top[..., 1]).min() > 1e-2


def test_greedy_text_repeats_but_not_always(run: tuple[torch.Tensor, torch.Tensor]) -> None:
    right = total = 0
    for row in run[0].tolist():
        follower: dict[tuple[int, ...], int] = {}
        for end in range(3, len(row)):
            suffix = tuple(row[end - 3 : end])
            if end >= PROMPT_LEN:
                total += 1
                right += follower.get(suffix) == row[end]
            follower[suffix] = row[end]
    assert 0.6 < right / total < 0.95


def test_samples_vary(run: tuple[torch.Tensor, torch.Tensor]) -> None:
    other = 1 - run[1].softmax(-1).max(-1).values
    assert 0.05 < other.mean() < 0.5


def test_text_depends_on_early_tokens(
    model: torch.nn.Module, run: tuple[torch.Tensor, torch.Tensor]
) -> None:
    ids = run[0]
    changed = ids.clone()
    changed[:, 3] = (changed[:, 3] + 77) % 500 + 3
    with torch.no_grad():
        differs = model(ids).logits.argmax(-1) != model(changed).logits.argmax(-1)
    assert differs[:, 4:64].float().mean() > 0.02


@pytest.mark.parametrize(
    "text", ["", " a  b\n", "naïve 船 🚢 \x00\x7f", "<|im_start|>user\nhi<|im_end|>"]
)
def test_any_string_survives_the_tokenizer(text: str) -> None:
    tokenizer = make_tokenizer(512)
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert [tokenizer.token_to_id(special) for special in SPECIALS] == [0, 1, 2]


def test_chat_template_and_tokenizer_load_in_transformers(tiny_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Where?"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"
    own = Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))
    assert tokenizer(chat)["input_ids"] == own.encode(chat).ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_architectures(tmp_path: Path, arch: str) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        make_tiny(tmp_path, arch, heads=6, kv_heads=3, hidden=48, tie_word_embeddings=True)
    )
    assert loaded.config.model_type == arch
    logits = loaded(torch.tensor([[5, 6, 7]])).logits
    assert logits.isfinite().all()
    assert (loaded.lm_head.weight == loaded.model.embed_tokens.weight).all()
