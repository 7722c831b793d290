"""CUDA graphs that are not there: what a round launches is recorded once and run again from the
record, so that a machine without a GPU sees what a graph would get wrong.

As in a graph, Python runs at the capture alone: tensors are those of then, and so are all numbers.
An operation that has to know values on the host fails, as does a tensor that nobody keeps but the
record, whose memory a graph would read after it is gone. Memory that was allocated within and is
not kept outside holds garbage before every replay.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from triton.runtime.interpreter import GridExecutor
from triton.tools.tensor_descriptor import TensorDescriptor

from sgl_spec import LLM
from sgl_spec.engine.cuda import prefill
from sgl_spec.engine.cuda.graphs import Replayed, captured_parts, run_all
from sgl_spec.engine.cuda.sources import ShapedRounds
from sgl_spec.engine.cuda.worker import DeviceWorker

WAITS = {  # operations that have to know values, or copy from the host's memory
    f"aten.{name}"
    for name in (
        "_local_scalar_dense.default",
        "item.default",
        "is_nonzero.default",
        "equal.default",
        "nonzero.default",
        "masked_select.default",
        "bincount.default",
        "_unique2.default",
        "unique_consecutive.default",
        "resolve_conj.default",  # on the way to NumPy and to lists
        "lift_fresh.default",  # from a list
    )
}
_NO_WORK = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}
_GARBAGE = 0xFF  # NaN as a float, -1 as an integer


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor of the record lies: the number of its storage, and its layout."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Described:
    """A tensor descriptor whose base lies there."""

    base: _Place
    shape: list[int]
    strides: list[int]
    block: list[int]


@dataclass(frozen=True, slots=True)
class _Step:
    """One call. fresh: where those of its results lie that have memory of their own."""

    call: Callable[..., Any]
    args: Any
    kwargs: Any
    name: str
    fresh: tuple[tuple[int, _Place], ...] = ()

    def reads(self) -> set[int]:
        """Storages of its arguments."""
        values = tree_flatten((self.args, self.kwargs))[0]
        places = [value.base if isinstance(value, _Described) else value for value in values]
        return {place.storage for place in places if isinstance(place, _Place)}


class _Recorder(TorchDispatchMode):
    """Notes all that is enqueued while it is entered. made: storages from within. Until `release`
    every storage is kept, so that no two have one address."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self.refs: list[StorageWeakRef] = []
        self.num_bytes: list[int] = []
        self.made: set[int] = set()
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []
        self._launching = False

    def release(self) -> None:
        """Keep no storage alive."""
        self._kept.clear()

    def launch(self, executor: GridExecutor, run: Any, args: Any, kwargs: Any) -> None:
        """A kernel. run: does it."""
        self.steps.append(_Step(executor, *self._placed((args, kwargs)), executor.fn.__name__))
        self._launching = True  # what the interpreter does is none of the round's operations
        run(executor, *args, **kwargs)
        self._launching = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._launching:
            return func(*args, **kwargs)
        _refuse(func, args, kwargs)
        placed = self._placed((args, kwargs))
        known = set(self._numbers)
        found = func(*args, **kwargs)
        fresh = []
        for at, value in enumerate(tree_flatten(found)[0]):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in known:
                fresh.append((at, self._place(value)))
        self.made |= {place.storage for _, place in fresh}
        writes = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        if writes or (fresh and func._schema.name not in _NO_WORK):
            self.steps.append(_Step(func, *placed, str(func), tuple(fresh)))
        return found

    def _place(self, tensor: Tensor) -> _Place:
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(storage._cdata, len(self.refs))
        if number == len(self.refs):
            self.refs.append(StorageWeakRef(storage))
            self.num_bytes.append(storage.nbytes())
            self._kept.append(storage)
        layout = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return _Place(number, tensor.dtype, *layout)

    def _placed(self, values: Any) -> Any:
        """With places instead of tensors."""

        def one(value: Any) -> Any:
            if isinstance(value, TensorDescriptor):
                shapes = list(value.shape), list(value.strides), list(value.block_shape)
                return _Described(self._place(value.base), *shapes)
            has_storage = isinstance(value, Tensor) and not value.is_mkldnn  # as packed weights
            return self._place(value) if has_storage else value

        return tree_map(one, values)


