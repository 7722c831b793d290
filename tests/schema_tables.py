"""`python tests/schema_tables.py` writes the tables of fields in docs/http.md from the schema."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sgl_spec.server import openai_schema as openai
from sgl_spec.server import responses_schema as responses
from sgl_spec.server import schema
from sgl_spec.server.body import Body
from sgl_spec.server.unsupported import UNSUPPORTED

PAGE = Path(__file__).resolve().parents[1] / "docs" / "http.md"
END = "<!-- end -->"
SHARED = schema.Settings.names().keys()
OPENAI = openai.OpenAI.names().keys()


def fields(model: type[Body], *, but: Iterable[str] = ()) -> str:
    """One row for each field: its name, its types, its default and its help."""
    document = model.model_json_schema()
    lines = ["| field | type | default | |", "|---|---|---|---|"]
    for name, about in document["properties"].items():
        if name in but:
            continue
        default = json.dumps(about.get("default", {}))
        if name in document.get("required", ()):
            default = "must be given"
        told = about.get("description") or next(
            (one["description"] for one in about.get("anyOf", []) if "description" in one), ""
        )
        kinds = " or ".join(dict.fromkeys(types(about)))
        lines.append(f"| `{name}` | {kinds} | {default} | {told} |")
    return "\n".join(lines)


def types(about: Mapping[str, Any]) -> Iterable[str]:
    """What a field may be, in words; null is never said."""
    if "anyOf" in about:
        for one in about["anyOf"]:
            yield from types(one)
    elif "enum" in about or "const" in about:
        yield from (f"`{json.dumps(one)}`" for one in about.get("enum", [about.get("const")]))
    elif about.get("type") == "array":
        yield " or ".join(plural(one) for one in types(about["items"])) or "list"
    elif about.get("type") != "null":
        yield "object" if "$ref" in about else str(about.get("type", ""))


def plural(kind: str) -> str:
    """A list of what is called `kind`."""
    head, found, rest = kind.partition(" of ")
    return f"list of {head}s{found}{rest}" if kind else ""


def unsupported() -> str:
    """One row for fields that the same models have with the same values."""
    tables = {
        "all": UNSUPPORTED,
        "OpenAI": openai.OpenAI.unsupported,
        "`/v1/completions`": openai.Completions.unsupported,
        "chat": openai.Chat.unsupported,
        "`messages`": openai.Message.unsupported,
        "content parts": openai.TextPart.unsupported,
        "`stream_options`": openai.StreamOptions.unsupported,
        "`/v1/responses`": responses.Responses.unsupported,
        "`/start_profile`": schema.Profile.unsupported,
    }
    lines = ["| where | beside null | |", "|---|---|---|"]
    for where, table in tables.items():
        inherited = {"all": (), "OpenAI": UNSUPPORTED}.get(where, openai.OpenAI.unsupported)
        rows: dict[str, list[str]] = {}
        for name, neutral in table.items():
            if name not in inherited:
                values = " or ".join(f"`{json.dumps(value)}`" for value in neutral)
                rows.setdefault(values, []).append(f"`{name}`")
        lines += [f"| {where} | {values} | {', '.join(names)} |" for values, names in rows.items()]
    return "\n".join(lines)


TABLES = {
    "generate": fields(schema.Generate),
    "openai": fields(openai.OpenAI, but=[n for n in SHARED if n != "min_tokens"]),
    "completions": fields(openai.Completions, but=OPENAI),
    "chat": fields(openai.Chat, but=OPENAI),
    "messages": fields(openai.Message),
    "responses": fields(responses.Responses),
    "sampling": fields(schema.Sampling),
    "tokenize": fields(schema.Tokenize),
    "detokenize": fields(schema.Detokenize),
    "profile": fields(schema.Profile),
    "unsupported": unsupported(),
}


def written(page: str) -> str:
    """The page with the tables of today between their marks."""
    for name, table in TABLES.items():
        mark = f"<!-- fields: {name} -->"
        assert mark in page, f"docs/http.md has no place for {mark}"
        before, after = page.split(mark)
        page = f"{before}{mark}\n{table}\n{END}{after.partition(END)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
