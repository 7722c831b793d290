"""How large things are: the KV pools, the largest forwards, what is captured as CUDA graphs."""

from __future__ import annotations

import torch

from sgl_spec.args import ResolvedArgs
from sgl_spec.engine.cuda.costs import TreeShapes
from sgl_spec.engine.drafting import device_index
from sgl_spec.engine.memory import (
    CAPTURED_ROWS,
    ROUND_KINDS,
    GpuMemory,
    Shapes,
    cpu_room,
    gpu_hint,
    least_slots,
    pool_slots,
    row_counts,
    work_bytes,
)
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.draft import DraftModel
from sgl_spec.speculative.ngram import IndexSize


class Sizing:
    """Sizes of one engine by its flags, its models and the memory. free_at_start: bytes that were
    free before anything was loaded.

    work: bytes that a GPU's forwards need beside weights and KV; known with the pool's slots.
    """

    def __init__(
        self,
        args: ResolvedArgs,
        device: torch.device,
        model: Decoder,
        draft_model: DraftModel | None,
        free_at_start: int,
    ) -> None:
        self.args, self.device = args, device
        self.model, self.draft_model = model, draft_model
        self.context_length = model.config.context_length
        self.work = 0
        self._free_at_start = free_at_start

    def pool_slots(self, width: int) -> int:
        """Slots of the KV pools. width: most slots of a request."""
        args, per_token = self.args, self._kv_bytes_per_token()
        if self.device.type == "cpu":
            draft = 0 if self.draft_model is None else self.draft_model.weight_bytes
            weights = self.model.weight_bytes + draft
            return pool_slots(args, cpu_room(args, self._free_at_start, weights), per_token, width)
        self._reserve_work(width)
        memory = GpuMemory.read(self.device)
        config, itemsize = self.model.config, self.model.dtype.itemsize
        self.work = work_bytes(config, itemsize, self._largest_shapes())
        self.work += 0 if self.index is None else self.index.nbytes
        if args.max_total_tokens is not None:
            memory.check_slots(args.max_total_tokens, per_token, self.work)
            return pool_slots(args, 0, per_token, width)
        room = memory.room(args.mem_fraction_static, self.work)
        hint = gpu_hint(memory, self.work, least_slots(args, width) * per_token)
        return pool_slots(args, room, per_token, width, hint)

    def _reserve_work(self, width: int) -> None:
        """Make the models' work space, so that what is left of the memory is known. width: most
        positions of a request."""
        args = self.args
        self.model.reserve(args.max_running_requests, args.tree_nodes, width)
        if self.draft_model is not None:
            most = max(args.round_slots, args.tree_nodes)
            self.draft_model.reserve(args.max_running_requests, most, width)

    @property
    def index(self) -> IndexSize | None:
        """See `drafting.device_index`."""
        return device_index(self.args, self.model, self.context_length)

    def _largest_shapes(self) -> Shapes:
        """What the largest forwards will hold."""
        args, draft = self.args, self.draft_model
        prompt_rows = self.prefill_budget
        if args.chunked_prefill_size == -1:
            prompt_rows = max(prompt_rows, self.context_length)
        sizes = self.graph_sizes(args.max_running_requests)
        trees = TreeShapes(sizes, args.tree_nodes) if draft is None and args.tree_nodes > 1 else ()
        prompts = len(row_counts(min(self.prefill_budget, CAPTURED_ROWS)))
        return Shapes(
            prompt_rows=prompt_rows,
            requests=args.max_running_requests,
            nodes=args.tree_nodes,
            captured=0 if draft is None else len(draft.capture),
            draft_columns=0 if draft is None else draft.logit_width,
            graphs=ROUND_KINDS * (len(sizes) + len(trees)) + (prompts if sizes else 0),
        )

    def graph_sizes(self, rows: int) -> tuple[int, ...]:
        """Batch sizes whose rounds are captured as CUDA graphs; () where none is."""
        args, capturable = self.args, self.model.backend.capturable
        if self.device.type != "cuda" or args.disable_cuda_graph or not capturable:
            return ()
        from sgl_spec.engine.cuda.graphs import capture_sizes  # a CPU server needs no triton

        return capture_sizes(rows, args.cuda_graph_bs, args.cuda_graph_max_bs)

    @property
    def prefill_budget(self) -> int:
        """Prompt tokens of one forward."""
        chunk, most = self.args.chunked_prefill_size, self.args.max_prefill_tokens
        assert chunk is not None, "decided with the device"
        return most if chunk == -1 else min(chunk, most)

    def _kv_bytes_per_token(self) -> int:
        """Bytes of one slot in the target's cache and in the draft model's."""
        draft = self.draft_model
        own = 0 if draft is None else draft.kv_bytes_per_token
        return self.model.kv_bytes_per_token + own

    def memory(self, num_slots: int) -> dict[str, float]:
        """GB of weights and KV caches, the draft model's included and by itself; of a GPU also what
        is set aside for work space and CUDA graphs, and its memory."""
        draft, kv = self.draft_model, num_slots * self._kv_bytes_per_token()
        gpu = {}
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            gpu = {"work": self.work / 1e9, "total": total / 1e9, "free": free / 1e9}
        own = 0 if draft is None else draft.weight_bytes
        target_kv = num_slots * self.model.kv_bytes_per_token
        return {
            "weight": (self.model.weight_bytes + own) / 1e9,
            "kvcache": kv / 1e9,
            "draft_weight": own / 1e9,
            "draft_kvcache": (kv - target_kv) / 1e9,
            "token_capacity": num_slots,
            **gpu,
        }
