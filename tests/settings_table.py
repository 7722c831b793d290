"""Every setting of a request that bears on its text or its drafts, alone and with every other.

The ids in here are those of a small vocabulary (64 tokens or more), 0 being one that ends.
"""

from __future__ import annotations

import itertools
from typing import Any

from sgl_spec.request import Speculation

Setting = dict[str, Any]

SINGLE: dict[str, Setting] = {
    "greedy": {"temperature": 0.0},
    "T0.7": {"temperature": 0.7},
    "T1.3": {"temperature": 1.3},
    "top_k": {"top_k": 5},
    "top_k=1": {"top_k": 1},
    "top_p": {"top_p": 0.6},
    "top_p~0": {"top_p": 1e-6},
    "min_p": {"min_p": 0.1},
    "min_p=1": {"min_p": 1.0},
    "frequency=2": {"frequency_penalty": 2.0},
    "frequency=-2": {"frequency_penalty": -2.0},
    "presence=2": {"presence_penalty": 2.0},
    "presence=-1.5": {"presence_penalty": -1.5},
    "repetition=1.6": {"repetition_penalty": 1.6},
    "repetition=0.5": {"repetition_penalty": 0.5},
    "ban": {"logit_bias": dict.fromkeys(range(1, 41), -100.0)},
    "force": {"logit_bias": {7: 100.0, 11: 100.0, 30: 100.0, 0: 100.0}},
    "mild bias": {"logit_bias": {5: 4.0, 9: -6.5, 0: -1.0, 33: 2.5}},
    "minimum": {"min_new_tokens": 12},
    "stop ids": {"stop_token_ids": (5, 11, 23, 47)},
    "stop strings": {"stop": ("7", "A", "+-", "Z.")},
    "ignore_eos": {"ignore_eos": True},
    "seed<0": {"seed": -(2**63) + 12345},
    "no drafts": {"speculation": False},
    "few drafts": {"speculation": Speculation(max_draft_tokens=2)},
}


def pairs() -> dict[str, Setting]:
    """Two settings each, where they are not two values of one."""
    found = {}
    for (a, first), (b, second) in itertools.combinations(SINGLE.items(), 2):
        if not first.keys() & second.keys():
            found[f"{a}, {b}"] = first | second
    return found
