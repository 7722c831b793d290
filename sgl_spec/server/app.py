"""The HTTP routes. Each reads a body, asks the `Service`, and words the answer."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response

import sgl_spec
from sgl_spec.errors import InvalidRequestError, NotFoundError, SglSpecError, UnavailableError
from sgl_spec.server.fields import preview, read_object
from sgl_spec.server.frontend import ClientGone
from sgl_spec.server.http import (
    ApiKey,
    EventStream,
    Json,
    Run,
    error_body,
    error_reply,
    read_json,
    read_optional,
)
from sgl_spec.server.openai_protocol import check_model
from sgl_spec.server.protocol import ABORT
from sgl_spec.server.service import Service

# Nobody reads it, but the log shows it.
CLIENT_GONE_STATUS = 499
# Pages of every origin may call, as in SGLang. No cookie means anything here, only the key does.
ANY_PAGE: dict[str, Any] = {
    "allow_origins": ["*"],
    "allow_credentials": True,
    "allow_methods": ["*"],
    "allow_headers": ["*"],
}
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ROOT = f"""sgl-spec {sgl_spec.__version__}
POST /generate {{"text": ..., "sampling_params": {{...}}}}
POST /v1/chat/completions, /v1/completions; GET /v1/models (OpenAI)
GET /health, /model_info, /server_info
/openapi.json lists every route, docs/http.md describes them.
"""

router = APIRouter()


class ServerState:
    """What the routes find: the service once there is one, else why not."""

    def __init__(self) -> None:
        self.service: Service | None = None
        self.problem: str | None = "The server is loading the model."

    def ready(self) -> Service:
        """The service; raises `UnavailableError` before it is ready and after its end."""
        if self.service is None or self.problem is not None:
            raise UnavailableError(self.problem or "The server is loading the model.")
        return self.service


def _service(request: Request) -> Service:
    state: ServerState = request.app.state.server
    return state.ready()


async def _answer(
    request: Request, make: Callable[[object], Awaitable[tuple[Run, bool]]]
) -> Response:
    run, stream = await make(await read_json(request))
    return EventStream(run) if stream else await run.whole(request)


@router.get("/")
async def root() -> Response:
    """What this is, for whoever looks with a browser."""
    return PlainTextResponse(_ROOT)


@router.api_route("/generate", methods=["POST", "PUT"])
async def generate(request: Request) -> Response:
    """Text or ids in, text, ids and meta_info out."""
    return await _answer(request, _service(request).generate)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """OpenAI completions."""
    return await _answer(request, _service(request).completions)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """OpenAI chat completions."""
    return await _answer(request, _service(request).chat)


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The model that is served."""
    return Json({"object": "list", "data": _service(request).models()})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """The card of the model, under any of the names that requests may give it."""
    service = _service(request)
    check_model(name, service.names)
    return Json(service.models()[0])


@router.get("/health")
async def health(request: Request) -> Response:
    """200 when the engine lives and the model is loaded; costs no generation."""
    _service(request)
    return Response()


@router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """200 when the engine generates a token, or shows that it is busy with others."""
    await _service(request).check_generates()
    return Response()


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(request: Request) -> Response:
    """What the model is."""
    return Json(_service(request).model_info())


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(request: Request) -> Response:
    """Every option as resolved, and the engine's state."""
    return Json(await _service(request).server_info())


@router.api_route("/flush_cache", methods=["GET", "POST"])
async def flush_cache(request: Request) -> Response:
    """Drop the prefix cache and the drafter's memory, if no request is running."""
    timeout = _seconds(request.query_params.get("timeout", "0"))
    ok, message = await _service(request).flush_cache(timeout)
    return PlainTextResponse(f"{message}\n", 200 if ok else 400)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InvalidRequestError(
            f"timeout must be a number of seconds >= 0, got {preview(text)}.", param="timeout"
        )
    return seconds


@router.api_route("/start_profile", methods=["GET", "POST"])
async def start_profile(request: Request) -> Response:
    """Begin a trace of the engine."""
    service = _service(request)
    return Json(await service.profile("start_profile", await read_optional(request)))


@router.api_route("/stop_profile", methods=["GET", "POST"])
async def stop_profile(request: Request) -> Response:
    """End and write it."""
    service = _service(request)
    return Json(await service.profile("stop_profile", {}))


@router.post("/abort_request")
async def abort_request(request: Request) -> Response:
    """End one request, one call, or all."""
    service = _service(request)
    fields = read_object(await read_json(request), ABORT)
    if not fields["rid"] and not fields["abort_all"]:
        raise InvalidRequestError("Either rid or abort_all must be given.", param="rid")
    service.frontend.abort(None if fields["abort_all"] else fields["rid"])
    return Response()


@router.post("/tokenize")
@router.post("/v1/tokenize")
async def tokenize(request: Request) -> Response:
    """Text to ids."""
    service = _service(request)
    return Json(await service.tokenize(await read_json(request)))


@router.post("/detokenize")
@router.post("/v1/detokenize")
async def detokenize(request: Request) -> Response:
    """Ids to text."""
    service = _service(request)
    return Json(service.detokenize(await read_json(request)))


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus metrics, with --enable-metrics."""
    text = await _service(request).metrics_text()
    if text is None:
        raise NotFoundError("Metrics are off; start the server with --enable-metrics.")
    return Response(text, media_type=METRICS_TYPE)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SglSpecError)
    return error_reply(request.url.path, error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    kind = NotFoundError.type if error.status_code == 404 else InvalidRequestError.type
    message = f"{request.method} {path}: {error.detail}."
    body = error_body(path, error.status_code, kind, message, None)
    return Json(body, error.status_code, error.headers)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE_STATUS)


async def _on_bug(request: Request, error: Exception) -> Response:
    path = request.url.path
    message = f"The server failed on this request: {type(error).__name__}."
    reply = Json(error_body(path, 500, "InternalServerError", message, None), 500)
    if "origin" in request.headers:  # this reply passes by the middleware
        reply.headers["Access-Control-Allow-Origin"] = "*"
    return reply


def build_app(state: ServerState, api_key: str | None) -> FastAPI:
    """The ASGI application over `state`."""
    app = FastAPI(title="sgl-spec", version=sgl_spec.__version__)
    app.state.server = state
    app.include_router(router)
    app.add_exception_handler(SglSpecError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(Exception, _on_bug)
    if api_key is not None:
        app.add_middleware(ApiKey, key=api_key)
    # Around the key: browsers ask what is allowed without it, and hide a 401 that does not allow.
    app.add_middleware(CORSMiddleware, **ANY_PAGE)
    return app
