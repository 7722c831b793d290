"""Constrained output of the embedded model, whose instructions lure it out of the grammar."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from grammar_checks import ASKED, Follower
from grammars import LURES
from serving import Launch
from solo import Solo
from talk import Canary, Reply, accepted, drained, generate, stream, together

from sgl_spec.text import load_tokenizer

VOCAB, EOS = 49152, [2]
TESTS = Path(__file__).parents[1]
MODULES = {"NGRAM": TESTS / "free_rows.py", "SELF": TESTS / "plugin_drafters.py"}
FREE = {"temperature": 0, "max_new_tokens": 24}
NAMES = [name for name in ASKED if not name.startswith("ebnf")]


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def prompt_of(i: int) -> str:
    return chat(LURES[i % len(LURES)])


def sampling_of(i: int, most: int) -> dict[str, object]:
    settings = {"temperature": (0, 1)[i % 2], "seed": i, "max_new_tokens": most}
    return {**ASKED[NAMES[i]], **settings}


@pytest.fixture(scope="module")
def solo(smollm2_dir: Path) -> Solo:
    return Solo(smollm2_dir)


@pytest.mark.parametrize(
    ("algorithm", "most", "step"),
    [
        pytest.param("NGRAM", 48, 4, id="ngram"),
        pytest.param("NGRAM", 160, 1, id="ngram-all", marks=pytest.mark.slow),
        pytest.param("SELF", 160, 1, id="self-all", marks=pytest.mark.slow),
    ],
)
def test_lured_answers_are_in_the_grammar(
    launch_shared: Launch, smollm2_dir: Path, solo: Solo, algorithm: str, most: int, step: int
) -> None:
    """All schemas and regexes at once, every other one streamed, beside eight that are free; every
    `step`-th is compared with what it gives alone, without speculation."""
    flags = ["--speculative-algorithm", algorithm, "--max-total-tokens", "16000"]
    flags += ["--speculative-drafter-module", str(MODULES[algorithm])]
    if algorithm == "SELF":
        flags += ["--speculative-draft-model-path", str(smollm2_dir)]
    server = launch_shared(*flags, model="smollm2")
    canary = Canary(server, "The capital of France is")
    free = [chat(f"Name {i} rivers.") for i in range(2, 10)]
    calls = [functools.partial(generate, server, prompt, **FREE) for prompt in free]
    for i in range(len(NAMES)):
        send = stream if i % 4 < 2 else generate
        calls.append(functools.partial(send, server, prompt_of(i), **sampling_of(i, most)))
    replies: list[Reply] = together(calls, 24)
    follower = Follower(load_tokenizer(smollm2_dir), VOCAB, EOS)
    for i, (name, reply) in enumerate(zip(NAMES, replies[8:], strict=True)):
        follower.check(ASKED[name], reply)
        if i % step == 0:
            assert reply["output_ids"] == solo.ids(prompt_of(i), **sampling_of(i, most)), name
    for prompt, reply in list(zip(free, replies[:8], strict=True))[::step]:
        assert reply["output_ids"] == solo.ids(prompt, **FREE)
    stopped = [r["meta_info"]["finish_reason"]["type"] == "stop" for r in replies[8:]]
    assert sum(stopped) > 0.7 * len(stopped)
    assert sum(map(accepted, replies[8:])) > 20
    canary.alive()
    drained(server)
