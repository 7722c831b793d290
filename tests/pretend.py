"""A device that is not there: a machine without a GPU holds the engine to its discipline.

Tensors of the pretended device are wrappers around tensors on the CPU, which do the computing. An
operation that mixes the two, even where CUDA would copy an index in passing, fails, and so does
reading a wrapper's memory from NumPy. What is not the CPU takes the way of all other devices, on
plain torch.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("pretended")
DEVICE = torch.device("pretended", 0)
_MOVES = {"aten::to", "aten::_to_copy", "aten::copy_", "aten::_local_scalar_dense"}


class There(Tensor):
    """A tensor on the pretended device; `held` is where its values are."""

    held: Tensor

    @staticmethod
    @torch.inference_mode(False)  # a view of an ordinary tensor is one, whatever is around it
    def __new__(cls, held: Tensor) -> There:
        there = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        there.held = held
        return there  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside `Pretended`")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"There({self.held!r})"


class _Functions(TorchFunctionMode):
    """What torch does behind the dispatcher's back."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") is not None:
            device = torch.device(kwargs["device"])
            return func(*args, **(kwargs | {"device": "cpu"})).to(device)
        if func is Tensor.tolist and isinstance(args[0], There):
            return args[0].cpu().tolist()
        if func is Tensor.numpy and isinstance(args[0], There) and kwargs.get("force"):
            return args[0].cpu().numpy()
        if func is F.scaled_dot_product_attention and isinstance(args[0], There):
            parts, _ = tree_flatten((args, kwargs))
            assert all(isinstance(x, There) for x in parts if isinstance(x, Tensor)), "mixed"
            args, kwargs = tree_map(lambda x: x.held if isinstance(x, There) else x, (args, kwargs))
            return There(func(*args, **kwargs))
        return func(*args, **kwargs)


class Pretended(TorchDispatchMode):
    """While it is entered, `DEVICE` computes. crossings: copies from there to here by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.crossings: Counter[str] = Counter()
        self._functions = _Functions()

    def __enter__(self) -> Pretended:
        super().__enter__()
        self._functions.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._functions.__exit__(*exception)
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        there = [x for x in tensors if isinstance(x, There)]
        here = [x for x in tensors if not isinstance(x, There) and x.dim()]
        asked = kwargs.get("device")
        name = func._schema.name
        if there and here and name not in _MOVES:
            shapes = [f"{tuple(x.shape)} {x.dtype}" for x in here]
            raise AssertionError(f"{func} mixes tensors here with some there: {', '.join(shapes)}")
        wraps = bool(there) if asked is None else torch.device(asked).type == DEVICE.type
        if name == "aten::copy_":
            wraps = isinstance(args[0], There)
        if there and (not wraps or name == "aten::_local_scalar_dense"):
            self.crossings[name] += 1
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        owners = {id(x.held): x for x in there}
        args, kwargs = tree_map(lambda x: x.held if isinstance(x, There) else x, (args, kwargs))
        result = func(*args, **kwargs)
        if name == "aten::to" and bool(there) is not wraps and id(result) in {id(x) for x in args}:
            result = result.clone()  # between devices a move is a copy

        def wrapped(x: Any) -> Any:
            if not isinstance(x, Tensor) or not wraps:
                return x
            return owners.get(id(x)) if id(x) in owners else There(x)

        return tree_map(wrapped, result)
