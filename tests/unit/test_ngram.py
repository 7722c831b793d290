"""The n-gram drafter without a model: the target is a text that is given, and trees follow it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_spec.bench.__main__ import main as bench_main
from sgl_spec.errors import ConfigError
from sgl_spec.speculative import ngram
from sgl_spec.speculative.base import DraftBatch, DrafterContext, build_drafter
from sgl_spec.speculative.ngram import NgramDrafter
from sgl_spec.speculative.ngram_options import NgramOptions
from sgl_spec.speculative.ngram_scores import UNKNOWN_SHARE, AcceptanceModel
from sgl_spec.speculative.prune import keep_nodes
from sgl_spec.speculative.tree import AcceptResult, TokenTree, narrow

VOCAB = 1000
ROWS = 6
Prune = Callable[[TokenTree], TokenTree]


def make(**options: object) -> NgramDrafter:
    settings = {"capacity": 20_000, "max_trie_depth": 8} | options
    return NgramDrafter(ROWS, NgramOptions(**settings), seed=1)


class Server:
    """Rows that each follow a given text; every tree is checked before it is followed. late: what
    the drafter puts off is done behind the next proposal."""

    def __init__(
        self,
        drafter: NgramDrafter,
        width: int = 600,
        prune: Prune | None = None,
        *,
        late: bool = False,
    ) -> None:
        self.drafter = drafter
        self.late = late
        self.tokens = np.zeros((ROWS, width), np.int32)
        self.lengths = np.zeros(ROWS, np.int64)
        self.max_nodes = np.full(ROWS, drafter.options.num_draft_tokens)
        self.texts: dict[int, list[int]] = {}
        self.drafted: list[tuple[float, bool]] = []  # score and acceptance of every drafted node
        self._prune = prune

    def start(self, row: int, text: list[int], length: int, known: int = 0) -> None:
        """A request whose first `length` tokens are there and whose continuation is `text`."""
        self.texts[row] = text
        self.tokens[row, :length] = text[:length]
        self.lengths[row] = length
        self.drafter.begin(row, self.tokens[row, :length], known)
        if not self.late:
            self.drafter.settle()

    def stop(self, row: int) -> None:
        del self.texts[row]
        self.drafter.finish(row)

    def batch(self) -> DraftBatch:
        rows = np.array(sorted(self.texts), np.int64)
        return DraftBatch(rows, self.lengths[rows], self.max_nodes[rows], self.tokens)

    def propose(self) -> TokenTree:
        batch = self.batch()
        tree = self.drafter.propose(batch)
        tree.validate(VOCAB)
        assert (tree.num_nodes.numpy() <= batch.max_nodes).all()
        assert tree.scores is not None
        roots = self.tokens[batch.rows, batch.lengths - 1]
        assert (tree.tokens[:, 0].numpy() == roots).all()
        return tree

    def round(self) -> int:
        """Propose, prune, follow, observe. Returns the tokens emitted."""
        tree, batch = self.propose(), self.batch()
        if self.late:
            self.drafter.settle()
        if self._prune is not None:
            tree = self._prune(tree)
        accepted = self.follow(tree, batch)
        self.drafter.observe(batch, tree, accepted)
        if not self.late:
            self.drafter.settle()
        counts = accepted.counts.numpy()
        self.lengths[batch.rows] += counts
        return int(counts.sum())

    def follow(self, tree: TokenTree, batch: DraftBatch) -> AcceptResult:
        path = torch.zeros_like(tree.parents)
        tokens = torch.zeros_like(tree.parents)
        counts = torch.zeros_like(tree.num_nodes)
        for i, (row, length) in enumerate(zip(batch.rows, batch.lengths, strict=True)):
            at, step, visited = 0, 0, {0}
            while True:
                token = self.texts[row][length + step]
                tokens[i, step], path[i, step] = token, at
                self.tokens[row, length + step] = token
                step += 1
                nodes = range(1, int(tree.num_nodes[i]))
                kids = [n for n in nodes if tree.parents[i, n] == at and tree.tokens[i, n] == token]
                if not kids:
                    break
                at = kids[0]
                visited.add(at)
            counts[i] = step
            assert tree.scores is not None
            for node in range(1, int(tree.num_nodes[i])):
                self.drafted.append((float(tree.scores[i, node]), node in visited))
        return AcceptResult(tokens, path, counts)

    def settle(self) -> None:
        """Rounds until nothing waits to be inserted, but for what the last ones gave if that is
        late."""
        waits = "queued_tokens" if self.late else "pending_tokens"
        while self.drafter.stats()[waits]:
            self.round()


def chain(tree: TokenTree, row: int = 0) -> list[int]:
    """Tokens from the root down the path of best scores."""
    assert tree.scores is not None
    path, at = [], 0
    while True:
        nodes = range(1, int(tree.num_nodes[row]))
        kids = [node for node in nodes if tree.parents[row, node] == at]
        if not kids:
            return path
        at = max(kids, key=lambda node: float(tree.scores[row, node]))
        path.append(int(tree.tokens[row, at]))


def distinct(count: int, start: int = 0) -> list[int]:
    """Tokens in an order without repetition."""
    return [(start + 7 * i) % VOCAB for i in range(count)]


@pytest.mark.parametrize("match_type", ["BFS", "PROB"])
def test_a_copy_of_the_prompt_is_drafted_as_one_long_chain(match_type: str) -> None:
    """All nodes of the tree go down the copy, beyond the depth of the trie."""
    drafter = make(match_type=match_type, num_draft_tokens=20, max_trie_depth=6)
    server = Server(drafter)
    prompt = distinct(100)
    text = [*prompt, 990, 991, *prompt, *prompt, *prompt, *prompt]
    server.start(0, text, 103)
    server.settle()
    while server.lengths[0] < 120:
        server.round()
    done = int(server.lengths[0])
    tree = server.propose()
    assert int(tree.num_nodes[0]) == 20
    assert chain(tree) == text[done : done + 19]


def test_outputs_and_prompts_of_other_requests_are_copied() -> None:
    server = Server(make())
    answer, document = distinct(60), distinct(60, 3)
    server.start(0, [990, *answer, 991, 992], 2)
    while server.lengths[0] < 60:
        server.round()
    server.stop(0)
    server.start(1, [*document, 993, 993, 993], 60)
    server.settle()
    server.stop(1)
    server.start(2, [980, *answer, *answer], 5)
    server.start(3, [981, *document, *document], 5)
    tree = server.propose()
    assert chain(tree, 0)[:6] == answer[4:10]
    assert chain(tree, 1)[:6] == document[4:10]


def test_a_loop_is_drafted_past_its_own_end() -> None:
    """The last occurrence of the match ends with the text itself: the draft goes round again."""
    server = Server(make(num_draft_tokens=16))
    text = [1, 2, 3] * 60
    server.start(0, text, 40)
    server.settle()
    server.round()
    done = int(server.lengths[0])
    assert chain(server.propose()) == text[done : done + 15]


@pytest.mark.parametrize("period", [1, 2, 3, 5, 8, 13, 21])
@pytest.mark.parametrize("kept", [2, 4, 9])
def test_a_loop_is_drafted_past_what_is_not_inserted_yet(period: int, kept: int) -> None:
    """The end of the text comes from the text, where its n-grams come a round late."""

    def prune(tree: TokenTree) -> TokenTree:
        return keep_nodes(tree, tree.depths() < kept)

    server = Server(make(num_draft_tokens=16), prune=prune, late=True)
    text = distinct(period) * (600 // period)
    server.start(0, text, 60)
    while server.round() < kept:
        assert server.lengths[0] < 80
    for _ in range(3):
        assert server.round() == kept
        done = int(server.lengths[0])
        assert chain(server.propose()) == text[done : done + 15]


@pytest.mark.parametrize("rounds", [0, 1, 5])
def test_what_is_late_goes_in_once(rounds: int) -> None:
    """Also where the row was given to another request before it went in."""
    server = Server(make(capacity=100_000), late=True)
    texts = [distinct(300, 1), distinct(300, 2)]
    server.start(0, texts[0], 20)
    for _ in range(rounds):
        server.round()
    first = int(server.lengths[0])
    server.stop(0)
    server.start(0, texts[1], 10)
    server.settle()
    late = int(server.drafter.stats()["pending_tokens"])
    assert late <= 1 + ngram.MAX_REST
    ends = [*range(first), *range(int(server.lengths[0]) - late)]
    assert counted(server.drafter) == sum(min(8, end + 1) for end in ends)


def test_a_drafter_that_is_never_told_to_settle_inserts_a_round_late() -> None:
    drafter = make(capacity=100_000)
    tokens = np.array([distinct(300)], np.int32)
    drafter.begin(0, tokens[0, :20], 0)
    one = torch.ones(1, 1, dtype=torch.int64)
    for length in range(20, 24):
        batch = DraftBatch(np.array([0]), np.array([length]), np.array([12]), tokens)
        drafter.observe(batch, drafter.propose(batch), AcceptResult(one, one - 1, one[0]))
    late = int(drafter.stats()["pending_tokens"])
    assert late <= 1 + ngram.MAX_REST
    assert counted(drafter) == sum(min(8, end + 1) for end in range(24 - late))


def test_a_chain_goes_on_from_an_older_stream_where_the_newest_ends() -> None:
    """A request that copies a few tokens ahead of another must not shorten its drafts."""
    server = Server(make(num_draft_tokens=16, max_trie_depth=12))
    document = distinct(120)
    server.start(0, [*document, 990, 990], 120)
    server.settle()
    server.stop(0)
    server.start(1, document, 45)
    server.settle()
    server.start(2, document, 40)
    tree = server.propose()
    assert chain(tree, 1) == document[40:55]


def test_a_text_never_seen_gets_a_root_only_tree() -> None:
    server = Server(make())
    server.start(0, distinct(200), 1)
    server.start(1, distinct(200, 1), 20)
    assert server.propose().num_nodes.tolist() == [1, 1]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_trees_obey_their_rules_on_any_text(data: st.DataObject) -> None:
    """Distinct siblings, parents first, falling scores (`validate`) and budgets, for every size."""
    nodes = data.draw(st.sampled_from([2, 3, 4, 12, 64]))
    drafter = make(
        num_draft_tokens=nodes,
        max_trie_depth=data.draw(st.sampled_from([2, 3, 9])),
        match_type=data.draw(st.sampled_from(["BFS", "PROB"])),
        capacity=data.draw(st.sampled_from([1024, 20_000])),
    )
    server = Server(drafter)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    vocab = data.draw(st.sampled_from([1, 2, 5, VOCAB]))
    for row in range(ROWS):
        server.start(row, rng.integers(0, vocab, 600).tolist(), int(rng.integers(1, 30)))
    for _ in range(6):
        server.max_nodes[:] = rng.integers(1, nodes + 1, ROWS)
        server.round()
        row = int(rng.integers(ROWS))
        if server.lengths[row] > 60:
            server.stop(row)
            server.start(row, rng.integers(0, vocab, 600).tolist(), int(rng.integers(1, 30)))
        if not data.draw(st.booleans()):
            server.lengths[0] = min(server.lengths[0], 400)
        if server.lengths.max() > 500:
            break


def test_breadth_limits_the_children_of_the_root() -> None:
    """From a match of one token among many followers, and from a long one."""
    for match_type in ("BFS", "PROB"):
        drafter = make(min_bfs_breadth=1, max_bfs_breadth=3, match_type=match_type)
        server = Server(drafter)
        many = [token for other in range(2, 40) for token in (1, other)]
        server.start(0, [*many, 1, 1, 1], len(many) + 1)
        server.settle()
        tree = server.propose()
        assert int((tree.parents[0, 1 : int(tree.num_nodes[0])] == 0).sum()) <= 3
    assert NgramOptions().breadth().tolist()[1:] == [
        9,
        8,
        8,
        7,
        7,
        6,
        6,
        5,
        5,
        4,
        4,
        3,
        3,
        2,
        2,
        1,
        1,
    ]


def test_a_reused_row_starts_clean() -> None:
    """Neither the old request's text, nor its log position, nor its offset reach the next one."""
    server = Server(make())
    server.start(0, [1, 2, 3] * 100, 30)
    for _ in range(4):
        server.round()
    server.stop(0)
    assert drafter_offsets(server.drafter)[0] == 0.0
    before = server.drafter.trie.num_nodes
    server.start(0, distinct(300, 500), 10)
    assert server.propose().num_nodes.tolist() == [1]
    server.settle()
    ids = server.drafter.trie.nodes.all_ids()
    grams = server.drafter.trie.nodes.depth(ids)
    grown = server.drafter.trie.num_nodes - before
    length = int(server.lengths[0])
    # Only n-grams of the new text: none that runs from the old text's end into the new one.
    assert grown == sum(min(8, end + 1) for end in range(length))
    assert grams.max() == 8


