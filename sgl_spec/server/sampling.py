"""Sampling fields as the three generating routes spell them, and where absent values come from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sgl_spec.errors import InvalidRequestError, preview
from sgl_spec.request import SEED_RANGE, SamplingParams, Speculation, is_seed
from sgl_spec.server.fields import (
    BOOLEAN,
    IDS,
    INTEGER,
    NUMBER,
    STRINGS,
    Ignore,
    Kind,
    Renamed,
    Table,
    Use,
    is_integer,
    is_number,
)
from sgl_spec.server.grammar import GRAMMAR, VLLM_GRAMMAR, grammar_of
from sgl_spec.server.unsupported import UNSUPPORTED

logger = logging.getLogger(__name__)

MAX_KEY_CHARS = 20  # of a token id in `logit_bias`
MAX_DRAFT_TOKENS = 1 << 16  # more than any tree holds, so that a larger wish is the same wish


def _is_biases(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return all(_is_id_key(key) and is_number(bias) for key, bias in value.items())


def _is_id_key(key: str) -> bool:
    digits = key.removeprefix("-")
    short = len(key) <= MAX_KEY_CHARS and digits.isascii() and digits.isdigit()
    return short and str(int(key)) == key


def _is_speculation(value: object) -> bool:
    if not isinstance(value, dict):
        return value is False
    most = value.get("max_draft_tokens", -1)
    return len(value) == 1 and is_integer(most) and most >= 0


BIASES = Kind('an object of numbers by token id, as {"50256": -100}', _is_biases)
# What no 64-bit integer holds arrives as a double: an integer all the same, if a shortened one.
SEED = Kind(SEED_RANGE, lambda value: is_integer(value) and is_seed(value))
SPECULATION = Kind('false or {"max_draft_tokens": k} with an integer k >= 0', _is_speculation)

_RENAMED: Table = {
    "include_stop_str_in_output": Renamed("no_stop_trim"),
    **{name: Renamed(here) for name, here in VLLM_GRAMMAR.items()},
}

# Fast tokenizers put nothing between special tokens, whatever this says; so it is in SGLang too.
_IGNORED: Table = {"spaces_between_special_tokens": Ignore(BOOLEAN)}

# `sampling_params` of /generate. The defaults are SGLang's; generation_config has no say here.
NATIVE: Table = {
    **UNSUPPORTED,
    "n": Use(INTEGER, 1),
    "max_new_tokens": Use(INTEGER, 128),
    "min_new_tokens": Use(INTEGER, 0),
    "temperature": Use(NUMBER, 1.0),
    "top_p": Use(NUMBER, 1.0),
    "top_k": Use(INTEGER, -1),
    "min_p": Use(NUMBER, 0.0),
    "frequency_penalty": Use(NUMBER, 0.0),
    "presence_penalty": Use(NUMBER, 0.0),
    "repetition_penalty": Use(NUMBER, 1.0),
    "logit_bias": Use(BIASES, {}),
    "speculation": Use(SPECULATION),
    "stop": Use(STRINGS, ()),
    "stop_token_ids": Use(IDS, ()),
    "ignore_eos": Use(BOOLEAN, False),
    "skip_special_tokens": Use(BOOLEAN, True),
    "no_stop_trim": Use(BOOLEAN, False),
    "seed": Use(SEED),
    "sampling_seed": Use(SEED, target="seed"),
    "stream_interval": Use(INTEGER),
    **GRAMMAR,
    **_RENAMED,
    **_IGNORED,
}

# The sampling fields that /v1/completions and /v1/chat/completions share. `temperature`, `top_p`,
# `top_k`, `min_p` and `repetition_penalty` have no default here: `SamplingDefaults` gives it.
OPENAI: Table = {
    **UNSUPPORTED,
    "n": Use(INTEGER, 1),
    "temperature": Use(NUMBER),
    "top_p": Use(NUMBER),
    "top_k": Use(INTEGER),
    "min_p": Use(NUMBER),
    "frequency_penalty": Use(NUMBER, 0.0),
    "presence_penalty": Use(NUMBER, 0.0),
    "repetition_penalty": Use(NUMBER),
    "logit_bias": Use(BIASES, {}),
    "speculation": Use(SPECULATION),
    "min_tokens": Use(INTEGER, 0, target="min_new_tokens"),
    "stop": Use(STRINGS, ()),
    "stop_token_ids": Use(IDS, ()),
    "ignore_eos": Use(BOOLEAN, False),
    "skip_special_tokens": Use(BOOLEAN, True),
    "no_stop_trim": Use(BOOLEAN, False),
    "seed": Use(SEED),
    "sampling_seed": Use(SEED, target="seed"),
    "stream_interval": Use(INTEGER),
    **GRAMMAR,
    **_RENAMED,
    **_IGNORED,
}

SAMPLING_FIELDS = (
    *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "speculation"),
    *("stop", "stop_token_ids", "ignore_eos", "no_stop_trim"),
    *("skip_special_tokens", "stream_interval"),
)

OPENAI_DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
# Settings of generation_config that would change the draw and that this version does not have.
UNSUPPORTED_DEFAULTS = {
    "encoder_repetition_penalty": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
}


class SamplingDefaults:
    """Values of sampling fields that an OpenAI request leaves out.

    generation: the model's generation_config; empty for --sampling-defaults openai. Values in it
    that this version cannot honour are logged, once, here.
    """

    def __init__(self, generation: Mapping[str, Any]) -> None:
        self.values = dict(OPENAI_DEFAULTS)
        for name, value in generation.items():
            if name in OPENAI_DEFAULTS and value is not None:
                self._take(name, value)
            elif name in UNSUPPORTED_DEFAULTS and value not in (None, UNSUPPORTED_DEFAULTS[name]):
                logger.warning(
                    "The model's generation_config asks for %s=%r, which is not supported and has "
                    "no effect.",
                    name,
                    value,
                )

    def _take(self, name: str, value: Any) -> None:
        """Let generation_config's value be the default, if it is one that a client could send."""
        if name == "top_k" and is_number(value) and float(value).is_integer():
            value = int(value) or -1  # "keep every token" is 0 there and -1 here
        field = NATIVE[name]
        assert isinstance(field, Use)
        try:
            if not field.kind.accepts(value):
                raise InvalidRequestError(
                    f"{name} must be {field.kind.allowed}, got {preview(value)}."
                )
            SamplingParams(**{name: value}).check(vocab_size=1)
        except InvalidRequestError as error:
            logger.warning("The model's generation_config is not used: %s", error.message)
        else:
            self.values[name] = value

    def fill(self, fields: dict[str, Any]) -> dict[str, Any]:
        """`fields` with the defaults where they are None."""
        absent = {name: value for name, value in self.values.items() if fields[name] is None}
        return fields | absent


def sampling_of(fields: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The `SamplingParams` fields among `fields`, as its types. where: their object's path."""
    chosen = {name: fields[name] for name in SAMPLING_FIELDS}
    stop = chosen["stop"]
    chosen["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    chosen["stop_token_ids"] = tuple(chosen["stop_token_ids"])
    chosen["logit_bias"] = {int(token): bias for token, bias in chosen["logit_bias"].items()}
    if isinstance(chosen["speculation"], dict):
        most = min(chosen["speculation"]["max_draft_tokens"], MAX_DRAFT_TOKENS)
        chosen["speculation"] = Speculation(max_draft_tokens=most)
    return chosen | grammar_of(fields, where)
