"""Grammars under the acceptance rules for sampled drafts, whose drafter knows no grammar."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from fixed_costs import FLAT, fix_costs
from grammar_checks import ASKED, Follower
from tiny import IM_END, make_tokenizer

from sgl_spec import LLM, Completion, SamplingParams

VOCAB = 512
DRAFTERS = str(Path(__file__).parents[1] / "sampling_drafters.py")
RULES: dict[str, dict[str, Any]] = {
    "chain": {"speculative_use_rejection_sampling": True, "speculative_num_steps": 3},
    "tree": {
        "speculative_use_rejection_sampling": True,
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 2,
    },
    "block": {"speculative_use_block_verification": True, "speculative_num_steps": 3},
    "thresholds": {"speculative_accept_threshold_single": 0.05},
}


@pytest.mark.parametrize("rule", RULES)
def test_every_grammar(tiny_model_dir: Path, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, sampled and greedy, beside free requests; a tree that may not be pruned holds
    drafts outside the grammar, and none of them comes out. However slow the machine is: compiling
    has all the time it wants, and what a row costs does not matter."""
    monkeypatch.setattr("sgl_spec.engine.grammar_jobs.TIMEOUT_S", math.inf)
    fix_costs(monkeypatch, FLAT)
    llm = LLM(
        str(tiny_model_dir),
        speculative_algorithm="SAMPLER",
        speculative_drafter_module=DRAFTERS,
        speculative_draft_model_path=str(tiny_model_dir),
        max_running_requests=40,
        max_total_tokens=12000,
        **RULES[rule],
    )
    scheduler = llm.engine.scheduler
    scheduler.limits = dataclasses.replace(scheduler.limits, check_every_step=True)
    common = {"max_new_tokens": 80, "ignore_eos": False}
    asked = [
        {**grammar, **common, "seed": i, "temperature": float(i % 3 > 0)}
        for i, grammar in enumerate(ASKED.values())
    ]
    free = [{**common, "seed": i, "temperature": float(i % 2)} for i in range(6)]
    prompts = ["The harbour master kept a ledger"] * (len(asked) + len(free))
    done = llm.generate(prompts, [*asked, *free])
    follower = Follower(make_tokenizer(VOCAB), VOCAB, [IM_END])
    for (name, grammar), one in zip(ASKED.items(), done, strict=False):
        finish = {"type": one.finish.kind}
        reply = {
            "output_ids": one.output_ids,
            "text": one.text,
            "meta_info": {"finish_reason": finish},
        }
        try:
            follower.check(grammar, reply)
        except Exception as error:
            error.add_note(f"{name}: {one.finish}, {one.output_ids}, {one.text!r}")
            raise
    cut = {name: one.finish for name, one in zip(ASKED, done, strict=False) if is_cut(one)}
    assert len(cut) < len(asked) / 2, cut
    # Greedy texts are those of plain decoding under every rule.
    for i in range(0, len(asked), 3):
        alone = llm.generate(prompts[0], SamplingParams(**asked[i], speculation=False))[0]
        names = (list(ASKED)[i], alone.finish, done[i].finish)
        assert alone.output_ids == done[i].output_ids, names
    specs = [one.spec for one in done[: len(asked)] if one.spec is not None]
    assert 20 < sum(spec.accepted for spec in specs) < sum(spec.proposed for spec in specs), specs


def is_cut(one: Completion) -> bool:
    return one.finish.kind != "stop"
