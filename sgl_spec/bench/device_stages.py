"""The stages of a round on a device, whose rounds are graphs; see `stages`.

Marks lie between stages, not between the layers of a forward, so that they cost a round little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from sgl_spec.bench.stages import Recorder, Replacement, Wrapped, as_stage, replaced
from sgl_spec.engine.cuda import host_round, ngram_round, plain_round, rounds, tree_round
from sgl_spec.engine.cuda.graphs import Replayed
from sgl_spec.engine.cuda.ngram import DeviceNgram
from sgl_spec.engine.cuda.worker import DeviceWorker
from sgl_spec.engine.engine import Engine
from sgl_spec.models.eagle import EagleHead
from sgl_spec.models.layer import total_bytes
from sgl_spec.models.standalone import StandaloneDraft
from sgl_spec.speculative.model_drafter import ModelDrafter


@contextmanager
def watched_device(engine: Engine, recorder: Recorder) -> Iterator[None]:
    """The engine with every stage of its rounds wrapped, its graphs made anew with the marks, and
    without a batch in flight between steps; as it was afterwards."""
    worker, scheduler = engine.scheduler.worker, engine.scheduler
    assert isinstance(worker, DeviceWorker)
    limits = scheduler.limits
    scheduler.limits = replace(limits, overlap=False)
    worker.rounds.forget()
    try:
        with replaced([*_host(engine, recorder), *_device(engine, recorder), *_graphs(recorder)]):
            yield
    finally:
        scheduler.limits = limits
        worker.rounds.forget()


def _host(engine: Engine, recorder: Recorder) -> Iterator[Replacement]:
    worker: Any = engine.scheduler.worker
    if engine.drafter is not None and not isinstance(engine.drafter, ModelDrafter | DeviceNgram):
        propose = engine.drafter.propose
        yield engine.drafter, "propose", Wrapped(recorder, "drafting", propose)
        yield worker, "settle", Wrapped(recorder, "tell the drafter", worker.settle)


def _device(engine: Engine, recorder: Recorder) -> Iterator[Replacement]:
    model: Any = engine.model
    weights = total_bytes([*model.stack.tensors(), model.norm])
    verify = _reading(recorder, weights, model.kv_bytes_per_token, rounds.verify)
    for module in (plain_round, tree_round, host_round, ngram_round):
        yield module, "verify", as_stage(recorder, "verify", verify)
    head = _reading(recorder, total_bytes(model.lm_head.tensors()), 0, model.raw_logits)
    yield model, "raw_logits", Wrapped(recorder, "output layer", head)
    stages: list[tuple[Any, str, str]] = [
        (tree_round, "build_tree", "tree build"),
        (tree_round, "grow_tree", "tree build"),
        (rounds, "move_path", "compaction"),
        (rounds.Acceptance, "accept", "sample and follow"),
        (tree_round.Drafting, "grow", "draft steps"),
        (ngram_round.NgramRound, "_draft", "drafting"),
        (ngram_round.NgramRound, "_learn", "tell the drafter"),
        (tree_round.Extension, "extend", "draft extend"),
        (rounds.Requests, "begin", "row state"),
        (rounds.Acceptance, "finish", "row state"),
    ]
    for owner, name, stage in stages:
        yield owner, name, as_stage(recorder, stage, getattr(owner, name))
    if engine.draft_model is not None:
        yield from _draft_reads(engine.draft_model, recorder)


def _draft_reads(draft: Any, recorder: Recorder) -> Iterator[Replacement]:
    """What a forward of the draft model, its output layer and its fusion read, in whichever stage
    they are."""
    if isinstance(draft, StandaloneDraft):
        layers, head, fusion = draft.model.stack.tensors(), draft.model.lm_head, None
    else:
        layers, head, fusion = draft._stack.tensors(), draft._head, draft._fc
        if isinstance(draft, EagleHead):  # whose fusion is part of its forward
            layers, fusion = [*layers, *fusion.tensors()], None
    reads = [("forward", total_bytes(layers), draft.kv_bytes_per_token)]
    reads.append(("raw_logits", total_bytes(head.tensors()), 0))
    if fusion is not None:
        reads.append(("fuse", total_bytes(fusion.tensors()), 0))
    for name, read, kv in reads:
        yield draft, name, _reading(recorder, read, kv, getattr(draft, name))


def _reading(
    recorder: Recorder, read: int, kv: int, inner: Callable[..., Any]
) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Tensor:
        recorder.reads(read, kv)
        found: Tensor = inner(*args, **kwargs)
        return found

    return counted


def _graphs(recorder: Recorder) -> Iterator[Replacement]:
    run, capture = Replayed.run, Replayed.capture

    def watched_run(self: Replayed) -> None:
        if self.graph is not None:
            recorder.replay(self)
        run(self)

    def watched_capture(self: Replayed, pool: object) -> None:
        with recorder.capture(self):
            capture(self, pool)

    yield Replayed, "run", watched_run
    yield Replayed, "capture", watched_capture