def drafter_offsets(drafter: NgramDrafter) -> npt.NDArray[np.float64]:
    return drafter.model.offsets


def test_a_resumed_request_is_not_counted_twice() -> None:
    server = Server(make())
    text = distinct(200)
    server.start(0, text, 30)
    server.settle()
    for _ in range(5):
        server.round()
    server.settle()
    total, start = counted(server.drafter), int(server.lengths[0])
    server.stop(0)
    server.start(3, text, start, known=start)
    assert server.drafter.stats()["pending_tokens"] == 0
    server.round()
    server.settle()
    length = int(server.lengths[3])
    assert counted(server.drafter) == total + 8 * (length - start)
    server.stop(3)
    server.start(2, text, length + 4, known=length)
    server.settle()
    assert counted(server.drafter) == total + 8 * (int(server.lengths[2]) - start)


def test_a_drafter_whose_trees_are_not_worth_verifying_rests() -> None:
    """It proposes every fourth round then, learns all the same, and wakes with a new request."""
    server = Server(make(), prune=only_roots)
    looping = [3, 4, 5] * 100
    server.start(0, looping, 30)
    server.settle()
    widths = [server.propose().width for _ in range(24) if server.round()]
    assert widths.count(1) == 18
    length = int(server.lengths[0])
    server.stop(0)  # what the rest left uninserted goes in now
    server.start(1, looping, 30)
    assert server.propose().width > 1
    server.settle()
    assert server.drafter.stats()["pending_tokens"] == 0
    assert counted(server.drafter) >= sum(min(8, end + 1) for end in range(length))


