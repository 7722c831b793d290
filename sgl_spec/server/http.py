"""HTTP without policy: bodies in, JSON and event streams out, errors in their route's shape."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import orjson
from fastapi import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl_spec.errors import (
    InvalidRequestError,
    PayloadTooLargeError,
    RequestTimeoutError,
    SglSpecError,
    TooManyRequestsError,
    UnauthorizedError,
    UnsupportedMediaTypeError,
    preview,
)
from sgl_spec.server.frontend import ClientGone, Frontend, Ticket
from sgl_spec.server.logs import POLLED
from sgl_spec.server.output import Output, failure_of
from sgl_spec.server.requests import Made

OPEN = (*POLLED, "/")  # without a key: probes ask nothing private, and the page has a field for one
MAX_BODY_BYTES = 8 * 2**20
# A body over the limit is read to this size and dropped, so that its sender gets to see the 413.
MAX_DROPPED_BYTES = 64 * 2**20
BODY_TIMEOUT_S = 60.0
DONE = b"data: [DONE]\n\n"


# A server that loads, or whose queue is full, may be ready when it is asked again.
_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "5"},
}


class Json(Response):
    """A JSON reply."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Value to bytes."""
        return orjson.dumps(content)


def error_body(path: str, status: int, kind: str, message: str, param: str | None) -> Any:
    """An error as OpenAI routes show it (flat), or as the native routes do (under "error")."""
    flat = {"object": "error", "message": message, "type": kind, "param": param, "code": status}
    return flat if path.startswith("/v1/") else {"error": flat}


def error_reply(path: str, error: SglSpecError) -> Response:
    """The reply for an error met before anything was sent."""
    body = error_body(path, error.status, error.type, error.message, error.param)
    return Json(body, error.status, _HEADERS.get(error.status))


async def read_json(request: Request) -> Any:
    """The request body as JSON. Refuses bodies that are too large, of another type, or not JSON."""
    if request.url.path.startswith("/v1/"):
        _check_content_type(request)
    return _parsed(await _read_body(request))


def _parsed(body: bytes) -> Any:
    """The value, by a reader that is strict and one that sees keys which come twice."""
    try:
        orjson.loads(body)
        return json.loads(body, object_pairs_hook=_pairs)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {error}.") from None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequestError(f"The field {preview(twice)} is given twice.", param=twice)
    return found


async def read_optional(request: Request) -> Any:
    """The request body as JSON, an empty object where there is none."""
    body = await _read_body(request)
    return _parsed(body) if body else {}


def _check_content_type(request: Request) -> None:
    declared = request.headers.get("content-type", "")
    if declared.partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMediaTypeError(
            f"Content-Type must be application/json, got {declared or 'none'}."
        )


