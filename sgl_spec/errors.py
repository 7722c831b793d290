"""Errors a user can meet. Each class knows its HTTP status and its OpenAI `type`.

`assert` is for our mistakes; these are for theirs. A message states the value seen and the values
allowed. One boundary (the HTTP app, or `main` at start-up) turns an error into a reply or exit
code.
"""

from __future__ import annotations

import json

PREVIEW_CHARS = 80


def preview(value: object) -> str:
    """A short JSON rendering of a value for messages."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=repr)
    if not text.isascii():
        text = text.encode(errors="backslashreplace").decode()  # lone surrogates
    return text if len(text) <= PREVIEW_CHARS else text[: PREVIEW_CHARS - 3] + "..."


class SglSpecError(Exception):
    """Base of every error that a user may be shown."""

    status = 500
    type = "InternalServerError"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(SglSpecError):
    """A request field has a value that cannot be served; `param` names the field."""

    status = 400
    type = "BadRequestError"


class UnauthorizedError(SglSpecError):
    """The API key is missing or wrong."""

    status = 401
    type = "AuthenticationError"


class NotFoundError(SglSpecError):
    """The model or resource named in the request does not exist here."""

    status = 404
    type = "NotFoundError"


class RequestTimeoutError(SglSpecError):
    """The rest of the request body did not come."""

    status = 408
    type = "BadRequestError"


class PayloadTooLargeError(SglSpecError):
    """The request body is larger than the server reads."""

    status = 413
    type = "BadRequestError"


class UnsupportedMediaTypeError(SglSpecError):
    """The request body is declared as something other than JSON."""

    status = 415
    type = "BadRequestError"


class TooManyRequestsError(SglSpecError):
    """A key has as many requests open as it may (--max-requests-per-key)."""

    status = 429
    type = "RateLimitError"


class UnavailableError(SglSpecError):
    """The server is loading, shutting down, or its engine did not answer in time."""

    status = 503
    type = "ServiceUnavailableError"


class EngineDeadError(SglSpecError):
    """The engine process has ended and the server is about to exit; in `LLM`, a step failed."""

    status = 503
    type = "ServiceUnavailableError"


class ConfigError(SglSpecError):
    """A flag, or a combination of flags, cannot work. Ends the start-up with one sentence."""


class UnsupportedModelError(ConfigError):
    """A checkpoint's config or weights hold something that is not supported; it is named."""


class DrafterError(SglSpecError):
    """A drafter from outside broke off or returned what it may not; the engine ends with it."""
