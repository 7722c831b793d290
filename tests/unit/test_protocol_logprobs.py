"""How log-probabilities are asked for, and how they are worded, part by part and whole."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from test_protocol_requests import INFO
from tiny import IM_END, make_tokenizer
from tokenizers import Tokenizer

from sgl_spec.errors import InvalidRequestError
from sgl_spec.messages import Chunks, OutputChunk
from sgl_spec.request import FinishReason, LogprobParams, Logprobs, SamplingParams, TokenizedRequest
from sgl_spec.server.frontend import Frontend, Update
from sgl_spec.server.logprobs import (
    CompletionLogprobs,
    NativeLogprobs,
    chat_logprobs,
    token_name,
)
from sgl_spec.server.openai_protocol import read_chat, read_completions
from sgl_spec.server.openai_replies import ChatReplies, CompletionReplies
from sgl_spec.server.output import Output
from sgl_spec.server.protocol import GenerateReplies, read_generate
from sgl_spec.server.requests import Made, RequestMaker
from sgl_spec.server.sampling import SamplingDefaults
from sgl_spec.server.tokenizer import ServerTokenizer

PROMPT = "The boat, où? 🚢"
ANSWER = "évidemment là: 🚢!"
LENGTH = FinishReason(kind="length")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer(512)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def made_up(ids: list[int], ask: LogprobParams, seed: int = 0) -> Logprobs:
    """Values that differ everywhere, as an engine would send them."""
    found = Logprobs()
    for place, token in enumerate(ids):
        base = -1.0 - seed - place / 64
        found.values.append(base)
        if ask.top_logprobs_num:
            best = [token, *range(ask.top_logprobs_num - 1)]
            found.top_ids.append(best)
            found.top_values.append([base - i / 1024 for i in range(len(best))])
        if ask.token_ids_logprob:
            found.id_values.append([base - 2.0 - i for i in range(len(ask.token_ids_logprob))])
    return found


class Case:
    """One request and its updates, cut at will."""

    def __init__(self, tokenizer: Tokenizer, ask: LogprobParams, stop: str | None = None) -> None:
        self.tokenizer, self.ask = tokenizer, ask
        self.prompt, self.answer = ids_of(tokenizer, PROMPT), ids_of(tokenizer, ANSWER)
        stops = () if stop is None else (stop,)
        self.request = TokenizedRequest(
            rid="a",
            input_ids=self.prompt,
            sampling=SamplingParams(seed=1, stop=stops),
            logprobs=ask,
            stream=True,
        )
        start = ask.logprob_start_len
        self.in_prompt = made_up(self.prompt[start + 1 :] if start >= 0 else [], ask, seed=7)
        self.logprobs = made_up(self.answer, ask)
        self.finish = LENGTH if stop is None else FinishReason(kind="stop", matched=stop)
        self.output = Output(self.request, tokenizer)
        self.made = Made([self.request], [0], None)

    def updates(self, *cuts: int) -> list[tuple[Update, str]]:
        """The updates when the answer comes in pieces that end at `cuts`, and their text."""
        ends = [*cuts, len(self.answer)]
        return [
            self._feed(start, end, last=end == ends[-1])
            for start, end in zip([0, *cuts], ends, strict=True)
        ]

    def _feed(self, start: int, end: int, *, last: bool) -> tuple[Update, str]:
        ids = self.answer[start:end]
        chunk = OutputChunk(
            rid="a",
            ids=ids,
            prompt_tokens=len(self.prompt),
            completion_tokens=end,
            finish=self.finish if last else None,
        )
        first = self.in_prompt if start == 0 else Logprobs()
        update = Update(0, ids, chunk, self.logprobs.part(start, end), first)
        return update, self.output.feed(update)


ASK = LogprobParams(logprob_start_len=0, top_logprobs_num=2, token_ids_logprob=(5, 6))


# --- /generate ------------------------------------------------------------------------------------


def native(case: Case, *, texts: bool = False, incremental: bool = False) -> GenerateReplies:
    body = {"text": PROMPT, "return_logprob": True, "return_text_in_logprobs": texts}
    call = read_generate(body)
    return GenerateReplies(call, case.tokenizer, incremental=incremental, speculating=False)


def events(case: Case, replies: Any, *cuts: int) -> list[Any]:
    found: list[Any] = []
    ends = [*cuts, len(case.answer)]
    for start, end in zip([0, *cuts], ends, strict=True):
        update, new = case._feed(start, end, last=end == ends[-1])
        found += [dict(e) for e in replies.events(case.output, 0, new, update.ids)]
    return found


def test_native_lists(tokenizer: Tokenizer) -> None:
    case = Case(tokenizer, ASK)
    case.updates(3)
    meta = native(case).whole([case.output])["meta_info"]
    rest = zip(case.in_prompt.values, case.prompt[1:], strict=True)
    assert meta["input_token_logprobs"] == [
        [None, case.prompt[0], None],
        *([value, token, None] for value, token in rest),
    ]
    assert [e[1] for e in meta["output_token_logprobs"]] == case.answer
    assert [e[0] for e in meta["output_token_logprobs"]] == case.logprobs.values
    assert meta["output_token_logprobs_length"] == len(case.answer)
    assert meta["input_top_logprobs"][0] is meta["input_token_ids_logprobs"][0] is None
    for side, ids in (("input", case.prompt), ("output", case.answer)):
        assert len(meta[f"{side}_top_logprobs"]) == len(ids)
        tops = meta[f"{side}_top_logprobs"][1:]
        assert [[e[1] for e in top] for top in tops] == [[i, 0] for i in ids[1:]]
        wanted = meta[f"{side}_token_ids_logprobs"][1:]
        assert [[e[1] for e in one] for one in wanted] == [[5, 6]] * (len(ids) - 1)


def test_native_texts(tokenizer: Tokenizer) -> None:
    case = Case(tokenizer, ASK)
    case.updates()
    meta = native(case, texts=True).whole([case.output])["meta_info"]
    shown = [e[2] for e in meta["input_token_logprobs"] + meta["output_token_logprobs"]]
    assert all(isinstance(text, str) for text in shown)
    assert "\ufffd" in "".join(shown), "a ship is several tokens, none of which is text"
    assert meta["output_top_logprobs"][0][0][2] == meta["output_token_logprobs"][0][2]


def test_native_keys_are_those_asked_for(tokenizer: Tokenizer) -> None:
    case = Case(tokenizer, LogprobParams())
    case.updates()
    meta = native(case).whole([case.output])["meta_info"]
    assert {key for key in meta if "logprob" in key} == {
        "input_token_logprobs",
        "output_token_logprobs",
        "output_token_logprobs_length",
    }
    assert meta["input_token_logprobs"] == []


@pytest.mark.parametrize("start", [1, 3])
def test_native_prompt_from_a_position(tokenizer: Tokenizer, start: int) -> None:
    case = Case(tokenizer, LogprobParams(logprob_start_len=start))
    case.updates()
    entries = native(case).whole([case.output])["meta_info"]["input_token_logprobs"]
    assert [e[1] for e in entries] == case.prompt[start:]
    assert [e[0] for e in entries] == [None, *case.in_prompt.values]


@pytest.mark.parametrize("cuts", [(), (1,), (2, 3, 5), tuple(range(1, 8))])
def test_native_streams(tokenizer: Tokenizer, cuts: tuple[int, ...]) -> None:
    """Cumulative streams repeat everything, incremental ones only the prompt's."""
    case = Case(tokenizer, ASK)
    shown = [e["meta_info"] for e in events(case, native(case), *cuts)]
    whole = native(case).whole([case.output])["meta_info"]
    again = Case(tokenizer, ASK)
    pieces = [e["meta_info"] for e in events(again, native(again, incremental=True), *cuts)]
    ends = [*cuts, len(case.answer)]
    for name in (key for key in whole if key.endswith("logprobs")):
        assert shown[-1][name] == whole[name]
        if name.startswith("input"):
            assert all(e[name] == whole[name] for e in [*shown, *pieces])
        else:
            assert flat(e[name] for e in pieces) == whole[name]
    for seen in (shown, pieces):
        assert [e["output_token_logprobs_length"] for e in seen] == ends


