"""Acceptance rules in the engine: sampled drafts through the drafter protocol, judged by the real
target, with every slot checked after every step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plain
import pytest
import torch
from draft_rig import disturbed
from drafting import drafter_options
from rule_world import LEVEL, likely_p_value
from serving import Launch
from talk import generate
from tiny import make_tiny
from torch import Tensor

from sgl_spec import LLM, Completion, SamplingParams
from sgl_spec.errors import ConfigError, DrafterError
from sgl_spec.request import LogprobParams, Speculation

ROOT = Path(__file__).parents[2]
DRAFTERS = str(ROOT / "tests" / "sampling_drafters.py")
REJECTION = {"speculative_use_rejection_sampling": True}
RULES: dict[str, dict[str, Any]] = {
    "chain": {**REJECTION, "speculative_num_steps": 3},
    "tree": {**REJECTION, "speculative_num_steps": 3, "speculative_eagle_topk": 2},
    "block": {"speculative_use_block_verification": True, "speculative_num_steps": 3},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is quick to run many thousand times."""
    directory = tmp_path_factory.mktemp("small")
    return make_tiny(directory, vocab=260, layers=1, hidden=32)


def make(model: Path, drafter: str = "SAMPLER", *, check: bool = True, **flags: Any) -> LLM:
    options = {
        "speculative_algorithm": drafter,
        "speculative_drafter_module": DRAFTERS,
        "speculative_draft_model_path": str(model),
        "max_running_requests": 48,
        "max_total_tokens": 8192,
    }
    if drafter == "STANDALONE":
        options["speculative_draft_model_path"] = str(nearly(model))
    llm = LLM(str(model), **(options | flags))
    scheduler = llm.engine.scheduler
    scheduler.limits = dataclasses.replace(scheduler.limits, check_every_step=check)
    return llm


def nearly(model: Path) -> Path:
    """A draft model that is the target, disturbed."""
    draft = model.with_name(f"{model.name}-disturbed")
    return draft if draft.exists() else disturbed(model, draft, 0.3)


def finished(llm: LLM) -> None:
    """Every slot is back."""
    assert llm.engine.scheduler.flush()
    pages = llm.engine.slots.pages
    assert pages.free_slots == pages.total


def per_round(done: list[Completion]) -> float:
    specs = [one.spec for one in done if one.spec is not None]
    return sum(spec.accepted for spec in specs) / sum(spec.verify_ct for spec in specs)


# --- the distribution -----------------------------------------------------------------------------

PROMPT, LENGTH = [40, 41, 42], 4


