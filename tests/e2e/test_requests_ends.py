"""Where a request ends: stops inside accepted blocks, exact counts, the edge of the context."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from drafting import DRAFTERS, drafter_flags
from serving import Launch, Server
from solo import Solo
from talk import (
    Canary,
    Reply,
    accepted,
    body,
    drained,
    generate,
    in_both_modes,
    speculated,
    stream_events,
    together,
)
from tiny import end_on, make_tiny
from tokenizers import Tokenizer

VOCAB, CONTEXT, NODES = 512, 384, 12
GREEDY = {"temperature": 0, "ignore_eos": True}
# A loop that the tiny model stays in for a while, so that blocks are long.
LOOP = [*range(60, 73)] * 3
SPECULATING = DRAFTERS[1:]
ENDS = list(range(4, VOCAB, 7))


@pytest.fixture(scope="module")
def servers(launch_shared: Launch, tiny_model_dir: Path) -> dict[str, Server]:
    """A server for each drafter, with a short context."""
    common = ("--context-length", str(CONTEXT), "--max-total-tokens", "16000")
    return {
        name: launch_shared(*drafter_flags(name, tiny_model_dir), *common) for name in SPECULATING
    }


@pytest.fixture(params=SPECULATING)
def server(servers: dict[str, Server], request: pytest.FixtureRequest) -> Iterator[Server]:
    """Every drafter in turn; the server must be well and drained afterwards."""
    chosen = servers[request.param]
    canary = Canary(chosen, LOOP)
    yield chosen
    canary.alive()
    drained(chosen)


@pytest.fixture(scope="module")
def solo(tiny_model_dir: Path) -> Solo:
    return Solo(tiny_model_dir, context_length=CONTEXT)


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))


def repeats(server: Server) -> bool:
    """Whether this server's drafts are ever right (JUNK's are not)."""
    return speculated([generate(server, LOOP, max_new_tokens=100, **GREEDY)])


class TestStops:
    def test_a_stop_id_ends_the_text_wherever_it_falls(self, server: Server, solo: Solo) -> None:
        """Over all positions some lie inside a block: nothing after the stop is ever given out."""
        whole = solo.ids(LOOP, max_new_tokens=64, **GREEDY)
        cuts = [p for p in range(2, 41) if whole[p] not in whole[:p]]
        assert len(cuts) >= 8

        def check(p: int) -> Reply:
            stop = {"stop_token_ids": [whole[p]], "max_new_tokens": 64}
            reply = in_both_modes(server, LOOP, **stop, **GREEDY)
            assert reply["output_ids"] == whole[: p + 1]
            assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": whole[p]}
            assert reply["text"] == solo.run(LOOP, **stop, **GREEDY).text
            return reply

        learned = repeats(server)  # n-grams of the text are then there to copy
        replies = together([functools.partial(check, p) for p in cuts])
        assert speculated(replies) or not learned

    def test_a_stop_string_ends_the_text_wherever_it_falls(
        self, server: Server, solo: Solo, tokenizer: Tokenizer
    ) -> None:
        whole = solo.ids(LOOP, max_new_tokens=64, **GREEDY)

        def check(p: int) -> None:
            stop = tokenizer.decode(whole[p : p + 2])
            sampling = {"stop": [stop], "max_new_tokens": 64, **GREEDY}
            expected = solo.run(LOOP, **sampling)
            reply = in_both_modes(server, LOOP, **sampling)
            assert reply["output_ids"] == expected.output_ids
            assert reply["text"] == expected.text
            assert stop not in reply["text"]
            assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
            kept = generate(server, LOOP, no_stop_trim=True, **sampling)
            assert kept["text"] == expected.text + stop

        decoded = {p: tokenizer.decode(whole[p : p + 2]) for p in range(2, 41)}
        sound = [p for p, text in decoded.items() if "\ufffd" not in text]
        assert len(sound) >= 20
        together([functools.partial(check, p) for p in sound])

    def test_the_stop_that_is_completed_first_wins(
        self, server: Server, solo: Solo, tokenizer: Tokenizer
    ) -> None:
        """Two stops within one block, listed both ways: one answer."""
        whole = solo.ids(LOOP, max_new_tokens=64, **GREEDY)
        for p, gap in itertools.product(range(2, 30, 3), (1, 3)):
            first, second = (tokenizer.decode(whole[q : q + 2]) for q in (p, p + gap))
            if "\ufffd" in first + second:
                continue
            replies = [
                in_both_modes(server, LOOP, stop=stops, max_new_tokens=64, **GREEDY)
                for stops in ([first, second], [second, first])
            ]
            expected = solo.run(LOOP, stop=[first, second], max_new_tokens=64, **GREEDY)
            for reply in replies:
                assert reply["output_ids"] == expected.output_ids
                assert reply["text"] == expected.text
                assert reply["meta_info"]["finish_reason"]["matched"] == expected.finish.matched


class TestCounts:
    def test_every_length_is_delivered_exactly(self, server: Server, solo: Solo) -> None:
        whole = solo.ids(LOOP, max_new_tokens=40, **GREEDY)

        def check(n: int) -> None:
            reply = in_both_modes(server, LOOP, max_new_tokens=n, **GREEDY)
            assert reply["output_ids"] == whole[:n]
            assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": n}

        together([functools.partial(check, n) for n in range(1, 41)])

    def test_no_tokens(self, server: Server) -> None:
        reply = in_both_modes(server, LOOP, max_new_tokens=0)
        assert (reply["text"], reply["output_ids"]) == ("", [])

    def test_the_edge_of_the_context(self, server: Server, solo: Solo) -> None:
        """Outputs that fill the context to its last token, four at once beside short requests."""
        rng = random.Random(1)
        long = [
            [rng.randrange(3, VOCAB) for _ in range(CONTEXT - left)] for left in range(1, NODES + 4)
        ]
        long += [[*LOOP * 12][: CONTEXT - left] for left in (2, NODES, 2 * NODES, 3 * NODES)]
        short = [[rng.randrange(3, VOCAB) for _ in range(5)] for _ in range(len(long))]

        def fill(prompt: list[int]) -> None:
            left = CONTEXT - len(prompt)
            reply = generate(server, prompt, max_new_tokens=left, **GREEDY)
            assert reply["output_ids"] == solo.ids(prompt, max_new_tokens=left, **GREEDY)
            assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": left}
            refused = server.client.post("/generate", json=body(prompt, max_new_tokens=left + 1))
            assert refused.status_code == 400, refused.text

        def beside(prompt: list[int]) -> None:
            reply = generate(server, prompt, max_new_tokens=30, **GREEDY)
            assert reply["output_ids"] == solo.ids(prompt, max_new_tokens=30, **GREEDY)

        pairs = [
            (functools.partial(fill, a), functools.partial(beside, b))
            for a, b in zip(long, short, strict=True)
        ]
        together(list(itertools.chain.from_iterable(pairs)), 8)
        for over in (0, 1, NODES, NODES + 8):
            refused = server.client.post("/generate", json=body([5] * (CONTEXT + over)))
            assert refused.status_code == 400
            assert "context" in refused.json()["error"]["message"]

    def test_streams_of_any_bytes(self, server: Server, solo: Solo, tokenizer: Tokenizer) -> None:
        """The tiny model's text breaks off inside characters all the time."""
        prompt = tokenizer.encode("船 Où").ids
        sampling = {"temperature": 1, "seed": 3, "ignore_eos": True}
        whole = solo.ids(prompt, max_new_tokens=48, **sampling)
        start = len(tokenizer.decode(prompt))

        def check(n: int) -> str:
            reply = in_both_modes(server, prompt, max_new_tokens=n, **sampling)
            assert reply["output_ids"] == whole[:n]
            text = tokenizer.decode([*prompt, *whole[:n]])[start:]
            assert reply["text"] == text
            request = {"prompt": prompt, "max_tokens": n, "stream": True, **sampling}
            events = stream_events(server, request, "/v1/completions")
            assert "".join(c["text"] for event in events for c in event["choices"]) == text
            return text

        texts = together([functools.partial(check, n) for n in range(1, 49)])
        assert any(text.endswith("\ufffd") for text in texts)


