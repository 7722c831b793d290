"""How often the greedy text of each drafter is that of plain decoding, prompt by prompt.

In exact arithmetic it always is. On a GPU in bfloat16 the rows of a tree are computed in another
shape than a single row, and may be rounded another way; a text then parts where the two most likely
tokens are nearly as likely. For the first difference of each prompt plain decoding says how near:
the gap between its two largest logits there. First turns of the bundled Spec-Bench questions,
spread over the file. Other options are the server's:
python -m sgl_spec.bench agree --drafters NGRAM EAGLE3:some/head --device cuda
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from sgl_spec.args import ServerArgs
from sgl_spec.bench.accept import CHAT, TASKS, questions
from sgl_spec.bench.report import provenance, say, table, write_row
from sgl_spec.contradictions import contradictions
from sgl_spec.errors import ConfigError
from sgl_spec.llm import LLM, Completion
from sgl_spec.request import LogprobParams
from sgl_spec.server.tokenizer import ServerTokenizer

MODEL_DRAFTERS = ("EAGLE", "EAGLE3", "STANDALONE")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token in which a drafter's text is another. gap: between the two largest logits of
    plain decoding there; apart: between those of the two tokens (None where one text ends)."""

    prompt: int
    position: int
    plain: int | None
    drafted: int | None
    gap: float
    apart: float | None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where two texts part: which tokens they have there, None for a text's end."""

    prompt: int
    position: int
    plain: int | None
    drafted: int | None


@dataclass(frozen=True, slots=True)
class DrafterRow:
    """A drafter over all prompts. tokens: of its texts. accept_length: tokens of rounds over
    rounds."""

    drafter: str
    prompts: int
    agree: int
    tokens: int
    seconds: float
    accept_length: float | None
    differences: list[Difference]


def main(argv: Sequence[str]) -> None:
    """`python -m sgl_spec.bench agree`."""
    options, server = _parser().parse_known_args(argv)
    bench = AgreeBench(options, server)
    rows = bench.run()
    print(_table(rows))
    if options.json:
        conditions = provenance(argv=["python", "-m", "sgl_spec.bench", "agree", *argv])
        found = {**conditions, **bench.facts, "rows": [asdict(row) for row in rows]}
        write_row(Path(options.json), found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_spec.bench agree", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--drafters",
        nargs="+",
        default=["NGRAM", "EAGLE3", "STANDALONE"],
        metavar="NAME[:PATH]",
        help="algorithms, with the draft model's path unless it is the built-in one",
    )
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=48, help="requests that run together")
    parser.add_argument("--json", help="append one JSON row to this file")
    return parser