def test_a_look_is_what_would_be_proposed_and_leaves_no_trace() -> None:
    plain, looked = Server(make()), Server(make())
    for server in (plain, looked):
        server.start(0, [3, 4, 5, 9] * 150, 30)
        server.start(1, distinct(300), 20)
    for _ in range(20):
        seen, tree = looked.drafter.look(looked.batch()), looked.propose()
        assert seen.tokens.equal(tree.tokens)
        assert seen.num_nodes.equal(tree.num_nodes)
        assert looked.round() == plain.round()
        looked.drafter.look(looked.batch())
    # Each round above was proposed for twice.
    counts = {"proposed", "match_rate"}
    assert {k: v for k, v in looked.drafter.stats().items() if k not in counts} == {
        k: v for k, v in plain.drafter.stats().items() if k not in counts
    }


def test_who_looks_does_not_wait_for_a_rest_to_end() -> None:
    server = Server(make(), prune=only_roots)
    server.start(0, [3, 4, 5] * 100, 30)
    while server.propose().width > 1:
        server.round()
    assert server.drafter.look(server.batch()).width > 1
    assert server.propose().width > 1


def test_a_round_may_be_observed_behind_the_next_proposal() -> None:
    """What was verified is still told from what is proposed by then."""
    drafters = [make(), make()]
    for late, drafter in enumerate(drafters):
        server = Server(drafter, late=True)
        server.start(0, [3, 4, 5, 9, 4, 7] * 100, 40)
        server.start(1, distinct(60) * 10, 70)
        owed: list[tuple[DraftBatch, TokenTree, AcceptResult]] = []
        for _ in range(30):
            batch, tree = server.batch(), server.propose()
            if late and owed:
                drafter.observe(*owed.pop())
            drafter.settle()
            accepted = server.follow(tree, batch)
            server.lengths[batch.rows] += accepted.counts.numpy()
            owed.append((batch, tree, accepted))
            if not late:
                drafter.observe(*owed.pop())
        for last in owed:
            drafter.observe(*last)
        drafter.settle()
    punctual, late_stats = (each.stats() for each in drafters)
    assert late_stats["acceptance_rate"] == pytest.approx(punctual["acceptance_rate"], abs=0.02)
    assert late_stats["acceptance_rate"] > 0.5
    assert late_stats["pending_tokens"] == 0