def test_native_abort_before_the_prompt_was_read(tokenizer: Tokenizer) -> None:
    case = Case(tokenizer, ASK)
    aborted = FinishReason(kind="abort", message="Aborted")
    chunk = OutputChunk(rid="a", ids=[], prompt_tokens=3, completion_tokens=0, finish=aborted)
    case.output.feed(Update(0, [], chunk, Logprobs(), case.in_prompt.part(0, 2)))
    meta = native(case).whole([case.output])["meta_info"]
    assert [e[1] for e in meta["input_token_logprobs"]] == case.prompt[:3]
    assert meta["output_token_logprobs"] == []


def test_entries_are_made_once(tokenizer: Tokenizer) -> None:
    """A cumulative stream must not work through all of its tokens at every event."""
    case = Case(tokenizer, ASK)
    reader = NativeLogprobs(case.request, tokenizer, texts=True)
    made: list[int] = []
    entries = reader._entries
    reader._entries = lambda v, i: made.append(len(v)) or entries(v, i)  # type: ignore[method-assign]
    for start in range(len(case.answer)):
        case._feed(start, start + 1, last=False)
        reader.meta(case.output)
    per_token = 1 + 2 + 2
    assert sum(made) == per_token * (len(case.prompt) - 1 + len(case.answer))


