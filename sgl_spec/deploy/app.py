"""The Ray Serve application: fronts that read requests and route them, replicas that serve them.

A front reads the body, since Ray's own proxy routes before it has seen one. Where a replica is lost
before a reply has begun, its requests go to another.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.request_router import RequestRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from sgl_spec.deploy.args import DeployArgs
from sgl_spec.deploy.own_server import Call, Head, OwnServer, ReplicaLost, passed_on
from sgl_spec.deploy.policy import PrefixPolicy, prefix_chain
from sgl_spec.errors import EngineDeadError
from sgl_spec.server.http import DONE, MAX_BODY_BYTES, error_body, error_reply, event

logger = logging.getLogger(__name__)

LOST = (RayActorError, ReplicaLost)
ATTEMPTS = 6
BACKOFF_S = 0.25  # doubled from attempt to attempt: 8 s in all
LAST_WORDS_S = 1.0
HEALTH_PERIOD_S = 2.0
# Every replica has to be told; the reply is the first of the worst status.
FOR_ALL = {"/flush_cache", "/abort_request", "/add_external_corpus", "/remove_external_corpus"}
_ENDED = "The replica that served this request has ended."


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Ray Serve's side of `PrefixPolicy`. A replica that is full passes a request to the others."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Ray's constructor for what a router adds."""
        self._policy = PrefixPolicy(**kwargs)

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Ranks of replicas to try."""
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        cache = self.replica_queue_len_cache
        loads = {name: cache.get(one.replica_id) or 0 for name, one in by_name.items()}
        best = by_name.pop(self._policy.choose(_chain_of(pending_request), loads))
        return [[best], list(by_name.values())]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Learn where a prompt went."""
        alive = {one.unique_id for one in self.curr_replicas}
        self._policy.routed(_chain_of(pending_request), replica_id.unique_id, alive)


def _chain_of(pending_request: Any) -> tuple[int, ...]:
    if pending_request is None or not pending_request.args:
        return ()
    call: Call = pending_request.args[0]
    return call.chain if call.attempt == 0 else ()


class Replica:
    """One server in an actor of its own. When the server ends, so does the actor, and Ray starts
    another."""

    async def __init__(self, flags: list[str]) -> None:  # type: ignore[misc]  # Ray awaits it
        self._server = await OwnServer.start(flags)
        self._stopping = False
        self._watch = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        code = await self._server.process.wait()
        if not self._stopping:
            logger.error("The server ended with exit code %s.", code)
            await asyncio.sleep(LAST_WORDS_S)  # its last replies are on their way
            os._exit(1)

    async def forward(self, call: Call) -> AsyncIterator[Head | bytes]:
        """A reply as it comes."""
        async for part in self._server.forward(call):
            yield part

    async def whole(self, call: Call) -> tuple[Head, bytes]:
        """A reply at once."""
        head, *parts = [part async for part in self._server.forward(call)]
        assert isinstance(head, Head)
        return head, b"".join(part for part in parts if isinstance(part, bytes))

    async def check_health(self) -> None:
        """Asked by Ray every few seconds."""
        if not await self._server.healthy():
            raise ReplicaLost("The server is not healthy.")

    async def __del__(self) -> None:
        """Awaited by Ray once the last request has ended."""
        self._stopping = True
        await self._server.stop()


