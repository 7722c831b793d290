"""`sgl-spec trace FILE`: the rounds that a server with --spec-trace has written, in the terminal or
as a page that needs no server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from sgl_spec.errors import ConfigError, preview
from sgl_spec.server.page import trace_page

EXIT_USAGE = 2
_MISSED, _TAKEN, _OWN = "  ", "\u2714 ", "+ "


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="sgl-spec trace", description=__doc__)
    parser.add_argument(
        "file", type=Path, nargs="+", help="a file in the directory that --spec-trace named"
    )
    parser.add_argument("--html", type=Path, metavar="PAGE", help="write a page instead")
    parser.add_argument("--rid", help="of this request alone")
    parser.add_argument("--rounds", type=int, default=5, help="trees to print of each request")
    asked = parser.parse_args(argv)
    try:
        requests = [one for path in asked.file for one in read(path)]
        requests = [one for one in requests if asked.rid in (None, one["rid"])]
        if not requests:
            wanted = "" if asked.rid is None else f" {preview(asked.rid)}"
            raise ConfigError(f"{' '.join(map(str, asked.file))}: no request{wanted} in it.")
        if asked.html is not None:
            asked.html.write_text(trace_page(requests), "utf-8")
            sys.stdout.write(f"Written: {asked.html}\n")
            return 0
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    for request in requests:
        sys.stdout.write("\n".join([*told(request, asked.rounds), ""]) + "\n")
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """The requests of a trace, in the order of their ends. A last line without its end is one that
    is being written, or that a crash has cut."""
    *lines, _ = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            request = orjson.loads(line)
            found.append({**request, "rounds": list(request["rounds"])})
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number}, is no request of a trace: {error}"
            ) from error
    return found


def told(request: dict[str, Any], trees: int) -> Iterator[str]:
    """A request in lines. trees: rounds whose trees are drawn."""
    rounds = request["rounds"]
    emitted = sum(len(one["output_ids"]) for one in rounds)
    length = f", accept length {emitted / len(rounds):.2f}" if rounds else ""
    yield f"{request['rid']}: {len(request['output_ids'])} tokens, {len(rounds)} rounds{length}"
    yield marked(request)
    for number, one in enumerate(rounds[:trees], 1):
        yield ""
        yield headline(number, one)
        yield from drawn(one)


def marked(request: dict[str, Any]) -> str:
    """The text, with what was drafted in brackets."""
    rounds = request["rounds"]
    parts = [request["text"][: rounds[0]["text_start"]] if rounds else request["text"]]
    for one in rounds:
        count = len(one["accepted"])
        drafted, own = one["output_texts"][:count], one["output_texts"][count:]
        parts += [f"[{''.join(drafted)}]" if any(drafted) else "", *own]
    return "".join(parts)


def headline(number: int, one: dict[str, Any]) -> str:
    """What a round was."""
    names = ("draft", "verify", "host", "round")
    times = [
        f"{name} {one[f'{name}_ms']:.1f} ms" for name in names if one[f"{name}_ms"] is not None
    ]
    nodes, taken = len(one["tokens"]) - 1, len(one["accepted"])
    about = f"round {number}: {one['source'] or 'no drafts'}, {nodes} drafted, {taken} accepted"
    return ", ".join([about, *times])


def drawn(one: dict[str, Any]) -> Iterator[str]:
    """A round's tree, a node a line: the accepted ones are ticked, the target's own token has a
    plus."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(one["parents"]):
        children.setdefault(parent, []).append(node)
    accepted, own = set(one["accepted"]), len(one["accepted"])
    end = one["accepted"][-1] if accepted else 0

    def below(node: int, indent: str) -> Iterator[str]:
        mark = _TAKEN if node in accepted else _MISSED
        score = "" if one["scores"] is None else f"draft {one['scores'][node]:.2f}  "
        numbers = f"{score}target {one['probs'][node]:.2f}" if node else ""
        yield f"{mark}{indent}{one['texts'][node]!r}  {numbers}".rstrip()
        if node == end and own < len(one["output_texts"]):
            prob = one["output_probs"][own]
            yield f"{_OWN}{indent}  {one['output_texts'][own]!r}  target {prob:.2f}"
        for child in children.get(node, ()):
            yield from below(child, indent + "  ")

    return below(0, "")
