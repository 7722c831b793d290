"""Engines and requests that together use every feature, to be run on a device and on the CPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from draft_rig import KINDS, make_draft
from model_runs import Piece, Run

from sgl_spec import LLM, Completion, LogprobParams, SamplingParams
from sgl_spec.speculative.noise import exponential, noise_bits, row_keys
from sgl_spec.speculative.penalties import TokenCounts
from sgl_spec.speculative.sampling import adjust, build_rows

CUSTOM = str(Path(__file__).parents[1] / "examples" / "custom_drafter.py")
TREE = {
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 3,
    "speculative_num_draft_tokens": 8,
}
WHOLE = {"speculative_verify_whole_trees": True}
CHAIN = {"speculative_num_steps": 3}
# Name: drafter and flags.
SERVERS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "none, pages of 4, no cache": ("none", {"page_size": 4, "disable_radix_cache": True}),
    "NGRAM": ("NGRAM", WHOLE),
    "a plug-in": ("PROMPT_LOOKUP", {"speculative_drafter_module": CUSTOM}),
    "NGRAM, weighed": ("NGRAM", {"page_size": 4}),
    "EAGLE": ("EAGLE", TREE | WHOLE),
    "EAGLE3": ("EAGLE3", TREE | WHOLE),
    "EAGLE3, weighed": ("EAGLE3", TREE),
    "STANDALONE": ("STANDALONE", TREE | WHOLE),
    "thresholds": (
        "EAGLE",
        TREE
        | WHOLE
        | {"speculative_accept_threshold_single": 0.05, "speculative_accept_threshold_acc": 0.6},
    ),
    "rejection, tree": (
        "EAGLE3",
        {
            "speculative_use_rejection_sampling": True,
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 2,
            "speculative_num_draft_tokens": 6,
        },
    ),
    "rejection, chain": ("STANDALONE", CHAIN | {"speculative_use_rejection_sampling": True}),
    "block": ("STANDALONE", CHAIN | {"speculative_use_block_verification": True}),
    "simulated": ("EAGLE3", TREE | {"simulate_acc_len": 2.5}),
}
# Under these rules the text depends on the drafts, so rounding in them shows as well.
DRAFTS_DECIDE = ("thresholds", "rejection, tree", "rejection, chain", "block", "simulated")

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        "temperature": 0.8,
        "frequency_penalty": 0.6,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.2,
    },
    "bias": {
        "temperature": 1.0,
        "logit_bias": {40: 3.0, 41: -2.5, 50: -100.0},
        "min_new_tokens": 6,
        "stop_token_ids": (9, 60),
    },
    "forced": {"temperature": 0.7, "logit_bias": dict.fromkeys(range(100, 110), 100.0)},
    "regex": {"temperature": 0.5, "regex": "[a-z]{2,6}( [a-z]{2,6}){2,9}"},
    "schema": {
        "temperature": 1.0,
        "json_schema": '{"type":"object","properties":{"a":{"type":"integer"},'
        '"b":{"type":"array","items":{"type":"boolean"}}},"required":["a","b"]}',
    },
}
ASKED = {
    "greedy": LogprobParams(logprob_start_len=2, top_logprobs_num=3, token_ids_logprob=(7, 40)),
    "filtered": LogprobParams(top_logprobs_num=1),
    "regex": LogprobParams(logprob_start_len=0),
}


@dataclass(frozen=True)
class Models:
    """A target and its drafts."""

    target: Path
    drafts: dict[str, Path]


def make_models(target: Path, directory: Path) -> Models:
    """Random drafts for a target."""
    return Models(target, {kind: make_draft(kind, directory / kind, target) for kind in KINDS})


def make_engine(models: Models, server: str, **flags: Any) -> LLM:
    """The engine of that name; prompts go in chunks of 16."""
    drafter, own = SERVERS[server]
    options: dict[str, Any] = {"speculative_algorithm": drafter, "chunked_prefill_size": 16}
    if drafter in models.drafts:
        options["speculative_draft_model_path"] = str(models.drafts[drafter])
    options |= {"max_total_tokens": 4096, "max_running_requests": 12, "dtype": "float32"}
    return LLM(str(models.target), **(options | own | flags))


def asked(server: str) -> list[str]:
    """The requests for a server. Where batches decide about texts there are none that join when
    their grammar is compiled."""
    grammars = ("regex", "schema") if server == "simulated" else ()
    return [name for name in REQUESTS if name not in grammars]


def prompts() -> list[list[int]]:
    """One per request, two of them with a beginning in common; loops, which n-grams know."""
    rng = random.Random(3)
    lengths = (40, 5, 17, 33, 21, 16, 3, 9)
    found = [[3 + (start + i) % 13 for i in range(n)] for start, n in enumerate(lengths)]
    found[3][:17] = found[2]
    for ids in found:
        ids[rng.randrange(len(ids))] = rng.randrange(16, 512)
    return found


def settings(names: Sequence[str], new: int) -> list[SamplingParams]:
    """Of these requests."""
    return [
        SamplingParams(**{"seed": seed, "max_new_tokens": new} | REQUESTS[name])
        for seed, name in enumerate(names)
    ]


def run(llm: LLM, names: Sequence[str], new: int = 12) -> list[Completion]:
    """These requests at once, and every slot back afterwards."""
    asks = [ASKED.get(name) for name in names]
    done = llm.generate(prompts()[: len(names)], settings(names, new), asks)
    assert llm.engine.scheduler.flush()
    pages = llm.engine.slots.pages
    assert pages.free_slots == pages.total
    return done


def gap(
    plain: LLM, ids: Sequence[int], params: SamplingParams, prompt: int, pair: list[int]
) -> float:
    """How far apart the scores of two tokens lie that may follow `ids`, `prompt` of them the
    prompt: adjusted logits, plus temperature times noise. plain: an engine on the CPU."""
    model = plain.engine.model
    counts = TokenCounts(1, model.config.vocab_size)
    counts.start(0, ids[:prompt], ids[prompt:])
    rows = build_rows([params], [prompt], model.config.eos_token_ids, counts=counts)
    (logits,) = Run(model, 1, len(ids)).logits(Piece(0, 0, ids))
    x, position = logits[-1:].clone(), torch.tensor([len(ids)])
    adjust(x, rows, position)
    keys = row_keys(rows.seed, position)
    noise = exponential(noise_bits(keys, torch.tensor(pair, dtype=torch.int32))).log()
    scores = x[0, pair] - params.temperature * noise[0]
    return float((scores[0] - scores[1]).abs())
