"""The service behind the routes, before a frontend that only notes what it is sent."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest
from test_protocol_requests import INFO
from tiny import make_tokenizer

from sgl_spec.args import ServerArgs
from sgl_spec.errors import InvalidRequestError
from sgl_spec.messages import Chunks, OutputChunk, Submit, ToEngine
from sgl_spec.request import FinishReason, Logprobs
from sgl_spec.server.app import ServerState, build_app
from sgl_spec.server.frontend import Frontend
from sgl_spec.server.http import ApiKey, PerKey
from sgl_spec.server.logs import POLLED
from sgl_spec.server.output import failure_of
from sgl_spec.server.service import Service
from sgl_spec.server.tokenizer import ServerTokenizer

TOKENIZER = ServerTokenizer(make_tokenizer(512), None, {})


class Rig:
    """An engine that ends each request at once; `sent` is what it was asked for."""

    def __init__(self, **how: Any) -> None:
        self.sent: list[Submit] = []
        self.frontend = Frontend(self._take)
        args = ServerArgs(model_path="m", allow_auto_truncate=how.pop("truncate", False)).resolve()
        info = msgspec.structs.replace(INFO, **how)
        self.service = Service(args, info, TOKENIZER, self.frontend, None)

    def _take(self, message: ToEngine) -> None:
        assert isinstance(message, Submit)
        self.sent.append(message)
        request = message.request
        prompt = Logprobs(values=[-1.0] * (len(request.input_ids) - 1))
        chunk = OutputChunk(
            rid=request.rid,
            ids=[65] * request.sampling.max_new_tokens,
            prompt_tokens=len(request.input_ids),
            completion_tokens=request.sampling.max_new_tokens,
            finish=FinishReason(kind="length"),
            logprobs=Logprobs(values=[-2.0] * request.sampling.max_new_tokens),
            prompt_logprobs=prompt if request.logprobs is not None else None,
        )
        asyncio.get_running_loop().call_soon(self.frontend.on_message, Chunks([chunk]))

    def completion(self, **body: Any) -> dict[str, Any]:
        """The reply of /v1/completions."""
        return self.reply("completions", body)

    def reply(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Of a route, whole."""

        async def call() -> dict[str, Any]:
            run, _ = await getattr(self.service, route)(body)
            async with run.open() as ticket:
                while updates := await ticket.updates():
                    for update in updates:
                        run.outputs[update.index].feed(update)
            reply: dict[str, Any] = run.replies.whole(run.outputs)
            return reply

        return asyncio.run(call())


@pytest.mark.parametrize("prompt", ["text", "ids"])
def test_an_echo_shows_the_prompt_that_the_model_saw(prompt: str) -> None:
    rig = Rig(truncate=True, context_length=8, max_req_input_len=7, max_request_tokens=8)
    text = "<|im_start|>the boats of the harbour" + " the harbour" * 9
    ids = TOKENIZER.encode(text)
    short = "a<|im_end|>"
    given: Any = [text, short] if prompt == "text" else [ids, TOKENIZER.encode(short)]
    reply = rig.completion(prompt=given, echo=True, logprobs=0, max_tokens=2)
    seen = [sent.request.input_ids for sent in rig.sent]
    assert [len(one) for one in seen] == [7, 2]
    shown = [TOKENIZER.decode(one, skip_special_tokens=prompt == "ids") for one in seen]
    for choice, echo, tokens in zip(reply["choices"], shown, seen, strict=True):
        found, lists = choice["text"], choice["logprobs"]
        assert found.startswith(echo)
        assert {len(values) for values in lists.values()} == {len(lists["tokens"])}
        at = lists["text_offset"][len(tokens)]
        assert at == len(echo), "the output's first token stands behind the echo"
        for name, start in zip(lists["tokens"], lists["text_offset"], strict=True):
            assert found[start:].startswith(name) or name.startswith("<|im_")
    if prompt == "text":
        assert text.startswith(shown[0])


def test_the_warm_up_fits_into_small_contexts_and_pools() -> None:
    for most, tokens in ((2, 1), (6, 5), (8, 7), (9, 8), (64, 8)):
        rig = Rig(max_request_tokens=most)
        asyncio.run(rig.service.warm_up())
        (sent,) = rig.sent
        assert (len(sent.request.input_ids), sent.request.sampling.max_new_tokens) == (1, tokens)


