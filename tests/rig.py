"""A small engine around the fake model, driven step by step without processes or sockets."""

from __future__ import annotations

from collections.abc import Callable

from fakes import EOS, OracleDrafter, RandomDrafter, SumModel

from sgl_spec.engine.kv_pool import ceil_page
from sgl_spec.engine.limits import Limits
from sgl_spec.engine.metrics import EngineCounters
from sgl_spec.engine.policy import tree_reserve
from sgl_spec.engine.req import Req, make_req
from sgl_spec.engine.runner import Runner
from sgl_spec.engine.scheduler import Scheduler
from sgl_spec.engine.slots import SlotManager
from sgl_spec.engine.worker import Worker
from sgl_spec.messages import OutputChunk
from sgl_spec.request import LogprobParams, SamplingParams, TokenizedRequest

CONTEXT = 96
NODES = 6


class Rig:
    """A small engine; every step checks the whole slot invariant."""

    def __init__(
        self,
        *,
        drafter: str = "none",
        page: int = 1,
        slots: int = 2000,
        rows: int = 8,
        chunk: int = 16,
        use_cache: bool = True,
        spread: float = 6.0,
        worker: Callable[..., Runner] = Worker,
        **limits: object,
    ) -> None:
        self.model = SumModel(spread)
        nodes = 1 if drafter == "none" else NODES
        reserve = tree_reserve(nodes)
        width = ceil_page(CONTEXT + reserve + page - 1, page)
        self.slots = SlotManager(
            num_slots=ceil_page(slots, page),
            page_size=page,
            num_rows=rows,
            width=width,
            use_cache=use_cache,
        )
        kv = self.model.new_kv_cache(self.slots.pages.total)
        self.drafter = {
            "none": lambda: None,
            "random": lambda: RandomDrafter(NODES),
            "oracle": lambda: OracleDrafter(NODES, self.model),
        }[drafter]()
        self.worker = worker(
            self.model,
            kv,
            self.slots.table,
            drafter=self.drafter,
        )
        self.counters = EngineCounters()
        options: dict[str, object] = {
            "max_running": rows,
            "max_queued": None,
            "max_request_tokens": min(CONTEXT, self.slots.pages.total - reserve),
            "prefill_budget": chunk,
            "chunked": True,
            "draft_tokens": nodes,
            "round_slots": nodes,
            "check_every_step": True,
        }
        self.scheduler = Scheduler(
            self.worker,
            self.slots,
            Limits(**(options | limits)),  # type: ignore[arg-type]
            self.counters,
        )
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, OutputChunk] = {}
        self.chunks: dict[str, list[OutputChunk]] = {}
        self.sampling: dict[str, SamplingParams] = {}

    def submit(
        self,
        rid: str,
        prompt: list[int],
        *,
        stream: bool = False,
        logprobs: LogprobParams | None = None,
        **params: object,
    ) -> Req:
        sampling = SamplingParams(**({"seed": 1, "temperature": 0.0} | params))  # type: ignore[arg-type]
        self.sampling[rid] = sampling
        request = TokenizedRequest(
            rid=rid, input_ids=prompt, sampling=sampling, stream=stream, logprobs=logprobs
        )
        req = make_req(request, [EOS], None)
        self.scheduler.submit(req)
        return req

    def step(self) -> None:
        for chunk in self.scheduler.step():
            assert chunk.rid not in self.ends, "a chunk after the terminal one"
            self.chunks.setdefault(chunk.rid, []).append(chunk)
            self.outputs.setdefault(chunk.rid, []).extend(chunk.ids)
            if chunk.finish is not None:
                self.ends[chunk.rid] = chunk

    def run(self, most: int = 20_000) -> None:
        while self.scheduler.has_work:
            most -= 1
            assert most > 0, "the scheduler makes no progress"
            self.step()
        self.drained()

    def drained(self) -> None:
        """Everything is back: slots, rows, and the drafter's view of them."""
        self.slots.check([])
        assert self.scheduler.flush()
        assert self.slots.pages.free_slots == self.slots.pages.total
        if self.drafter is not None:
            assert not self.drafter.rows
