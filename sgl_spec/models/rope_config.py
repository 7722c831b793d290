"""Rotary settings of a config: `rope_theta` with `rope_scaling` (old), or `rope_parameters`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sgl_spec.errors import UnsupportedModelError

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_DEFAULT_THETA = 10000.0
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_KNOWN = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "partial_rotary_factor",
    "finetuned",  # a note that some yarn configs carry; it changes nothing
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: `kind` is one of `ROPE_KINDS`; a kind ignores the fields it does not use.

    original_positions: context length before scaling (llama3, yarn). attention_factor: multiplies
    cos and sin, None to derive it from factor, mscale and mscale_all_dim (yarn).
    """

    kind: str = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    def context(self, max_positions: int) -> int:
        """Longest context, in tokens, given the config's `max_position_embeddings`."""
        if self.kind == "linear":
            return int(max_positions * self.factor)
        if self.kind == "yarn":
            return max(max_positions, int(self.original_positions * self.factor))
        return max_positions


def parse_rope(config: dict[str, Any], max_positions: int, where: str) -> RopeConfig:
    """Rotary settings of a whole `config.json`; `where` names the file in refusals."""
    found = _merged(config, where)
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise _refuse(where, "rope_type", kind, ", ".join(ROPE_KINDS))
    unknown = sorted(set(found) - _KNOWN)
    if unknown:
        raise _refuse(where, "rope_parameters", unknown, ", ".join(sorted(_KNOWN)))
    if found.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise _refuse(where, "partial_rotary_factor", found["partial_rotary_factor"], "1.0")
    for key in _REQUIRED[kind]:
        if found.get(key) is None:
            raise _refuse(where, f"rope_parameters.{key}", None, f"a number (rope type {kind})")

    def number(key: str, default: float) -> float:
        value = default if found.get(key) is None else found[key]
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if not numeric or not 0 <= value < math.inf or (value == 0 and default > 0):
            raise _refuse(where, f"rope_parameters.{key}", value, "a positive number")
        return float(value)

    return RopeConfig(
        kind=kind,
        theta=number("rope_theta", _DEFAULT_THETA),
        factor=number("factor", 1.0),
        low_freq_factor=number("low_freq_factor", 1.0),
        high_freq_factor=number("high_freq_factor", 4.0),
        original_positions=int(number("original_max_position_embeddings", max_positions)),
        attention_factor=number("attention_factor", 0.0) or None,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        mscale=number("mscale", 0.0),
        mscale_all_dim=number("mscale_all_dim", 0.0),
        truncate=found.get("truncate") is not False,
    )


def _merged(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The rotary object with the keys that older configs keep beside it."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
        raise _refuse(where, "rope_parameters", found, "one object for all layers")
    beside = {
        key: config[key]
        for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
        if config.get(key) is not None
    }
    return beside | found


def _refuse(where: str, key: str, value: object, allowed: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{where}: {key} = {value!r} is not supported; allowed: {allowed}.", param=key
    )
