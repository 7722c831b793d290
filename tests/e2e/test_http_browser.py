"""Pages of other origins may call: what browsers ask first, and what they must find in replies."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from scripted import Scripted, Start, body, starter

PAGE = "http://a.page:8080"
KEY = {"Authorization": "Bearer sesame"}
CALLS = ["/generate", "/v1/completions", "/v1/chat/completions", "/server_info", "/metrics"]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    with starter(tmp_path_factory.mktemp("browser")) as begin:
        yield begin


@pytest.fixture(scope="module")
def server(start: Start) -> Scripted:
    return start("--api-key", "sesame")


@pytest.fixture(scope="module")
def client(server: Scripted) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"Origin": PAGE}, trust_env=False) as client:
        yield client


def allows(reply: httpx.Response) -> bool:
    return reply.headers.get("access-control-allow-origin") in ("*", PAGE)


@pytest.mark.parametrize("path", CALLS)
def test_browsers_ask_without_the_key(client: httpx.Client, path: str) -> None:
    wanted = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    reply = client.options(path, headers=wanted)
    assert reply.status_code == 200
    assert allows(reply)
    assert "POST" in reply.headers["access-control-allow-methods"]
    granted = reply.headers["access-control-allow-headers"]
    assert {"authorization", "content-type"} <= {name.strip() for name in granted.split(",")}


@pytest.mark.parametrize("stream", [False, True])
def test_replies_may_be_read(client: httpx.Client, stream: bool) -> None:
    request = body("The harbour", max_new_tokens=9, extra={"stream": stream})
    with client.stream("POST", "/generate", json=request, headers=KEY) as reply:
        assert reply.status_code == 200
        assert allows(reply)
        assert reply.headers["vary"] == "Origin"
        lines = [line for line in reply.iter_lines() if line]
    assert (lines[-1] == "data: [DONE]") is stream


def test_errors_may_be_read(client: httpx.Client) -> None:
    """Else a page would see no status and no message of them."""
    for headers, request, status in (({}, {}, 401), (KEY, {"text": 5}, 400)):
        reply = client.post("/generate", json=request, headers=headers)
        assert reply.status_code == status
        assert reply.json()["error"]["message"]
        assert allows(reply)


def test_who_is_no_browser_sees_none_of_it(server: Scripted) -> None:
    reply = httpx.get(f"{server.url}/health", trust_env=False)
    assert reply.status_code == 200
    assert not any(name.startswith("access-control") for name in reply.headers)