def test_what_a_rest_left_uninserted_goes_in_after_the_end() -> None:
    server = Server(make(), prune=only_roots)
    server.start(0, distinct(300), 30)
    server.settle()
    while not server.drafter.stats()["pending_tokens"]:
        server.round()
    ends = [int(server.lengths[0])]
    server.stop(0)
    assert server.drafter.stats()["pending_tokens"] > 0
    server.start(1, distinct(300, 5), 2)
    server.settle()
    ends.append(int(server.lengths[1]))
    known = sum(min(8, end + 1) for length in ends for end in range(length))
    assert counted(server.drafter) == known


def only_roots(tree: TokenTree) -> TokenTree:
    keep = torch.zeros_like(tree.tokens, dtype=torch.bool)
    keep[:, 0] = True
    return narrow(keep_nodes(tree, keep))


def test_a_request_retracted_in_the_queue_keeps_its_place() -> None:
    """`finish` does not drop what was given: it is still inserted, once."""
    drafter = make(capacity=100_000)
    server = Server(drafter)
    text = distinct(580)
    server.start(0, text, 500)
    server.start(1, distinct(600, 3), 2)
    server.round()
    assert drafter.stats()["pending_tokens"] > 0
    given = int(server.lengths[0])
    server.stop(0)
    server.start(2, text, given, known=given)
    while drafter.stats()["pending_tokens"]:
        server.stop(2)
        server.start(2, text, given, known=given)
        server.round()
    ends = given + int(server.lengths[1])
    later = counted(drafter)
    assert later >= 8 * (ends - 16)
    assert later <= 8 * (ends + 200)


