"""What is refused before ranks load anything, and what they notice later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_spec.args import ServerArgs
from sgl_spec.engine import ranks
from sgl_spec.engine.rank_process import obey
from sgl_spec.errors import ConfigError
from sgl_spec.messages import Agreed, Joined, Step, decode_from_rank, decode_to_rank, encode
from tests.tiny import make_tiny

FACTS = {"version of sgl-spec": "1", "content of m": "abc"}


def test_equal_ranks_may_join() -> None:
    ranks.require_same(Joined(1, FACTS), FACTS)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (
            "version of sgl-spec",
            "2",
            "Rank 3 has another version of sgl-spec than rank 0: 2 there, 1 here; all must be the "
            "same.",
        ),
        (
            "content of m",
            "abd",
            "Rank 3 has another content of m than rank 0; all must be the same.",
        ),
    ],
)
def test_ranks_that_differ_are_refused(name: str, value: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ranks.require_same(Joined(3, FACTS | {name: value}), FACTS)
    assert caught.value.message == sentence


def test_a_fingerprint_tells_weights_and_configs_apart(tmp_path: Path) -> None:
    """Weights of the same names and shapes, and configs of the same length."""
    one, same, other = (
        make_tiny(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    first = ranks.fingerprint(one)
    assert ranks.fingerprint(same) == first
    assert ranks.fingerprint(other) != first
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps(config | {"rope_theta": 10001.0}))
    assert ranks.fingerprint(same) != first


def test_a_fingerprint_sees_the_middle_of_the_weights(tiny_model_dir: Path, tmp_path: Path) -> None:
    """One layer of a fine-tune, say."""
    path = tmp_path / "model.safetensors"
    weights = load_file(tiny_model_dir / "model.safetensors")
    save_file(weights, path)
    before = ranks.fingerprint(tmp_path)
    save_file({name: weight + 1e-3 for name, weight in weights.items()}, path)
    assert ranks.fingerprint(tmp_path) != before


def test_fewer_gpus_than_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    args = ServerArgs(model_path=str(tiny_model_dir), tp_size=2).resolve()
    with pytest.raises(ConfigError, match="--tp-size 2 needs as many GPUs, torch sees 1"):
        ranks.lead(args, pytest.fail)


def test_messages_keep_what_they_carry() -> None:
    for value in (None, 1.5, [["x", 2.0], None], [[0, ""]]):
        assert decode_to_rank(encode(Agreed(value))) == Agreed(value)
    joined = Joined(1, FACTS)
    assert decode_from_rank(encode(joined)) == joined


def test_a_rank_that_has_come_apart_says_so() -> None:
    """A call where a measured value was due, and the other way round."""
    follower = object.__new__(ranks.Follower)
    follower._receive = Step
    follower.ranks = ranks.ALONE
    with pytest.raises(RuntimeError, match="have come apart at Step"):
        follower._next_agreed(1.0)
    with pytest.raises(RuntimeError, match="have come apart at Agreed"):
        obey(None, Agreed(1.0))  # type: ignore[arg-type]
