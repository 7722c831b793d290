"""Simulated acceptance: a real root path of the asked length, the target's token behind it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from heads import make_eagle3
from model_runs import Piece, Run

from sgl_spec.args import ServerArgs
from sgl_spec.errors import ConfigError
from sgl_spec.llm import LLM
from sgl_spec.request import SamplingParams
from sgl_spec.speculative.rules import FollowRule
from sgl_spec.speculative.sampling import build_rows
from sgl_spec.speculative.simulate import SimulatedRule
from sgl_spec.speculative.tree import AcceptResult, TokenTree

VOCAB = 50


def trees(rng: random.Random, batch: int, width: int, fewest: int) -> TokenTree:
    """Random trees of `fewest` to `width` nodes; a parent's children have distinct tokens."""
    tokens, parents = torch.zeros(batch, width).long(), torch.full((batch, width), -1)
    for i in range(batch):
        for node in range(1, width):
            parents[i, node] = rng.randrange(max(0, node - 3), node)
            tokens[i, node] = node * 3 % VOCAB
    counts = torch.tensor([rng.randint(fewest, width) for _ in range(batch)])
    return TokenTree(tokens, parents, counts)


def judge(rule: SimulatedRule, tree: TokenTree) -> tuple[AcceptResult, torch.Tensor]:
    """The result, and the target's favourite at every node."""
    logits = torch.randn(tree.batch * tree.width, VOCAB)
    offsets = torch.arange(tree.batch) * tree.width
    greedy = [SamplingParams(temperature=0.0, seed=0) for _ in range(tree.batch)]
    rows = build_rows(greedy, [1] * tree.batch, ())
    result = rule(tree, logits, offsets, rows, torch.full((tree.batch,), 9))
    return result, logits.view(tree.batch, tree.width, VOCAB).argmax(2)


