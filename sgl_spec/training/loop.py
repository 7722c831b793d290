"""The training loop that every draft shares: schedule, optimizer, clipping, checkpoints, logs."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sgl_spec.errors import ConfigError
from sgl_spec.training.feed import Batch, Feed, Position
from sgl_spec.training.stopping import StopRequest

logger = logging.getLogger(__name__)

CHECKPOINT = "checkpoint.pt"
_STATE = {"weights", "constants", "optimizers", "optimizer", "progress"}
_MAX_NORM = 1.0


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How long and how fast. Exactly one of steps and seconds bounds the run.

    seconds: wall-clock time from `started` on (time.monotonic), loading and compiling included.
    lr: peak learning rate. save_every, eval_every, log_every: seconds between checkpoints,
    held-out evaluations and log lines. steps_per_log: log by steps instead, for repeatable runs.
    """

    out: Path
    started: float
    steps: int | None
    seconds: float | None
    lr: float
    optimizer: str
    warmup: float
    weight_decay: float
    save_every: float
    eval_every: float
    log_every: float
    resume: bool


@dataclass(frozen=True, slots=True)
class StepStats:
    """Of one batch: loss to minimise, and figures by name ([] or [k] tensors) for the log."""

    loss: Tensor
    figures: dict[str, Tensor]


class Draft(Protocol):
    """What the loop trains."""

    weights: dict[str, torch.nn.Parameter]
    constants: dict[str, Tensor]  # belong to the weights: restored with a checkpoint

    def matrices(self) -> set[str]:
        """Names of hidden matrices: Muon's, when that is the optimizer."""
        ...

    def loss(self, batch: Batch) -> StepStats: ...

    def evaluate(self) -> dict[str, float]:
        """Held-out figures; logged, and kept for the provenance."""
        ...

    def save(self, run: dict[str, Any]) -> None:
        """Write the draft in its published layout. run: provenance of the loop."""
        ...


def learning_rate(share: float, peak: float, warmup: float) -> float:
    """Linear warm-up over the first `warmup` of the run, then half a cosine to zero at share 1."""
    if share < warmup:
        return peak * share / warmup
    angle = math.pi * min(1.0, (share - warmup) / (1.0 - warmup))
    return peak * 0.5 * (1.0 + math.cos(angle))


