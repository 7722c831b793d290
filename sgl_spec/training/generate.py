"""Batched generation for making data: as many tokens per second as one device gives.

It serves nobody: no prefix cache, no streaming, one KV region of fixed length per row. A row that
finishes is given the next prompt every few steps, so the batch stays full until prompts run out.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgl_spec.errors import ConfigError
from sgl_spec.models.decoder import Decoder
from sgl_spec.training.static_decoder import Rows, StaticDecoder, capacity_for

logger = logging.getLogger(__name__)
IntArray = npt.NDArray[np.int64]

_STEPS = 16  # between two looks at what has finished
_PREFILL_TOKENS = 1 << 15  # padded tokens of one prefill, for memory


def kv_bytes(model: Decoder, tokens: int) -> int:
    """KV memory of one row of a `Generator` for prompts and answers of `tokens` together."""
    return capacity_for(tokens) * model.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt to continue. max_new: most new tokens; temperature: 0 for greedy."""

    index: int
    prompt: IntArray
    max_new: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a job got. tokens: new ids, the stop id included. ended: with a stop id."""

    job: Job
    tokens: IntArray
    ended: bool


class Generator:
    """Continues prompts with one model, `batch_size` at a time.

    max_prompt, max_new: the longest job, in tokens; KV memory is `batch_size` rows of their sum.
    stop_ids: None for the model's own. Sampling draws from torch's generator of the device, seeded
    here. attention: "torch" or "triton" (a GPU only). On a GPU the decode step is replayed as a
    CUDA graph unless `graphs` is False.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        batch_size: int,
        max_prompt: int,
        max_new: int,
        seed: int,
        stop_ids: tuple[int, ...] | None = None,
        attention: str = "torch",
        graphs: bool = True,
    ) -> None:
        self.max_prompt, self.max_new = max_prompt, max_new
        self._check_lengths(model, max_prompt + max_new)
        self._device = model.device
        self._rows = Rows.empty(batch_size, max_new, model.device)
        stops = model.config.eos_token_ids if stop_ids is None else stop_ids
        capacity = capacity_for(max_prompt + max_new)
        self._decoder = StaticDecoder(
            model, self._rows, capacity, stops, attention=attention, graphs=graphs
        )
        self._stops = set(stops)
        self._jobs: list[Job | None] = [None] * batch_size
        self._next = np.zeros(batch_size, dtype=np.int64)  # position fed next, as the host knows it
        torch.manual_seed(seed)

    def run(self, jobs: Iterable[Job]) -> Iterator[Continuation]:
        """Continuations in the order in which they finish.

        `jobs` is read as rows get free. It runs best when neighbours are about equally long. A run
        may be left at any time; the next one starts afresh.
        """
        queue = iter(jobs)
        self._clear()
        self._fill(queue)
        while any(job is not None for job in self._jobs):
            with torch.inference_mode():
                self._decoder.advance(_STEPS, int(self._next.max()) + _STEPS)
            yield from self._harvest()
            self._fill(queue)

    def _clear(self) -> None:
        """Forget the jobs of a run that its caller left early."""
        self._jobs = [None] * len(self._jobs)
        self._next[:] = 0
        self._rows.alive.zero_()

    def _check_lengths(self, model: Decoder, longest: int) -> None:
        if longest > model.config.context_length:
            raise ConfigError(
                f"Prompts of {self.max_prompt} and answers of {self.max_new} tokens need a context "
                f"of {longest}; the model has {model.config.context_length}."
            )

    def _fill(self, queue: Iterator[Job]) -> None:
        """Give free rows the next jobs."""
        free = deque(row for row, job in enumerate(self._jobs) if job is None)
        taken: list[tuple[int, Job]] = []
        while free and (job := next(queue, None)) is not None:
            self._check_job(job)
            taken.append((free.popleft(), job))
        if not taken:
            return
        for row, job in taken:
            self._jobs[row] = job
            self._next[row] = len(job.prompt) - 1
        with torch.inference_mode():
            self._start(taken)

    def _check_job(self, job: Job) -> None:
        fits = 1 <= len(job.prompt) <= self.max_prompt and 1 <= job.max_new <= self.max_new
        assert fits, f"{len(job.prompt)} + {job.max_new} tokens, room for {self.max_prompt}"

    def _start(self, taken: list[tuple[int, Job]]) -> None:
        """Write the KV of each prompt but its last token, which is the first that is fed."""
        taken = sorted(taken, key=lambda item: len(item[1].prompt))
        for group in _padded_groups(taken):
            longest = len(group[-1][1].prompt) - 1
            ids = np.zeros((len(group), longest), dtype=np.int64)
            for line, (_, job) in zip(ids, group, strict=True):
                line[: len(job.prompt) - 1] = job.prompt[:-1]
            if longest:
                self._decoder.prefill(self._on_device([row for row, _ in group]), self._copy(ids))
        self._rows.start(
            self._on_device([row for row, _ in taken]),
            tokens=self._on_device([int(job.prompt[-1]) for _, job in taken]),
            positions=self._on_device([len(job.prompt) - 1 for _, job in taken]),
            limits=self._on_device([job.max_new for _, job in taken]),
            temperatures=torch.tensor([job.temperature for _, job in taken]).to(self._device),
        )

    def _harvest(self) -> list[Continuation]:
        """Take out what has finished; one transfer says which rows, one brings their tokens."""
        state = torch.stack((self._rows.alive.long(), self._rows.counts)).cpu().numpy()
        done = [row for row, job in enumerate(self._jobs) if job is not None and not state[0, row]]
        alive = state[0].astype(bool)
        self._next[alive] += _STEPS
        if not done:
            return []
        new = self._rows.new[self._on_device(done)].cpu().numpy().astype(np.int64)
        finished = []
        for line, row in zip(new, done, strict=True):
            job = self._jobs[row]
            assert job is not None
            tokens = line[: state[1, row]]
            finished.append(Continuation(job, tokens, int(tokens[-1]) in self._stops))
            self._jobs[row] = None
            self._next[row] = 0
        return finished

    def _on_device(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device)

    def _copy(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _padded_groups(taken: list[tuple[int, Job]]) -> Iterator[list[tuple[int, Job]]]:
    """Runs of jobs, ascending in length, whose padded size stays within `_PREFILL_TOKENS`."""
    group: list[tuple[int, Job]] = []
    for item in taken:
        if group and (len(group) + 1) * len(item[1].prompt) > _PREFILL_TOKENS:
            yield group
            group = []
        group.append(item)
    if group:
        yield group