ONE: dict[str, Any] = {"input_ids": [1]}
TWO: dict[str, Any] = {"input_ids": [[1], [2]]}
LOGPROBS = {**TWO, "return_logprob": True}
ROOMY = {"context_length": 1000, "max_req_input_len": 999, "max_request_tokens": 1000}
FAULTS: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "generate",
        {**ONE, "sampling_params": {"seed": 2**63}},
        "sampling_params.seed",
        "9223372036854775807",
    ),
    (
        "generate",
        {**ONE, "sampling_params": {"sampling_seed": 2**63}},
        "sampling_params.sampling_seed",
        "9223372036854775807, got 9223372036854775808.",
    ),
    (
        "completions",
        {"prompt": "a", "sampling_seed": 2**63},
        "sampling_seed",
        "9223372036854775807",
    ),
    ("completions", {"prompt": "a", "seed": 2**63}, "seed", "9223372036854775807"),
    ("generate", {**TWO, "sampling_params": {"top_p": 0}}, "sampling_params.top_p", "must be"),
    (
        "generate",
        {**TWO, "sampling_params": [{}, {"top_p": 0}]},
        "sampling_params[1].top_p",
        "must be",
    ),
    (
        "generate",
        {**TWO, "sampling_params": [{}, {"n": 0}]},
        "sampling_params[1].n",
        "equal to 1, got 0",
    ),
    ("generate", {**TWO, "sampling_params": [{}, {"seed": "1"}]}, "sampling_params[1].seed", "int"),
    ("generate", {"input_ids": [[1], [2, 999]]}, "input_ids[1]", "got 999"),
    ("generate", {"input_ids": [[1], [5] * 1000]}, "input_ids[1]", "leaves no room for output"),
    (
        "generate",
        {**TWO, "sampling_params": [{}, {"regex": "a", "ebnf": "b"}]},
        "sampling_params[1].ebnf",
        "sampling_params[1].regex and sampling_params[1].ebnf cannot both be given",
    ),
    ("generate", {**LOGPROBS, "top_logprobs_num": [0, 129]}, "top_logprobs_num[1]", "got 129"),
    ("generate", {**LOGPROBS, "token_ids_logprob": [[], [999]]}, "token_ids_logprob[1]", "999"),
    ("generate", {**LOGPROBS, "token_ids_logprob": [999]}, "token_ids_logprob", "999"),
    (
        "completions",
        {"prompt": [[1], [999]], "echo": True},
        "prompt[1]",
        "prompt[1][0] must be a token id from 0 to 511, got 999.",
    ),
    ("completions", {"prompt": ["a", "b"], "min_tokens": 17}, "min_tokens", "0 to 16, got 17"),
    (
        "completions",
        {"prompt": "a", "stop": ["x"] * 5000},
        "stop",
        "stop must be at most 32 non-empty strings, got 5000 strings.",
    ),
    ("completions", {"prompt": "a", "stop": ["é", ""]}, "stop", 'got ["é",""].'),
    ("completions", {"prompt": "a", "x" * 99: 1}, "x" * 99, "x" * 76 + "...."),
    ("detokenize", {"tokens": [[1], [2, 3, -1]]}, "tokens[1]", "tokens[1][2] must be a token id"),
    ("detokenize", {"tokens": [1, 512]}, "tokens", "tokens[1] must be a token id"),
]


@pytest.mark.parametrize(("route", "body", "param", "message"), FAULTS)
def test_errors_name_fields_as_the_client_does(
    route: str, body: dict[str, Any], param: str, message: str
) -> None:
    rig = Rig(**ROOMY)

    async def ask() -> None:
        found = getattr(rig.service, route)(body)
        await found

    with pytest.raises(InvalidRequestError) as caught:
        asyncio.run(ask())
    assert caught.value.param == param
    assert message in caught.value.message
    assert len(caught.value.message) < 300
    assert not rig.sent


