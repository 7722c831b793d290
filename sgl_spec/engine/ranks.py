"""Several engine processes that share one model: rank 0 leads, the others do what it does.

Every rank runs the whole engine. Rank 0 alone hears of requests; it hands each call of its engine
on before it obeys it itself (`Party.tell`), and what it measures or waited for in the middle of a
call (`Ranks.agree`). The rest of an engine is a function of these, so all ranks plan the same
batches, launch the same collectives and draw the same tokens without a word about either.

Ranks are children of rank 0 and end with it, in whatever way it ends. Rank 0 hears at once when one
of them ends (`Party.watch`).
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zmq

from sgl_spec import __version__
from sgl_spec.args import ResolvedArgs
from sgl_spec.engine.drafting import find_draft_model
from sgl_spec.errors import ConfigError, SglSpecError
from sgl_spec.layers.parallel import ALONE, Ranks, TorchRanks
from sgl_spec.messages import (
    Agreed,
    Failed,
    FromRank,
    Join,
    Joined,
    RankFailed,
    Shutdown,
    ToRank,
    decode_from_rank,
    decode_to_rank,
    encode,
)
from sgl_spec.models.checkpoint import resolve_checkpoint
from sgl_spec.models.config import ModelConfig
from sgl_spec.models.shard import check_size

logger = logging.getLogger(__name__)

_ENTRY = "sgl_spec.engine.rank_process:main"
_JOIN_TIMEOUT_S = 120.0  # of a process that imports torch on a busy machine
_POLL_MS = 100
_END_S = 2.0  # that ranks have to end when they are told to
_LAST_WORDS_S = 0.3  # from a rank's end to the arrival of what it said
_COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)
_SAMPLES, _SAMPLE_BYTES = 16, 4096  # of each file of weights

OnDeath = Callable[[Failed], None]
"""Called in a thread with the reason when a rank has ended that was not told to."""


def exit_at_once(failed: Failed) -> None:
    """An `OnDeath` for programs that end with their engine."""
    sys.stderr.write(f"{failed.message}\n")
    os._exit(1)


class Party:
    """The ranks of one engine as the engine sees them; this one is alone. See the module."""

    ranks: Ranks = ALONE

    def tell(self, message: ToRank) -> None:
        """Hand a call on to the other ranks."""

    def check(self, digest: int) -> None:
        """Raise unless all ranks decided what this digest stands for."""

    def failure(self) -> str | None:
        """Why another rank ended, where one has."""
        return None

    def close(self) -> None:
        """The end of all ranks."""


class _Joined(Party):
    """One of several ranks that meet at `meeting`."""

    def __init__(self, args: ResolvedArgs, join: Join, agreed: Callable[[Any], Any]) -> None:
        device = _own_device(args, join)
        backend = "nccl" if device.type == "cuda" else "gloo"
        if device.type == "cpu":
            torch.set_num_threads(max(1, torch.get_num_threads() // join.size))
        _set_network(join.meeting)
        dist.init_process_group(
            backend,
            init_method=join.meeting,
            rank=join.rank,
            world_size=join.size,
            timeout=_COLLECTIVE_TIMEOUT,
        )
        world = dist.group.WORLD
        host = world if backend == "gloo" else dist.new_group(backend="gloo")
        assert isinstance(host, dist.ProcessGroup)
        self._torch_ranks = TorchRanks(agreed, host, ordered=bool(args.strict))
        self.ranks = self._torch_ranks
        self._steps = 0

    def check(self, digest: int) -> None:
        """See `Party`."""
        self._steps += 1
        differing = self._torch_ranks.differing(digest)
        if differing:
            named = ", ".join(map(str, differing))
            raise RuntimeError(
                f"--check-ranks: in step {self._steps} these ranks decided otherwise than rank 0: "
                f"{named}."
            )


def _own_device(args: ResolvedArgs, join: Join) -> torch.device:
    if args.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(join.local)
    return torch.device("cuda", join.local)


def _set_network(meeting: str) -> None:
    """Settings of the libraries, unless the user has made them. One host's ranks meet on its
    loopback device. NCCL's multicast over NVLink stays off: machines whose fabric is shared refuse
    it, and the first collective then hangs."""
    if meeting.startswith("file:"):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


# --- rank 0 ---------------------------------------------------------------------------------------


def lead(args: ResolvedArgs, on_death: OnDeath) -> Party:
    """The ranks that the flags ask for, started and met, before anything is loaded. `ConfigError`
    for what cannot be shared so."""
    if args.tp_size == 1:
        return Party()
    facts = common_facts(args)
    _require_devices(args)
    return Leader(args, facts, on_death)


def common_facts(args: ResolvedArgs) -> dict[str, str]:
    """What all ranks must have in common. `ConfigError` if the model cannot be divided so."""
    path = args.model_path
    both = args.tokenizer_path == path
    directory = resolve_checkpoint(path, args.revision, tokenizer=both)
    check_size(ModelConfig.from_hf(directory, args.context_length), args.tp_size)
    draft = find_draft_model(args)
    return {
        "version of sgl-spec": __version__,
        "version of torch": str(torch.__version__),
        f"content of {path}": fingerprint(directory),
        "content of the draft model": "" if draft is None else fingerprint(draft.directory),
    }


def fingerprint(directory: Path) -> str:
    """A digest of a checkpoint's files: names, sizes, and some of what each holds."""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix not in (".json", ".safetensors", ".bin"):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(size * sample // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _require_devices(args: ResolvedArgs) -> None:
    if args.device == "cpu" or not torch.cuda.is_available():
        return
    found = torch.cuda.device_count()
    if found < args.tp_size:
        raise ConfigError(
            f"--tp-size {args.tp_size} needs as many GPUs, torch sees {found}.", param="tp_size"
        )