@pytest.mark.parametrize("mean", [1.0, 2.4, 3.0, 3.7])
def test_paths_are_root_paths_and_the_mean_is_met(mean: float) -> None:
    rng, rule, given = random.Random(3), SimulatedRule(FollowRule(), mean), []
    for _ in range(40):
        tree = trees(rng, batch=rng.randint(1, 5), width=14, fewest=12)
        depths = torch.where(tree.used(), tree.depths(), -1)
        result, favourite = judge(rule, tree)
        for i, count in enumerate(result.counts.tolist()):
            path = result.path[i, :count].tolist()
            assert path[0] == 0
            for parent, node in itertools.pairwise(path):
                assert tree.parents[i, node] == parent
            drafted = tree.tokens[i, path[1:]].tolist()
            assert result.tokens[i, :count].tolist() == [*drafted, favourite[i, path[-1]]]
            assert path[-1] == int((depths[i] == count - 1).nonzero()[0])
            assert count in {int(mean), -int(-mean // 1)}
            given.append(count)
    assert sum(given) / len(given) == pytest.approx(mean, rel=0.02)


def test_a_shallow_tree_gives_its_deepest_path() -> None:
    rule = SimulatedRule(FollowRule(), 3.5)
    root = TokenTree(torch.tensor([[4]]), torch.tensor([[-1]]), torch.tensor([1]))
    assert judge(rule, root)[0].counts.tolist() == [1]
    chain = TokenTree(torch.arange(4)[None], torch.arange(-1, 3)[None], torch.tensor([4]))
    assert judge(rule, chain)[0].counts.tolist() == [4]  # what the root lacked, if one round can


def test_no_request_gets_all_the_longer_rounds() -> None:
    rule, rng = SimulatedRule(FollowRule(), 2.25), random.Random(1)
    given = [judge(rule, trees(rng, 4, 14, 14))[0].counts for _ in range(8)]
    assert torch.stack(given).sum(0).tolist() == [18, 18, 18, 18]


# --- in the engine --------------------------------------------------------------------------------


def engine(target: Path, **flags: object) -> LLM:
    return LLM(str(target), speculative_algorithm="EAGLE3", **flags)


@pytest.fixture(scope="module")
def head(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A tiny target has two layers; the head reads the inputs of both.
    layers = {"eagle_config": {}, "eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    return make_eagle3(tmp_path_factory.mktemp("head"), tiny_model_dir, **layers)


@pytest.mark.parametrize(("shape", "mean"), [((5, 4, 8), 3.0), ((3, 1, 4), 2.0), ((3, 1, 4), 2.6)])
def test_rounds_of_a_server(
    tiny_model_dir: Path, head: Path, shape: tuple[int, int, int], mean: float
) -> None:
    """A random head: no draft is right, and yet each round gives what was asked. What follows an
    accepted draft is the target's own token after it, so the KV of the path was kept."""
    llm = engine(
        tiny_model_dir,
        speculative_draft_model_path=str(head),
        speculative_num_steps=shape[0],
        speculative_eagle_topk=shape[1],
        speculative_num_draft_tokens=shape[2],
        simulate_acc_len=mean,
    )
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 512) for _ in range(n)] for n in (5, 20, 33)]
    params = {"temperature": 0.0, "max_new_tokens": 121, "ignore_eos": True}
    done = llm.generate(prompts, params)
    for one in done:
        assert one.spec is not None
        assert one.spec.simulated == mean
        assert one.spec.emitted / one.spec.verify_ct == pytest.approx(mean, rel=0.02)
    state = llm.engine.state()
    achieved = state.spec_emitted_total / state.spec_verify_total
    assert achieved == pytest.approx(mean, rel=0.02)
    if mean != int(mean):
        return
    for prompt, one in zip(prompts, done, strict=True):
        text = prompt + one.output_ids
        logits = Run(llm.engine.model, 1, len(text)).logits(Piece(0, 0, text[:-1]))[0]
        drawn = range(len(prompt), len(text), int(mean))  # the prompt's own, then each round's
        assert [text[i] for i in drawn] == [int(logits[i - 1].argmax()) for i in drawn]
        others = [i for i in range(len(prompt), len(text)) if i not in drawn]
        right = [text[i] == int(logits[i - 1].argmax()) for i in others]
        assert (
            sum(right) < len(right) / 4
        )  # drafts stand in the text that the target would not draw


def test_the_log_line_is_marked(tiny_model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    llm = LLM(
        str(tiny_model_dir),
        speculative_algorithm="NGRAM",
        simulate_acc_len=1.5,
        decode_log_interval=4,
    )
    llm.generate([[5, 6, 7, 5, 6, 7, 5, 6]], {"max_new_tokens": 40, "ignore_eos": True})
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Decode batch")]
    assert lines
    assert all("accept len" not in line or "(simulated)" in line for line in lines)
    assert any("(simulated)" in line for line in lines)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, "--simulate-acc-len 2.5 needs --speculative-algorithm"),
        (
            {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 2},
            "--simulate-acc-len must be at most 2, the levels of the trees, got 2.5",
        ),
        (
            {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 1},
            "--simulate-acc-len must be at most 2",
        ),
        (
            {"speculative_algorithm": "EAGLE3", "speculative_use_rejection_sampling": True},
            "so --speculative-use-rejection-sampling has nothing to decide",
        ),
        (
            {"speculative_algorithm": "NGRAM", "speculative_accept_threshold_acc": 0.5},
            "so --speculative-accept-threshold-acc has nothing to decide",
        ),
    ],
)
def test_refusals(flags: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ServerArgs(model_path="smollm2", simulate_acc_len=2.5, **flags).resolve()
    assert said in refused.value.message


@pytest.mark.parametrize("value", [0.5, 65, "nan", "two"])
def test_values_that_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="--simulate-acc-len must be a number from 1 to 64"):
        ServerArgs(model_path="smollm2", speculative_algorithm="NGRAM", simulate_acc_len=value)
