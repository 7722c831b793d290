"""From the fields of a body to `SamplingParams`, and where absent values come from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import orjson

from sgl_spec.errors import InvalidRequestError
from sgl_spec.request import GRAMMAR_KINDS, Speculation
from sgl_spec.server.openai_schema import OpenAI, ResponseFormat
from sgl_spec.server.schema import MAX_DRAFT_TOKENS, Sampling, Settings

logger = logging.getLogger(__name__)

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
# The fields that `SamplingParams` takes as they are.
_PLAIN = (
    *("frequency_penalty", "presence_penalty", "logit_bias", "ignore_eos", "no_stop_trim"),
    *("skip_special_tokens", "stream_interval"),
)


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
        if name == "top_k" and value == 0 and not isinstance(value, bool):
            value = -1  # "keep every token" is 0 there and -1 here
        try:
            self.values[name] = getattr(Sampling.read({name: value}), name)
        except InvalidRequestError as error:
            logger.warning("The model's generation_config is not used: %s", error.message)

    def of(self, body: OpenAI) -> dict[str, Any]:
        """The values of `body`, with the defaults where it has none."""
        given = {name: getattr(body, name) for name in self.values}
        return {name: self.values[name] if v is None else v for name, v in given.items()}


def native_sampling(body: Sampling, where: str) -> dict[str, Any]:
    """What `sampling_params` of /generate ask for, as fields of `SamplingParams`."""
    names = ("max_new_tokens", "min_new_tokens", *OPENAI_DEFAULTS)
    return {name: getattr(body, name) for name in names} | _shared(body, f"{where}.", None)


def openai_sampling(
    body: OpenAI, defaults: SamplingDefaults, max_tokens: int | None
) -> dict[str, Any]:
    """The same of a body of the OpenAI routes."""
    shared = _shared(body, "", body.response_format)
    budget = {"max_new_tokens": max_tokens, "min_new_tokens": body.min_tokens}
    return defaults.of(body) | budget | shared


def _shared(body: Settings, prefix: str, response_format: ResponseFormat | None) -> dict[str, Any]:
    chosen = {name: getattr(body, name) for name in _PLAIN}
    speculation = body.speculation
    if speculation:
        most = min(speculation.max_draft_tokens, MAX_DRAFT_TOKENS)
        chosen["speculation"] = Speculation(max_draft_tokens=most)
    else:
        chosen["speculation"] = speculation
    chosen["seed"] = body.sampling_seed if body.seed is None else body.seed
    chosen["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    chosen["stop_token_ids"] = tuple(body.stop_token_ids)
    return chosen | _grammar(body, prefix, response_format)


def _grammar(body: Settings, prefix: str, response_format: ResponseFormat | None) -> dict[str, Any]:
    """The field that says what the output must match, if one does, and what the client calls it."""
    asked: dict[str, Any] = {"response_format": response_format and _wanted_schema(response_format)}
    asked |= {f"{prefix}{kind}": getattr(body, kind) for kind in GRAMMAR_KINDS}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise InvalidRequestError(
            f"{given[0]} and {given[1]} cannot both be given: an output has one grammar.",
            param=given[1],
        )
    if not given:
        return {}
    (name,) = given
    kind = "json_schema" if name == "response_format" else name.removeprefix(prefix)
    text = schema_text(asked[name], name)
    return {kind: text, "grammar_field": name}


def with_schema(sampling: dict[str, Any], schema: dict[str, Any], name: str) -> dict[str, Any]:
    """`sampling` with an output that matches the schema, which the client calls `name`."""
    if other := sampling.get("grammar_field"):
        raise InvalidRequestError(
            f"{other} and {name} cannot both be given: an output has one grammar.", param=name
        )
    return sampling | {"json_schema": schema_text(schema, name), "grammar_field": name}


def _wanted_schema(asked: ResponseFormat) -> dict[str, Any] | None:
    if asked.json_schema is not None:
        return asked.json_schema.json_schema
    return {"type": "object"} if asked.type == "json_object" else None


def schema_text(schema: dict[str, Any] | str, where: str) -> str:
    """A schema as JSON, its keys in the client's order: properties come out in that order."""
    if isinstance(schema, str):
        return schema
    try:
        return orjson.dumps(schema).decode()
    except orjson.JSONEncodeError as error:
        raise InvalidRequestError(f"{where} cannot be read: {error}.", param=where) from error
