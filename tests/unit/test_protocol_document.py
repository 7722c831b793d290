"""docs/http.md tells every field that the tables hold, with its default and limit, and no other."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from sgl_spec import request
from sgl_spec.server import http, requests
from sgl_spec.server.app import router
from sgl_spec.server.fields import Ignore, Refuse, Table, Use
from sgl_spec.server.grammar import JSON_SCHEMA
from sgl_spec.server.openai_protocol import (
    CHAT,
    COMPLETIONS,
    MAX_OPENAI_LOGPROBS,
    MESSAGE,
    STREAM_OPTIONS,
)
from sgl_spec.server.protocol import ABORT, DETOKENIZE, GENERATE, PROFILE, TOKENIZE
from sgl_spec.server.sampling import NATIVE, OPENAI_DEFAULTS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "http.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
# Where a field may stand. The sampling fields of /generate are at home in an object of their own.
PLACES: dict[str, Table] = {
    "`/generate`": GENERATE | NATIVE,
    "`/v1/completions`": COMPLETIONS,
    "chat": CHAT,
    "`messages`": MESSAGE,
    "`stream_options`": STREAM_OPTIONS,
    "`response_format.json_schema`": JSON_SCHEMA,
    "`/start_profile`": PROFILE,
}
SEVERAL = {
    "all": ("`/generate`", "`/v1/completions`", "chat"),
    "OpenAI": ("`/v1/completions`", "chat"),
}


def rows(section: str, first: str) -> list[list[str]]:
    """The cells of the section's table whose header starts with `first`."""
    lines = iter(SECTIONS[section].splitlines())
    header = next(line for line in lines if line.startswith(f"| {first} |"))
    body = itertools.takewhile(lambda line: line.startswith("|"), itertools.islice(lines, 1, None))
    found = [[cell.strip() for cell in line[1:-1].split("|")] for line in body]
    assert all(len(cells) == header.count("|") - 1 for cells in found)
    return found


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def defaults(section: str, first: str = "field") -> dict[str, Any]:
    """The default of each field of a table; one for all fields of a row, or one each."""
    found = {}
    for fields, said, _ in rows(section, first):
        values = json.loads(f"[{said}]")
        each = names(fields)
        found |= dict(zip(each, values * len(each) if len(values) == 1 else values, strict=True))
    return found


def used(table: Table) -> dict[str, Any]:
    """The same of a table in the code, where the model's own default is OpenAI's."""
    given = {name: rule.default for name, rule in table.items() if isinstance(rule, Use)}
    given |= {name: value for name, value in OPENAI_DEFAULTS.items() if given.get(name, 0) is None}
    return {name: [] if value == () else value for name, value in given.items()}


SAMPLING = defaults("Sampling")
SHARED = defaults("Fields of the OpenAI routes") | {
    name: value
    for name, value in SAMPLING.items()
    if name not in ("max_new_tokens", "min_new_tokens")
}


def test_fields_of_sampling_params() -> None:
    assert used(NATIVE) == SAMPLING


def test_fields_of_generate() -> None:
    told = defaults("Fields of /generate") | defaults("Log-probabilities", "`/generate`")
    assert used(GENERATE) == told


@pytest.mark.parametrize(("route", "table"), [("completions", COMPLETIONS), ("chat", CHAT)])
def test_fields_of_the_openai_routes(route: str, table: Table) -> None:
    header = {"completions": "`/v1/completions`", "chat": "`/v1/chat/completions`"}[route]
    assert used(table) == SHARED | defaults("Fields of the OpenAI routes", header)


@pytest.mark.parametrize(
    ("section", "first", "field", "table"),
    [
        ("Fields of the OpenAI routes", "field", "stream_options", STREAM_OPTIONS),
        ("Fields of the OpenAI routes", "`/v1/chat/completions`", "messages", MESSAGE),
    ],
)
def test_fields_of_inner_objects(section: str, first: str, field: str, table: Table) -> None:
    (row,) = [row for row in rows(section, first) if field in names(row[0])]
    assert set(names(row[2])) == set(used(table))


