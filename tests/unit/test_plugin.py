"""A drafter from outside: what it lacks and what it does wrong is said by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sgl_spec import LLM
from sgl_spec.errors import ConfigError, DrafterError
from sgl_spec.speculative.base import (
    KVDrafter,
    protocol_methods,
    register_drafter,
)
from sgl_spec.speculative.plugin_tree import checked
from sgl_spec.speculative.tree import DraftProbs, TokenTree

HEAD = "import torch\nfrom sgl_spec import register_drafter\n"
# Proposes nothing: root-only trees.
QUIET = """
from sgl_spec.speculative.tree import root_only
class Quiet:
    def __init__(self, context): pass
    def begin(self, row, tokens, known): pass
    def propose(self, batch): return root_only(torch.from_numpy(batch.roots()))
    def observe(self, batch, tree, accepted): pass
    def finish(self, row): pass
    def flush(self): pass
    def stats(self): return {"learned": 3.0}
"""
METHODS = ["begin", "propose", "observe", "finish", "flush", "stats"]


def start(tmp_path: Path, model: str, source: str, name: str) -> LLM:
    module = tmp_path / "drafters.py"
    module.write_text(HEAD + source)
    return LLM(
        model,
        speculative_algorithm=name,
        speculative_drafter_module=module,
        max_total_tokens=400,
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_class_that_lacks_a_method_ends_the_start_before_the_model_is_loaded(
    tmp_path: Path, method: str
) -> None:
    source = QUIET.replace(f"def {method}(", f"def other_{method}(")
    source += "register_drafter('gap', Quiet)\n"
    with pytest.raises(ConfigError) as caught:
        start(tmp_path, str(tmp_path), source, "GAP")
    assert caught.value.message == (
        f"The drafter GAP lacks {method}; it must have the methods {', '.join(METHODS)}."
    )


def test_a_drafter_with_kv_has_more_methods() -> None:
    class Half:
        follows_kv = True
        begin = propose = observe = finish = flush = stats = open = lambda *_: None

    with pytest.raises(ConfigError, match="HALF lacks prefilled, verified, written_len;"):
        register_drafter("half", Half)  # type: ignore[arg-type]
    names = [name for name in vars(KVDrafter) if not name.startswith("_")]
    assert protocol_methods(Half) == [*METHODS, *names]


def test_a_drafter_with_kv_says_what_it_reads(tmp_path: Path, tiny_model_dir: Path) -> None:
    source = QUIET + "    follows_kv, capture = True, ()\n    written_len = open = len\n"
    source += "    prefilled = verified = len\nregister_drafter('half', lambda c: Quiet(c))\n"
    with pytest.raises(ConfigError, match=r"HALF lacks reads_ahead; .* capture, reads_ahead"):
        start(tmp_path, str(tiny_model_dir), source, "HALF")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("register_drafter('made', lambda context: 5)", "The drafter MADE lacks begin, propose"),
        (
            "register_drafter('made', lambda context: 1 / 0)",
            "The drafter MADE cannot be built: ZeroDivisionError: division by zero.",
        ),
        (
            "register_drafter('made', lambda context: exit('no'))",
            "The drafter MADE cannot be built: SystemExit: no.",
        ),
        ("raise SystemExit('no')", "cannot be imported: SystemExit: no"),
        ("nothing", "cannot be imported: NameError: name 'nothing' is not defined"),
    ],
)
def test_what_cannot_be_built_ends_the_start(
    tmp_path: Path, tiny_model_dir: Path, source: str, sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        start(tmp_path, str(tiny_model_dir), source, "MADE")
    assert sentence in caught.value.message


def test_a_name_that_nobody_registered_ends_the_start_before_the_model_is_loaded(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"must be none or one of .*EAGLE, .*got 'UNHEARD'"):
        start(tmp_path, str(tmp_path), "pass", "unheard")


def test_a_drafter_registered_in_this_process_needs_no_module(tiny_model_dir: Path) -> None:
    exec(HEAD + QUIET + "register_drafter('here', Quiet)\n", {})
    with LLM(str(tiny_model_dir), speculative_algorithm="here", max_total_tokens=400) as llm:
        (done,) = llm.generate("a", {"max_new_tokens": 4, "ignore_eos": True})
        assert len(done.output_ids) == 4
        assert llm.engine.args.speculative_algorithm == "HERE"
    register_drafter("DFLASH", lambda context: 1)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="DFLASH is not supported by this version"):
        LLM(str(tiny_model_dir), speculative_algorithm="DFLASH")


@pytest.mark.parametrize("method", ["begin", "propose", "observe", "finish"])
def test_an_exception_in_a_method_names_drafter_and_method(
    tmp_path: Path, tiny_model_dir: Path, method: str
) -> None:
    source = (
        QUIET
        + f"""