def exact(model: Any, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every output of LENGTH tokens, from transformers' logits and the settings'
    definitions."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        texts = list(found)
        ids = torch.tensor([[*PROMPT, *text] for text in texts])
        rows = model(ids).logits[:, -1].double().tolist()
        longer = {}
        for text, logits in zip(texts, rows, strict=True):
            for token, chance in next_probs(logits, list(text), params).items():
                longer[(*text, token)] = found[text] * chance
        found = longer
    return found


def next_probs(logits: list[float], output: list[int], params: SamplingParams) -> dict[int, float]:
    tokens = plain.candidates(params, set(), len(output), len(logits))
    values = {t: plain.adjusted(logits[t], t, PROMPT, output, params) for t in tokens}
    order = sorted(values, key=lambda t: (-values[t], t))
    weights = {t: math.exp((x - values[order[0]]) / params.temperature) for t, x in values.items()}
    kept = plain.filtered(order, weights, params)
    total = sum(weights[t] for t in kept)
    return {t: weights[t] / total for t in kept}


def counted(done: list[Completion], texts: list[tuple[int, ...]]) -> Tensor:
    place = {text: i for i, text in enumerate(texts)}
    index = torch.tensor([place[tuple(one.output_ids)] for one in done])
    return torch.bincount(index, minlength=len(texts))


FILTERS = {"temperature": 1.3, "top_k": 3}
PENALTIES = {
    **FILTERS,
    "frequency_penalty": 1.5,
    "repetition_penalty": 1.4,
    "logit_bias": {43: -1.0, 127: 1.0},
}


def check_distribution(
    model: Path, rule: str, drafter: str, settings: dict[str, Any], draws: int
) -> None:
    from transformers import AutoModelForCausalLM

    llm = make(model, drafter, check=False, **RULES[rule])
    base = {**settings, "max_new_tokens": LENGTH, "ignore_eos": True}
    done: list[Completion] = []
    for start in range(0, draws, 1000):
        some = range(start, min(start + 1000, draws))
        done += llm.generate([PROMPT] * len(some), [{**base, "seed": seed} for seed in some])
    finished(llm)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    chances = exact(reference, SamplingParams(**base))
    texts = list(chances)
    expected = torch.tensor([chances[text] for text in texts], dtype=torch.float64)
    assert float(expected.sum()) == pytest.approx(1)
    assert likely_p_value(counted(done, texts), expected) > LEVEL
    assert per_round(done) > 0.1


@pytest.mark.parametrize(
    ("rule", "drafter", "settings"),
    [
        ("tree", "SAMPLER", FILTERS),
        ("tree", "HALF_SAMPLER", PENALTIES),
        ("block", "SAMPLER", PENALTIES),
        ("tree", "STANDALONE", PENALTIES),
        ("block", "STANDALONE", FILTERS),
    ],
)
def test_outputs_have_the_targets_distribution(
    small_dir: Path, rule: str, drafter: str, settings: dict[str, Any]
) -> None:
    check_distribution(small_dir, rule, drafter, settings, 4000)


def test_many_outputs_of_chains_have_the_targets_distribution(small_dir: Path) -> None:
    check_distribution(small_dir, "chain", "SAMPLER", FILTERS, 20_000)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [FILTERS, PENALTIES], ids=["filters", "penalties"])
@pytest.mark.parametrize("drafter", ["SAMPLER", "HALF_SAMPLER", "STANDALONE"])
@pytest.mark.parametrize("rule", RULES)
def test_many_outputs_have_the_targets_distribution(
    small_dir: Path, rule: str, drafter: str, settings: dict[str, Any]
) -> None:
    check_distribution(small_dir, rule, drafter, settings, 20_000)


# --- requests of every kind in one batch ----------------------------------------------------------


