"""What the `config.json` of a draft head says. Three layouts are published: two of EAGLE, and that
of the `speculators` package."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_spec.errors import UnsupportedModelError
from sgl_spec.models.config import Keys, ModelConfig

EAGLE = "EAGLE"
EAGLE3 = "EAGLE3"
SPECULATORS = "speculators"

# Heads are published under the names that servers gave them, or under that of their layer.
_ARCHITECTURES = {
    EAGLE: {
        "LlamaForCausalLMEagle": "LlamaForCausalLM",
        "EagleLlamaForCausalLM": "LlamaForCausalLM",
        "LlamaForCausalLM": "LlamaForCausalLM",
        "Qwen2ForCausalLMEagle": "Qwen2ForCausalLM",
        "Qwen2ForCausalLM": "Qwen2ForCausalLM",
    },
    EAGLE3: {
        "LlamaForCausalLMEagle3": "LlamaForCausalLM",
        "Eagle3LlamaForCausalLM": "LlamaForCausalLM",
        "LlamaForCausalLM": "LlamaForCausalLM",
    },
    SPECULATORS: {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"},
}
_CAPTURE = "eagle_aux_hidden_state_layer_ids"
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")
_DEFAULT_FEATURES = 3
# Switches of `eagle_config` for heads of other structures.
_ONE_VALUE = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A draft head: the geometry of its layers, and where it differs from a decoder.

    layers: its vocab_size is the target's. draft_vocab_size: columns of its own output, None where
    it uses the target's head. target_hidden: width of the target's rows. capture: layers of the
    target whose inputs it reads, None where the config does not say; num_features: how many.
    fc_bias: whether `fc` has one. norm_before_fc: one norm over all features. feature_norms: a norm
    for each feature, None where the stored names decide. norm_before_residual: the residual stream
    starts from the normed feature. norm_output: what goes back into the head is final-normed.
    """

    layout: str
    layers: ModelConfig
    draft_vocab_size: int | None
    target_hidden: int
    capture: tuple[int, ...] | None
    num_features: int
    fc_bias: bool
    norm_before_fc: bool = False
    feature_norms: bool | None = False
    norm_before_residual: bool = False
    norm_output: bool = False


def read_head_config(keys: Keys, algorithm: str) -> HeadConfig:
    """Read a head's config as one for `algorithm` (EAGLE or EAGLE3).

    Raises `UnsupportedModelError` naming the key whose value is missing or cannot be served.
    """
    if algorithm == EAGLE:
        return _eagle(keys)
    if keys.content.get("speculators_model_type") is not None:
        return _speculators(keys)
    return _eagle3(keys)


def _eagle(keys: Keys) -> HeadConfig:
    layers = _layers(keys, EAGLE)
    return HeadConfig(
        layout=EAGLE,
        layers=layers,
        draft_vocab_size=None,
        target_hidden=layers.hidden_size,
        capture=None,
        num_features=1,
        fc_bias=keys.flag("bias", True),
    )


def _eagle3(keys: Keys) -> HeadConfig:
    layers = _layers(keys, EAGLE3)
    if "draft_vocab_size" not in keys.content:
        raise keys.refuse("draft_vocab_size", "absent", "an integer, or null for the target's head")
    own = keys.content["draft_vocab_size"] is not None
    nested = Keys(keys.get("eagle_config", dict, "an object", {}), keys.path)
    for key, only in _ONE_VALUE.items():
        if nested.flag(key, only) != only:
            raise keys.refuse(f"eagle_config.{key}", not only, str(only))
    # Servers look for these in both places; the nested one is the newer.
    both = Keys({**keys.content, **nested.content}, keys.path)
    capture = _capture(keys, nested)
    return HeadConfig(
        layout=EAGLE3,
        layers=layers,
        draft_vocab_size=keys.count("draft_vocab_size") if own else None,
        target_hidden=keys.count("target_hidden_size", layers.hidden_size),
        capture=capture,
        num_features=_num_features(both, capture),
        fc_bias=keys.flag("bias", False),
        norm_before_fc=both.flag("norm_before_fc", False),
        feature_norms=_first_flag(both, "fc_norm", "use_aux_norm"),
        norm_before_residual=both.flag("norm_before_residual", False),
        norm_output=both.flag("norm_output", False),
    )


