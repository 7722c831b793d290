"""The HTTP routes. Each reads a body, asks the `Service`, and words the answer."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi_offline import FastAPIOffline
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, PlainTextResponse, Response

import sgl_spec
from sgl_spec.errors import (
    InvalidRequestError,
    NotFoundError,
    SglSpecError,
    UnavailableError,
    preview,
)
from sgl_spec.server.body import Body
from sgl_spec.server.frontend import ClientGone
from sgl_spec.server.http import (
    ApiKey,
    Counted,
    EventStream,
    Json,
    PerKey,
    Run,
    TrailingSlash,
    error_body,
    error_reply,
    read_json,
    read_optional,
)
from sgl_spec.server.openai_protocol import check_model
from sgl_spec.server.openai_schema import Chat, Completions
from sgl_spec.server.page import POLICY, page
from sgl_spec.server.responses_schema import Responses
from sgl_spec.server.schema import AbortRequest, Detokenize, Generate, Profile, Tokenize
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
_REF = "#/components/schemas/{model}"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ROOT = f"""sgl-spec {sgl_spec.__version__}
POST /generate {{"text": ..., "sampling_params": {{...}}}}
POST /v1/chat/completions, /v1/completions, /v1/responses; GET /v1/models (OpenAI)
GET /health, /model_info, /server_info
/docs shows every route and field, /openapi.json tells them to programs.
"""

router = APIRouter()


def _takes(body: type[Body], *, required: bool = True) -> dict[str, Any]:
    """What /openapi.json says of the body of a route, which `Body.read` reads."""
    content = {"application/json": {"schema": {"$ref": _REF.format(model=body.__name__)}}}
    return {"requestBody": {"required": required, "content": content}}


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
async def root(request: Request) -> Response:
    """What this is: a page for browsers, a few lines for others."""
    if "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(page(), headers={"Content-Security-Policy": POLICY, "Vary": "Accept"})
    return PlainTextResponse(_ROOT, headers={"Vary": "Accept"})


@router.put("/generate", openapi_extra=_takes(Generate))
@router.post("/generate", openapi_extra=_takes(Generate))
async def generate(request: Request) -> Response:
    """Text or ids in, text, ids and meta_info out."""
    return await _answer(request, _service(request).generate)


@router.post("/v1/completions", openapi_extra=_takes(Completions))
async def completions(request: Request) -> Response:
    """OpenAI completions."""
    return await _answer(request, _service(request).completions)


@router.post("/v1/chat/completions", openapi_extra=_takes(Chat))
async def chat_completions(request: Request) -> Response:
    """OpenAI chat completions."""
    return await _answer(request, _service(request).chat)


@router.post("/v1/responses", openapi_extra=_takes(Responses))
async def responses(request: Request) -> Response:
    """OpenAI responses, stateless."""
    return await _answer(request, _service(request).responses)


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


@router.get("/load")
@router.get("/get_load")
async def get_load(request: Request) -> Response:
    """How busy the engine is, as routers of other projects ask it."""
    return Json(await _service(request).load())


@router.get("/flush_cache")
@router.post("/flush_cache")
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


@router.get("/start_profile", openapi_extra=_takes(Profile, required=False))
@router.post("/start_profile", openapi_extra=_takes(Profile, required=False))
async def start_profile(request: Request) -> Response:
    """Begin a trace of the engine."""
    service = _service(request)
    return Json(await service.profile("start_profile", await read_optional(request)))


@router.get("/stop_profile")
@router.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """End and write it."""
    service = _service(request)
    return Json(await service.profile("stop_profile", {}))


@router.post("/abort_request", openapi_extra=_takes(AbortRequest))
async def abort_request(request: Request) -> Response:
    """End one request, one call, or all."""
    service = _service(request)
    service.abort(await read_json(request))
    return Response()


@router.post("/tokenize", openapi_extra=_takes(Tokenize))
@router.post("/v1/tokenize", openapi_extra=_takes(Tokenize))
async def tokenize(request: Request) -> Response:
    """Text to ids."""
    service = _service(request)
    return Json(await service.tokenize(await read_json(request)))


@router.post("/detokenize", openapi_extra=_takes(Detokenize))
@router.post("/v1/detokenize", openapi_extra=_takes(Detokenize))
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


BODIES = (Generate, Completions, Chat, Responses, Tokenize, Detokenize, AbortRequest, Profile)


def _openapi(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """The document of FastAPI with the models of the bodies in it."""
    make = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            _, models = models_json_schema(
                [(body, "validation") for body in BODIES], ref_template=_REF
            )
            components = make().setdefault("components", {})
            components.setdefault("schemas", {}).update(models["$defs"])
        return make()

    return document


def build_app(
    state: ServerState,
    api_key: str | None,
    tell: Callable[[str, str, int], None] | None = None,
    per_key: int | None = None,
) -> FastAPI:
    """The ASGI application over `state`. tell: see `Counted`. per_key: see `PerKey`. /docs and
    /redoc come with what they show, so that they work without a network."""
    app = FastAPIOffline(title="sgl-spec", version=sgl_spec.__version__, redirect_slashes=False)
    app.state.server = state
    app.include_router(router)
    app.openapi = _openapi(app)  # type: ignore[method-assign]
    app.add_exception_handler(SglSpecError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(Exception, _on_bug)
    if per_key is not None:
        app.add_middleware(PerKey, limit=per_key)
    if api_key is not None:
        app.add_middleware(ApiKey, key=api_key)
    app.add_middleware(TrailingSlash)
    if tell is not None:
        app.add_middleware(Counted, tell=tell)
    # Around the key: browsers ask what is allowed without it, and hide a 401 that does not allow.
    app.add_middleware(CORSMiddleware, **ANY_PAGE)
    return app
