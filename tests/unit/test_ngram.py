"""The n-gram drafter without a model: the target is a text that is given, and trees follow it."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_spec.bench import ngram as bench
from sgl_spec.bench.__main__ import main as bench_main
from sgl_spec.errors import ConfigError
from sgl_spec.speculative.base import DraftBatch, DrafterContext, build_drafter
from sgl_spec.speculative.ngram import IndexSize, NgramDrafter, NgramOptions
from sgl_spec.speculative.prune import keep_nodes
from sgl_spec.speculative.tree import AcceptResult, TokenTree
from sgl_spec_kernels.ngram_ref import GRAMS

VOCAB = 1000
ROWS = 6
WIDTH = 600
Prune = Callable[[TokenTree], TokenTree]


def make(width: int = WIDTH, **options: object) -> NgramDrafter:
    given = {"capacity": 20_000, "max_trie_depth": 8} | options
    made = NgramOptions(**given)  # type: ignore[arg-type]
    return NgramDrafter(ROWS, made, IndexSize.of(made.capacity, width, ROWS))


class Server:
    """Rows that each follow a given text; every tree is checked before it is followed."""

    def __init__(
        self, drafter: NgramDrafter, width: int = WIDTH, prune: Prune | None = None
    ) -> None:
        self.drafter = drafter
        self.tokens = np.zeros((ROWS, width), np.int32)
        self.lengths = np.zeros(ROWS, np.int64)
        self.max_nodes = np.full(ROWS, drafter.nodes)
        self.texts: dict[int, list[int]] = {}
        self.drafted: list[tuple[float, bool]] = []  # score and acceptance of every drafted node
        self._prune = prune

    def start(self, row: int, text: list[int], length: int, known: int = 0) -> None:
        """A request whose first `length` tokens are there and whose continuation is `text`."""
        self.texts[row] = text
        self.tokens[row, :length] = text[:length]
        self.lengths[row] = length
        self.drafter.begin(row, self.tokens[row, :length], known)

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
        if self._prune is not None:
            tree = self._prune(tree)
        accepted = self.follow(tree, batch)
        self.drafter.observe(batch, tree, accepted)
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
    server = Server(make(match_type=match_type, num_draft_tokens=20, max_trie_depth=6))
    prompt = distinct(100)
    text = [*prompt, 990, 991, *prompt, *prompt, *prompt, *prompt]
    server.start(0, text, 103)
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
    server.round()
    server.stop(1)
    server.start(2, [980, *answer, *answer], 5)
    server.start(3, [981, *document, *document], 5)
    tree = server.propose()
    assert chain(tree, 0)[:6] == answer[4:10]
    assert chain(tree, 1)[:6] == document[4:10]


@pytest.mark.parametrize("period", [1, 2, 3, 5, 8, 13, 21])
def test_a_loop_is_drafted_past_its_own_end(period: int) -> None:
    """The last occurrence of the match ends with the text itself: the draft goes round again."""
    server = Server(make(num_draft_tokens=16))
    text = distinct(period) * (WIDTH // period)
    server.start(0, text, 44)
    done = int(server.lengths[0])
    assert chain(server.propose()) == text[done : done + 15]


def test_a_chain_goes_on_from_an_older_stream_where_the_newest_ends() -> None:
    """A request that copies a few tokens ahead of another must not shorten its drafts."""
    server = Server(make(num_draft_tokens=16, max_trie_depth=12))
    document = distinct(120)
    server.start(0, [*document, 990, 990], 120)
    server.round()
    server.stop(0)
    server.start(1, document, 45)
    server.start(2, document, 40)
    assert chain(server.propose(), 1) == document[40:55]


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
        server.start(row, rng.integers(0, vocab, WIDTH).tolist(), int(rng.integers(1, 30)))
    for _ in range(6):
        server.max_nodes[:] = rng.integers(1, nodes + 1, ROWS)
        server.round()
        row = int(rng.integers(ROWS))
        if server.lengths[row] > 60:
            server.stop(row)
            server.start(row, rng.integers(0, vocab, WIDTH).tolist(), int(rng.integers(1, 30)))
        if server.lengths.max() > 500:
            break


@pytest.mark.parametrize(("widest", "children"), [(1, 1), (3, 3), (10, 8)])
def test_breadth_limits_the_children_of_the_root(widest: int, children: int) -> None:
    """A match of one token among many followers."""
    options = {"min_bfs_breadth": 1, "max_bfs_breadth": widest, "num_draft_tokens": 64}
    server = Server(make(**options))  # type: ignore[arg-type]
    many = [token for other in range(2, 40) for token in (other, 1)]
    server.start(0, many, len(many))
    tree = server.propose()
    assert int((tree.parents[0, 1 : int(tree.num_nodes[0])] == 0).sum()) == children


def test_a_reused_row_starts_clean() -> None:
    """Nothing of the old request's text is taken for the new one's."""
    server = Server(make())
    server.start(0, [1, 2, 3] * 100, 30)
    for _ in range(4):
        server.round()
    server.stop(0)
    server.start(0, distinct(300, 500), 10)
    assert server.propose().num_nodes.tolist() == [1]


def test_a_resumed_request_goes_on_as_before() -> None:
    server = Server(make())
    text = [*distinct(40), 990, *distinct(200)]
    server.start(0, text, 44)
    for _ in range(3):
        server.round()
    before, length = server.propose(), int(server.lengths[0])
    server.stop(0)
    server.start(3, text, length, known=length)
    after = server.propose()
    assert before.tokens.tolist() == after.tokens.tolist()
    assert before.scores is not None
    assert after.scores is not None
    assert before.scores.tolist() == after.scores.tolist()


def test_flush_forgets_everything() -> None:
    server = Server(make())
    server.start(0, [1, 2, 3] * 100, 80)
    for _ in range(17):
        server.round()
    fresh = make()
    server.start(1, [3, 1, 2], 2)
    assert server.propose().num_nodes[1] > 1
    server.stop(0)
    server.stop(1)
    server.drafter.flush()
    assert server.drafter.stats() == fresh.stats()
    assert torch.equal(server.drafter.index.costs, fresh.index.costs)
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
    server = Server(make(width=4000, capacity=200_000, num_draft_tokens=8), width=4000)
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


def test_drafts_that_are_never_verified_are_judged_all_the_same() -> None:
    """A text that begins to copy after long free writing comes back by itself."""
    server = Server(make(width=2000), width=2000, prune=only_likely(0.3))
    rng = np.random.default_rng(1)
    free, copied = rng.integers(0, 8, 900).tolist(), distinct(60, 9)
    server.start(0, [*copied, *free, *copied * 8], 60)
    while server.lengths[0] < 960:
        server.round()
    assert max(server.round() for _ in range(24)) > 4


# --- where texts lie ------------------------------------------------------------------------------


def test_a_text_that_grows_keeps_its_place() -> None:
    drafter = make(width=60, capacity=1024, num_draft_tokens=3)
    server = Server(drafter, width=60)
    text = distinct(7) * 9
    server.start(0, text, 16)
    for turn in range(40):  # others come and go, as many as fill the log several times
        for row in range(1, ROWS):
            server.start(row, distinct(60, 500 + turn + 7 * row), 20)
        if turn % 10 == 0:
            server.round()
        server.propose()
        at = drafter._growing[0][0]
        kept = drafter.index.log[at : at + int(server.lengths[0])] - 1
        assert kept.tolist() == text[: len(kept)]
        spans = sorted(drafter._growing.values())
        assert len(spans) == ROWS
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert spans[-1][1] <= len(drafter.index.log)
        for row in range(1, ROWS):
            server.stop(row)


def test_a_text_that_has_ended_is_drafted_from_until_its_place_is_needed() -> None:
    server = Server(make(width=60, capacity=1024), width=60)
    server.start(0, distinct(60), 60)
    server.propose()
    server.stop(0)
    server.start(1, distinct(60), 8)
    assert chain(server.propose())[:4] == distinct(60)[8:12]
    server.stop(1)
    for turn in range(30):
        server.start(0, distinct(60, 501 + turn), 60)
        server.propose()
        server.stop(0)
    server.start(1, distinct(60), 8)
    assert server.propose().num_nodes.tolist() == [1]


def test_a_log_has_room_for_all_texts_that_grow_and_the_table_for_the_capacity() -> None:
    size = IndexSize.of(10_000_000, 131_072, 48)
    assert size.tokens > 48 * 131_072
    assert size.grams <= 10_000_000
    assert IndexSize.of(10_000_000, 4096, 48).grams == 10_000_000 // GRAMS * GRAMS
    assert IndexSize.of(10_000_000, 131_072, 100_000).nbytes < 1 << 29


# --- options and the benchmark --------------------------------------------------------------------


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
    assert drafter.index.by_count
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
            make(**case)  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [2, 5, 18, 64])
def test_breadth_falls_to_the_longest_match(depth: int) -> None:
    options = NgramOptions(max_trie_depth=depth, min_bfs_breadth=2, max_bfs_breadth=6)
    breadth, longest = options.breadth(), min(depth - 1, 16)
    assert options.longest == longest
    assert set(breadth[longest:].tolist()) == {2}
    assert breadth[1].item() == (6 if longest > 1 else 2)
    assert bool((breadth.diff() <= 0).all())


def test_the_benchmark_serves_what_was_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Accept lengths are exact: a text that repeats itself is accepted as far as trees go."""
    texts, result = tmp_path / "texts.jsonl", tmp_path / "ngram.json"
    loop = {"name": "bench96", "prompt": [5, 6, 7, 5, 6, 7], "output": [5, 6, 7] * 5}
    free = {"name": "bench96", "prompt": [100], "output": list(range(200, 215))}
    texts.write_text("".join(json.dumps(line) + "\n" for line in (loop, free)))
    command = ["ngram", "--texts", str(texts), "--json", str(result), "--sets", "bench96"]
    assert bench_main([*command, "--nodes", "8", "--requests", "1", "2"]) == 0
    assert "accept_length" in capsys.readouterr().out
    row = json.loads(result.read_text())
    assert row["argv"][:4] == ["python", "-m", "sgl_spec.bench", "ngram"]
    assert row["hardware"]["cpu"]
    lengths = [each["accept_length"] for each in row["rows"]]
    assert lengths == [28 / 16, 28 / 16]


def test_the_benchmark_records_greedy_texts(tmp_path: Path) -> None:
    options = bench._parser().parse_args(
        ["--limit", "1", "--max-new-tokens", "3", "--texts", str(tmp_path / "texts")]
    )
    texts = bench.record(options)
    assert [text.name for text in texts] == ["bench96"] * 6 + ["spec_bench"] * 6
    assert all(1 <= len(text.output) <= 3 for text in texts)
    assert bench.record(options) == texts


def test_the_benchmark_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_main(["nothing"]) == 2
    assert "ngram" in capsys.readouterr().err
    assert bench_main(["--help"]) == 0
