"""Trees of a drafter on the host, in rounds on the device: with them, without them ahead of the
host, and from the one to the other. In the interpreter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from device_cases import CUSTOM
from kernel_runs import INTERPRETED
from tiny import MIN_VOCAB, make_tiny

from sgl_spec import LLM
from sgl_spec.engine.asked import ASK, PLAIN, AskedDrafts
from sgl_spec.engine.batch import Batch, DecodeBatch, Launched
from sgl_spec.engine.control import Decision, Load
from sgl_spec.engine.costs import Costs
from sgl_spec.engine.cuda import worker as device_worker
from sgl_spec.engine.cuda.costs import DeviceCosts, TreeShapes
from sgl_spec.engine.cuda.drafting import HostTreeRounds
from sgl_spec.engine.cuda.worker import DeviceWorker
from sgl_spec.speculative.base import DraftBatch
from sgl_spec.speculative.tree import AcceptResult, TokenTree

PROMPTS = [[7], [40, 41, 42, 43, 9], [40, 41, 5]]
NEW = [10, 5, 5]
ROWS = 2  # the third request comes when another has ended
NODES = 3


class Prophet:
    """Drafts what comes, and something wrong beside it, where the first text's length says so.
    asked: lengths of that text at proposals. told: [(length, kept)] of what it observed."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts
        self.row_of: dict[int, list[int]] = {}
        self.asked: list[int] = []
        self.told: list[tuple[int, int]] = []

    def begin(self, row: int, tokens: np.ndarray, known: int) -> None:
        (self.row_of[row],) = (t for t in self.texts if t[: len(tokens)] == tokens.tolist())

    def propose(self, batch: DraftBatch) -> TokenTree:
        self.asked.append(int(batch.lengths[0]))
        tokens = torch.zeros(len(batch.rows), NODES, dtype=torch.int64)
        parents = torch.tensor([[-1, 0, 1]]).repeat(len(batch.rows), 1)
        has = batch.lengths[0] % 4 > 1
        for i, (row, length) in enumerate(zip(batch.rows, batch.lengths, strict=True)):
            text = self.row_of[int(row)]
            assert text[:length] == batch.tokens[row, :length].tolist(), "not as collected"
            given = [text[length - 1], *text[length : length + 2], 1, 1][:NODES]
            given[2] += length % 3 == 0  # a wrong one now and then
            tokens[i] = torch.tensor(given) % MIN_VOCAB
        counts = torch.full((len(batch.rows),), NODES if has else 1)
        scores = torch.tensor([[1.0, 0.9, 0.8]]).repeat(len(tokens), 1)
        return TokenTree(tokens, parents, counts, scores)

    def observe(self, batch: DraftBatch, tree: TokenTree, accepted: AcceptResult) -> None:
        for row, length, kept in zip(batch.rows, batch.lengths, accepted.counts, strict=True):
            text = self.row_of[int(row)][: length + int(kept)]
            assert text == batch.tokens[row, : length + int(kept)].tolist()
        self.told.append((int(batch.lengths[0]), int(accepted.counts[0])))

    def finish(self, row: int) -> None:
        del self.row_of[row]

    def flush(self) -> None:
        pass

    def stats(self) -> dict[str, float]:
        return {}


class Watch:
    """A round takes 5 ms, and the device waits 3 ms for a tree."""

    @classmethod
    def started(cls) -> Watch:
        return cls()

    def stop(self) -> None:
        pass

    def ms(self) -> float:
        return 5.0

    def ms_until(self, later: Watch) -> float:
        return 3.0


class InTurn(AskedDrafts):
    """Asks for three rounds, and rests for three."""

    def decide(self, requests: int) -> Decision:
        super().decide(requests)
        self.made = getattr(self, "made", -1) + 1
        return Decision(Load(requests, requests), ASK if self.made % 6 < 3 else PLAIN, 1.0)


def known(shapes: TreeShapes) -> DeviceCosts:
    costs = DeviceCosts(shapes)
    costs.know(ROWS, ROWS, 5.0)
    costs.know(ROWS, ROWS * NODES, 5.0)
    return costs


@INTERPRETED
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of rows that fill a forward up: garbage
@pytest.mark.parametrize("overlap", [True, False])
def test_texts_are_the_same_with_and_without_trees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    target = make_tiny(tmp_path, vocab=MIN_VOCAB, layers=1)
    sampling = [{"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True} for new in NEW]
    options = {"max_total_tokens": 512, "max_running_requests": ROWS, "context_length": 64}
    expected = [one.output_ids for one in LLM(str(target), **options).generate(PROMPTS, sampling)]
    llm = LLM(
        str(target),
        attention_backend="triton",
        speculative_algorithm="PROMPT_LOOKUP",
        speculative_drafter_module=CUSTOM,
        speculative_num_draft_tokens=NODES,
        chunked_prefill_size=2,
        disable_overlap_schedule=not overlap,
        **options,
    )
    worker = llm.engine.scheduler.worker
    assert isinstance(worker, DeviceWorker)
    monkeypatch.setattr(device_worker, "Stopwatch", Watch)
    source = worker.source
    assert isinstance(source, HostTreeRounds)
    worker.rounds.sizes, source.shapes = (ROWS,), TreeShapes((ROWS,), NODES)
    texts = [prompt + new for prompt, new in zip(PROMPTS, expected, strict=True)]
    drafter = worker.drafter = Prophet(texts)
    source.costs = known(source.shapes)
    source.drafter, source.asked = drafter, InTurn(Costs(source.costs))
    launches: list[tuple[bool, int]] = []  # whether it is a round, and behind how many batches
    launch = worker.launch

    def watched(batch: Batch) -> Launched:
        launches.append((isinstance(batch, DecodeBatch), worker._under_way))
        return launch(batch)

    monkeypatch.setattr(worker, "launch", watched)
    assert [one.output_ids for one in llm.generate(PROMPTS, sampling)] == expected
    assert llm.engine.counters.accepted > 3
    behind = [under_way for is_round, under_way in launches if is_round]
    assert 0 in behind
    assert any(behind) == overlap, "rounds without trees run ahead"
    assert drafter.asked
    assert (False, 1) in launches or not overlap, "a prompt waits for no tokens"
    assert sum(kept for _, kept in drafter.told) >= NEW[0] - 1
    assert llm.engine.scheduler.flush()