async def _read_body(request: Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read_whole(request)
    except TimeoutError:
        raise RequestTimeoutError(
            f"The request body did not come within {BODY_TIMEOUT_S:.0f} s."
        ) from None


async def _read_whole(request: Request) -> bytes:
    body = bytearray()
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= MAX_BODY_BYTES:
            body += part
        elif size > MAX_DROPPED_BYTES:
            break
    if size > MAX_BODY_BYTES:
        raise PayloadTooLargeError(
            f"The request body is larger than {MAX_BODY_BYTES} bytes, the most this server reads."
        )
    return bytes(body)


class Replies(Protocol):
    """How a route words what its requests give."""

    def whole(self, outputs: Sequence[Output]) -> Any:
        """The body of a reply that is no stream."""

    def events(self, output: Output, index: int, new: str, ids: list[int]) -> Iterable[Any]:
        """The events of one update: `new` text and `ids` were added to `output`."""

    def last(self, outputs: Sequence[Output]) -> Iterable[Any]:
        """The events after all outputs have ended."""


class Run:
    """One call: its requests, their outputs, and the words for them."""

    def __init__(
        self, frontend: Frontend, made: Made, outputs: Sequence[Output], replies: Replies
    ) -> None:
        self.frontend = frontend
        self.made = made
        self.outputs = outputs
        self.replies = replies

    def open(self) -> Ticket:
        """Send the requests to the engine."""
        return self.frontend.open(self.made.requests, self.made.group)

    async def whole(self, request: Request) -> Response:
        """Wait for all outputs and reply at once. Raises `ClientGone` and the engine's errors."""
        async with self.open() as ticket:
            ticket.watch(request.receive)
            while updates := await ticket.updates():
                for update in updates:
                    self.outputs[update.index].feed(update)
                    _raise_failure(self.outputs[update.index])
        return Json(self.replies.whole(self.outputs))

    async def next_events(self, ticket: Ticket) -> bytes:
        """The next events of a stream. Raises the error that ended a request."""
        parts: list[Any] = []
        for update in await ticket.updates():
            output = self.outputs[update.index]
            new = output.feed(update)
            _raise_failure(output)
            parts += self.replies.events(output, update.index, new, update.ids)
        if ticket.finished:
            parts += self.replies.last(self.outputs)
        return b"".join(map(event, parts))


def _raise_failure(output: Output) -> None:
    failure = failure_of(output.finish)
    if failure is not None:
        raise failure


def event(value: Any) -> bytes:
    """One server-sent event, under its name where it has one (/v1/responses)."""
    name = f"event: {value['type']}\n".encode() if "type" in value else b""
    return name + b"data: " + orjson.dumps(value) + b"\n\n"


class EventStream(Response):
    """A run as server-sent events.

    The status line waits for the first event, so that a request refused by the engine still gets
    its own status; an error after that travels as an event. The stream always ends with [DONE].
    """

    media_type = "text/event-stream"

    def __init__(self, run: Run) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run and send until the end, or until the client is gone."""
        path = scope["path"]
        started = False
        try:
            async with self._run.open() as ticket:
                ticket.watch(receive)
                while not ticket.finished:
                    body = await self._run.next_events(ticket)
                    if not started:
                        await send(self._start())
                        started = True
                    await _send_part(send, body)
        except ClientGone:
            return
        except SglSpecError as error:
            if not started:
                await error_reply(path, error)(scope, receive, send)
                return
            await _send_part(send, event(_stream_error(error)))
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    def _start(self) -> dict[str, Any]:
        return {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _stream_error(error: SglSpecError) -> Any:
    """Clients of both kinds of route look for "error" in an event."""
    return error_body("", error.status, error.type, error.message, error.param)


class TrailingSlash:
    """ASGI middleware: /v1/models/ is /v1/models, for every method and without a redirect."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on without the slash."""
        if scope["type"] == "http" and len(scope["path"]) > 1:
            scope["path"] = scope["path"].rstrip("/") or "/"
        await self._app(scope, receive, send)


class Counted:
    """ASGI middleware: tells of each reply its path, method and status. Paths that no route has are
    one, so that clients cannot fill a table."""

    def __init__(self, app: ASGIApp, tell: Callable[[str, str, int], None]) -> None:
        self._app = app
        self._tell = tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and listen to the status."""

        async def listen(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                endpoint = route.path if route is not None else "other"
                self._tell(endpoint, scope["method"], message["status"])
            await send(message)

        await self._app(scope, receive, listen if scope["type"] == "http" else send)


class PerKey:
    """ASGI middleware: a key (an Authorization header, or none) has at most so many requests open.
    Those of `POLLED` do not count."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit
        self._open: Counter[bytes] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or reply 429."""
        if scope["type"] != "http" or scope["path"] in POLLED:
            await self._app(scope, receive, send)
            return
        key = dict(scope["headers"]).get(b"authorization", b"")
        if self._open[key] >= self._limit:
            error = TooManyRequestsError(
                f"This key has {self._limit} requests open, as many as it may at once."
            )
            await error_reply(scope["path"], error)(scope, receive, send)
            return
        self._open[key] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]


class ApiKey:
    """ASGI middleware: every path but `OPEN` needs `Authorization: Bearer KEY`.

    A key that is not ASCII may come as UTF-8 or as Latin-1: clients differ. The word "Bearer" has
    no case (RFC 9110, 11.1).
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = [key.encode()]
        with contextlib.suppress(UnicodeEncodeError):
            self._expected.append(key.encode("latin-1"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or reply 401."""
        guarded = scope["type"] == "http" and scope["path"] not in OPEN
        if guarded and not self._opens(dict(scope["headers"]).get(b"authorization", b"")):
            error = UnauthorizedError("Unauthorized: the API key is missing or wrong.")
            await error_reply(scope["path"], error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _opens(self, given: bytes) -> bool:
        scheme, _, key = given.partition(b" ")
        fits = [hmac.compare_digest(key.strip(b" "), one) for one in self._expected]
        return scheme.lower() == b"bearer" and any(fits)
