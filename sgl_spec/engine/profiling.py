"""torch.profiler around the engine's steps, started and stopped by requests."""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from sgl_spec.errors import InvalidRequestError, preview

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "SGLANG_TORCH_PROFILER_DIR"
ACTIVITIES = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}


class Profiler:
    """At most one trace at a time, written in Chrome's format when it is stopped or when it has the
    steps that were asked for. Writing takes seconds, in which the engine stands still."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._path = Path()
        self._left: int | None = None  # steps until it stops by itself
        self._serial = itertools.count()

    def start(self, asked: Mapping[str, Any]) -> Path:
        """Begin; the file that the trace will be in.

        asked: `output_dir` (None: the environment's SGLANG_TORCH_PROFILER_DIR, or the directory for
        temporary files), `num_steps` (forwards; None: until stopped), `activities` ("CPU", "GPU";
        None: what there is), `record_shapes`, `with_stack`. Raises `InvalidRequestError` naming
        what cannot be done.
        """
        if self._profile is not None:
            raise InvalidRequestError(f"A trace is being taken already, for {self._path}.")
        steps = asked.get("num_steps")
        if steps is not None and steps < 1:
            raise InvalidRequestError(
                f"num_steps must be an integer >= 1, got {steps}.", param="num_steps"
            )
        activities = _activities(asked.get("activities"))
        self._path = _directory(asked.get("output_dir")) / self._name()
        self._left = steps
        self._profile = profile(
            activities=activities,
            record_shapes=bool(asked.get("record_shapes")),
            with_stack=bool(asked.get("with_stack")),
        )
        self._profile.start()
        return self._path

    def _name(self) -> str:
        moment = time.strftime("%Y%m%d-%H%M%S")
        return f"{moment}-{os.getpid()}-{next(self._serial)}.trace.json.gz"

    def stop(self) -> Path:
        """End the trace; the file that holds it. `InvalidRequestError` if none is taken or it
        cannot be written."""
        running, self._profile = self._profile, None
        if running is None:
            raise InvalidRequestError("No trace is being taken; /start_profile starts one.")
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the last step's batch may still be under way
        running.stop()
        try:
            running.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            raise InvalidRequestError(f"Cannot write {self._path}: {error}") from error
        return self._path

    def step(self) -> AbstractContextManager[Any]:
        """Around a step of the engine, which then has its name in the trace."""
        return nullcontext() if self._profile is None else record_function("engine step")

    def stepped(self) -> None:
        """After a step, which may have been the trace's last. A trace that cannot be written is
        lost, which the log tells; nobody waits for it, and requests go on."""
        if self._profile is None or self._left is None:
            return
        self._left -= 1
        if self._left:
            return
        try:
            logger.info("Wrote the trace %s.", self.stop())
        except InvalidRequestError as error:
            logger.error("%s", error.message)


def _activities(asked: list[str] | None) -> list[ProfilerActivity]:
    gpu = torch.cuda.is_available()
    names = asked or (["CPU", "GPU"] if gpu else ["CPU"])
    unknown = not ACTIVITIES.keys() >= set(names)
    if unknown or ("GPU" in names and not gpu):
        allowed = 'a list of "CPU" and "GPU"' if gpu or unknown else '["CPU"] without a GPU'
        raise InvalidRequestError(
            f"activities must be {allowed}, got {preview(names)}.", param="activities"
        )
    return [ACTIVITIES[name] for name in names]


def _directory(asked: str | None) -> Path:
    directory = Path(asked or os.environ.get(DIRECTORY_VARIABLE) or tempfile.gettempdir())
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequestError(
            f"output_dir {directory} cannot be made: {error.strerror or error}.",
            param="output_dir",
        ) from error
    if not os.access(directory, os.W_OK):
        raise InvalidRequestError(
            f"output_dir must be a directory that the server may write to, got {directory}.",
            param="output_dir",
        )
    return directory
