"""One engine: checkpoint to scheduler. Used by the engine process and, in-process, by
`sgl_spec.LLM`."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import msgspec
import psutil

from sgl_spec.args import ServerArgs
from sgl_spec.engine.asked import AskedDrafts
from sgl_spec.engine.costs import Costs, forward_costs
from sgl_spec.engine.device import device_name, fitting, resolve_device
from sgl_spec.engine.drafting import (
    find_draft_model,
    load_draft_model,
    make_drafter,
    register_drafters,
    rule_of,
    topology_of,
)
from sgl_spec.engine.grammar import Compile, make_compiler, refuse_all
from sgl_spec.engine.grammar_jobs import GrammarJobs
from sgl_spec.engine.kv_pool import ceil_page, floor_page
from sgl_spec.engine.limits import Limits
from sgl_spec.engine.metrics import (
    DRAFTS_ENOUGH,
    EngineCounters,
    RoundLog,
    Throughput,
    useless_drafts,
)
from sgl_spec.engine.policy import (
    PREFILL_REQUESTS_CUDA,
    PREFILLS_IN_A_ROW_CUDA,
    tree_reserve,
)
from sgl_spec.engine.profiling import Profiler
from sgl_spec.engine.ranks import OnDeath, Party, lead
from sgl_spec.engine.req import make_req
from sgl_spec.engine.scheduler import Scheduler
from sgl_spec.engine.sizing import Sizing
from sgl_spec.engine.slots import SlotManager
from sgl_spec.engine.worker import Worker
from sgl_spec.errors import InvalidRequestError, SglSpecError
from sgl_spec.layers.context import KVCache
from sgl_spec.layers.transfer import wait_for
from sgl_spec.messages import (
    Abort,
    Control,
    EngineState,
    OutputChunk,
    PrepareMore,
    Step,
    Submit,
)
from sgl_spec.models.checkpoint import resolve_checkpoint, resolve_tokenizer
from sgl_spec.models.loader import load_model
from sgl_spec.request import TokenizedRequest
from sgl_spec.speculative.base import follows_kv
from sgl_spec.speculative.model_drafter import ModelDrafter
from sgl_spec.speculative.rules import FollowRule
from sgl_spec.speculative.simulate import SimulatedRule
from sgl_spec.text import PROMPT_TAIL, StopMatcher, load_tokenizer

if TYPE_CHECKING:
    from sgl_spec.engine.cuda.worker import DeviceWorker  # a CPU server needs no triton

logger = logging.getLogger(__name__)

_NO_ARGS: Mapping[str, Any] = MappingProxyType({})
SCRATCH_SLOTS = 64  # behind the pool's, for rows that fill up a batch


class Engine:
    """A model with its scheduler. Not thread-safe: one thread submits and steps.

    info: plain data about what was loaded, as `messages.Ready` carries it. party: the ranks that
    run the same engine; those are told what this one is. Made by `start`, or alone.
    """

    def __init__(
        self, args: ServerArgs, party: Party | None = None, *, check_every_step: bool = False
    ) -> None:
        resolved = args.resolve()
        self.party = party or Party()
        assert self.party.ranks.size == resolved.tp_size, "`start` makes the other ranks"
        self.device = resolve_device(resolved.device)
        self.args = resolved.for_device(self.device.type)
        register_drafters(self.args)
        self._free_at_start = psutil.virtual_memory().available // self.party.ranks.size
        self.model_dir, self.tokenizer_dir = self._directories()
        self._draft = find_draft_model(self.args)
        with fitting("The weights", self.device):
            self.model = load_model(
                self.model_dir,
                dtype=self.args.dtype,
                device=str(self.device),
                load_format=self.args.load_format,
                context_length=self.args.context_length,
                attention_backend=self.args.attention_backend,
                ranks=self.party.ranks,
                strict=bool(self.args.strict),
            )
            if self.args.strict:
                from sgl_spec.engine.strict import require_strict

                require_strict(self.model, every=self.args.check_strict)
        self.args = self.args.for_target(self.model.config.architecture)
        self.counters = EngineCounters()
        self.throughput = Throughput()
        self.profiler = Profiler()
        self.judged = False  # whether the draft model was found good, or a warning given
        self.round_log = RoundLog(self.args.decode_log_interval, self.args.simulate_acc_len)
        self.tokenizer = load_tokenizer(self.tokenizer_dir)
        self._build(check_every_step)

    @classmethod
    def start(cls, args: ServerArgs, on_death: OnDeath) -> Self:
        """An engine with the ranks that the flags ask for."""
        resolved = args.resolve()
        party = lead(resolved, on_death)
        try:
            return cls(resolved, party)
        except BaseException as error:
            reason = None if isinstance(error, SglSpecError) else party.failure()
            party.close()
            if reason is not None:
                raise SglSpecError(reason) from error
            raise

    def _directories(self) -> tuple[Path, Path]:
        """Where the model is, and where its tokenizer."""
        path, revision = self.args.model_path, self.args.revision
        if self.args.tokenizer_path == path:
            both = resolve_checkpoint(path, revision)
            return both, both
        model = resolve_checkpoint(path, revision, tokenizer=False)
        return model, resolve_tokenizer(self.args.tokenizer_path)

    def _build(self, check_every_step: bool) -> None:
        args, config = self.args, self.model.config
        self.context_length = config.context_length
        with fitting("The draft's weights", self.device):
            self.draft_model = load_draft_model(args, self._draft, self.model, self.tokenizer_dir)
        self.sizing = Sizing(args, self.device, self.model, self.draft_model, self._free_at_start)
        reserve, page = tree_reserve(args.round_slots), args.page_size
        width = ceil_page(self.context_length + reserve + page - 1, page)
        self.num_slots = self.party.ranks.least(self.sizing.pool_slots(width))
        rows = min(args.max_running_requests, max(1, self.num_slots // (reserve + page)))
        self.slots = SlotManager(
            num_slots=self.num_slots,
            page_size=page,
            num_rows=rows,
            width=width,
            use_cache=not args.disable_radix_cache,
            device=self.device,
            scratch=SCRATCH_SLOTS if self._mirrors else 0,
        )
        kv = self.model.new_kv_cache(self.slots.cache_slots)
        self.rule = rule_of(args)
        self.drafter = make_drafter(
            args, self.model, self.slots, self.draft_model, self.sizing.index
        )
        self.slots.reads_ahead = follows_kv(self.drafter) and self.drafter.reads_ahead
        self.worker = self._make_worker(kv, rows)
        limits = self._limits(rows, reserve, check_every_step)
        grammars = GrammarJobs(
            self._grammar_compiler(), config.vocab_size, agree=self.party.ranks.agree
        )
        self.scheduler = Scheduler(self.worker, self.slots, limits, self.counters, grammars)

    def _make_worker(self, kv: KVCache, rows: int) -> Worker | DeviceWorker:
        """What runs the batches: rounds that live on the device where the fused kernels run, the
        drafter is one of ours and drafts are followed, else one forward at a time."""
        args, table = self.args, self.slots.table
        ours = not follows_kv(self.drafter) or isinstance(self.drafter, ModelDrafter)
        simulated = self.rule if isinstance(self.rule, SimulatedRule) else None
        follows = isinstance(self.rule if simulated is None else simulated.rule, FollowRule)
        if self.model.kernels == "torch" or not ours or not follows:
            return Worker(
                self.model,
                kv,
                table,
                drafter=self.drafter,
                asked=self._asked(kv, rows),
                rule=self.rule,
                topology=topology_of(args),
            )
        from sgl_spec.engine.cuda.graphs import Rounds
        from sgl_spec.engine.cuda.worker import DeviceWorker

        sizes = self.sizing.graph_sizes(rows)
        worker = DeviceWorker(
            self.model,
            kv,
            table,
            rounds=Rounds(sizes, captures=bool(sizes)),
            most_nodes=args.tree_nodes,
            drafter=self.drafter,
            simulated=simulated,
            weighs=self._weighs,
            prefill_rows=self.sizing.prefill_budget,
        )
        worker.prepare()
        return worker

    def _asked(self, kv: KVCache, rows: int) -> AskedDrafts | None:
        """What decides about drafts, where they may be left out by what they cost."""
        if not self._weighs:
            return None
        most = rows * self.args.tree_nodes
        measured = forward_costs(self.model, kv, max_requests=rows, max_rows=most)
        logger.info("Verify cost in ms: %s", measured)
        return AskedDrafts(Costs(measured), partial(wait_for, self.device), self.model.clock)

    @property
    def _weighs(self) -> bool:
        """Whether a drafter's trees may be cut by what they cost. A simulated length needs whole
        trees."""
        args = self.args
        whole = args.speculative_verify_whole_trees or args.simulate_acc_len is not None
        return self.drafter is not None and not self.rule.samples and not whole

    @property
    def _mirrors(self) -> bool:
        """Whether the slot table has a copy on the device."""
        return self.device.type != "cpu" or self.model.kernels == "triton"

    def _grammar_compiler(self) -> Compile:
        if self.args.grammar_backend == "none":
            return refuse_all("is not supported: the server runs with --grammar-backend none")
        config = self.model.config
        closed = not self.args.open_json_schemas
        return make_compiler(self.tokenizer, config.vocab_size, config.eos_token_ids, closed=closed)

    def _limits(self, rows: int, reserve: int, check_every_step: bool) -> Limits:
        args = self.args
        alone = floor_page(self.num_slots, args.page_size) - reserve
        return Limits(
            max_running=rows,
            max_queued=args.max_queued_requests,
            max_request_tokens=min(self.context_length, alone),
            prefill_budget=self.sizing.prefill_budget,
            prefill_requests=PREFILL_REQUESTS_CUDA if self.sizing.graph_sizes(rows) else None,
            prefills_in_a_row=PREFILLS_IN_A_ROW_CUDA if self.device.type == "cuda" else 1,
            pause_tokens=self.worker.pause_tokens(args.max_prefill_pause_ms),
            chunked=args.chunked_prefill_size != -1,
            draft_tokens=args.tree_nodes,
            round_slots=args.round_slots,
            schedule_policy=args.schedule_policy,
            stream_interval=args.stream_interval,
            overlap=not args.disable_overlap_schedule,
            check_every_step=check_every_step,
        )

    @property
    def info(self) -> dict[str, Any]:
        """What /model_info and /server_info show of the engine."""
        config, limits = self.model.config, self.scheduler.limits
        return {
            "model_dir": str(self.model_dir),
            "tokenizer_dir": str(self.tokenizer_dir),
            "model_path": self.args.model_path,
            "vocab_size": config.vocab_size,
            "context_length": self.context_length,
            "max_req_input_len": limits.max_request_tokens - 1,
            "max_request_tokens": limits.max_request_tokens,
            "max_total_tokens": self.num_slots,
            "max_running_requests": limits.max_running,
            "eos_token_ids": list(config.eos_token_ids),
            "generation_defaults": dict(config.generation_defaults),
            "architectures": [config.architecture],
            "model_type": config.model_type,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.device.type,
            "device_name": device_name(self.device),
            "attention_backend": self.model.backend.name,
            "strict": self.model.backend.strict,
            "chunked_prefill_size": self.args.chunked_prefill_size,
            "page_size": self.args.page_size,
            "speculative_algorithm": self.args.speculative_algorithm,
            "draft_tokens": self.args.tree_nodes,
            "acceptance_rule": self.rule.name,
            "memory": self.sizing.memory(self.num_slots),
            "tp_size": self.party.ranks.size,
        }

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return self.scheduler.has_work

    def submit(self, request: TokenizedRequest) -> None:
        """Queue a request; it is answered by the chunks of later steps."""
        self.party.tell(Submit(request))
        stops = None
        if request.sampling.stop:
            stops = StopMatcher(
                self.tokenizer,
                request.sampling.stop,
                skip_special_tokens=request.sampling.skip_special_tokens,
                prompt_tail=request.input_ids[-PROMPT_TAIL:],
            )
        req = make_req(request, self.model.config.eos_token_ids, stops)
        req.spec.simulated = self.args.simulate_acc_len
        self.scheduler.submit(req)

    def abort(self, rid: str | None) -> None:
        """End one request, or all of them for None."""
        self.party.tell(Abort(rid))
        self.scheduler.abort(rid)

    def prepare_more(self) -> bool:
        """Use a moment without work; see `Worker.prepare_more`."""
        self.party.tell(PrepareMore())
        return self.worker.prepare_more()

    def step(self) -> list[OutputChunk]:
        """One forward; the chunks it gave."""
        self.party.tell(Step())
        with self.profiler.step():
            chunks = self.scheduler.step()
        self.profiler.stepped()
        self.throughput.add(self.counters.generated)
        self._log_rounds()
        if not self.has_work:
            self.slots.check_counts([])
        if self.args.check_ranks:
            self.party.check(self._digest(chunks))
        return chunks

    def _digest(self, chunks: list[OutputChunk]) -> int:
        """Of what a step decided: the tokens that it gave out, and all counts, those of drafts
        included."""
        given = [(chunk.rid, chunk.ids, chunk.finish is not None) for chunk in chunks]
        return zlib.crc32(repr((given, self.counters.as_dict())).encode())

    def close(self) -> None:
        """The end of the other ranks."""
        self.party.close()

    def _log_rounds(self) -> None:
        running = self.scheduler.running
        shown: dict[str, Any] = {
            "running": len(running),
            "queued": len(self.scheduler.waiting),
            "used": self.slots.held_slots(running) / self.num_slots,
        }
        for line in (
            self.round_log.prefill_line(self.counters, **shown),
            self.round_log.line(self.counters, **shown),
        ):
            if line is not None:
                logger.info(line)

        self._judge_drafts()

    def _judge_drafts(self) -> None:
        """Warn once of a draft model that is of no use."""
        if self.judged or self.draft_model is None or self.args.simulate_acc_len is not None:
            return
        problem = useless_drafts(self.counters)
        self.judged = problem is not None or self.counters.proposed >= 10 * DRAFTS_ENOUGH
        if problem is not None:
            logger.warning("%s", problem)

    def control(self, op: str, args: Mapping[str, Any] = _NO_ARGS) -> tuple[dict[str, Any], str]:
        """Answer `messages.Control`: (data, message). Raises `InvalidRequestError` if it cannot."""
        if op == "state":
            return msgspec.to_builtins(self.state()), ""
        if op == "flush_cache":
            self.party.tell(Control(0, op))
            if not self.scheduler.flush():
                raise InvalidRequestError("The cache was not flushed: requests are running.")
            return {}, "Cache flushed."
        if op == "start_profile":
            return {"trace": str(self.profiler.start(args))}, "Profiling started."
        if op == "stop_profile":
            return {"trace": str(self.profiler.stop())}, "Profiling stopped."
        raise InvalidRequestError(
            f"op must be state, flush_cache, start_profile or stop_profile, got {op!r}.", param="op"
        )

    def state(self) -> EngineState:
        """Counts as of now."""
        running, counters = self.scheduler.running, self.counters
        held = self.slots.held_slots(running)
        return EngineState(
            running=len(running),
            queued=len(self.scheduler.waiting),
            grammar_queued=len(self.scheduler.compiling),
            used_tokens=held,
            cached_tokens=self.slots.cache.cached_tokens,
            free_tokens=self.slots.pages.free_slots,
            held_tokens=held,
            gen_throughput=self.throughput.rate(),
            drafter=self.worker.drafter_stats(),
            **counters.as_dict(),
        )
