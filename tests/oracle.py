"""Requests of every kind, and what each must give: `plain` over transformers' logits of the whole
text, token by token, without cache, batch or engine."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plain
import regex
import settings_table
import torch
from reference import Reference
from scoring import check as check_logprobs
from tiny import IM_END, SPECIALS

from sgl_spec import Completion, LogprobParams, SamplingParams

ASKED = ("plain", "settings", "mixed")
PATTERN = "[a-z]{2,6}( [a-z]{2,6}){2,9}"
SCORED = LogprobParams(logprob_start_len=0, top_logprobs_num=3, token_ids_logprob=(9, 200, 2))


@dataclass(frozen=True)
class Case:
    """A request and its text."""

    prompt: list[int]
    params: SamplingParams
    ask: LogprobParams | None
    output: list[int]


class Oracle:
    """directory: of a tiny model. new: tokens of a text at most. lengths: of the prompts."""

    def __init__(self, directory: Path, new: int = 20, lengths: Sequence[int] = (1, 17, 65)):
        self.reference = Reference(directory)
        self.vocab = int(self.reference.model.config.vocab_size)
        self.new, self.lengths = new, lengths
        decode = self.reference.tokenizer.decode
        self._tokens = [decode([i]) for i in range(self.vocab)]

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> list[float]:
        """Of the token after a text."""
        found: list[float] = self.reference.model(torch.tensor([ids])).logits[0, -1].tolist()
        return found

    def text(self, ids: list[int]) -> str:
        """Of output ids."""
        return str(self.reference.tokenizer.decode(ids, skip_special_tokens=True))

    def grammar(self, output: list[int]) -> set[int]:
        """Tokens that PATTERN allows behind an output, the one that ends it among them."""
        text = "".join(self._tokens[i] for i in output)
        ids = range(len(SPECIALS), self.vocab)
        found = {i for i in ids if regex.fullmatch(PATTERN, text + self._tokens[i], partial=True)}
        return found | ({IM_END} if regex.fullmatch(PATTERN, text) else set())

    def case(
        self, prompt: list[int], setting: dict[str, Any], ask: LogprobParams | None = None
    ) -> Case:
        """setting: sampling parameters by name, over this oracle's defaults."""
        params = SamplingParams(**({"max_new_tokens": self.new} | setting))
        allowed = None if params.regex is None else self.grammar
        output = plain.decode(self.logits, prompt, params, [IM_END], self.text, allowed)
        return Case(prompt, params, ask, output)

    @functools.cache  # noqa: B019, an oracle lives as long as its module's tests
    def cases(self, asked: str) -> list[Case]:
        """asked: one of ASKED."""
        made: dict[str, list[Case]] = {}
        if asked in ("plain", "mixed"):
            made["plain"] = [self.case(p, one) for p, one in self._plain()]
        if asked in ("settings", "mixed"):
            made["settings"] = [self.case(p, one) for p, one in self._settings(asked)]
        if asked == "mixed":
            made["plain"] = made["plain"][::3]
            made["mixed"] = [self.case(*one) for one in self._others()]
        found = [case for cases in made.values() for case in cases]
        random.Random(asked).shuffle(found)
        return found

    @functools.cache  # noqa: B019, as above
    def next_turns(self) -> list[Case]:
        """Prompts that go on behind an answer to a plain case."""
        before = [case for case in self.cases("plain") if len(case.prompt) > 16][:4]
        return [self.case([*c.prompt, *c.output, 7], {"temperature": 0.0}) for c in before]

    def prompts(self) -> list[list[int]]:
        """Lengths around chunks and pages; some share a beginning, some repeat themselves."""
        rng, longest = random.Random(5), max(self.lengths)
        shared = [rng.randrange(3, self.vocab) for _ in range(longest + 5)]
        loop = [*range(40, 53)] * (1 + longest // 26)
        fresh = [[rng.randrange(3, self.vocab) for _ in range(n)] for n in self.lengths]
        mixed = loop[: longest // 3] + shared[: longest // 2] + loop
        return [*fresh, [*shared, 7, 8], shared + [9] * 5, loop, mixed]

    def _plain(self) -> list[tuple[list[int], dict[str, Any]]]:
        """Every prompt greedily, and sampled or filtered."""
        filtered = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01}
        found = []
        for i, prompt in enumerate(self.prompts()):
            sampled = filtered if i % 3 == 2 else {"temperature": 1.0}
            both: list[dict[str, Any]] = [{"temperature": 0.0}, sampled]
            found += [(prompt, {"ignore_eos": True, "seed": i} | one) for one in both]
        return found

    def _settings(self, asked: str) -> list[tuple[list[int], dict[str, Any]]]:
        """The table's rows and some of its pairs; prompts loop or are free."""
        rng = random.Random(6)
        rows = [*settings_table.SINGLE.values(), *[*settings_table.pairs().values()][::20]]
        found = []
        for serial, setting in enumerate(rows if asked == "settings" else rows[::4]):
            loop = [*range(40 + serial % 5, 48)] * 2
            prompt = loop if serial % 2 else [rng.randrange(3, self.vocab) for _ in range(9)]
            found.append((prompt, {"seed": serial, "temperature": 0.8} | setting))
        return found

    def _others(self) -> list[tuple[list[int], dict[str, Any], LogprobParams | None]]:
        """Grammars, and log-probabilities of prompts and outputs."""
        found: list[tuple[list[int], dict[str, Any], LogprobParams | None]] = []
        for i, prompt in enumerate(self.prompts()[:6]):
            sampled = {"temperature": float(i % 2), "seed": i}
            start = (0, len(prompt) - 1, -1)[i % 3]
            ask = LogprobParams(logprob_start_len=start, top_logprobs_num=i)
            found.append((prompt, sampled | {"regex": PATTERN}, SCORED if i == 2 else None))
            found.append((prompt, sampled, SCORED if i < 2 else ask))
        return found

    def check(self, cases: Sequence[Case], done: Sequence[Completion]) -> None:
        """What came of the cases is what had to."""
        wrong = [
            (len(case.prompt), case.params, case.output, one.output_ids)
            for case, one in zip(cases, done, strict=True)
            if case.output != one.output_ids
        ]
        assert not wrong, wrong
        for case, one in zip(cases, done, strict=True):
            check_logprobs(self.reference, case.prompt, one, case.ask)