class Leader(_Joined):
    """Rank 0, and the processes of the others. facts: see `Joined`."""

    def __init__(self, args: ResolvedArgs, facts: dict[str, str], on_death: OnDeath) -> None:
        if dist.is_initialized():
            raise ConfigError(
                f"--tp-size {args.tp_size}: this process has a torch.distributed group already, "
                "of another engine or of its own program.",
                param="tp_size",
            )
        self._on_death, self._reason = on_death, ""
        self._ending = threading.Event()
        self._directory = Path(tempfile.mkdtemp(prefix="sgl-spec-ranks-"))
        self._context = zmq.Context()
        self._reports = self._bind(zmq.PULL, "reports")
        others = range(1, args.tp_size)
        self._plans = [self._bind(zmq.PUSH, f"plan{rank}") for rank in others]
        self._processes = [self._start(args, rank) for rank in others]
        try:
            meeting = f"file://{self._directory}/meeting"
            for rank, plan in zip(others, self._plans, strict=True):
                plan.send(encode(Join(rank, args.tp_size, rank, meeting)))
            self._await_joined(facts)
            super().__init__(args, Join(0, args.tp_size, 0, meeting), self._hand_on)
        except BaseException:
            self._end_processes(0.0)
            self._remove()
            raise
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def tell(self, message: ToRank) -> None:
        """See `Party`."""
        data = encode(message)
        for plan in self._plans:
            plan.send(data)

    def _hand_on(self, value: Any) -> Any:
        self.tell(Agreed(value))
        return value

    def failure(self) -> str | None:
        """See `Party`. Waits a moment for what is on its way."""
        deadline = time.monotonic() + 3 * _LAST_WORDS_S
        while not self._reason and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._reason or None

    def close(self) -> None:
        """See `Party`. Doing it twice does nothing."""
        if self._ending.is_set():
            return
        self._ending.set()
        failed = bool(self._reason)
        if not failed:
            self.tell(Shutdown())
        self._end_processes(0.0 if failed else _END_S)
        if dist.is_initialized():
            dist.destroy_process_group()
        self._remove()

    # --- processes --------------------------------------------------------------------------------

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.LINGER, 0)
        socket.bind(self._address(name))
        return socket

    def _address(self, name: str) -> str:
        return f"ipc://{self._directory}/{name}"

    def _start(self, args: ResolvedArgs, rank: int) -> subprocess.Popen[bytes]:
        """A rank's process, tied to the life of this one; see `server.child`."""
        given = {item.name: getattr(args, item.name) for item in dataclasses.fields(args)}
        quiet = args.log_level if args.log_level == "debug" else "warning"  # rank 0 says it all
        boot = {
            "entry": _ENTRY,
            "args": given | {"log_level": quiet},
            "to_engine": self._address(f"plan{rank}"),
            "from_engine": self._address("reports"),
        }
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "sgl_spec.server.child", str(os.getpid())],
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            process_group=0,
        )
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(json.dumps(boot).encode())
        return process

    def _await_joined(self, facts: dict[str, str]) -> None:
        """Until every rank has said what it has; `ConfigError` if that is not what rank 0 has."""
        missing = set(range(1, len(self._processes) + 1))
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        while missing:
            if not self._reports.poll(_POLL_MS):
                if reason := self._ended():
                    raise SglSpecError(reason)
                if time.monotonic() > deadline:
                    raise SglSpecError(f"Rank {min(missing)} did not start in time.")
                continue
            message = decode_from_rank(self._reports.recv())
            if isinstance(message, RankFailed):
                kind = ConfigError if message.config_error else SglSpecError
                raise kind(message.message)
            require_same(message, facts)
            missing.discard(message.rank)

    def _ended(self) -> str:
        """The end of a rank's process in words, "" while all of them live."""
        for rank, process in enumerate(self._processes, 1):
            code = process.poll()
            if code is not None:
                how = (
                    f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                )
                return f"Rank {rank} {how}."
        return ""

    def _watch(self) -> None:
        """Tell when a rank has failed or ended. From here on the reports are this thread's."""
        while not self._ending.is_set():
            failed = self._reported(_POLL_MS)
            if failed is None and (ended := self._ended()):
                failed = self._reported(int(1e3 * _LAST_WORDS_S)) or Failed(ended)
            if failed is not None and not self._ending.is_set():
                self._reason = failed.message
                self._on_death(failed)
                return

    def _reported(self, wait_ms: int) -> Failed | None:
        if not self._reports.poll(wait_ms):
            return None
        message = decode_from_rank(self._reports.recv())
        assert isinstance(message, RankFailed), "a rank joins once"
        if message.config_error:  # rank 0 would say the same
            return Failed(message.message, config_error=True)
        return Failed(f"Rank {message.rank}: {message.message}")

    def _end_processes(self, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _remove(self) -> None:
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)