class AgreeBench:
    """Runs one engine after the other, so that each has the memory to itself."""

    def __init__(self, options: argparse.Namespace, server: Sequence[str]) -> None:
        self.options = options
        given = [] if "--model-path" in server else ["--model-path", "smollm2"]
        given += [*server, "--max-running-requests", str(options.batch)]
        self.flags = _keywords(ServerArgs.from_cli(given))
        for name in ("speculative_algorithm", "speculative_draft_model_path"):
            if name in self.flags:
                raise ConfigError("agree takes drafters from --drafters.")
        for drafter in options.drafters:
            refusals = contradictions(ServerArgs(**self._drafting(drafter)))
            if refusals:
                raise ConfigError(f"--drafters {drafter}: {' '.join(refusals)}")
        self.prompts: list[list[int]] = []
        self.facts: dict[str, Any] = {
            "model_path": self.flags["model_path"],
            "max_new_tokens": options.max_new_tokens,
            "batch": options.batch,
        }

    def run(self) -> list[DrafterRow]:
        """A row for each drafter."""
        plain, seconds = self._answers(self.flags)
        found = [(name, *self._answers(self._drafting(name))) for name in self.options.drafters]
        self.facts["plain_seconds"] = seconds
        differing = {name: _first_differences(plain, texts) for name, texts, _ in found}
        gaps = self._gaps([one for each in differing.values() for one in each], plain)
        rows = []
        for name, texts, took in found:
            mine = [gaps.pop(0) for _ in differing[name]]
            rows.append(_row(name, texts, took, mine))
        return rows

    def _drafting(self, drafter: str) -> dict[str, Any]:
        name, _, path = drafter.partition(":")
        flags = self.flags | {"speculative_algorithm": name}
        return flags | {"speculative_draft_model_path": path} if path else flags

    def _answers(self, flags: dict[str, Any]) -> tuple[list[Completion], float]:
        """Every prompt's greedy text, and the seconds of all together."""
        with _llm(flags) as llm:
            if not self.prompts:
                self._choose(llm)
            params = {"temperature": 0.0, "max_new_tokens": self.options.max_new_tokens}
            start = time.perf_counter()
            texts = llm.generate(self.prompts, params)
            seconds = time.perf_counter() - start
        say(f"{flags.get('speculative_algorithm', 'plain')}: {seconds:.1f} s")
        return texts, seconds

    def _choose(self, llm: LLM) -> None:
        """Prompts at equal distances in the file."""
        asked, count = questions((*TASKS, CHAT), None), self.options.prompts
        if count > len(asked):
            raise ConfigError(f"--prompts must be at most {len(asked)}, got {count}.")
        tokenizer = ServerTokenizer.from_dir(llm.engine.tokenizer_dir)
        chosen = [asked[i * len(asked) // count] for i in range(count)]
        chats = [[{"role": "user", "content": one.text}] for one in chosen]
        self.prompts = [tokenizer.encode_chat(chat) for chat in chats]
        model = llm.engine.model
        self.facts["dtype"] = str(model.dtype).removeprefix("torch.")
        self.facts["device"] = str(model.device)

    def _gaps(self, places: list[_Place], plain: list[Completion]) -> list[Difference]:
        """What plain decoding makes of each first difference."""
        if not places:
            return []
        with _llm(self.flags) as llm:
            return [self._gap(llm, place, plain[place.prompt].output_ids) for place in places]

    def _gap(self, llm: LLM, place: _Place, text: list[int]) -> Difference:
        ids = tuple(token for token in (place.plain, place.drafted) if token is not None)
        asked = LogprobParams(top_logprobs_num=2, token_ids_logprob=ids)
        params = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
        (done,) = llm.generate([self.prompts[place.prompt] + text[: place.position]], params, asked)
        assert done.logprobs is not None
        first, second = done.logprobs.top_values[0]
        values = done.logprobs.id_values[0]
        apart = abs(values[0] - values[1]) if len(values) == 2 else None
        return Difference(**asdict(place), gap=first - second, apart=apart)


class _llm:
    """An `LLM` whose device memory is free again afterwards."""

    def __init__(self, flags: dict[str, Any]) -> None:
        self._llm = LLM(**flags)

    def __enter__(self) -> LLM:
        return self._llm

    def __exit__(self, *error: object) -> None:
        self._llm.shutdown()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _keywords(args: ServerArgs) -> dict[str, Any]:
    """The options that are not at their defaults."""
    found = {}
    for field in fields(args):
        value = getattr(args, field.name)
        if field.name in ("without_effect", "logged"):
            continue
        if field.default is MISSING or value != field.default:
            found[field.name] = value
    return found


def _first_differences(plain: Sequence[Completion], drafted: Sequence[Completion]) -> list[_Place]:
    found = []
    for index, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        a, b = one.output_ids, other.output_ids
        if a == b:
            continue
        shared = min(len(a), len(b))
        at = next((i for i in range(shared) if a[i] != b[i]), shared)
        own, others = (ids[at] if at < len(ids) else None for ids in (a, b))
        found.append(_Place(index, at, own, others))
    return found


def _row(
    name: str, texts: Sequence[Completion], seconds: float, differences: list[Difference]
) -> DrafterRow:
    rounds = sum(text.spec.verify_ct for text in texts if text.spec is not None)
    emitted = sum(text.spec.emitted for text in texts if text.spec is not None)
    return DrafterRow(
        drafter=name,
        prompts=len(texts),
        agree=len(texts) - len(differences),
        tokens=sum(len(text.output_ids) for text in texts),
        seconds=seconds,
        accept_length=emitted / rounds if rounds else None,
        differences=differences,
    )


def _table(rows: Sequence[DrafterRow]) -> str:
    header = ["drafter", "prompts", "agree", "gap p50", "gap max", "accept length", "tokens"]
    lines = []
    for row in rows:
        gaps = [one.gap for one in row.differences]
        middle: object = statistics.median(gaps) if gaps else "-"
        length: object = "-" if row.accept_length is None else row.accept_length
        most: object = max(gaps) if gaps else "-"
        lines.append([row.drafter, row.prompts, row.agree, middle, most, length, row.tokens])
    return table(header, lines)