def test_grammars_keep_the_name_that_the_client_used() -> None:
    """The engine, which may refuse them, words its errors with it."""
    for where, body in (
        ("sampling_params", {**ONE, "sampling_params": {"regex": "a"}}),
        ("sampling_params[1]", {**TWO, "sampling_params": [{}, {"regex": "a"}]}),
    ):
        run, _ = asyncio.run(Rig(**ROOMY).service.generate(body))
        grammar = run.made.requests[-1].sampling.grammar
        assert grammar is not None
        assert grammar.field == f"{where}.regex"
    problem = FinishReason(kind="abort", message="regex is bad", status=400, param="regex")
    failure = failure_of(problem)
    assert failure is not None
    assert (failure.status, failure.param) == (400, "regex")


@pytest.mark.parametrize("key", ["sésame", "船", "sesame"])
def test_a_key_may_hold_any_characters(key: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"status": 200})

    def status(path: str, *headers: tuple[bytes, bytes]) -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "path": path, "headers": list(headers)}
        asyncio.run(ApiKey(app, key)(scope, None, send))  # type: ignore[arg-type]
        code: int = sent[0]["status"]
        return code

    right = f"Bearer {key}".encode()
    for scheme in ("bearer", "BEARER"):
        assert status("/generate", (b"authorization", f"{scheme} {key}".encode())) == 200
    assert status("/generate", (b"authorization", right)) == 200
    if key.isascii() or key == "sésame":
        assert status("/generate", (b"authorization", right.decode().encode("latin-1"))) == 200
    for wrong in (b"", right + b"x", right[:-1], right[7:], b"Bearer sesam", b"\xff"):
        assert status("/generate", (b"authorization", wrong)) == 401, wrong
    assert status("/generate") == 401
    assert [status(path) for path in (*POLLED, "/")] == [200] * 4
    assert [status(path) for path in ("/healthy", "/health/x", "/metrics2")] == [401] * 3


def test_an_item_of_a_cut_response_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    monkeypatch.setattr(rig.service, "_render", lambda chat: "Hi.")

    async def call() -> Any:
        run, _ = await rig.service.responses({"input": "Hi.", "max_output_tokens": 3})
        async with run.open() as ticket:
            while not ticket.finished:
                await run.next_events(ticket)
        return run.replies

    replies = asyncio.run(call())
    assert [item["status"] for item in replies._items.done] == ["incomplete"]


def test_a_key_has_so_many_requests_open() -> None:
    async def body() -> None:
        going_on = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await going_on.wait()
            await send({"status": 200})

        limited = PerKey(app, 2)
        seen: list[Any] = []

        def ask(key: bytes, path: str = "/generate") -> asyncio.Task[None]:
            async def send(message: Any) -> None:
                if "status" in message:
                    seen.append((key, message["status"]))

            scope = {"type": "http", "path": path, "headers": [(b"authorization", key)]}
            return asyncio.create_task(limited(scope, None, send))  # type: ignore[arg-type]

        tasks = [ask(b"a"), ask(b"a"), ask(b"b"), ask(b"a"), ask(b"a", "/health")]
        await asyncio.sleep(0.01)
        assert seen == [(b"a", 429)]
        going_on.set()
        await asyncio.gather(*tasks, ask(b"a"))
        assert sorted(seen[1:]) == [(b"a", 200)] * 4 + [(b"b", 200)]
        assert not limited._open

    asyncio.run(body())


@pytest.mark.parametrize("origin", [None, "http://a.page"])
def test_a_fault_of_ours_is_a_500_that_pages_can_read(
    monkeypatch: pytest.MonkeyPatch, origin: str | None
) -> None:
    def fault(*_: object) -> None:
        raise ValueError("ours")

    state = ServerState()
    state.problem, state.service = None, Rig().service
    monkeypatch.setattr(Service, "models", fault)
    transport = httpx.ASGITransport(build_app(state, None), raise_app_exceptions=False)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get("/v1/models", headers={"Origin": origin} if origin else {})

    reply = asyncio.run(ask())
    assert reply.status_code == 500
    assert "The server failed on this request: ValueError." in reply.text
    assert reply.headers.get("access-control-allow-origin") == ("*" if origin else None)


@pytest.mark.parametrize("strict", [False, True])
def test_a_reply_says_what_its_bits_depend_on(strict: bool) -> None:
    body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
    meta = Rig(strict=strict).reply("generate", body)["meta_info"]
    assert meta.get("strict") == (True if strict else None)