def requests(count: int) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Prompts that share beginnings; greedy, sampled, narrowed and undrafted in turn."""
    prompts = [[*range(40, 53), 60 + i % 3, *range(100, 100 + i % 7)] for i in range(count)]
    base = {"max_new_tokens": 24, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 1},
        {"temperature": 0.0, "speculation": Speculation(max_draft_tokens=2)},
        {
            "temperature": 0.9,
            "top_p": 0.9,
            "seed": 2,
            "speculation": Speculation(max_draft_tokens=1),
        },
        {"temperature": 0.9, "seed": 3, "speculation": False},
    ]
    return prompts, [{**base, **kinds[i % len(kinds)]} for i in range(count)]


@pytest.fixture(scope="module")
def plain_texts(tiny_model_dir: Path) -> list[list[int]]:
    prompts, settings = requests(20)
    alone = [{**s, "speculation": None} for s in settings]
    return [one.output_ids for one in LLM(str(tiny_model_dir)).generate(prompts, alone)]


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("rule", RULES)
def test_greedy_and_undrafted_requests_keep_their_text(
    tiny_model_dir: Path, plain_texts: list[list[int]], rule: str, page: int
) -> None:
    prompts, settings = requests(20)
    llm = make(tiny_model_dir, page_size=page, **RULES[rule])
    done = llm.generate(prompts, settings)
    finished(llm)
    budgets = {"greedy": 0, "narrow": 0}
    for one, params, text in zip(done, settings, plain_texts, strict=True):
        assert len(one.output_ids) == 24
        if params["temperature"] == 0 or params.get("speculation") is False:
            assert one.output_ids == text
        assert one.spec is not None
        drafted = params.get("speculation")
        most = drafted.max_draft_tokens if isinstance(drafted, Speculation) else 64
        most = 0 if drafted is False else most
        assert one.spec.proposed <= most * one.spec.verify_ct
        budgets["narrow" if most < 64 else "greedy"] += one.spec.proposed
    assert min(budgets.values()) > 0
    assert per_round([one for one, s in zip(done, settings, strict=True) if "top_p" in s]) > 0.05


@pytest.mark.parametrize("rule", RULES)
def test_a_seed_repeats_the_text_alone_and_in_a_batch(tiny_model_dir: Path, rule: str) -> None:
    prompts, settings = requests(10)
    llm = make(tiny_model_dir, **RULES[rule])
    together = [one.output_ids for one in llm.generate(prompts, settings)]
    assert [one.output_ids for one in llm.generate(prompts, settings)] == together
    for i in (1, 3, 6):
        assert llm.generate(prompts[i], settings[i])[0].output_ids == together[i]
    other = [{**s, "seed": 77} for s in settings]
    assert [one.output_ids for one in llm.generate(prompts, other)] != together


@pytest.mark.parametrize("rule", RULES)
def test_a_pool_that_runs_out_retracts_and_finishes(
    tiny_model_dir: Path, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl_spec.engine.policy.GROWTH_TOKENS", 2)
    prompts, settings = requests(20)
    llm = make(tiny_model_dir, max_total_tokens=400, disable_radix_cache=True, **RULES[rule])
    done = llm.generate(prompts, [{**s, "max_new_tokens": 60} for s in settings])
    assert llm.engine.counters.retracted > 0
    assert all(len(one.output_ids) == 60 for one in done)
    finished(llm)


def test_the_default_rule_keeps_seeded_texts_with_sampled_drafts(
    tiny_model_dir: Path, plain_texts: list[list[int]]
) -> None:
    """A drafter that samples may as well serve the default rule, which never looks at q."""
    prompts, settings = requests(20)
    done = make(tiny_model_dir, "SAMPLER").generate(prompts, settings)
    settled = zip(done, plain_texts, strict=True)
    assert all(one.output_ids == text for one, text in settled)


@pytest.mark.parametrize("rule", RULES)
def test_a_grammar_holds_and_its_drafts_are_judged_not_dropped(
    tiny_model_dir: Path, rule: str
) -> None:
    llm = make(tiny_model_dir, **RULES[rule])
    base = {"regex": "([a-f]{3}-)+[0-9]{2}", "max_new_tokens": 40, "temperature": 1.0}
    done = llm.generate(["Say: "] * 12, [{**base, "seed": i} for i in range(12)])
    finished(llm)
    ended = [one.text for one in done if one.finish.kind == "stop"]
    assert all(set(one.text) <= set("abcdef-0123456789") for one in done)
    assert len(ended) > 6
    assert all(text[-3] == "-" and text[-2:].isdigit() for text in ended)
    shape = llm.engine.args.shape
    assert shape is not None
    for one in done:
        assert one.spec is not None
        full = (shape.nodes - 1) * one.spec.verify_ct
        assert one.spec.proposed > full / 2, "illegal drafts stay in the tree"


@pytest.mark.parametrize("rule", RULES)
def test_log_probabilities_are_those_of_the_emitted_tokens(tiny_model_dir: Path, rule: str) -> None:
    prompts, settings = requests(6)
    llm, scorer = make(tiny_model_dir, **RULES[rule]), LLM(str(tiny_model_dir))
    for prompt, one in zip(prompts, llm.generate(prompts, settings, LogprobParams()), strict=True):
        whole = [*prompt, *one.output_ids]
        ask = LogprobParams(logprob_start_len=len(prompt) - 1)
        scored = scorer.generate([whole], {"max_new_tokens": 1}, ask)[0].prompt_logprobs
        assert one.logprobs is not None
        assert scored is not None
        assert one.logprobs.values == pytest.approx(scored.values, abs=1e-3)


# --- what is refused ------------------------------------------------------------------------------


def test_a_drafter_that_cannot_sample_is_refused_by_name(tiny_model_dir: Path) -> None:
    flags = {
        "speculative_algorithm": "PROMPT_LOOKUP",
        "speculative_drafter_module": str(ROOT / "examples" / "custom_drafter.py"),
    }
    for rule, flag in [("chain", "rejection-sampling"), ("block", "block-verification")]:
        with pytest.raises(ConfigError, match=rf"--speculative-use-{flag} needs.*PROMPT_LOOKUP"):
            LLM(str(tiny_model_dir), **flags, **RULES[rule])
    with pytest.raises(ConfigError, match="JUNK does not say"):
        LLM(str(tiny_model_dir), **drafter_options("JUNK", tiny_model_dir), **RULES["tree"])


def test_a_drafter_that_breaks_its_word_is_caught(tiny_model_dir: Path) -> None:
    llm = make(tiny_model_dir, "BROKEN_SAMPLER", **RULES["chain"])
    said = "BROKEN_SAMPLER failed in propose: sampled trees have the parents"
    with pytest.raises(DrafterError, match=said):
        llm.generate([PROMPT], {"max_new_tokens": 8, "ignore_eos": True})


# --- over HTTP ------------------------------------------------------------------------------------


def flags_of(options: dict[str, Any]) -> list[str]:
    flags = [[f"--{name.replace('_', '-')}", str(value)] for name, value in options.items()]
    return [word for pair in flags for word in pair if word != "True"]


def test_a_server_says_which_rule_it_uses_and_serves_by_it(
    launch: Launch, tiny_model_dir: Path
) -> None:
    options = {
        "speculative_algorithm": "SAMPLER",
        "speculative_drafter_module": DRAFTERS,
        "speculative_draft_model_path": tiny_model_dir,
    }
    server = launch(*flags_of({**options, **RULES["tree"]}))
    info = server.client.get("/server_info").json()
    assert info["acceptance_rule"] == "rejection"
    assert info["speculative_use_rejection_sampling"] is True
    assert (info["speculative_eagle_topk"], info["draft_tokens"]) == (2, 12)
    sampling = {"temperature": 0.9, "seed": 5, "max_new_tokens": 30, "ignore_eos": True}
    reply = generate(server, [40, 41, 42], **sampling)
    assert generate(server, [40, 41, 42], **sampling)["output_ids"] == reply["output_ids"]
    meta = reply["meta_info"]
    assert meta["spec_num_proposed_drafts"] > meta["spec_num_correct_drafts"] > 0


def test_thresholds_accept_more_of_ngrams_drafts(launch: Launch) -> None:
    """The loosest threshold accepts any draft that the target does not exclude."""
    ngram = {"speculative_algorithm": "NGRAM", "speculative_verify_whole_trees": True}
    loose = launch(*flags_of({**ngram, "speculative_accept_threshold_single": 0}))
    exact = launch(*flags_of(ngram))
    shown = [s.client.get("/server_info").json()["acceptance_rule"] for s in (loose, exact)]
    assert shown == ["thresholds (single 0, acc 1)", "follow"]
    loop = [*range(40, 53)] * 4
    hot = {"temperature": 1.5, "seed": 3, "max_new_tokens": 60, "ignore_eos": True}
    lengths = [generate(s, loop, **hot)["meta_info"]["spec_accept_length"] for s in (loose, exact)]
    assert lengths[0] > lengths[1]
    cold = {**hot, "temperature": 0}
    texts = [generate(s, loop, **cold)["output_ids"] for s in (loose, exact)]
    assert texts[0] == texts[1]