class Front:
    """Reads requests, sends them to replicas, and sends again what was lost unanswered."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas
        self._streams = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        """Any route, any method."""
        query = request.url.query
        prefix = request.scope.get("root_path", "")  # where the application is mounted
        path = quote(request.scope["path"].removeprefix(prefix))
        call = Call(
            request.method,
            path + (f"?{query}" if query else ""),
            passed_on(request.headers.items()),
            body := await _read(request),
            prefix_chain(body),
        )
        if path.rstrip("/") in FOR_ALL:
            return await self._to_all(call)
        for attempt in range(ATTEMPTS):
            last = attempt == ATTEMPTS - 1
            try:
                return await self._ask(replace(call, attempt=attempt), last=last)
            except LOST as error:
                logger.warning("Attempt %d of %s: %s", attempt + 1, call.target, error)
                if not last:
                    await asyncio.sleep(BACKOFF_S * 2**attempt)
        return error_reply(path, EngineDeadError(_ENDED))

    async def _ask(self, call: Call, *, last: bool) -> Response:
        """The reply of some replica; `ReplicaLost` if it has not begun and may come from another: a
        503 says that nothing was done."""
        parts = self._streams.forward.remote(call)
        try:
            head = await anext(parts)
            if head.status == 503 and not last:
                raise ReplicaLost("the replica is not available")
            if head.is_stream:
                first = await anext(parts)
                body = _events(parts, first)
                return _headed(StreamingResponse(body, head.status), head)
            whole = b"".join([part async for part in parts])
            return _headed(Response(whole, head.status), head)
        except BaseException:
            parts.cancel()
            raise

    async def _to_all(self, call: Call) -> Response:
        replies = await self._replicas.broadcast("whole", call).results_async(
            return_exceptions=True
        )
        told = [reply for reply in replies if not isinstance(reply, BaseException)]
        if not told:
            return error_reply(call.target, EngineDeadError(_ENDED))
        head, body = max(told, key=lambda reply: reply[0].status)
        return _headed(Response(body, head.status), head)


async def _read(request: Request) -> bytes:
    """The body. Of one that is too large only so much that the server refuses it."""
    body = bytearray()
    async for part in request.stream():
        body += part[: MAX_BODY_BYTES + 1 - len(body)]
    return bytes(body)


async def _events(parts: Any, first: bytes) -> AsyncIterator[bytes]:
    """The rest of a stream. One that breaks off ends as the server's own do: with an error."""
    try:
        yield first
        async for part in parts:
            yield part
    except LOST:
        problem = EngineDeadError(_ENDED)
        yield event(error_body("", problem.status, problem.type, problem.message, None)) + DONE
    finally:
        parts.cancel()


def _headed(response: Response, head: Head) -> Response:
    for name, value in head.headers:
        response.headers[name] = value
    return response


def build(args: DeployArgs, gpus: int) -> Any:
    """The application, whose replicas have `gpus` GPUs each."""
    bundle = {"CPU": float(args.cpus_per_replica), "GPU": float(gpus)}
    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": args.cpus_per_replica, "num_gpus": gpus},
        "placement_group_bundles": [{kind: count for kind, count in bundle.items() if count}],
        "placement_group_strategy": "STRICT_PACK",  # the GPUs of one replica are of one host
        "max_ongoing_requests": args.max_ongoing_requests,
        "health_check_period_s": HEALTH_PERIOD_S,
        "graceful_shutdown_timeout_s": 60,
    }
    if args.max_replicas is None:
        options["num_replicas"] = args.replicas
    else:
        options["autoscaling_config"] = {
            "min_replicas": args.replicas,
            "max_replicas": args.max_replicas,
            "target_ongoing_requests": args.target,
        }
    if args.route == "prefix":
        options["request_router_config"] = {"request_router_class": f"{__name__}:PrefixRouter"}
    replicas = serve.deployment(Replica, name="replica", **options).bind(list(args.server))
    front = serve.deployment(
        Front,
        name="front",
        num_replicas=args.fronts,
        max_ongoing_requests=100_000,
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(replicas)


def deploy(args: DeployArgs) -> None:
    """Start the application, or update the one of this name; returns when it serves."""
    own = args.address is None
    ray.init(address="local" if own else args.address, include_dashboard=False, log_to_driver=own)
    gpus = args.gpus(ray.cluster_resources().get("GPU", 0))
    serve.start(proxy_location="EveryNode", http_options={"host": args.host, "port": args.port})
    serve.run(build(args, gpus), name=args.name, route_prefix="/")
