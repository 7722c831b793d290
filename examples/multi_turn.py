"""Conversations side by side against a server or a deployment: what was cached, accept length, time
to first token. `python examples/multi_turn.py --url http://127.0.0.1:30000`"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_spec.bench.client import Target, ask, connected, send
from sgl_spec.bench.report import provenance

SYSTEM = "You answer questions about boats, harbours, tides and the people who live by them. " * 3
QUESTION = "Question {number}: tell me what the number {luck} means to a harbour master.\n"


@dataclass
class Seen:
    """What the turns gave."""

    prompt: int = 0
    cached: int = 0
    tokens: int = 0
    rounds: int = 0
    first: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """In figures."""
        return {
            "requests": len(self.first),
            "prompt_tokens": self.prompt,
            "cached_tokens": self.cached,
            "accept_length": round(self.tokens / self.rounds, 3) if self.rounds else None,
            "ttft_median_ms": round(1e3 * statistics.median(self.first), 1),
            "ttft_mean_ms": round(1e3 * statistics.mean(self.first), 1),
        }


async def talk(target: Target, session: Any, name: int, asked: Any, seen: Seen) -> None:
    """One conversation. Its text goes on in token ids, so that no answer is read as other ids."""
    luck = random.Random(name)
    ids: list[int] = []
    for turn in range(asked.turns):
        text = QUESTION.format(number=turn, luck=luck.randrange(10**12))
        said = {"prompt": text if ids else SYSTEM + text, "add_special_tokens": False}
        reply = await ask(target, "POST", "/tokenize", said)
        ids += json.loads(reply.content)["tokens"]
        limits = {"temperature": 0, "max_new_tokens": asked.new_tokens, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": limits, "stream": True}
        answer = await send(session, target, "POST", "/generate", json.dumps(body).encode())
        if answer.problem:
            raise SystemExit(answer.problem)
        *_, event = (part for part in answer.content.split(b"\n\n") if part[:7] == b"data: {")
        last = json.loads(event.removeprefix(b"data: "))
        if "error" in last:
            raise SystemExit(last["error"])
        facts = last["meta_info"]
        seen.prompt += facts["prompt_tokens"]
        seen.cached += facts["cached_tokens"]
        seen.tokens += facts["completion_tokens"]
        seen.rounds += facts.get("spec_verify_ct", 0)
        seen.first.append(answer.pieces[0][0] - answer.sent)
        ids += last["output_ids"]


async def run(asked: argparse.Namespace) -> dict[str, Any]:
    """All conversations, `at_once` of them side by side."""
    target, seen = Target(asked.url), Seen()
    gate = asyncio.Semaphore(asked.at_once)

    async def one(session: Any, name: int) -> None:
        async with gate:
            await talk(target, session, name, asked, seen)

    async with connected(target) as session:
        await asyncio.gather(*[one(session, name) for name in range(asked.conversations)])
    return seen.row()


def main() -> None:
    """Print the row; --json adds it to a file with its conditions."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default=os.environ.get("SGL_SPEC_URL", "http://127.0.0.1:30000"))
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--label", default="")
    asked = parser.parse_args()
    row = {"label": asked.label, **asyncio.run(run(asked))}
    print(json.dumps(row))
    if asked.json is not None:
        words = ["python", "examples/multi_turn.py", *sys.argv[1:]]
        known = json.loads(asked.json.read_text()) if asked.json.exists() else {"rows": []}
        facts = provenance(words) | {"rows": [*known["rows"], row]}
        asked.json.write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
