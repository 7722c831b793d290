"""The page that shows what speculation does: of a server, live, or of a trace."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import orjson

# The page holds all that it shows; it may talk to servers, the one beside it included.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "connect-src http: https:; form-action 'none'; base-uri 'none'"
)
_TRACE = '<script id="trace" type="application/json">null</script>'


@functools.cache
def page() -> str:
    """The page of a server."""
    folder = files("sgl_spec.server") / "data"
    html = (folder / "page.html").read_text("utf-8")
    for name in ("page.css", "page.js"):
        html = html.replace(f"/* {name} */", (folder / name).read_text("utf-8"))
    return html


def trace_page(requests: Sequence[dict[str, Any]]) -> str:
    """The page of a trace, in one file."""
    data = orjson.dumps(requests).decode().replace("<", "\\u003c")
    shown = page()
    assert shown.count(_TRACE) == 1
    return shown.replace(_TRACE, _TRACE.replace("null", data))
