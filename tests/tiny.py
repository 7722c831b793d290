"""A tiny Hugging Face checkpoint with random weights and a real tokenizer, made on the spot.

A peaked checkpoint likes to follow each token with its successor in a short cycle of tokens, by a
margin that only a strong pull from the attention over the whole context overturns. So greedy runs
loop, where an n-gram drafter finds what to copy, and break out of loops, where it is wrong; ties
are rare, so rounding does not change the text, while a wrong KV slot does. The other tokens form a
low and broad floor, which makes samples at temperature 1 vary. `tests/unit/test_tiny.py` holds the
default checkpoint to all of this.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, IM_START, IM_END = range(3)
MIN_VOCAB = 256 + len(SPECIALS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# What the tokenizer's merges are learned from.
TEXT = """\
The harbour master kept a ledger of every boat that came in before the winter storms. In the first
column he wrote the name, in the second the hour, and in the third whatever the crew had told him
about the weather further out. When the ledger was full he bound it with string and began another.
Nobody ever asked to read them, yet he wrote each line as if somebody would. One evening a girl from
the school on the hill knocked at his door and said that she was counting the boats as well, from
her window, and that her number was larger by seven. They sat down at the table with both lists and
compared them, line by line, until the lamp burned low. The seven boats had come in at night, with
no lights, and had left again before the morning. He had been asleep; she had not.
def count(boats: list[str], hours: dict[str, int]) -> int:
    total = 0
    for boat in boats:
        if hours.get(boat, 0) > 12:
            total += 1
    return total
{"name": "Gulls", "hour": 21, "crew": ["Ann", "Piet"], "weather": "fog, wind from the north-west"}
1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144. What comes after the last of these numbers, and why?
Ein Schiff fährt über den Fluß; где лодка? 船はどこですか。 Où est le bateau? 🚢
"""


def make_tokenizer(vocab: int) -> Tokenizer:
    """Byte-level BPE with exactly `vocab` entries, the specials first; any string encodes."""
    assert vocab >= MIN_VOCAB, f"bytes and specials alone are {MIN_VOCAB}, got vocab={vocab}"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    assert tokenizer.get_vocab_size() == vocab, f"the text yields {tokenizer.get_vocab_size()}"
    return tokenizer


def make_tiny(
    directory: Path,
    arch: str = "llama",
    *,
    vocab: int = 512,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 1,
    peaked: bool = True,
    **overrides: Any,
) -> Path:
    """Write a checkpoint of `arch` (llama, mistral, qwen2, qwen3) into `directory` and return it.

    `overrides` go into config.json (tie_word_embeddings, rope_scaling, head_dim, ...). The rows of
    the specials in an untied output layer are zero: a greedy run does not end by itself, and
    sampled text is text.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": IM_START,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
    }
    config = AutoConfig.for_model(arch, **(fields | overrides))
    model = AutoModelForCausalLM.from_config(config).float()
    fill(model, seed, peaked)
    model.save_pretrained(directory)
    write_tokenizer(directory, vocab)
    return directory


def write_tokenizer(directory: Path, vocab: int) -> None:
    """tokenizer.json, tokenizer_config.json (with the chat template) and generation_config.json."""
    make_tokenizer(vocab).save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[IM_START],
        "eos_token": SPECIALS[IM_END],
        "pad_token": SPECIALS[END_OF_TEXT],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    generation_config = {
        "bos_token_id": IM_START,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps(generation_config, indent=2))


def end_on(directory: Path, ids: Sequence[int]) -> Path:
    """Let `ids` end the text of the checkpoint in `directory`, which is returned."""
    file = directory / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": list(ids)}))
    return directory


# Gain of each weight on a unit-variance input, by name part; 1 where nothing is said. o_proj sets
# how often the context overrules the successor, lm_head how far that stands above the floor.
PEAKED = {"q_proj": 1.5, "k_proj": 1.5, "o_proj": 1.4, "lm_head": 2.2}
LOOP = 13  # tokens in a cycle of successors


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int, peaked: bool) -> None:
    """Random weights, every one of them different from what a loader might leave behind."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        part = name.split(".")[-2]
        gain = PEAKED.get(part, 1.0) if peaked else 1.0
        if name.endswith("norm.weight"):
            weight.copy_(1 + 0.1 * noise)
        elif weight.dim() == 1:
            weight.copy_(0.1 * noise)
        elif part == "embed_tokens":
            embedding = noise
            weight.copy_(noise)
        elif part == "lm_head":
            rows = embedding[predecessors(weight.shape[0])] if peaked else noise
            weight.copy_(rows * gain / weight.shape[1] ** 0.5)
            weight[: len(SPECIALS)] = 0
        else:
            weight.copy_(noise * gain / weight.shape[1] ** 0.5)


def predecessors(vocab: int) -> torch.Tensor:
    """[vocab]: the token before each token in its cycle of LOOP neighbouring ids."""
    ids = torch.arange(vocab)
    start = ids - (ids - len(SPECIALS)) % LOOP
    end = (start + LOOP).clamp(max=vocab)
    return torch.where(ids == start, end - 1, ids - 1)