def _refuse(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    name = func._schema.name
    assert str(func) not in WAITS, f"{func} within a graph"
    if name == "aten::repeat_interleave":
        sized = kwargs.get("output_size") is not None
        assert sized or isinstance(args[-1], int), f"{func} without a size within a graph"
    if name.startswith("aten::index") and isinstance(args[1], (list, tuple)):
        masks = [at for at in args[1] if at is not None and at.dtype == torch.bool]
        assert not masks, f"{func} by a mask within a graph"


@contextmanager
def _kernels_told(recorder: _Recorder) -> Iterator[None]:
    """The recorder learns of launches."""
    run = GridExecutor.__call__
    GridExecutor.__call__ = lambda executor, *args, **kwargs: recorder.launch(
        executor, run, args, kwargs
    )
    try:
        yield
    finally:
        GridExecutor.__call__ = run


class Tape:
    """A recorded program."""

    def __init__(self, program: Callable[[], object]) -> None:
        recorder = _Recorder()
        with _kernels_told(recorder), recorder:
            program()
        self.steps, made = recorder.steps, recorder.made
        recorder.release()
        gc.collect()
        lost = {number for number, ref in enumerate(recorder.refs) if ref.expired()}
        for step in self.steps:
            gone = step.reads() & lost - made
            assert not gone, f"{step.name} reads memory that nobody keeps"
        self._storages = [
            torch.UntypedStorage(size)
            if number in lost
            else torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            for number, (ref, size) in enumerate(
                zip(recorder.refs, recorder.num_bytes, strict=True)
            )
        ]
        self._lost = lost & made
        self._spoil(made)  # a capture computes nothing

    def replay(self) -> None:
        """Run it once more."""
        self._spoil(self._lost)
        for step in self.steps:
            args, kwargs = self._tensors((step.args, step.kwargs))
            found = tree_flatten(step.call(*args, **kwargs))[0]
            for at, place in step.fresh:
                self._tensor(place).copy_(found[at])

    def _spoil(self, storages: set[int]) -> None:
        for number in storages:
            self._storages[number].fill_(_GARBAGE)

    def _tensor(self, place: _Place) -> Tensor:
        empty = torch.empty(0, dtype=place.dtype)
        return empty.set_(self._storages[place.storage], place.offset, place.size, place.stride)

    def _tensors(self, values: Any) -> Any:
        """With tensors instead of places."""

        def one(value: Any) -> Any:
            if isinstance(value, _Described):
                base = self._tensor(value.base)
                return TensorDescriptor(base, value.shape, value.strides, value.block)
            return self._tensor(value) if isinstance(value, _Place) else value

        return tree_map(one, values)


def capture(replayed: Replayed, pool: object) -> None:
    """In place of `Replayed.capture`."""
    replayed.program.load(np.zeros(0, dtype=np.int64), None)
    run_all(replayed.program)
    parts = captured_parts(replayed.program)
    replayed.graphs = [Tape(part) for part in parts]  # type: ignore[misc]


def tape(llm: LLM, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> DeviceWorker:
    """From now on batches are filled up to these sizes, prompts to few rows, and all that a GPU
    would capture is recorded. Returns the worker."""
    worker = llm.engine.scheduler.worker
    assert isinstance(worker, DeviceWorker)
    monkeypatch.setattr(Replayed, "capture", capture)
    worker.rounds.sizes = sizes
    worker.rounds._pool = object()
    worker._prefills.sizes = (8,)
    monkeypatch.setattr(prefill, "PREFILL_REQUESTS_CUDA", max(sizes))
    if isinstance(worker.source, ShapedRounds):
        worker.source.shapes.sizes = sizes
    with torch.inference_mode():
        worker._prefills.prepare()
    return worker