def counted(drafter: NgramDrafter) -> int:
    """Occurrences of all n-grams in the trie."""
    return int(drafter.trie.counts(drafter.trie.nodes.all_ids()).sum())


def test_a_long_prompt_goes_in_by_slices() -> None:
    drafter = NgramDrafter(2, NgramOptions(capacity=200_000), seed=1)
    tokens = np.random.default_rng(0).integers(0, 2**31 - 1, (2, 5000)).astype(np.int32)
    drafter.begin(0, tokens[0, :4000], 0)
    drafter.settle()
    pending = [drafter.stats()["pending_tokens"]]
    lengths = np.array([4000])
    while pending[-1]:
        batch = DraftBatch(np.array([0]), lengths, np.array([12]), tokens)
        tree = drafter.propose(batch)
        one = torch.ones(1, 1, dtype=torch.int64)
        accepted = AcceptResult(one, torch.zeros_like(one), torch.ones(1, dtype=torch.int64))
        drafter.observe(batch, tree, accepted)
        drafter.settle()
        lengths = lengths + 1
        pending.append(drafter.stats()["pending_tokens"])
    assert pending[0] == 4000 - ngram.ROUND_TOKENS
    slices = -np.diff(pending)
    assert slices.max() <= ngram.ROUND_TOKENS
    assert counted(drafter) == sum(min(18, end + 1) for end in range(int(lengths[0])))


def test_a_drafter_that_was_skipped_catches_up() -> None:
    """Tokens that came while nobody observed are inserted with the next round."""
    server = Server(make(capacity=100_000))
    server.start(0, distinct(400), 20)
    server.settle()
    start = int(server.lengths[0])
    server.tokens[0, start : start + 200] = server.texts[0][start : start + 200]
    server.lengths[0] += 200
    server.round()
    server.settle()
    length = int(server.lengths[0])
    assert counted(server.drafter) == sum(min(8, end + 1) for end in range(length))


def test_flush_forgets_everything() -> None:
    server = Server(make())
    server.start(0, [1, 2, 3] * 100, 100)
    for _ in range(3):
        server.round()
    fresh = make().stats()
    server.start(1, [3, 1, 2], 2)
    assert server.propose().num_nodes[1] > 1
    server.stop(0)
    server.stop(1)
    server.drafter.flush()
    assert server.drafter.stats() == fresh
    server.start(0, [3, 1, 2], 2)  # what follows is known only from the text before the flush
    assert server.propose().num_nodes.tolist() == [1]


def only_likely(threshold: float) -> Prune:
    def prune(tree: TokenTree) -> TokenTree:
        assert tree.scores is not None
        mask = tree.scores >= threshold
        mask[:, 0] = True
        return keep_nodes(tree, mask)

    return prune


