"""Batches on the training device, with the rows whose next-token distribution is learned."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sgl_spec.errors import ConfigError
from sgl_spec.training.shards import IntArray, TokenBatch, TokenShards

_READY = 4  # batches prepared ahead


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's data, on the device.

    tokens: [B, S] int64. rows: [N] int64, flat indices b * S + p of the positions p whose next
    token the draft learns to predict; p >= the feed's `reach`. num_tokens: without padding.
    """

    tokens: Tensor
    rows: Tensor
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Position:
    """Where in the data a run stands: `batch` batches of pass `epoch` are done."""

    epoch: int = 0
    batch: int = 0


class Feed:
    """Training batches without end, in an order that depends on the seed and position alone."""

    def __init__(
        self,
        shards: TokenShards,
        *,
        tokens: int,
        max_len: int,
        seed: int,
        prompt_share: float,
        reach: int,
        device: torch.device,
    ) -> None:
        """tokens, max_len: size of a batch, see `TokenShards.batches`. prompt_share: the share of
        prompt positions that are learned beside all answer positions. reach: the first `reach`
        positions of a sequence are never learned (a draft chain of that many rows ends there).
        `ConfigError` where that leaves nothing: batches without a row would go by for ever."""
        self.shards = shards
        self.tokens, self.max_len, self.seed = tokens, max_len, seed
        self.prompt_share, self.reach, self.device = prompt_share, reach, device
        shards.require_training()
        longest = int(shards.lens[shards.training()].max())
        # A sequence's last position is learned unless it is among the first `reach`.
        if min(longest, max_len) <= reach:
            raise ConfigError(
                f"There is nothing to learn: the first {reach} tokens of a sequence are never "
                f"learned (a head's --ttt-steps), and of the data's up to {longest} only "
                f"{max_len} are read (--max-len, --batch-tokens)."
            )

    def batches(self, start: Position) -> Generator[tuple[Batch, Position]]:
        """Each batch with the position after it. Prepared by a thread that ends with the
        iterator."""
        ready: queue.Queue[tuple[Batch, Position] | BaseException] = queue.Queue(_READY)
        stop = threading.Event()

        def hand_over(item: tuple[Batch, Position] | BaseException) -> None:
            while not stop.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    return
                except queue.Full:
                    continue

        def produce() -> None:
            try:
                for item in self._produce(start, stop):
                    hand_over(item)
            except BaseException as error:  # noqa: BLE001 - handed to the consumer, raised there
                hand_over(error)

        thread = threading.Thread(target=produce, name="feed", daemon=True)
        thread.start()
        try:
            while True:
                item = ready.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stop.set()
            thread.join()

    def _produce(self, start: Position, stop: threading.Event) -> Iterator[tuple[Batch, Position]]:
        """`stop` is looked at for every batch: a long stretch of them may have no row to learn."""
        epoch, skip = start.epoch, start.batch
        while True:
            for index, batch in enumerate(self._pass(epoch)):
                if stop.is_set():
                    return
                if index < skip:
                    continue
                rng = np.random.default_rng((self.seed, epoch, index))
                rows = learned_rows(batch, self.prompt_share, self.reach, rng)
                if len(rows):
                    yield self._on_device(batch, rows), Position(epoch, index + 1)
            epoch, skip = epoch + 1, 0

    def _pass(self, epoch: int) -> Iterator[TokenBatch]:
        return self.shards.batches(
            self.shards.training(),
            tokens=self.tokens,
            max_len=self.max_len,
            seed=self.seed + 1000 * epoch,
        )

    def _on_device(self, batch: TokenBatch, rows: IntArray) -> Batch:
        return place(batch, rows, self.device)


def place(batch: TokenBatch, rows: IntArray, device: torch.device) -> Batch:
    """Copy to the device without waiting for it."""

    def move(tensor: Tensor) -> Tensor:
        if device.type != "cuda":
            return tensor.to(device)
        return tensor.pin_memory().to(device, non_blocking=True)

    return Batch(move(batch.tokens), move(torch.from_numpy(rows)), int(batch.lens.sum()))


def learned_rows(
    batch: TokenBatch, prompt_share: float, reach: int, rng: np.random.Generator
) -> IntArray:
    """Flat indices of the positions to learn: those that predict an answer token or what would
    follow the last one, and a random share of those inside the prompt."""
    columns = np.arange(batch.tokens.shape[1])
    lens, prompts = batch.lens.numpy()[:, None], batch.prompt_lens.numpy()[:, None]
    answer = columns >= prompts - 1
    chosen = answer | (rng.random(batch.tokens.shape) < prompt_share)
    inside = (columns < lens) & (columns >= reach)
    return np.flatnonzero(chosen & inside).astype(np.int64)
