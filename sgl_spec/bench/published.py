"""Tables of a document, generated from an experiment's table.json, so that both always agree.

    <!-- table results/on-off.json: setting load tokens_per_s speedup where temperature=0.0 -->
    <!-- table results/on-off.json: setting by group of accept_length -->
    <!-- end -->

The first marker names columns and which rows, the second makes a column of each value of `group`.
What stands up to `end` is replaced, the conditions of the experiment included:
python -m sgl_spec.bench published docs/experiments.md
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sgl_spec.bench.tables import cell, markdown
from sgl_spec.errors import ConfigError

_BLOCK = re.compile(
    r"(?P<marker><!-- table (?P<file>\S+): (?P<columns>[\w ]+?)"
    r"(?: by (?P<axis>\w+) of (?P<metric>\w+))?(?: where (?P<where>.+?))? -->\n)"
    r".*?(?P<end><!-- end -->)",
    re.DOTALL,
)
Row = Mapping[str, Any]


def fill(document: Path) -> str:
    """The document with every table as its JSON has it. `ConfigError` names what a marker asks for
    that there is not."""

    def block(match: re.Match[str]) -> str:
        return f"{match['marker']}{_table(match, document)}\n{match['end']}"

    return _BLOCK.sub(block, document.read_text(encoding="utf-8"))


def _table(match: re.Match[str], document: Path) -> str:
    path = document.parent / match["file"]
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{document}: cannot read {path}: {error}.") from error
    rows = [row for row in content["rows"] if _wanted(row, (match["where"] or "").split())]
    columns = match["columns"].split()
    asked = [*columns, *filter(None, (match["axis"], match["metric"]))]
    known = set(content["rows"][0]) if content["rows"] else set()
    if not rows or not known >= set(asked):
        unknown = ", ".join(name for name in asked if name not in known) or "rows"
        raise ConfigError(f"{document}: {match['file']} has no {unknown} for {match['marker']!r}.")
    if match["axis"]:
        made = _pivot(rows, columns, match["axis"], match["metric"])
    else:
        made = markdown(columns, [[cell(row[name]) for name in columns] for row in rows])
    return f"{made}\n\n{content['conditions']}."


def _wanted(row: Row, conditions: Sequence[str]) -> bool:
    pairs = (condition.partition("=") for condition in conditions)
    return all(str(row.get(name)) == value for name, _, value in pairs)


def _pivot(rows: Sequence[Row], columns: Sequence[str], axis: str, metric: str) -> str:
    """A row for each combination of `columns`, the metric once for each value of the axis."""
    values = list(dict.fromkeys(str(row[axis]) for row in rows))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        key = tuple(cell(row[name]) for name in columns)
        of_key = lines.setdefault(key, {})
        if str(row[axis]) in of_key:
            raise ConfigError(f"Two rows have {axis} {row[axis]} for {key}; name more columns.")
        of_key[str(row[axis])] = cell(row[metric])
    cells = [[*key, *(found.get(value, "-") for value in values)] for key, found in lines.items()]
    return markdown([*columns, *(f"{axis} {value}" for value in values)], cells)


def main(argv: Sequence[str]) -> None:
    """`python -m sgl_spec.bench published`."""
    parser = argparse.ArgumentParser(
        prog="python -m sgl_spec.bench published",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("documents", nargs="+", type=Path, metavar="DOCUMENT.md")
    for document in parser.parse_args(argv).documents:
        text = fill(document)
        document.write_text(text, encoding="utf-8")
        print(f"{document}: {len(_BLOCK.findall(text))} tables")