# --- OpenAI ---------------------------------------------------------------------------------------


def openai_replies(case: Case, *, echo: bool, stream: bool) -> CompletionReplies:
    body = {"prompt": PROMPT, "logprobs": 2, "echo": echo, "stream": stream}
    call = read_completions(body, SamplingDefaults({}), (), repr)
    return CompletionReplies(
        call, case.made, "m", case.tokenizer, cache_report=False, speculating=False
    )


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stop", [None, "!"])
def test_completions(tokenizer: Tokenizer, echo: bool, stop: str | None) -> None:
    ask = LogprobParams(logprob_start_len=0 if echo else -1, top_logprobs_num=2)
    case = Case(tokenizer, ask, stop)
    case.updates(2, 4)
    (choice,) = openai_replies(case, echo=echo, stream=False).whole([case.output])["choices"]
    found = choice["logprobs"]
    ids = (case.prompt if echo else []) + case.answer
    assert found["tokens"] == [token_name(tokenizer, i) for i in ids]
    head = [None, *case.in_prompt.values] if echo else []
    assert found["token_logprobs"] == head + case.logprobs.values
    assert len(found["top_logprobs"]) == len(ids)
    assert found["top_logprobs"][0] is None or not echo
    text = (PROMPT if echo else "") + ANSWER
    for token, at in zip(found["tokens"], found["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert text[at : at + len(token)] == token
    assert choice["text"] == text.removesuffix("!" if stop else "")


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("cuts", [(), (1,), (2, 3, 5), tuple(range(1, 8))])
def test_completion_streams_add_up(tokenizer: Tokenizer, echo: bool, cuts: tuple[int, ...]) -> None:
    """Every token's entry comes once, also when its text is held back."""
    ask = LogprobParams(logprob_start_len=0 if echo else -1, top_logprobs_num=2)
    case = Case(tokenizer, ask, "!")
    streamed = events(case, openai_replies(case, echo=echo, stream=True), *cuts)
    (whole,) = openai_replies(case, echo=echo, stream=False).whole([case.output])["choices"]
    parts = [c for e in streamed for c in e["choices"]]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert flat(p["logprobs"][name] for p in parts if p["logprobs"]) == values


def test_nobody_asks_openai(tokenizer: Tokenizer) -> None:
    case = Case(tokenizer, ASK)
    request = TokenizedRequest(rid="a", input_ids=[5], sampling=SamplingParams(seed=1))
    made = Made([request], [0], None)
    output = Output(request, tokenizer)
    call = read_completions({"prompt": "x", "echo": True}, SamplingDefaults({}), (), repr)
    replies = CompletionReplies(call, made, "m", tokenizer, cache_report=False, speculating=False)
    update, _ = case.updates()[0]
    new = output.feed(Update(0, update.ids, update.chunk))
    streamed = list(replies.events(output, 0, new, update.ids))
    assert [c["logprobs"] for e in streamed for c in e["choices"]] == [None] * 3
    assert replies.whole([output])["choices"][0]["logprobs"] is None


def test_tokens_that_look_the_same_share_a_name(tokenizer: Tokenizer) -> None:
    """Names are keys there; bytes keep parts of characters apart, the likelier of two wins."""
    boat = ids_of(tokenizer, "🚢")
    names = [token_name(tokenizer, i) for i in boat]
    assert len(set(names)) == len(boat) > 1
    assert all(name.startswith("bytes:\\x") for name in names)
    reader = CompletionLogprobs(Case(tokenizer, ASK).request, tokenizer, "")
    twice = Logprobs([-3.0], [[boat[0], 510]], [[-1.0, -2.0]])
    (named,) = reader.new([boat[0]], twice)["top_logprobs"]
    assert named == {names[0]: -1.0, token_name(tokenizer, 510): -2.0}


def test_offsets_with_a_token_that_the_echo_does_not_show(tokenizer: Tokenizer) -> None:
    ids = [IM_END, *ids_of(tokenizer, PROMPT)]
    request = TokenizedRequest(
        rid="a", input_ids=ids, sampling=SamplingParams(seed=1), logprobs=LogprobParams()
    )
    reader = CompletionLogprobs(request, tokenizer, PROMPT)
    found = reader.prompt(Logprobs([-1.0] * (len(ids) - 1)))
    assert found["tokens"][0] == "<|im_end|>"
    assert found["text_offset"][:2] == [0, 0]
    assert found["text_offset"][2] == len(found["tokens"][1])
    after = reader.new(ids_of(tokenizer, "x")[:1], Logprobs([-1.0]))
    assert after["text_offset"] == [len(PROMPT)]


def test_chat(tokenizer: Tokenizer) -> None:
    ask = LogprobParams(top_logprobs_num=2)
    case = Case(tokenizer, ask)
    content = chat_logprobs(tokenizer, case.answer, case.logprobs)["content"]
    assert content is not None
    assert bytes(flat(entry["bytes"] for entry in content)).decode() == ANSWER
    assert [entry["logprob"] for entry in content] == case.logprobs.values
    for entry, token in zip(content, case.answer, strict=True):
        assert entry["top_logprobs"][0] == {k: entry[k] for k in ("token", "logprob", "bytes")}
        assert entry["token"] == token_name(tokenizer, token)
        assert len(entry["top_logprobs"]) == 2


@pytest.mark.parametrize("cuts", [(), (1, 2, 5)])
def test_chat_streams_add_up(tokenizer: Tokenizer, cuts: tuple[int, ...]) -> None:
    case = Case(tokenizer, LogprobParams())
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "stream": True}
    call = read_chat(body, SamplingDefaults({}), (), repr)
    options = {"cache_report": False, "speculating": False}
    replies = ChatReplies(call, case.made, "m", tokenizer, **options)  # type: ignore[arg-type]
    streamed = events(case, replies, *cuts)
    (whole,) = replies.whole([case.output])["choices"]
    parts = [c for e in streamed for c in e["choices"]]
    content = flat(p["logprobs"]["content"] for p in parts if p["logprobs"])
    assert content == whole["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[]] * len(case.answer)


# --- asking ---------------------------------------------------------------------------------------


def test_asking_natively() -> None:
    body = {"text": "a", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    (asked,) = read_generate(body | {"token_ids_logprob": [3, 4]}).asked
    assert asked.logprobs == LogprobParams(
        logprob_start_len=0, top_logprobs_num=2, token_ids_logprob=(3, 4)
    )


def test_how_to_report_is_kept_or_refused() -> None:
    """Without `return_logprob` the other fields stand at their defaults, as clients send them."""
    nothing = {
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": [],
        "return_text_in_logprobs": False,
    }
    (silent,) = read_generate({"text": "a", "return_logprob": False} | nothing).asked
    assert silent.logprobs is None
    for name, value in {
        "logprob_start_len": 0,
        "top_logprobs_num": 3,
        "token_ids_logprob": [1],
        "return_text_in_logprobs": True,
    }.items():
        for said in ({}, {"return_logprob": False}):
            with pytest.raises(InvalidRequestError) as caught:
                read_generate({"text": "a"} | said | {name: value})
            assert caught.value.param == name
            assert "must be left out unless return_logprob is true" in caught.value.message
        assert read_generate({"text": "a", "return_logprob": True, name: value})


def test_asking_for_a_batch() -> None:
    """One value for all, or one each."""
    batch: dict[str, Any] = {"text": ["a", "b", "c"], "return_logprob": True}
    shared = read_generate(batch | {"top_logprobs_num": 2, "token_ids_logprob": [1, 2]}).asked
    wanted = LogprobParams(top_logprobs_num=2, token_ids_logprob=(1, 2))
    assert [a.logprobs for a in shared] == [wanted] * 3
    each = read_generate(
        batch
        | {
            "return_logprob": [True, False, True],
            "logprob_start_len": [0, 1, -1],
            "top_logprobs_num": [0, 1, 2],
            "token_ids_logprob": [[1], [2], []],
        }
    ).asked
    assert [a.logprobs for a in each] == [
        LogprobParams(logprob_start_len=0, token_ids_logprob=(1,)),
        None,
        LogprobParams(top_logprobs_num=2),
    ]
    for name, value in (
        ("return_logprob", [True]),
        ("logprob_start_len", [0, 0]),
        ("top_logprobs_num", [1] * 4),
        ("token_ids_logprob", [[1], [2]]),
    ):
        with pytest.raises(InvalidRequestError, match=f"{name} must hold one value") as caught:
            read_generate(batch | {name: value})
        assert caught.value.param == name


def test_asking_openai() -> None:
    def completion(**body: Any) -> LogprobParams | None:
        fields = {"prompt": "a"} | body
        return read_completions(fields, SamplingDefaults({}), (), repr).asked[0].logprobs

    assert completion() is completion(echo=True) is None
    assert completion(logprobs=0) == LogprobParams()
    assert completion(logprobs=20, echo=True) == LogprobParams(
        logprob_start_len=0, top_logprobs_num=20
    )

    def chat(**body: Any) -> LogprobParams | None:
        fields = {"messages": [{"role": "user", "content": "x"}]} | body
        return read_chat(fields, SamplingDefaults({}), (), repr).asked[0].logprobs

    assert chat() is chat(logprobs=False, top_logprobs=0) is None
    assert chat(logprobs=True) == LogprobParams()
    assert chat(logprobs=True, top_logprobs=3) == LogprobParams(top_logprobs_num=3)


def test_ranges_that_need_the_prompt_and_the_vocabulary(tokenizer: Tokenizer) -> None:
    maker = RequestMaker(INFO, ServerTokenizer(tokenizer, None, {}), truncate=False, seed=1)

    def make(**body: Any) -> Made:
        fields = {"input_ids": [7, 8, 9], "return_logprob": True}
        call = read_generate({**fields, "sampling_params": {"max_new_tokens": 4}, **body})
        return asyncio.run(maker.make(call.asked, None, stream=False))

    (request,) = make(logprob_start_len=2, token_ids_logprob=[511]).requests
    assert request.logprobs == LogprobParams(logprob_start_len=2, token_ids_logprob=(511,))
    for body, message in (
        ({"logprob_start_len": 3}, "logprob_start_len must be -1 .* 0 to 2, got 3"),
        ({"logprob_start_len": -2}, "logprob_start_len must be -1"),
        ({"token_ids_logprob": [512]}, "token_ids_logprob must be ids from 0 to 511, got 512"),
        ({"top_logprobs_num": 129}, "top_logprobs_num must be an integer from 0 to 128, got 129"),
    ):
        with pytest.raises(InvalidRequestError, match=message) as caught:
            make(**body)
        assert caught.value.param == next(iter(body))


# --- between the processes ------------------------------------------------------------------------


def test_chunks_that_wait_are_merged(tokenizer: Tokenizer) -> None:
    """A slow reader gets one update; nothing is lost, doubled or shared between updates."""
    case = Case(tokenizer, ASK)

    async def body() -> None:
        frontend = Frontend(lambda _: None)
        async with frontend.open([case.request]) as ticket:
            seen = []
            for start, end in ((0, 1), (1, 4), (4, 5), (5, len(case.answer))):
                chunk = OutputChunk(
                    rid="a",
                    ids=case.answer[start:end],
                    prompt_tokens=1,
                    completion_tokens=end,
                    finish=LENGTH if end == len(case.answer) else None,
                    logprobs=case.logprobs.part(start, end),
                    prompt_logprobs=case.in_prompt if start == 0 else None,
                )
                frontend.on_message(Chunks([chunk]))
                if end == 4:
                    seen += await ticket.updates()
            seen += await ticket.updates()
        assert [len(u.ids) for u in seen] == [4, len(case.answer) - 4]
        assert seen[0].logprobs == case.logprobs.part(0, 4)
        assert seen[1].logprobs == case.logprobs.part(4)
        assert [u.prompt_logprobs for u in seen] == [case.in_prompt, Logprobs()]

    asyncio.run(body())
