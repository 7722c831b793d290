"""The embedded model over HTTP says, token for token, what transformers' `generate` says.

The five things that could matter are paired: every two of them meet in every combination of their
values. The slow test runs them all against references that were generated one prompt at a time.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import real_prompts
from openai import OpenAI
from reference import Reference
from serving import Launch, Server
from talk import (
    Canary,
    Reply,
    accepted,
    drained,
    flush,
    generate,
    in_both_modes,
    speculated,
    stream,
    stream_events,
    together,
)

from sgl_spec.bench.report import provenance, write_row

NEW = 24
RECORD = "SGL_SPEC_RECORD_MATRIX"
BATCH = 16
GREEDY = {"temperature": 0, "max_new_tokens": NEW}


@dataclass(frozen=True)
class Setup:
    """How a server is started. chunk: -1 is off."""

    algorithm: str
    chunk: int
    page: int

    def flags(self) -> list[str]:
        return [
            *("--speculative-algorithm", self.algorithm),
            *("--chunked-prefill-size", str(self.chunk), "--page-size", str(self.page)),
            *("--max-total-tokens", "24000", "--max-running-requests", str(BATCH)),
        ]

    def __str__(self) -> str:
        return f"{self.algorithm}-chunk{self.chunk}-page{self.page}"


@dataclass(frozen=True)
class Pass:
    """How the prompts are sent: `clients` at a time; hits: their first halves were sent before."""

    clients: int
    hits: bool

    def __str__(self) -> str:
        return f"{'hits' if self.hits else 'cold'}-{self.clients}"


Start = Callable[[Setup], Server]

ALL_SETUPS = [Setup(*a) for a in itertools.product(("none", "NGRAM"), (32, -1), (1, 16))]
ALL_PASSES = [Pass(*a) for a in itertools.product((1, BATCH), (False, True))]
PAIRED = {
    Setup("none", 32, 1): [Pass(1, False), Pass(BATCH, True)],
    Setup("none", -1, 16): [Pass(BATCH, False), Pass(1, True)],
    Setup("NGRAM", 32, 16): [Pass(BATCH, False), Pass(1, True)],
    Setup("NGRAM", -1, 1): [Pass(1, False), Pass(BATCH, True)],
}


def test_every_pair_of_settings_is_covered() -> None:
    runs = [
        (s.algorithm, s.chunk, s.page, p.clients, p.hits) for s, ps in PAIRED.items() for p in ps
    ]
    for one, other in itertools.combinations(range(5), 2):
        assert len({(run[one], run[other]) for run in runs}) == 4


@dataclass
class Expected:
    """Prompts (as they are sent, and as ids) with transformers' answers."""

    reference: Reference
    prompts: list[str | list[int]]
    ids: list[list[int]]
    outputs: list[list[int]]

    def check(self, i: int, reply: Reply) -> bool:
        """Reply to prompt `i` is transformers' answer, or differs first at a tie: then True."""
        assert reply["meta_info"]["prompt_tokens"] == len(self.ids[i]), self.prompts[i]
        if reply["output_ids"] == self.outputs[i]:
            return False
        wrong = self.reference.explain(self.ids[i], self.outputs[i], reply["output_ids"])
        assert wrong is None, f"prompt {i} {self.prompts[i]!r}: {wrong}"
        return True


@pytest.fixture(scope="session")
def reference(smollm2_dir: Path) -> Reference:
    return Reference(smollm2_dir)


def ids_of(reference: Reference, prompt: str | list[int]) -> list[int]:
    return reference.encode(prompt) if isinstance(prompt, str) else prompt


def all_prompts(reference: Reference) -> list[str | list[int]]:
    document = reference.encode(real_prompts.chats()[82])[24:]
    return [
        *real_prompts.texts(),
        *real_prompts.SINGLE_TOKENS,
        *real_prompts.edge_prompts(document),
    ]


def answered(reference: Reference, prompts: list[str | list[int]], batch: int) -> Expected:
    """batch: prompts that transformers answers together."""
    ids = [ids_of(reference, prompt) for prompt in prompts]
    assert (min(map(len, ids)), max(map(len, ids)) >= 900) == (1, True)
    return Expected(reference, prompts, ids, reference.generate(ids, NEW, batch=batch))


@pytest.fixture(scope="session")
def expected(reference: Reference) -> Expected:
    """A third of the prompts, from the shortest to the longest."""
    prompts = sorted(all_prompts(reference), key=lambda p: len(ids_of(reference, p)))
    return answered(reference, [prompts[0], *prompts[3:-1:3], prompts[-1]], batch=8)


@pytest.fixture(scope="module")
def servers(launch_shared: Launch) -> Start:
    """One server at a time: `servers(setup)` stops the one before it."""
    running: list[Server] = []

    @functools.lru_cache(maxsize=1)
    def start(setup: Setup) -> Server:
        if running:
            running.pop().stop()
        running.append(launch_shared(*setup.flags(), model="smollm2"))
        return running[0]

    return start