def test_fields_without_effect() -> None:
    told = {
        (place, name, kind)
        for fields, where, kind, _ in rows("Fields without effect", "field")
        for place in SEVERAL.get(where, (where,))
        for name in names(fields)
    }
    assert told == {
        (place, name, rule.kind.allowed)
        for place, table in PLACES.items()
        for name, rule in table.items()
        if isinstance(rule, Ignore)
    }


def test_fields_that_are_not_supported() -> None:
    told = {
        (place, name, tuple(names(neutral)))
        for where, neutral, fields in rows("Fields that are not supported", "where")
        for place in SEVERAL.get(where, (where,))
        for name in names(fields)
    }
    assert told == {
        (place, name, tuple(json.dumps(value) for value in rule.neutral))
        for place, table in PLACES.items()
        for name, rule in table.items()
        if isinstance(rule, Refuse)
    }


@pytest.mark.parametrize(
    ("route", "table"),
    [
        ("/tokenize", TOKENIZE),
        ("/detokenize", DETOKENIZE),
        ("/abort_request", ABORT),
        ("/start_profile", PROFILE),
    ],
)
def test_fields_of_the_small_routes(route: str, table: Table) -> None:
    (about,) = [cells[1] for cells in routes() if re.search(rf" {route}`", cells[0])]
    for name, default in used(table).items():
        assert re.search(rf'[`"]{name}[`"]', about), name
        assert default in (None, "", False) or f"`{name}` ({json.dumps(default)})" in about


def routes() -> list[list[str]]:
    table = PAGE[: PAGE.index("\n## ")]
    return [line[1:-1].split("|", 1) for line in re.findall(r"^\|.*`.*$", table, re.MULTILINE)]


def test_every_route_is_told() -> None:
    """Under its name and its aliases, with the method that sends it where there are two."""
    told = " ".join(cell for row in routes() for cell in row) + SECTIONS["Errors"]
    for route in router.routes:
        assert isinstance(route, APIRoute)
        path = route.path.replace("{name:path}", "NAME").replace("/get_", "/")
        assert re.search(rf"[ `]{path}`", told), path
    both = [cells[0] for cells in routes() if " or " in cells[0]]
    served = {route.path: route.methods for route in router.routes if isinstance(route, APIRoute)}
    for cell in both:
        for path in re.findall(r"/\w+", cell):
            assert served[path] == set(re.findall(r"\b[A-Z]{3,}\b", cell))


LIMITS = [
    (
        "Sampling",
        f"1 to {request.MAX_CHOICES}; a call holds at most {requests.MAX_REQUESTS_PER_CALL}",
    ),
    ("Sampling", f"a string, or at most {request.MAX_STOP_STRINGS}"),
    ("Sampling", f"[{request.MIN_REPETITION_PENALTY:g}, 2]"),
    ("Sampling", f"[-{request.MAX_BIAS:g}, {request.MAX_BIAS:g}]"),
    ("Sampling", "from -2^63 to 2^63 - 1"),
    ("Sampling", f"seeds are below 2^{request.SEED_BITS}"),
    ("Names and aborts", f"1 to {requests.MAX_RID_CHARS} characters"),
    ("Fields of the OpenAI routes", f"0 to {MAX_OPENAI_LOGPROBS}"),
    ("Log-probabilities", f"0 to {request.MAX_TOP_LOGPROBS}"),
    ("Log-probabilities", f"at most {request.MAX_LOGPROB_IDS} ids"),
    ("Log-probabilities", f"2^{request.MAX_PROMPT_LOGPROBS.bit_length() - 1}"),
]


@pytest.mark.parametrize(("section", "limit"), LIMITS)
def test_limits(section: str, limit: str) -> None:
    assert limit in SECTIONS[section]


def test_the_size_of_a_body() -> None:
    assert f"A body is at most {http.MAX_BODY_BYTES >> 20} MiB" in PAGE