def _speculators(keys: Keys) -> HeadConfig:
    kind = keys.content["speculators_model_type"]
    if kind != "eagle3":
        raise keys.refuse("speculators_model_type", kind, "eagle3")
    if keys.content.get("quantization_config") is not None:
        raise keys.refuse("quantization_config", "present", "absent (plain weights)")
    for key in ("norm_before_residual", "draft_vocab_size"):
        if keys.content.get(key) is None:
            raise keys.refuse(key, "absent", "a value; it has no default here")
    layers = ModelConfig.from_keys(_layer_keys(keys))
    capture = _layer_ids(keys) or None
    return HeadConfig(
        layout=SPECULATORS,
        layers=layers,
        draft_vocab_size=keys.count("draft_vocab_size"),
        target_hidden=keys.count("target_hidden_size", layers.hidden_size),
        capture=capture,
        num_features=_num_features(keys, capture),
        fc_bias=False,
        norm_before_fc=keys.flag("norm_before_fc", False),
        feature_norms=keys.flag("fc_norm", False),
        norm_before_residual=keys.flag("norm_before_residual", False),
        norm_output=keys.flag("norm_output", False),
    )


def _layers(keys: Keys, layout: str) -> ModelConfig:
    """The decoder whose layers the head has; `qkv_bias` is EAGLE's own name for their biases."""
    allowed = _ARCHITECTURES[layout]
    found = keys.content.get("architectures")
    name = found[0] if isinstance(found, list) and len(found) == 1 else found
    if not isinstance(name, str) or name not in allowed:
        raise keys.refuse("architectures", found, ", ".join(allowed))
    content = {**keys.content, "architectures": [allowed[name]]}
    config = ModelConfig.from_keys(Keys(content, keys.path))
    bias = keys.flag("qkv_bias", config.attention_bias)
    return dataclasses.replace(config, attention_bias=bias)


def _layer_keys(keys: Keys) -> Keys:
    """`transformer_layer_config` as a whole config: what it leaves out is its class's default."""
    given = keys.get("transformer_layer_config", dict, "an object with a model_type")
    kind, allowed = given.get("model_type"), _ARCHITECTURES[SPECULATORS]
    if kind not in allowed:
        raise keys.refuse("transformer_layer_config.model_type", kind, ", ".join(allowed))
    content = {**_class_defaults(kind, given), **given, "architectures": [allowed[kind]]}
    return Keys(content, keys.path)


def _class_defaults(model_type: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers fills in, given the rest (a head_dim follows from other values)."""
    from transformers import AutoConfig  # seconds to import, and only this layout needs it

    content: dict[str, Any] = AutoConfig.for_model(**{**given, "model_type": model_type}).to_dict()
    if any(given.get(key) is not None for key in _ROPE_KEYS):
        content = {key: value for key, value in content.items() if key not in _ROPE_KEYS}
    return content


def _capture(keys: Keys, nested: Keys) -> tuple[int, ...] | None:
    """Inside `eagle_config` an id means the output of that layer; beside it, its input."""
    outputs, inputs = _layer_ids(nested, "eagle_config."), _layer_ids(keys)
    if outputs and inputs and inputs != tuple(layer + 1 for layer in outputs):
        allowed = f"absent, or one more than eagle_config's {list(outputs)}"
        raise keys.refuse(_CAPTURE, list(inputs), allowed)
    return tuple(layer + 1 for layer in outputs) or inputs or None


def _layer_ids(keys: Keys, where: str = "") -> tuple[int, ...]:
    """As the file has them, a list or a lone one; () where it has none. Their range is the
    target's business: `refuse_layers`."""
    said = keys.content.get(_CAPTURE)
    listed = said if isinstance(said, list) else [] if said is None else [said]
    if said == [] or not all(type(item) is int for item in listed):
        allowed = "a layer id of the target (0 is its first layer), a list of them, or null"
        raise keys.refuse(f"{where}{_CAPTURE}", said, allowed)
    return tuple(listed)


def refuse_layers(keys: Keys, num_layers: int) -> UnsupportedModelError:
    """The error for layer ids, said as in the file, that a target of `num_layers` does not have."""
    nested, most = (keys.content.get("eagle_config") or {}).get(_CAPTURE), num_layers - 1
    if nested is not None and keys.content.get("speculators_model_type") is None:
        allowed = f"-1 (the embedding) to {most - 1}, the outputs of the target's layers"
        return keys.refuse(f"eagle_config.{_CAPTURE}", nested, allowed)
    said = keys.content.get(_CAPTURE)
    allowed = f"0 to {most}, the inputs of layers 0 to {most} of the target"
    return keys.refuse(_CAPTURE, "absent" if said is None else said, allowed)


def _num_features(keys: Keys, capture: tuple[int, ...] | None) -> int:
    expected = len(capture) if capture else _DEFAULT_FEATURES
    found = keys.count("num_aux_hidden_states", expected)
    if found != expected:
        allowed = f"{expected}, as many as the target layers known to be read"
        raise keys.refuse("num_aux_hidden_states", found, allowed)
    return found


def _first_flag(keys: Keys, *names: str) -> bool | None:
    for name in names:
        if keys.content.get(name) is not None:
            return keys.flag(name, False)
    return None