@dataclass(slots=True)
class Progress:
    """Where a run is. share: of its schedule, 0 to 1; a run that is resumed before 1 goes on with
    the rest of the schedule, one resumed at 1 starts a new one."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    share: float = 0.0
    epoch: int = 0
    batch: int = 0


class Loop:
    """One run: until its steps or seconds are over, the last checkpoint written at the end."""

    def __init__(self, draft: Draft, feed: Feed, options: LoopOptions) -> None:
        if (options.steps is None) == (options.seconds is None):
            raise ConfigError("Give exactly one of --steps and --time-limit.")
        self.draft, self.feed, self.options = draft, feed, options
        self.optimizers = _optimizers(draft, options)
        self.progress = Progress()
        self.figures: dict[str, float] = {}
        self._first_share = 0.0
        self._first_step = 0
        self._begun: float | None = None  # when the first step was over: the schedule's start
        self._cost = 0.0  # seconds that saving and evaluating at the end will take
        if options.resume:
            self._resume()

    def run(self) -> None:
        """Train. A step is one batch; figures are averaged over the steps between log lines.

        Ctrl-C ends the run behind the step that it meets: with a checkpoint, and KeyboardInterrupt.
        """
        with StopRequest() as stop:
            self._train(stop)
            if not stop.asked:
                self._evaluate()
            self._save()
        if stop.asked:
            raise KeyboardInterrupt

    def _train(self, stop: StopRequest) -> None:
        """Steps until the schedule is over or `stop` is asked for."""
        begun = time.monotonic()
        window = _Window(begun)
        saved = evaluated = begun
        start = Position(self.progress.epoch, self.progress.batch)
        batches = self.feed.batches(start)
        try:
            for batch, position in batches:
                self._step(batch, position, window)
                now = time.monotonic()
                if now - window.since >= self.options.log_every:
                    self._log(window)
                    window = _Window(time.monotonic())
                if now - evaluated >= self.options.eval_every:
                    self._evaluate()
                    evaluated = time.monotonic()
                if now - saved >= self.options.save_every:
                    self._save()
                    saved = time.monotonic()
                if stop.asked or self.progress.share >= 1.0:
                    break
        finally:
            batches.close()
        if window.steps:
            self._log(window)

    def _step(self, batch: Batch, position: Position, window: _Window) -> None:
        rate = learning_rate(self.progress.share, self.options.lr, self.options.warmup)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["scale"]
        stats = self.draft.loss(batch)
        torch.autograd.backward(stats.loss)
        norm = torch.nn.utils.clip_grad_norm_(self.draft.weights.values(), _MAX_NORM)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        window.add(stats, norm, batch.num_tokens)
        if self._begun is None:
            float(stats.loss.detach())  # waits for the device: compiling is over
            self._begun = time.monotonic()
        progress = self.progress
        progress.step += 1
        progress.tokens += batch.num_tokens
        progress.epoch, progress.batch = position.epoch, position.batch
        progress.share = self._share()

    def _share(self) -> float:
        """How much of the schedule is over after this step."""
        if self.options.steps is not None:
            done = (self.progress.step - self._first_step) / self.options.steps
        else:
            assert self.options.seconds is not None
            assert self._begun is not None
            # The last seconds belong to the evaluation and the files at the end.
            end = self.options.started + self.options.seconds - 1.5 * self._cost
            done = (time.monotonic() - self._begun) / max(1e-3, end - self._begun)
        return min(1.0, self._first_share + (1.0 - self._first_share) * done)

    def _log(self, window: _Window) -> None:
        means, rate, norm = window.means(), window.tokens_per_second(), window.norm()
        self.progress.seconds += time.monotonic() - window.since
        if not math.isfinite(means["loss"][0]):
            raise ConfigError(
                f"The loss became {means['loss'][0]} at step {self.progress.step}; "
                "a lower --lr may help."
            )
        listed = "  ".join(
            f"{name} {' '.join(f'{value:.3f}' for value in values)}"
            for name, values in means.items()
        )
        logger.info(
            "step %d  %.0f %%  epoch %d  %.0f tokens/s  norm %.2f  %s",
            self.progress.step,
            100 * self.progress.share,
            self.progress.epoch,
            rate,
            norm,
            listed,
        )

    def _evaluate(self) -> None:
        begun = time.monotonic()
        self.figures = self.draft.evaluate()
        listed = "  ".join(f"{name} {value:.3f}" for name, value in self.figures.items())
        self._cost = max(self._cost, time.monotonic() - begun)
        logger.info("held out at step %d: %s", self.progress.step, listed)

    def _save(self) -> None:
        self.options.out.mkdir(parents=True, exist_ok=True)
        path = self.options.out / CHECKPOINT
        partial = path.with_suffix(".partial")
        weights = {name: weight.detach() for name, weight in self.draft.weights.items()}
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {
            "weights": weights,
            "constants": self.draft.constants,
            "optimizers": states,
            "progress": asdict(self.progress),
        }
        torch.save(state | {"optimizer": self.options.optimizer}, partial)
        partial.rename(path)
        self.draft.save(self.provenance())
        logger.info("saved step %d in %s", self.progress.step, self.options.out)

    def provenance(self) -> dict[str, Any]:
        """What the loop did so far, for the file beside the weights."""
        progress = self.progress
        return {
            "steps": progress.step,
            "tokens_seen": progress.tokens,
            "epochs": progress.epoch,
            "training_seconds": round(progress.seconds),
            "schedule_share": round(progress.share, 4),
            "learning_rate": self.options.lr,
            "optimizer": self.options.optimizer,
            "held_out_figures": {name: round(value, 4) for name, value in self.figures.items()},
        }

    def _resume(self) -> None:
        path = self.options.out / CHECKPOINT
        state = _read_checkpoint(path, next(iter(self.draft.weights.values())).device)
        if state["optimizer"] != self.options.optimizer:
            raise ConfigError(
                f"{path} was made with --optimizer {state['optimizer']}, "
                f"this run has {self.options.optimizer}."
            )
        with torch.no_grad():
            for name, tensor in (self.draft.weights | self.draft.constants).items():
                stored = state["weights" if name in self.draft.weights else "constants"].get(name)
                if stored is None or stored.shape != tensor.shape:
                    found = None if stored is None else list(stored.shape)
                    raise ConfigError(
                        f"{path}: {name} has shape {found}, this run needs {list(tensor.shape)}."
                    )
                tensor.copy_(stored)
        for optimizer, stored in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored)
        self.progress = Progress(**state["progress"])
        if self.progress.share >= 1.0:
            self.progress.share = 0.0
        self._first_share, self._first_step = self.progress.share, self.progress.step
        logger.info("resumed at step %d of %s", self.progress.step, path)


def _read_checkpoint(path: Path, device: torch.device) -> dict[str, Any]:
    """What `_save` wrote; `ConfigError` for a file that is not there, not whole or not its own."""
    if not path.is_file():
        raise ConfigError(f"--resume: {path} does not exist.")
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # an unpickler may raise anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"--resume: cannot read {path}, is it whole? {reason}") from error
    if not isinstance(state, dict) or not state.keys() >= _STATE:
        raise ConfigError(f"--resume: {path} is no checkpoint of a training.")
    return state


class _Window:
    """Figures between two log lines, summed on the device: reading them waits for it."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.steps = 0
        self.tokens = 0
        self._norm: Tensor | None = None
        self._sums: dict[str, Tensor] = {}

    def add(self, stats: StepStats, norm: Tensor, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens
        self._norm = norm.detach() if self._norm is None else self._norm + norm.detach()
        for name, value in ({"loss": stats.loss} | stats.figures).items():
            value = value.detach()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def means(self) -> dict[str, list[float]]:
        return {name: (total / self.steps).flatten().tolist() for name, total in self._sums.items()}

    def norm(self) -> float:
        return float(self._norm) / self.steps if self._norm is not None else 0.0

    def tokens_per_second(self) -> float:
        return self.tokens / max(1e-9, time.monotonic() - self.since)


def _optimizers(draft: Draft, options: LoopOptions) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the hidden matrices and AdamW for the rest.

    Each parameter group has a `scale`: its learning rate as a multiple of the schedule's.
    """
    muon = draft.matrices() if options.optimizer == "muon" else set()
    rest = [weight for name, weight in draft.weights.items() if name not in muon]
    decayed = [weight for weight in rest if weight.dim() > 1]
    plain = [weight for weight in rest if weight.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": options.weight_decay, "scale": 1.0},
        {"params": plain, "weight_decay": 0.0, "scale": 1.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = next(iter(draft.weights.values())).device.type == "cuda"
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=fused)
    ]
    if muon:
        found.append(_muon([draft.weights[name] for name in sorted(muon)], options))
    return found


def _muon(weights: Iterable[torch.nn.Parameter], options: LoopOptions) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError("--optimizer muon needs torch 2.9 or newer; use adamw.")
    optimizer: torch.optim.Optimizer = torch.optim.Muon(
        [{"params": list(weights), "scale": 1.0}],
        lr=options.lr,
        weight_decay=options.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return optimizer
