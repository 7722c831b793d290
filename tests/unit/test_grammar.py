"""Masks over trees: the walk against stepping from scratch, and the engine against plain decoding
in a grammar."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from fake_grammar import Counting, commit, compile_counting, listed, mask_of, plain
from fakes import EOS, VOCAB, RandomDrafter, SumModel
from rig import NODES, Rig

from sgl_spec.engine.compiling import Compiling
from sgl_spec.engine.grammar_jobs import GrammarJobs
from sgl_spec.request import SamplingParams
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec.speculative.base import DraftBatch
from sgl_spec.speculative.grammar import Constraint, Place, mask_tree, token_masks
from sgl_spec.speculative.prune import CostTable, choose, keep_nodes
from sgl_spec.speculative.rules import make_rule
from sgl_spec.speculative.sampling import build_rows
from sgl_spec.speculative.topology import topology
from sgl_spec.speculative.tree import DraftProbs, TokenTree, narrow, root_only

# --- the walk -------------------------------------------------------------------------------------


def committed(
    automaton: Counting, count: int, rng: random.Random, ends: Sequence[int]
) -> Constraint:
    """A constraint some way into its grammar."""
    constraint = Constraint(automaton, ends, VOCAB)
    for _ in range(count):
        commit(constraint, rng.choice([t for t in listed(constraint.words) if t not in ends]))
    return constraint


def some_tree(
    rng: random.Random,
    constraints: Sequence[Constraint | None],
    nodes: int,
    legal_share: float = 0.8,
) -> TokenTree:
    """Trees whose drafts, children of random nodes, follow the grammar this often. What is behind
    a tree's nodes is no token."""
    size = (len(constraints), nodes)
    tokens, parents = np.full(size, 2**40, np.int64), np.full(size, -1, np.int64)
    tokens[:, 0] = 0
    counts = np.ones(len(constraints), np.int64)
    for i, one in enumerate(constraints):
        taken: set[tuple[int, int]] = set()
        for _ in range(rng.randrange(2 * nodes)):
            parent = rng.randrange(counts[i])
            path = path_to(tokens[i], parents[i], parent)
            legal = list(range(VOCAB)) if one is None else after(one, path)
            token = (
                rng.choice(legal) if legal and rng.random() < legal_share else rng.randrange(VOCAB)
            )
            if (parent, token) not in taken and counts[i] < nodes:
                taken.add((parent, token))
                tokens[i, counts[i]], parents[i, counts[i]] = token, parent
                counts[i] += 1
    scores = np.minimum.accumulate(np.linspace(1, 0.1, nodes))[None].repeat(len(constraints), 0)
    tree = TokenTree(
        *(torch.from_numpy(a) for a in (tokens, parents, counts)),
        scores=torch.from_numpy(scores.astype(np.float32)),
    )
    tree.validate(VOCAB)
    return tree