@pytest.mark.parametrize("likely", [0.9, 0.5, 0.15])
def test_scores_come_to_match_acceptance(likely: float) -> None:
    """A source in which the phrase book is followed with a known probability per token."""
    server = Server(make(capacity=200_000, num_draft_tokens=8), width=4000)
    rng = np.random.default_rng(0)
    book = [rng.integers(0, VOCAB, 40).tolist() for _ in range(8)]

    def text() -> list[int]:
        out: list[int] = []
        while len(out) < 4000:
            for token in book[rng.integers(len(book))]:
                out.append(token if rng.random() < likely else int(rng.integers(VOCAB)))
        return out[:4000]

    for row in range(ROWS):
        server.start(row, text(), 400)
    server.settle()
    for _ in range(150):
        server.round()
    server.drafted.clear()
    while server.lengths.max() < 3900 and len(server.drafted) < 15000:
        server.round()
    scores = np.array([score for score, _ in server.drafted])
    won = np.array([won for _, won in server.drafted])
    assert abs(scores.mean() - won.mean()) < 0.02
    for low, high in ((0, 0.05), (0.05, 0.2), (0.2, 0.4), (0.4, 0.6), (0.6, 0.8), (0.8, 1)):
        part = (scores >= low) & (scores < high)
        if part.sum() >= 400:
            assert abs(scores[part].mean() - won[part].mean()) < 0.08, (low, high)


def test_learning_works_on_a_pruned_tree_in_another_order() -> None:
    """The verified tree may be any part of the proposed one: nodes are matched by their paths."""
    rng = np.random.default_rng(1)
    text = rng.integers(0, 4, 600).tolist()
    results = []
    for shuffle in (False, True):

        def prune(tree: TokenTree, shuffle: bool = shuffle) -> TokenTree:
            assert tree.scores is not None
            mask = tree.scores > 0.05
            mask[:, 0] = True
            tree = keep_nodes(tree, mask)
            return reordered(tree) if shuffle else tree

        server = Server(make(num_draft_tokens=12), prune=prune)
        server.start(0, text, 200)
        server.settle()
        for _ in range(60):
            server.round()
        results.append((server.drafter.stats(), server.drafter.model.offsets))
    assert results[0][0] == results[1][0]
    assert results[0][1] == pytest.approx(results[1][1])
    assert results[0][0]["acceptance_rate"] > 0


def reordered(tree: TokenTree) -> TokenTree:
    """The same trees, nodes sorted by depth and then by falling token."""
    tokens, parents = tree.tokens.clone(), tree.parents.clone()
    depths = tree.depths()
    for i, count in enumerate(tree.num_nodes.tolist()):
        order = sorted(range(count), key=lambda n: (int(depths[i, n]), -int(tree.tokens[i, n])))
        place = {node: at for at, node in enumerate(order)}
        for at, node in enumerate(order):
            tokens[i, at] = tree.tokens[i, node]
            parents[i, at] = place[int(tree.parents[i, node])] if node else -1
    return TokenTree(tokens, parents, tree.num_nodes, torch.ones_like(tree.scores))


def test_a_request_pruned_to_nothing_is_probed_and_comes_back() -> None:
    """Bounded and repeatable probes; once they are accepted, the scores carry themselves."""
    runs = []
    for _ in range(2):
        server = Server(make(capacity=200_000), width=4000, prune=only_likely(0.6))
        drafter = server.drafter
        drafter.model._won[:] = 0.02 * drafter.model._tried  # everything looks hopeless
        drafter.model._log_odds[:] = -3.9
        text = distinct(100) * 40
        server.start(0, text, 300)
        server.settle()
        emitted = [server.round() for _ in range(300)]
        runs.append((emitted, drafter.stats()["probes"]))
    assert runs[0] == runs[1]
    emitted, probes = runs[0]
    assert sum(emitted[:20]) <= 30
    assert 1 <= probes <= 10
    assert np.mean(emitted[-50:]) >= 4


def test_probes_of_a_hopeless_request_become_rare() -> None:
    rng = np.random.default_rng(2)
    server = Server(make(capacity=200_000), width=4000, prune=only_likely(0.6))
    server.drafter.model._log_odds[:] = -3.9
    server.drafter.model.learn = lambda *trial: None  # type: ignore[method-assign]
    text = rng.integers(0, 30, 4000).tolist()
    server.start(0, text, 300)
    server.settle()
    before = server.drafter.stats()["probes"]
    nodes = 0
    for _ in range(1000):
        server.drafted.clear()
        server.round()
        nodes += len(server.drafted)
    probes = server.drafter.stats()["probes"] - before
    assert 2 <= probes <= 20
    assert nodes <= 3 * probes + 12


