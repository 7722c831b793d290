"""Prompts for the embedded model: 1 to 900 tokens, raw and chat-templated, of many kinds."""

# ruff: noqa: RUF001, scripts that look alike are the point
from __future__ import annotations

import json
from pathlib import Path

import sgl_spec.bench

DATA = Path(sgl_spec.bench.__file__).parent / "data"

SINGLE_TOKENS = [[1], [504], [49151]]

RAW = [
    "\n",
    "The capital of France is",
    "Q: What is the boiling point of water?\nA:",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "3.14159265358979323846264338327950288",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    '{"name": "Ann", "age": 31}\n{"name": "Piet", "age": 47}\n{"name":',
    "<ul>\n  <li>one</li>\n  <li>two</li>\n  <li>",
    "SELECT name, COUNT(*) FROM boats\nWHERE harbour = 'Rotterdam'\nGROUP BY",
    "船はどこですか。船は港にあります。",
    "Где лодка? Лодка у берега. Где рыба?",
    "🚢 ⛵ 🚤 👩‍👩‍👧 🚢 ⛵ 🚤 👩‍👩‍👧 🚢",
    "สวัสดีครับ ยินดีที่ได้",
    "مرحبا بالعالم",
    "The cat sat on the mat. The dog sat on the log. The cat sat on the mat. The dog",
]

# Indices into bench96.jsonl; the last five are 292 to 902 tokens long.
CHATS = [0, 1, 2, 5, 14, 18, 49, 55, 84, 85, 94, 58, 28, 16, 81]

# Prompts that end at, before and after the edges of chunks of 32 and pages of 16.
EDGES = [15, 16, 17, 31, 32, 33, 64, 65]

REPEAT = (
    "Repeat the following text word for word.\n\n"
    "The harbour master kept a ledger of every boat that came in before the winter storms. In the "
    "first column he wrote the name, in the second the hour, and in the third whatever the crew "
    "had told him about the weather further out.\n\n"
    "The harbour master kept a ledger of every boat"
)

MULTI_BYTE = (
    "船 🚢 Où est le bateau? где лодка 👩‍👩‍👧 ไทย naïve café ₿ 𝔘𝔫𝔦\n"
    "船 🚢 Où est le bateau? где лодка 👩‍👩‍👧 ไทย naïve café ₿ 𝔘𝔫𝔦\n"
    "船 🚢 Où"
)


def chats() -> list[str]:
    """Every chat-templated prompt of the benchmark."""
    lines = (DATA / "bench96.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def edge_prompts(document: list[int]) -> list[list[int]]:
    """Pieces of `document` (token ids) with the lengths of `EDGES`, sharing no beginning."""
    starts = [sum(EDGES[:i]) for i in range(len(EDGES))]
    return [document[start : start + size] for start, size in zip(starts, EDGES, strict=True)]


def texts() -> list[str]:
    """The prompts that are text."""
    every = chats()
    return [*RAW, REPEAT, MULTI_BYTE, *(every[i] for i in CHATS)]
