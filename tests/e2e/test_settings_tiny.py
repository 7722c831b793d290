"""The table of settings on a real model, with every drafter through its public protocol.

What a text should be is decoded by `plain` over transformers' logits, without cache or batch.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plain
import pytest
import settings_table
import torch
from drafting import DRAFTERS, drafter_flags, drafter_options
from fixed_costs import FLAT, fix_costs
from reference import Reference
from serving import Launch
from talk import Reply, accepted, drained, generate, speculated, together
from tiny import IM_END

from sgl_spec import LLM, Completion, SamplingParams
from sgl_spec.request import Speculation

NEW = 16
PAIRS_TAKEN = 5  # every fifth


@dataclass(frozen=True)
class Case:
    """A row of the table and its text."""

    name: str
    prompt: list[int]
    params: SamplingParams
    output: list[int]


@pytest.fixture(scope="module")
def cases(tiny_model_dir: Path) -> list[Case]:
    """Every setting alone, and a fifth of the pairs; prompts loop or are free."""
    reference = Reference(tiny_model_dir)

    @torch.inference_mode()
    def logits(ids: list[int]) -> list[float]:
        values: list[float] = reference.model(torch.tensor([ids])).logits[0, -1].tolist()
        return values

    def text(ids: list[int]) -> str:
        return str(reference.tokenizer.decode(ids, skip_special_tokens=True))

    rng = random.Random(6)
    pairs = list(settings_table.pairs().items())
    rows = [*settings_table.SINGLE.items(), *pairs[::PAIRS_TAKEN]]
    found = []
    for serial, (name, setting) in enumerate(rows):
        loop = [*range(40 + serial % 5, 48)] * 2
        prompt = loop if serial % 2 else [rng.randrange(3, 512) for _ in range(9)]
        base: dict[str, Any] = {"seed": serial, "max_new_tokens": NEW, "temperature": 0.8}
        params = SamplingParams(**(base | setting))
        output = plain.decode(logits, prompt, params, [IM_END], text)
        found.append(Case(name, prompt, params, output))
    return found


def compare(cases: list[Case], outputs: list[list[int]]) -> None:
    wrong = [
        (case.name, case.output, output)
        for case, output in zip(cases, outputs, strict=True)
        if case.output != output
    ]
    assert not wrong


@pytest.fixture
def whole_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify whatever is drafted, as if rows were free."""
    fix_costs(monkeypatch, FLAT)


@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_settings_on_a_real_model(drafter: str, cases: list[Case], tiny_model_dir: Path) -> None:
    """All in one crowd, then a part of them one by one."""
    assert len(cases) >= 60
    sizes = {"max_total_tokens": 8192, "max_running_requests": 16}
    llm = LLM(str(tiny_model_dir), **(sizes | drafter_options(drafter, tiny_model_dir)))
    crowd = llm.generate([c.prompt for c in cases], [c.params for c in cases])
    compare(cases, [one.output_ids for one in crowd])
    some = cases[::3]
    alone = [llm.generate(c.prompt, c.params)[0] for c in some]
    compare(some, [one.output_ids for one in alone])
    drafts_were_tried(drafter, [*crowd, *alone])


def drafts_were_tried(drafter: str, done: list[Completion]) -> None:
    stats = [one.spec for one in done if one.spec is not None]
    if drafter == "none":
        assert not stats
        return
    assert sum(spec.proposed for spec in stats) > 0
    if drafter != "JUNK":
        assert sum(spec.accepted for spec in stats) > 0.1 * sum(spec.verify_ct for spec in stats)


# --- over HTTP ------------------------------------------------------------------------------------


def as_json(params: SamplingParams) -> dict[str, Any]:
    """`sampling_params` of /generate: what differs from the defaults."""
    default = SamplingParams()
    names = SamplingParams.__struct_fields__
    given = {n: getattr(params, n) for n in names if getattr(params, n) != getattr(default, n)}
    if "logit_bias" in given:
        given["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if isinstance(params.speculation, Speculation):
        given["speculation"] = {"max_draft_tokens": params.speculation.max_draft_tokens}
    return given


@pytest.mark.parametrize("drafter", ["NGRAM", "SELF"])
def test_settings_over_http(
    drafter: str, cases: list[Case], launch: Launch, tiny_model_dir: Path
) -> None:
    """The crowd twice, so that NGRAM can copy in the second."""
    server = launch(
        *drafter_flags(drafter, tiny_model_dir),
        *("--max-total-tokens", "8192", "--max-running-requests", "16"),
        # A forward of the tiny model takes hardly longer than asking for drafts.
        "--speculative-verify-whole-trees",
    )
    calls = [functools.partial(generate, server, c.prompt, **as_json(c.params)) for c in cases]
    replies = together(calls) + together(calls)
    compare(cases * 2, [reply["output_ids"] for reply in replies])
    assert speculated(replies) or sum(map(accepted, replies)) > 0
    for case, reply in zip(cases * 2, replies, strict=True):
        assert reply["meta_info"]["seed"] == case.params.seed
        check_budget(case.params, reply)
    drained(server)


def check_budget(params: SamplingParams, reply: Reply) -> None:
    meta = reply["meta_info"]
    most = params.max_nodes(12) - 1
    assert meta.get("spec_num_proposed_drafts", 0) <= most * meta.get("spec_verify_ct", 0)
    assert len(meta.get("spec_correct_drafts_histogram", [])) <= most + 1