def test_offsets_follow_the_request() -> None:
    """Two requests in one bucket, one that accepts and one that does not."""
    model = AcceptanceModel(2)
    length, times = np.array([5]), np.array([3])
    bucket = model.bucket(length, np.array([0.6]), times, np.array([0]))
    rows = np.array([0, 1])
    for _ in range(200):
        expected = model.probability(np.repeat(bucket, 2), rows)
        model.learn(rows, np.repeat(bucket, 2), expected, np.array([True, False]))
    good, bad = model.probability(np.repeat(bucket, 2), rows).tolist()
    assert good > 0.8
    assert bad < 0.2
    model.start(1)
    assert abs(float(model.probability(bucket, np.array([1]))[0]) - 0.5) < 0.15


def test_a_bucket_that_is_never_tried_returns_to_its_prior() -> None:
    """What was learned from one bad stretch must not shut a bucket for ever."""
    model = AcceptanceModel(1)
    shut, other = model.bucket_unseen(np.array([17])), model.bucket_unseen(np.array([1]))
    row = np.zeros(1, np.int64)
    hopeful = float(model.probability(shut, row)[0])
    for _ in range(300):
        model.learn(row, shut, np.array([0.0]), np.array([False]))
    assert float(model.probability(shut, row)[0]) < 0.05
    for _ in range(6000):
        model.learn(row, other, np.array([0.0]), np.array([False]))
    assert abs(float(model.probability(shut, row)[0]) - hopeful) < 0.1


def test_buckets_are_distinct_and_priors_sensible() -> None:
    model = AcceptanceModel(1)
    lengths = np.array([1, 2, 3, 4, 5, 7, 10, 14, 17, 80])
    unseen = model.bucket_unseen(lengths)
    zero = np.zeros_like(lengths)
    unknown = np.full(lengths.size, UNKNOWN_SHARE)
    assert (unseen == model.bucket(lengths, unknown, zero + 1, zero)).all()
    assert np.unique(unseen).size == 9
    grid = np.array(np.meshgrid(lengths[:9], [0, 0.12, 0.3, 0.6, 0.8, 1.0], [1, 2, 5, 90], [0, 4]))
    length, share, times, rank = grid.reshape(4, -1)
    seen = model.bucket(length.astype(int), share, times.astype(int), rank.astype(int))
    assert np.unique(np.append(seen, unseen)).size == 9 * (6 * 4 * 2 + 1)
    prior = model.probability(unseen, np.zeros(1, np.int64))
    assert (np.diff(prior[:9]) > 0).all()
    assert prior[0] < 0.15
    assert prior[8] > 0.6


def test_options_come_from_the_server_and_bad_ones_are_refused() -> None:
    options: dict[str, object] = {
        "ngram_max_trie_depth": 5,
        "ngram_match_type": "PROB",
        "ngram_capacity": 5000,
        "draft_model_path": None,
    }
    drafter = build_drafter("ngram", DrafterContext(3, 100, 7, VOCAB, options))
    assert isinstance(drafter, NgramDrafter)
    assert drafter.options == NgramOptions(7, 5, 1, 10, "PROB", 5000)
    bad: list[dict[str, object]] = [
        {"num_draft_tokens": 1},
        {"num_draft_tokens": 65},
        {"min_bfs_breadth": 0},
        {"min_bfs_breadth": 3, "max_bfs_breadth": 2},
        {"match_type": "LONGEST"},
        {"max_trie_depth": 1},
        {"capacity": 10},
    ]
    for case in bad:
        with pytest.raises(ConfigError, match=str(next(iter(case.values())))):
            make(**case)


def test_the_benchmark_runs_and_writes_its_conditions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "ngram.json"
    assert bench_main(["ngram", "--quick", "--requests", "8", "--json", str(result)]) == 0
    assert "one request" in capsys.readouterr().out
    row = json.loads(result.read_text())
    assert row["argv"][:4] == ["python", "-m", "sgl_spec.bench", "ngram"]
    assert row["nodes"] >= 20_000
    assert 30 < row["bytes_per_node"] <= 64
    assert len(row["rows"]) == 4
    assert row["seed"] == 0
    assert row["hardware"]["cpu"]


def test_the_benchmark_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_main(["nothing"]) == 2
    assert "ngram" in capsys.readouterr().err
    assert bench_main(["--help"]) == 0
    assert bench_main(["ngram", "--quick", "--texts", "missing.jsonl"]) == 2
    assert "--tokenizer" in capsys.readouterr().err