class Broken(Quiet):
    def {method}(self, *args): return {{}}["lost"]
register_drafter("broken", Broken)
"""
    )
    llm = start(tmp_path, str(tiny_model_dir), source, "broken")
    with pytest.raises(DrafterError) as caught:
        llm.generate("a", {"max_new_tokens": 3})
    assert caught.value.message == f"The drafter BROKEN failed in {method}: KeyError: 'lost'."
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_proposal_must_be_a_tree(tmp_path: Path, tiny_model_dir: Path) -> None:
    source = (
        QUIET
        + """
class Chain(Quiet):
    def propose(self, batch): return [1, 2]
register_drafter("chain", Chain)
"""
    )
    llm = start(tmp_path, str(tiny_model_dir), source, "chain")
    with pytest.raises(DrafterError, match="CHAIN failed in propose: it must return a TokenTree"):
        llm.generate("a", {"max_new_tokens": 3})


def test_a_drafter_keeps_what_it_has_beside_the_protocol(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    source = QUIET + "Quiet.memory = 'kept'\nregister_drafter('quiet', Quiet)\n"
    with start(tmp_path, str(tiny_model_dir), source, "quiet") as llm:
        assert len(llm.generate("a", {"max_new_tokens": 3})[0].output_ids) == 3
        assert llm.engine.state().drafter["learned"] == 3.0
        assert getattr(llm.engine.drafter, "memory") == "kept"  # noqa: B009
        assert not hasattr(llm.engine.drafter, "samples")


# --- what a drafter returns ---

CHAIN = """
from dataclasses import replace
import sys
from sgl_spec.speculative.tree import DraftProbs, NodeMasks, TokenTree

def chain(batch, length=2, **fields):
    roots = torch.from_numpy(batch.roots())
    tokens = torch.full((len(roots), length), 7)
    tokens[:, 0] = roots
    parents = torch.arange(-1, length - 1).repeat(len(roots), 1)
    nodes = torch.from_numpy(batch.max_nodes).clamp(max=length)
    return replace(TokenTree(tokens, parents, nodes), **fields)

def put(tensor, column, value):
    tensor[:, column] = value
    return tensor

def odd(batch):
    right = chain(batch)
    return {value}

class Odd(Quiet):
    {method} = lambda self, batch: odd(batch)