def run_one_token_requests(server: Server, solo: Solo, count: int) -> None:
    """Requests that end in their prefill do not jam the queue."""
    rng = random.Random(2)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(1 + i % 7)] for i in range(50)]
    lengths = [1] * count + [rng.choice((1, 64)) for _ in range(count // 10)] + [0] * 5
    chosen = [(prompts[i % 50], n) for i, n in enumerate(lengths)]
    calls = [functools.partial(generate, server, p, max_new_tokens=n, **GREEDY) for p, n in chosen]
    replies = together(calls, 64)
    for (prompt, n), reply in zip(chosen, replies, strict=True):
        assert reply["output_ids"] == solo.ids(prompt, max_new_tokens=64, **GREEDY)[:n]


@pytest.mark.timeout(60)
def test_one_token_requests(server: Server, solo: Solo) -> None:
    run_one_token_requests(server, solo, 300)


@pytest.mark.slow
def test_two_thousand_one_token_requests(server: Server, solo: Solo) -> None:
    run_one_token_requests(server, solo, 2000)


# --- minimum length -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def eager_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for which every seventh token ends the text."""
    return end_on(make_tiny(tmp_path_factory.mktemp("eager")), ENDS)


@pytest.fixture(scope="module")
def eager(eager_dir: Path) -> Solo:
    return Solo(eager_dir)


@pytest.fixture(scope="module")
def eager_server(launch_shared: Launch, eager_dir: Path) -> Server:
    # A forward of the tiny model takes hardly longer than asking for drafts.
    drafts = ("--speculative-algorithm", "NGRAM", "--speculative-verify-whole-trees")
    flags = (*drafts, "--max-total-tokens", "8000")
    return launch_shared(*flags, model=eager_dir)


@pytest.mark.parametrize("minimum", [1, 7, 30])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_minimum_length_is_kept(
    eager_server: Server, eager: Solo, minimum: int, temperature: int
) -> None:
    """Texts that would end at once go on to the minimum and end then; in blocks as without."""
    rng = random.Random(4)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(6)] for _ in range(60)]
    base = {"temperature": temperature, "seed": 1, "max_new_tokens": 60}
    short = [p for p in prompts if len(eager.ids(p, **base)) < 5][:12]
    assert len(short) >= 6

    def check(prompt: list[int]) -> Reply:
        stopped = eager.ids(prompt, **base)[-1]
        own = {"ignore_eos": True, "stop_token_ids": [stopped]} if len(prompt) % 2 else {}
        sampling = {**base, **own, "min_new_tokens": minimum}
        reply = in_both_modes(eager_server, prompt, **sampling)
        assert reply["output_ids"] == eager.ids(prompt, **sampling)
        assert reply["meta_info"]["completion_tokens"] >= minimum
        ends = set(own.get("stop_token_ids", ENDS))
        assert not ends & set(reply["output_ids"][: minimum - 1])
        return reply

    replies = together([functools.partial(check, p) for p in [*short, *(p[:5] for p in short)]])
    finishes = {reply["meta_info"]["finish_reason"]["type"] for reply in replies}
    assert "stop" in finishes
    if minimum == 30 and temperature == 0:
        assert sum(map(accepted, replies)) > 0
    drained(eager_server)