def require_same(joined: Joined, facts: dict[str, str]) -> None:
    """`ConfigError` unless a rank has what rank 0 has."""
    for name, value in facts.items():
        theirs = joined.facts.get(name)
        if theirs != value:
            said = f": {theirs} there, {value} here" if name.startswith("version") else ""
            raise ConfigError(
                f"Rank {joined.rank} has another {name} than rank 0{said}; all must be the same.",
                param="tp_size",
            )


# --- the others -----------------------------------------------------------------------------------


class Follower(_Joined):
    """Another rank. receive: rank 0's next message."""

    def __init__(self, args: ResolvedArgs, join: Join, receive: Callable[[], ToRank]) -> None:
        self._receive = receive
        super().__init__(args, join, self._next_agreed)

    def _next_agreed(self, _mine: Any) -> Any:
        message = self._receive()
        if not isinstance(message, Agreed):
            raise RuntimeError(
                f"rank {self.ranks.rank} needs a value that rank 0 did not measure: the ranks have "
                f"come apart at {type(message).__name__}"
            )
        return message.value

    def close(self) -> None:
        """See `Party`."""
        dist.destroy_process_group()


class Plan:
    """A rank's two sockets: rank 0's calls, and what this one has to say."""

    def __init__(self, plan_addr: str, reports_addr: str) -> None:
        self._context = zmq.Context()
        self._inbox, self._outbox = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self._inbox.set(zmq.RCVHWM, 0)
        self._inbox.connect(plan_addr)
        self._outbox.connect(reports_addr)

    def receive(self) -> ToRank:
        """The next message; waits for it. The system ends this process with rank 0."""
        return decode_to_rank(self._inbox.recv())

    def report(self, message: FromRank) -> None:
        """Tell rank 0."""
        self._outbox.send(encode(message))

    def close(self) -> None:
        """Once what was said has been sent."""
        self._outbox.close(linger=1000)
        self._inbox.close(linger=0)
        self._context.term()


def ignore_interrupts() -> None:
    """Ctrl-C reaches the whole group; rank 0 decides when its ranks end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