register_drafter("odd", Odd)
"""
BROKEN_RULES = {
    "put(right.tokens, 0, 5) is None or right": "node 0 holds the request's last token, ",
    "chain(batch, tokens=put(right.tokens, 1, 512))": "tokens are 0 to 511",
    "chain(batch, tokens=put(right.tokens, 1, -1))": "tokens are 0 to 511",
    "chain(batch, tokens=right.tokens.int())": "a tree's integers are int64, got ",
    "chain(batch, tokens=right.tokens[0])": "tokens are [B, N], got [2]",
    "chain(batch, tokens=right.tokens.numpy())": "TokenTree.tokens is a tensor, got ndarray",
    "chain(batch, scores=1.0)": "TokenTree.scores is a tensor, got float",
    "chain(batch, num_nodes=None)": "TokenTree.num_nodes is a tensor, got NoneType",
    "chain(batch, num_nodes=right.num_nodes * 0)": "num_nodes is 1 to 2",
    "chain(batch, num_nodes=right.num_nodes + 9)": "num_nodes is 1 to 2",
    "chain(batch, num_nodes=right.num_nodes[:0])": (
        "tokens and parents are [B, N] and num_nodes is [B], with N from 1 to 64, got tokens "
        "[1, 2], parents [1, 2], num_nodes [0]"
    ),
    "chain(batch, parents=put(right.parents, 1, 1))": "a parent comes before its children",
    "chain(batch, parents=put(right.parents, 0, 0))": "the root's parent is -1",
    "chain(batch, 65)": (
        "TokenTree.tokens is [B, N] with N from 1 to 64, got [1, 65]; of a tree this server "
        "verifies at most 12 nodes, the root included (DrafterContext.draft_tokens)"
    ),
    "TokenTree(right.tokens[:0], right.parents[:0], right.num_nodes[:0])": (
        "a tree for each of the 1 requests is due, got 0"
    ),
    "chain(batch, scores=torch.tensor([[0.5, 0.5]]))": "scores start at 1 and never rise",
    "chain(batch, scores=torch.ones(1))": "scores are float32 [B, N], got torch.float32 [1]",
    "chain(batch, scores=torch.ones(1, 2).double())": "got torch.float64 [1, 2]",
    "chain(batch, num_nodes=torch.ones(1, dtype=torch.int64, device='meta'))": (
        "the tensors of a TokenTree lie on one device, got cpu, meta"
    ),
    "chain(batch, allowed=NodeMasks(right.tokens, right.tokens))": (
        "TokenTree.allowed is the engine's to set, it must be None"
    ),
    "[right]": "it must return a TokenTree, got list",
}


@pytest.mark.parametrize(("value", "rule"), BROKEN_RULES.items(), ids=range(len(BROKEN_RULES)))
def test_a_tree_that_breaks_a_rule_is_refused_with_drafter_method_and_rule(
    tmp_path: Path, tiny_model_dir: Path, value: str, rule: str
) -> None:
    source = QUIET + CHAIN.replace("{value}", value).replace("{method}", "propose")
    llm = start(tmp_path, str(tiny_model_dir), source, "odd")
    with pytest.raises(DrafterError) as caught:
        llm.generate("abc", {"max_new_tokens": 6, "temperature": 0})
    assert caught.value.message.startswith("The drafter ODD failed in propose: ")
    assert rule in caught.value.message


def sampled(probs: object = None, row_of: object = None, ids: object = None) -> DraftProbs:
    """What the children of the root of one tree of two nodes were drawn from."""
    return DraftProbs(
        torch.tensor([[0.25, 0.5, 0.25]]) if probs is None else probs,  # type: ignore[arg-type]
        torch.tensor([[0, -1]]) if row_of is None else row_of,  # type: ignore[arg-type]
        ids,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("draft", "rule"),
    [
        (5, "TokenTree.draft is a DraftProbs, got int"),
        (sampled(probs=[0.5]), "TokenTree.draft.probs is a tensor, got list"),
        (sampled(ids=[3]), "TokenTree.draft.ids is a tensor, got list"),
        (sampled(probs=torch.ones(1, 2) / 2), r"draft.probs is float32 \[Q, 3\], got .* \[1, 2\]"),
        (sampled(probs=torch.ones(1, 3)), "each row of draft.probs is a distribution"),
        (sampled(probs=torch.tensor([[1.5, -0.5, 0]])), "each row of draft.probs is a distrib"),
        (sampled(row_of=torch.tensor([0, -1])), r"draft.row_of is int64 \[1, 2\], .* \[2\]"),
        (sampled(row_of=torch.tensor([[-1, 0]])), "row_of of a node with children is 0 to 0"),
        (sampled(row_of=torch.tensor([[1, -1]])), "row_of of a node with children is 0 to 0"),
        (sampled(ids=torch.tensor([0, 1, 3])), "distinct tokens of 0 to 2"),
        (sampled(ids=torch.tensor([0, 1, 1])), "distinct tokens of 0 to 2"),
        (sampled(ids=torch.tensor([2, 1])), r"draft.probs is float32 \[Q, 2\]"),
    ],
)
def test_distributions_that_break_a_rule(draft: DraftProbs, rule: str) -> None:
    chain = torch.tensor([[2, 1]]), torch.tensor([[-1, 0]]), torch.tensor([2])
    roots = np.array([2])
    for right in (sampled(), sampled(ids=torch.tensor([2, 0, 1])), None):
        assert checked(TokenTree(*chain, draft=right), roots, 3).draft == right
    with pytest.raises(ValueError, match=rule):
        checked(TokenTree(*chain, draft=draft), roots, 3)


def test_what_stands_behind_the_nodes_means_nothing() -> None:
    """Also where the drafter left it unwritten; the engine gets no columns that no tree uses."""
    tree = TokenTree(
        tokens=torch.tensor([[4, 1, -9, 99], [5, 99, 99, 99]]),
        parents=torch.tensor([[-1, 0, 99, -7], [-1, 99, 99, 99]]),
        num_nodes=torch.tensor([2, 1]),
        scores=torch.tensor([[1, 0.5, 9, torch.nan], [1, 9, 9, 9]]),
    )
    found = checked(tree, np.array([4, 5]), 10)
    assert found.width == 2
    assert found.tokens.tolist() == [[4, 1], [5, 99]]


@pytest.mark.parametrize("method", ["settle", "propose"])
def test_leaving_is_a_fault_like_others(tmp_path: Path, tiny_model_dir: Path, method: str) -> None:
    source = QUIET + f"    def {method}(self, *args): raise SystemExit('enough')\n"
    llm = start(tmp_path, str(tiny_model_dir), source + "register_drafter('l', Quiet)\n", "l")
    with pytest.raises(DrafterError) as caught:
        llm.generate("a", {"max_new_tokens": 3})
    assert caught.value.message == f"The drafter L failed in {method}: SystemExit: enough."


# --- what a drafter is shown ---


@pytest.mark.parametrize("where", ["begin", "propose", "observe"])
def test_texts_are_read_only(tmp_path: Path, tiny_model_dir: Path, where: str) -> None:
    shown = "args[1]" if where == "begin" else "args[0].tokens"
    source = QUIET + f"    def {where}(self, *args): {shown}[:] = 0\n"
    llm = start(tmp_path, str(tiny_model_dir), source + "register_drafter('w', Quiet)\n", "w")
    with pytest.raises(DrafterError) as caught:
        llm.generate("a", {"max_new_tokens": 3})
    assert f"W failed in {where}: ValueError: assignment dest" in caught.value.message
    assert "read-only" in caught.value.message


SCRIBBLER = """
from sgl_spec.speculative.sampling import SamplingRows