def send_all(server: Server, expected: Expected, how: Pass, page: int) -> list[Reply]:
    """Replies to all prompts, sent `how`; what the prefix cache gave is checked."""
    flush(server)
    warm = [ids[: max(1, len(ids) // 2)] for ids in expected.ids]
    if how.hits:
        together([lambda h=half: generate(server, h, max_new_tokens=1) for half in warm], BATCH)

    def ask(i: int) -> Reply:
        if how.clients == 1 and not how.hits:
            flush(server)
        return generate(server, expected.prompts[i], **GREEDY)

    order = range(len(expected.prompts))
    replies = together([functools.partial(ask, i) for i in order], how.clients)
    for reply, half, ids in zip(replies, warm, expected.ids, strict=True):
        cached = reply["meta_info"]["cached_tokens"]
        if how.hits:
            assert cached >= min(len(half), len(ids) - 1) // page * page
        elif how.clients == 1:
            assert cached == 0
    return replies


def run_setup(
    server: Server, expected: Expected, setup: Setup, passes: Sequence[Pass]
) -> list[dict[str, Any]]:
    """Check every reply of every pass; what was seen, a row for each pass."""
    rows = []
    for how in passes:
        replies = send_all(server, expected, how, setup.page)
        ties = sum(expected.check(i, reply) for i, reply in enumerate(replies))
        helped = sum(map(accepted, replies))
        tokens = sum(reply["meta_info"]["completion_tokens"] for reply in replies)
        rows.append(
            {**asdict(setup), **asdict(how), "prompts": len(replies), "tokens": tokens}
            | {"drafted": helped, "excused_by_a_tie": ties}
        )
        print(rows[-1])
        assert (helped > 0) == (setup.algorithm == "NGRAM")
    return rows


@pytest.mark.parametrize("setup", PAIRED, ids=str)
def test_greedy_text_is_transformers(servers: Start, expected: Expected, setup: Setup) -> None:
    run_setup(servers(setup), expected, setup, PAIRED[setup])


@pytest.mark.slow
@pytest.mark.parametrize("setup", ALL_SETUPS, ids=str)
def test_full_matrix(
    servers: Start, alone: Expected, matrix: list[dict[str, Any]], setup: Setup
) -> None:
    matrix += run_setup(servers(setup), alone, setup, ALL_PASSES)


@pytest.fixture(scope="module")
def matrix() -> Iterator[list[dict[str, Any]]]:
    """The rows of the full matrix; a complete one goes to the file that RECORD names, if any."""
    rows: list[dict[str, Any]] = []
    yield rows
    if RECORD in os.environ and len(rows) == len(ALL_SETUPS) * len(ALL_PASSES):
        file = os.environ[RECORD]
        command = [f"{RECORD}={file}", "pytest", "-m", "slow", "tests/e2e/test_exact_smollm2.py"]
        write_row(Path(file), {**provenance(command), "new_tokens": NEW, "rows": rows})


@pytest.fixture(scope="session")
def alone(reference: Reference) -> Expected:
    """All prompts, answered one at a time."""
    prompts = all_prompts(reference)
    assert len(prompts) >= 40
    return answered(reference, prompts, batch=1)


class TestOneServer:
    """What one server with NGRAM shows beside plain replies; it is the last of the paired ones."""

    @pytest.fixture
    def server(self, servers: Start) -> Server:
        return servers(Setup("NGRAM", -1, 1))

    def test_chat_route_renders_the_template(self, server: Server, expected: Expected) -> None:
        """The chat route's answer is that of the templated prompt."""
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        template = expected.reference.tokenizer.apply_chat_template
        for question in ("Name three rivers.", "Was ist das? 🚢", "2 + 2 ="):
            messages = [{"role": "user", "content": question}]
            ids = template(messages, add_generation_prompt=True, return_dict=False)
            (answer,) = expected.reference.generate([ids], NEW)
            given = client.chat.completions.create(
                model="smollm2", messages=messages, temperature=0, max_tokens=NEW
            )
            text = expected.reference.tokenizer.decode(answer, skip_special_tokens=True)
            assert given.choices[0].message.content == text
            assert given.usage is not None
            assert given.usage.prompt_tokens == len(ids)

    def test_streams_of_multi_byte_text(self, server: Server, expected: Expected) -> None:
        """Cuts inside characters, blocks of accepted tokens: no character is lost, doubled or
        broken in any kind of stream."""
        prompt = real_prompts.MULTI_BYTE
        whole = generate(server, prompt, temperature=0, max_new_tokens=48, ignore_eos=True)
        assert speculated([whole])
        assert len(whole["text"].encode()) > 1.3 * len(whole["text"]), "the text is plain ASCII"
        decode = expected.reference.tokenizer.decode

        def check(n: int) -> None:
            sampling = {"temperature": 0, "max_new_tokens": n, "ignore_eos": True}
            reply = in_both_modes(server, prompt, **sampling)
            assert reply["output_ids"] == whole["output_ids"][:n]
            assert reply["text"] == decode(expected_ids(prompt, n))[len(prompt) :]
            request = {"prompt": prompt, "temperature": 0, "max_tokens": n, "ignore_eos": True}
            events = stream_events(server, request | {"stream": True}, "/v1/completions")
            deltas = [c["text"] for event in events for c in event["choices"]]
            assert "".join(deltas) == reply["text"]
            assert "\ufffd" not in reply["text"].rstrip("\ufffd")

        def expected_ids(text: str, n: int) -> list[int]:
            return expected.reference.encode(text) + whole["output_ids"][:n]

        together([functools.partial(check, n) for n in range(1, 49)], 8)

    def test_n_gives_one_greedy_text(self, server: Server) -> None:
        streamed = stream(server, real_prompts.REPEAT, **GREEDY)
        many = server.client.post(
            "/generate", json={"text": real_prompts.REPEAT, "sampling_params": GREEDY | {"n": 4}}
        ).json()
        assert [reply["output_ids"] for reply in many] == [streamed["output_ids"]] * 4

    def test_everything_is_given_back(self, server: Server) -> None:
        canary = Canary(server, real_prompts.REPEAT)
        drained(server)
        canary.alive()
