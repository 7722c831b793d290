"""Which device --device means."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgl_spec import LLM
from sgl_spec.engine.cuda.graphs import capture_sizes
from sgl_spec.engine.device import device_name, fitting, resolve_device
from sgl_spec.errors import ConfigError


def test_a_cpu_is_a_cpu_whatever_there_is() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert device_name(torch.device("cpu"))


def test_a_gpu_is_taken_where_torch_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 1)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    message = "--device must be cpu or auto, got cuda: .* was built without CUDA .*PIP_ARGS"
    with pytest.raises(ConfigError, match=message):
        resolve_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"built for CUDA 13\.0, sees none"):
        LLM("smollm2", device="cuda")


def test_weights_that_do_not_fit_are_a_matter_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = SimpleNamespace(total_memory=8 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Card")
    message = r"The weights do not fit the Card and its 8\.0 GB.*Tried to allocate"
    with pytest.raises(ConfigError, match=message), fitting("The weights", torch.device("cuda")):
        raise torch.cuda.OutOfMemoryError("Tried to allocate 9 GiB.\nsee the manual")
    with pytest.raises(KeyError), fitting("The weights", torch.device("cpu")):
        raise KeyError


@pytest.mark.parametrize(
    ("most", "asked", "limit", "sizes"),
    [
        (48, None, None, (1, 2, 4, 8, 12, 16, 24, 32, 40, 48)),
        (5, None, None, (1, 2, 4, 5)),
        (48, None, 3, (1, 2, 3)),
        (1, None, None, (1,)),
        (300, (8, 2, 8), None, (2, 8)),
        (4, (2, 64, 256), None, (2, 4)),
    ],
)
def test_sizes_of_graphs(
    most: int, asked: tuple[int, ...] | None, limit: int | None, sizes: tuple[int, ...]
) -> None:
    """The largest batch that may come has a graph unless a flag says otherwise, and none is for
    batches that cannot come."""
    assert capture_sizes(most, asked, limit) == sizes