def scribble(batch):
    for array in (batch.rows, batch.lengths, batch.max_nodes):
        array[:] = 1
    rows = batch.sampling
    for holder in (rows, rows.penalties, rows.bias):
        for name in holder.__slots__:
            value = getattr(holder, name)
            if isinstance(value, torch.Tensor):
                value.zero_()

class Scribbler(Quiet):
    def propose(self, batch):
        tree = super().propose(batch)
        scribble(batch)
        return tree
    def observe(self, batch, tree, accepted):
        scribble(batch)
        accepted.tokens.zero_()
        accepted.counts.zero_()
        tree.tokens.zero_()
register_drafter("scribbler", Scribbler)
"""


def test_a_drafter_that_overwrites_what_it_is_shown_changes_no_text(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    settings = {"max_new_tokens": 12, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    settings |= {"top_k": 40, "frequency_penalty": 0.5, "logit_bias": {"9": 3.0, "11": -2.0}}
    prompts = ["a", "the harbour"]
    with LLM(str(tiny_model_dir), max_total_tokens=400) as plain:
        expected = [one.output_ids for one in plain.generate(prompts, settings)]
    with start(tmp_path, str(tiny_model_dir), QUIET + SCRIBBLER, "scribbler") as llm:
        assert [one.output_ids for one in llm.generate(prompts, settings)] == expected