def path_to(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    path: list[int] = []
    while node > 0:
        path.append(int(tokens[node]))
        node = int(parents[node])
    return path[::-1]


def scratch(constraint: Constraint, path: Sequence[int]) -> Counting | None:
    """An automaton that took the committed text and then the path; None where it leaves the
    grammar or goes on after an end."""
    automaton = constraint.automaton.restart()
    assert isinstance(automaton, Counting)
    for token in constraint._committed:
        assert automaton.step(token)
    for token in path:
        if not automaton.allows(token) or not automaton.step(token):
            return None
    return automaton


def after(constraint: Constraint, path: Sequence[int]) -> list[int]:
    automaton = scratch(constraint, path)
    return [] if automaton is None else mask_of(automaton, sorted(constraint.end_ids))


def some_constraints(rng: random.Random, count: int) -> list[Constraint | None]:
    found: list[Constraint | None] = []
    for _ in range(count):
        least = rng.randrange(6)
        automaton = Counting(least, least + rng.randint(1, 5))
        ends = rng.choice([[EOS], [], [EOS, 9]])
        start = rng.randrange(min(least + 1, 3))
        found.append(committed(automaton, start, rng, ends) if rng.random() < 0.7 else None)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_masks_of_all_nodes_are_those_of_their_root_paths(seed: int) -> None:
    rng = random.Random(seed)
    constraints = some_constraints(rng, 4)
    before = [None if one is None else (one.words.copy(), one.place) for one in constraints]
    tree = some_tree(rng, constraints, 12)
    masked = mask_tree(tree, constraints)
    masked.validate(VOCAB)
    for i, one in enumerate(constraints):
        kept = paths(masked, i)
        if one is None:
            assert kept == paths(tree, i)
            assert masked.allowed is None or (masked.allowed.row_of[i] == -1).all()
            continue
        ends = one.end_ids
        legal = [p for p in paths(tree, i) if all(t in after(one, p[:d]) for d, t in enumerate(p))]
        assert kept == [p for p in legal if not ends & set(p[:-1])]
        assert masked.allowed is not None
        for node, path in enumerate(kept):
            row = int(masked.allowed.row_of[i, node])
            expected = [] if path and path[-1] in ends else after(one, path)
            assert (listed(masked.allowed.words[row].numpy()) if row >= 0 else []) == expected
        assert before[i] is not None
        assert np.array_equal(one.words, before[i][0]), "the walk moved the mask of the root"
    if masked.allowed is not None:
        rows = len(masked.allowed.words)
        assert rows <= int(tree.num_nodes.sum()), "a device has room for a mask a node"
    again = mask_tree(tree, constraints)
    assert [paths(again, i) for i in range(4)] == [paths(masked, i) for i in range(4)]


def paths(tree: TokenTree, i: int) -> list[list[int]]:
    """The root paths of a tree's nodes, in their order."""
    tokens, parents = tree.tokens[i].tolist(), tree.parents[i].tolist()
    return [path_to(tokens, parents, node) for node in range(int(tree.num_nodes[i]))]


@pytest.mark.parametrize("seed", range(20))
def test_masks_follow_their_nodes_through_pruning(seed: int) -> None:
    rng = random.Random(seed)
    constraints = some_constraints(rng, 3)
    masked = mask_tree(some_tree(rng, constraints, 10), constraints)
    table = CostTable(rows=(1, 100), ms=(1.0, 6.0 + seed % 40))
    chosen = choose(ArrayTree.of(masked), table)
    pruned = narrow(keep_nodes(masked, torch.from_numpy(chosen)))
    masks = token_masks(pruned)
    rows = [path for i in range(3) for path in paths(pruned, i)]
    owners = [one for i, one in enumerate(constraints) for _ in paths(pruned, i)]
    if masks is None:
        assert not any(constraints)
        return
    assert len(masks.row_of) == len(rows)
    for row, path, one in zip(masks.row_of.tolist(), rows, owners, strict=True):
        if row >= 0:
            assert one is not None
            assert listed(masks.words[row].numpy()) == after(one, path)


def test_without_a_grammar_in_the_batch_nothing_is_done() -> None:
    tree = root_only(torch.tensor([1, 2]))
    assert mask_tree(tree, [None, None]) is tree
    assert token_masks(tree) is None


def test_nodes_that_leave_the_grammar_stay_where_drafts_are_sampled() -> None:
    rng = random.Random(5)
    constraints: list[Constraint | None] = [committed(Counting(1, 9), 1, rng, [EOS]), None]
    tree = some_tree(rng, constraints, 12, legal_share=0.3)
    kept, pruned = mask_tree(tree, constraints, drop=False), mask_tree(tree, constraints)
    assert int(pruned.num_nodes[0]) < int(tree.num_nodes[0])
    assert torch.equal(kept.tokens, tree.tokens)
    assert torch.equal(kept.num_nodes, tree.num_nodes)
    assert kept.allowed is not None
    legal = [after(constraints[0], path) for path in paths(kept, 0)]  # type: ignore[arg-type]
    for row, mask in zip(kept.allowed.row_of[0].tolist(), legal, strict=False):
        assert (listed(kept.allowed.words[row].numpy()) if row >= 0 else []) == mask


def test_a_draft_that_is_too_hard_to_follow_is_dropped_and_the_text_is_found_again() -> None:
    """The automaton breaks in the middle of the walk; siblings and the next round see a new one."""
    rng = random.Random(2)
    constraint = committed(Counting(4, 9), 2, rng, [EOS])
    first = after(constraint, [])
    breaking = first[0]
    constraint.automaton = Counting(4, 9, frozenset([breaking]))
    for token in constraint._committed:
        constraint.automaton.step(token)
    second = next(t for t in after(constraint, [first[1]]) if t not in (breaking, EOS))
    tree = TokenTree(
        tokens=torch.tensor([[7, breaking, first[1], second, first[2]]]),
        parents=torch.tensor([[-1, 0, 0, 2, 0]]),
        num_nodes=torch.tensor([5]),
    )
    masked = mask_tree(tree, [constraint])
    assert paths(masked, 0) == [[], [first[1]], [first[1], second], [first[2]]]
    assert isinstance(constraint.automaton, Counting)
    assert constraint.automaton.restarts == 1
    assert commit(constraint, first[1]) is Place.OPEN
    assert commit(constraint, second) is Place.OPEN
    assert listed(constraint.words) == after(constraint, [])


def test_places() -> None:
    ended = Constraint(Counting(1, 1), [EOS], VOCAB)
    assert ended.place is Place.OPEN
    assert EOS not in listed(ended.words), "the text may not end before it is complete"
    assert commit(ended, listed(ended.words)[0]) is Place.ENDED
    forbidden = Constraint(Counting(1, 5), [EOS], VOCAB)
    assert commit(forbidden, EOS) is Place.BROKEN
    assert forbidden.problem == f"token {EOS} is not allowed here"
    stuck = Constraint(Counting(3, 1), [EOS], VOCAB)
    assert commit(stuck, listed(stuck.words)[0]) is Place.BROKEN
    assert "no token of the vocabulary" in stuck.problem


RULE_OPTIONS: dict[str, dict[str, object]] = {
    "follow": {},
    "rejection": {"rejection": True},
    "block": {"block": True},
    "thresholds": {"threshold_single": 0.02},
}


@pytest.mark.parametrize("seed", range(20))
def test_tokens_of_a_round_end_where_they_do_one_by_one(seed: int) -> None:
    """Also where tokens follow an end: what was drawn behind it means nothing."""
    rng = random.Random(seed)
    least, ends, first_end = rng.randrange(4), rng.choice([[EOS], [], [EOS, 9]]), rng.choice([0, 2])
    automaton = Counting(least, least + rng.randint(1, 3), frozenset([7]))
    whole, single = (Constraint(automaton.restart(), ends, VOCAB, first_end) for _ in "12")
    while single.place is Place.OPEN:
        text, places = list[int](), list[Place]()
        while len(text) < 5:
            given = listed(single.words) if single.place is Place.OPEN else []
            text.append(rng.choice(given if given and rng.random() < 0.9 else range(VOCAB)))
            if single.place is Place.OPEN:
                places.append(commit(single, text[-1]))
        legal = whole.take(text)
        assert (whole.place, whole.problem) == (single.place, single.problem)
        assert legal == len(places) - single.problem.startswith("token")
        assert np.array_equal(whole.words, single.words) or single.place is Place.BROKEN


@pytest.mark.parametrize("rule", ["rejection", "block", "thresholds"])
def test_no_acceptance_rule_leaves_the_grammar(rule: str) -> None:
    """Drafts of a drafter that knows no grammar; every token that comes out is one of its mask."""
    shape = topology(4, 1, 5) if rule == "block" else topology(2, 3, 8)
    judge = make_rule(**RULE_OPTIONS[rule])  # type: ignore[arg-type]
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    accepted = 0
    for trial in range(40):
        constraints: list[Constraint | None] = [
            committed(Counting(3, 12), 1, rng, [EOS]),
            None,
            committed(Counting(9, 12), 2, rng, []),
        ]
        params = [SamplingParams(seed=3 * trial + i, temperature=i % 2) for i in range(1, 4)]
        tree = sampled_tree(shape.parents, generator)
        masked = mask_tree(tree, constraints, drop=not judge.samples)
        total = int(masked.num_nodes.sum())
        logits = torch.randn(total, VOCAB, generator=generator)
        offsets = masked.num_nodes.cumsum(0) - masked.num_nodes
        lens = torch.tensor([5, 6, 7])
        rows = build_rows(params, [1, 1, 1], [EOS])
        result = judge(masked, logits, offsets, rows, lens, masks=token_masks(masked))
        for i, one in enumerate(constraints):
            new = result.tokens[i, : result.counts[i]].tolist()
            accepted += len(new) - 1
            for depth, token in enumerate(new if one is not None else []):
                assert one is not None
                assert token in after(one, new[:depth])
                if token in one.end_ids:
                    break
    assert accepted > 20, "the rule accepted nothing"


@pytest.mark.parametrize("rule", RULE_OPTIONS)
def test_end_ids_that_are_all_the_grammar_leaves_do_not_end_before_the_minimum(rule: str) -> None:
    """They are tokens like any other there: drafts behind them stay in the grammar, and from the
    minimum length on they end the request."""
    shape = topology(4, 1, 5) if rule == "block" else topology(2, 3, 8)
    judge = make_rule(**RULE_OPTIONS[rule])  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(2)
    behind = 0
    for trial in range(40):
        least, every = 2 + trial % 4, range(VOCAB)
        one = Constraint(Counting(1, 12), every, VOCAB, least)
        commit(one, listed(one.words)[trial % 3])
        tree = sampled_tree(shape.parents, generator, batch=1)
        masked = mask_tree(tree, [one], drop=not judge.samples)
        params = SamplingParams(
            seed=trial, temperature=trial % 2, min_new_tokens=least, stop_token_ids=tuple(every)
        )
        logits = torch.randn(int(masked.num_nodes), VOCAB, generator=generator)
        logits[:, tree.tokens[0]] += 3
        rows, zero = build_rows([params], [4], [EOS]), torch.zeros(1, dtype=torch.int64)
        result = judge(masked, logits, zero, rows, torch.tensor([4]), masks=token_masks(masked))
        for depth, token in enumerate(result.tokens[0, : result.counts[0]].tolist()):
            assert one.allows(token)
            behind += depth > 0
            if depth + 2 >= least:
                break
            assert commit(one, token) is Place.OPEN
    assert behind > 4, "no draft behind an end id was accepted"


def test_the_texts_end_is_not_drawn_before_the_minimum() -> None:
    """Even where the text may end and its other continuations are end ids as well."""
    one = Constraint(Counting(0, 12), [EOS, *range(9, VOCAB)], VOCAB, 2)
    assert not one.allows(EOS)
    commit(one, listed(one.words)[0])
    assert not one.allows(EOS)
    commit(one, listed(one.words)[0])
    assert one.allows(EOS)


def sampled_tree(parents: Sequence[int], generator: torch.Generator, batch: int = 3) -> TokenTree:
    """Trees of one shape with distinct siblings, and uniform q to judge them by."""
    size = len(parents)
    order = torch.rand(batch, VOCAB, generator=generator).argsort(1)[:, :size]
    probs, row_of = torch.full((1, VOCAB), 1 / VOCAB), torch.zeros(batch, size, dtype=torch.int64)
    return TokenTree(
        tokens=order,
        parents=torch.tensor(parents).expand(batch, -1).clone(),
        num_nodes=torch.full((batch,), size),
        draft=DraftProbs(probs=probs, row_of=row_of),
    )


# --- the engine -----------------------------------------------------------------------------------


class Knowing(RandomDrafter):
    """Drafts the text that a request will get, as a chain with wrong siblings, past its end."""

    def __init__(self, nodes: int, texts: dict[int, list[int]]) -> None:
        super().__init__(nodes)
        self.texts = texts  # by first prompt token

    def _grow(
        self,
        i: int,
        tokens: np.ndarray,
        parents: np.ndarray,
        counts: np.ndarray,
        most: int,
        ids: list[int],
    ) -> None:
        text = [*self.texts.get(ids[0], []), 5, EOS, 6, 7, 8, 9]
        parent = 0
        for true in text[len(ids) : len(ids) + most]:
            for token in ((true + 1) % VOCAB, true):
                if counts[i] < min(most, self.nodes):
                    tokens[i, counts[i]], parents[i, counts[i]] = token, parent
                    counts[i] += 1
            parent = int(counts[i]) - 1


class GrammarRig(Rig):
    """`Rig` with grammars that are compiled at once."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.scheduler.compiling = Compiling(GrammarJobs(compile_counting, VOCAB))

    def know(self, texts: dict[int, list[int]]) -> None:
        self.drafter = Knowing(NODES, texts)
        self.scheduler.worker.drafter = self.drafter  # type: ignore[attr-defined]


def requests(rng: random.Random, count: int) -> dict[str, tuple[list[int], SamplingParams]]:
    """Two in three have a grammar; all settings that have to do with ends."""
    made = {}
    for i in range(count):
        least = rng.randrange(12)
        grammar = f"{least},{least + rng.randint(1, 12)}" if i % 3 else None
        params = SamplingParams(
            regex=grammar,
            temperature=float(i % 2),
            seed=i,
            max_new_tokens=rng.choice([3, 20, 40]),
            min_new_tokens=rng.choice([0, 0, 3, 9]),
            ignore_eos=rng.random() < 0.4,
            stop_token_ids=rng.choice([(), (rng.randrange(1, VOCAB),), tuple(range(VOCAB))]),
        )
        prompt = [i + 1, *(rng.randrange(1, VOCAB) for _ in range(rng.randrange(30)))]
        made[str(i)] = (prompt, params)
    return made


def expected(
    model: SumModel, prompt: list[int], params: SamplingParams
) -> tuple[list[int], str | None]:
    if params.grammar is None:
        return model.reference(prompt, params), None
    ids, kind, _ = plain(model, prompt, params)
    return ids, kind


@pytest.mark.parametrize("drafter", ["none", "random", "knowing"])
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("crowded", [False, True])
def test_text_is_that_of_plain_decoding_in_the_grammar(
    drafter: str, page: int, crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any drafter, any neighbours, also when requests are retracted and resume."""
    if crowded:
        monkeypatch.setattr("sgl_spec.engine.policy.GROWTH_TOKENS", 2)
    rng = random.Random(17 + page)
    made = requests(rng, 40)
    rig = GrammarRig(
        drafter="none" if drafter == "none" else "random", page=page, slots=150 if crowded else 2000
    )
    wanted = {rid: expected(rig.model, *one) for rid, one in made.items()}
    if drafter == "knowing":
        rig.know({p[0]: p + wanted[rid][0] for rid, (p, _) in made.items()})
    for rid, (prompt, params) in made.items():
        given = {name: getattr(params, name) for name in params.__struct_fields__}
        rig.submit(rid, prompt, **given)
    rig.run()
    for rid, (ids, kind) in wanted.items():
        assert rig.outputs.get(rid, []) == ids, rid
        assert kind in (None, rig.ends[rid].finish.kind), rid
    kinds = {kind for _, kind in wanted.values()}
    assert {"stop", "length"} <= kinds
    if crowded:
        assert rig.counters.retracted > 0
    if drafter == "knowing":
        assert rig.counters.emitted >= 1.3 * rig.counters.verify_ct
        assert rig.counters.proposed < 2 * rig.counters.accepted, "illegal siblings were verified"


@pytest.mark.parametrize("drafter", ["none", "knowing"])
def test_a_grammar_that_has_ended_ends_the_request(drafter: str) -> None:
    """Whatever min_new_tokens and ignore_eos say, and in the middle of an accepted block."""
    rig = GrammarRig(drafter="none" if drafter == "none" else "random")
    cases = [
        SamplingParams(regex=f"{n},{n}", seed=n, temperature=1.0, max_new_tokens=40, **extra)  # type: ignore[arg-type]
        for n in range(1, 14)
        for extra in ({}, {"ignore_eos": True}, {"min_new_tokens": 30})
    ]
    texts = {i + 1: plain(rig.model, [i + 1, 2, 3], params) for i, params in enumerate(cases)}
    if drafter != "none":
        rig.know({first: [first, 2, 3, *ids] for first, (ids, _, _) in texts.items()})
    for i, params in enumerate(cases):
        given = {name: getattr(params, name) for name in params.__struct_fields__}
        rig.submit(str(i), [i + 1, 2, 3], **given)
    rig.run()
    for i, params in enumerate(cases):
        end = rig.ends[str(i)]
        assert rig.outputs[str(i)] == texts[i + 1][0]
        assert len(rig.outputs[str(i)]) == int(str(params.regex).split(",")[0])
        assert (end.finish.kind, end.finish.matched) == ("stop", None)
    if drafter != "none":
        assert rig.counters.emitted > 1.5 * rig.counters.verify_ct


def test_a_grammar_that_cannot_be_followed_ends_the_request_by_name() -> None:
    rig = GrammarRig(drafter="random")
    rig.submit("stuck", [1, 2], regex="9,2", max_new_tokens=20)
    rig.submit("fine", [1, 2], regex="2,9", max_new_tokens=20)
    rig.submit("renamed", [1, 2], regex="9,2", grammar_field="response_format", max_new_tokens=20)
    rig.run()
    end = rig.ends["stuck"].finish
    assert (end.kind, end.status) == ("abort", 400)
    assert end.message.startswith("regex cannot be followed any further: no token")
    assert len(rig.outputs["stuck"]) == 2
    assert rig.ends["renamed"].finish.message.startswith("response_format cannot be followed")
    assert rig.ends["fine"].finish.kind == "stop"


def test_a_draft_batch_without_budget_is_masked_as_well() -> None:
    """Speculation off for a request, in a batch that drafts and alone."""
    rig = GrammarRig(drafter="random")
    params = SamplingParams(
        regex="4,9", seed=1, temperature=1.0, speculation=False, max_new_tokens=20
    )
    given = {name: getattr(params, name) for name in params.__struct_fields__}
    rig.submit("alone", [3, 4], **given)
    rig.run()
    rig.submit("off", [3, 4], **given)
    rig.submit("on", [3, 4], **(given | {"speculation": None}))
    rig.run()
    ids, _, _ = plain(rig.model, [3, 4], params)
    assert rig.outputs == {"alone": ids, "off": ids, "on": ids}


def test_drafters_see_the_tree_that_was_verified() -> None:
    seen: list[TokenTree] = []

    class Watching(RandomDrafter):
        def observe(self, batch: DraftBatch, tree: TokenTree, accepted) -> None:  # type: ignore[no-untyped-def]
            super().observe(batch, tree, accepted)
            seen.append(tree)

    rig = GrammarRig(drafter="random")
    rig.drafter = rig.scheduler.worker.drafter = Watching(NODES)  # type: ignore[attr-defined]
    rig.submit("a", [1, 2], regex="20,30", max_new_tokens=40)
    rig.run()
    assert all(tree.allowed is not None for tree in seen)
    assert rig.ends["a"].spec.proposed == sum(int(tree.num_nodes[0]) - 1 for tree in seen)
