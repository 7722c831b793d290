"""The tensors of a draft head: what they are called in its file, and their shapes."""

from __future__ import annotations

from typing import Any

from sgl_spec.models.draft_config import EAGLE, EAGLE3, SPECULATORS, HeadConfig
from sgl_spec.models.eagle import EagleNames
from sgl_spec.models.eagle3 import Eagle3Names
from sgl_spec.models.loader import layer_shapes
from sgl_spec.models.stored import Shape

STANDALONE = "STANDALONE"

_LEGACY_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
_ATTENTION_INPUTS = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
)
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


def kind_of(content: dict[str, Any], names: frozenset[str] | None) -> str | None:
    """Which algorithm a directory is for, from its config and the names of its tensors (None: not
    known, and then the answer may be None too). One lost tensor does not change the answer."""
    plain = {name.removeprefix("model.") for name in names or ()}
    architectures = str(content.get("architectures"))
    if (
        "Eagle3" in architectures
        or content.get("speculators_model_type") is not None
        or "draft_vocab_size" in content
        or any(name == "d2t" or name.startswith("midlayer.") for name in plain)
        or any(name.endswith("hidden_norm.weight") for name in plain)
    ):
        return EAGLE3
    if "Eagle" in architectures or "fc.weight" in plain:
        return EAGLE
    if names is None:
        return None
    return STANDALONE if "norm.weight" in plain or _EMBEDDING in plain else EAGLE


def eagle_names(config: HeadConfig, stored: frozenset[str]) -> EagleNames:
    """How the file calls the tensors of an EAGLE head."""
    base = _base(stored)
    layers = tuple(f"{base}layers.{index}" for index in range(config.layers.num_layers))
    return EagleNames(fc=f"{base}fc", layers=layers)


def eagle_shapes(config: HeadConfig, names: EagleNames) -> dict[str, Shape]:
    """Name and shape of every weight of an EAGLE head."""
    hidden = config.layers.hidden_size
    shapes: dict[str, Shape] = _fc_shapes(config, names.fc, 2 * hidden)
    for index, prefix in enumerate(names.layers):
        layer = layer_shapes(config.layers)
        if index == 0:
            del layer["input_layernorm.weight"]
        shapes.update({f"{prefix}.{name}": shape for name, shape in layer.items()})
    return shapes


def eagle_unread(stored: frozenset[str]) -> list[str]:
    """Tensors that an EAGLE file may carry and nobody reads: the target's are used."""
    return [f"{_base(stored)}{_EMBEDDING}", _HEAD]


def eagle3_names(
    config: HeadConfig, stored: frozenset[str], target_hidden: int, *, tied: bool
) -> Eagle3Names:
    """How the file calls the tensors of an EAGLE3 head; optional ones are named if it has them.

    tied: whether the config ties the output to the head's embedding, where no output is stored.
    """
    base = _base(stored)
    layers = [f"{base}layers.{index}" for index in range(config.layers.num_layers)]
    if any(name.startswith(f"{base}midlayer.") for name in stored):
        layers[0] = f"{base}midlayer"
    own_head = config.draft_vocab_size is not None and not (tied and _HEAD not in stored)
    embedding = f"{base}{_EMBEDDING}"
    own_embedding = embedding in stored or config.layers.hidden_size != target_hidden
    return Eagle3Names(
        fc=f"{base}fc",
        layers=tuple(layers),
        norm=f"{base}norm.weight",
        feature_norms=_feature_norms(config, stored, base),
        input_norm=f"{base}input_norm.weight" if config.norm_before_fc else None,
        lm_head=_HEAD if own_head else None,
        embedding=embedding if own_embedding else None,
    )


def eagle3_shapes(config: HeadConfig, names: Eagle3Names) -> dict[str, Shape]:
    """Name and shape of every weight of an EAGLE3 head."""
    layers, hidden = config.layers, config.layers.hidden_size
    features = config.num_features * config.target_hidden
    shapes = _fc_shapes(config, names.fc, features)
    for index, prefix in enumerate(names.layers):
        layer = layer_shapes(layers)
        if index == 0:
            layer["hidden_norm.weight"] = (hidden,)
            layer.update({name: (layer[name][0], 2 * hidden) for name in _ATTENTION_INPUTS})
        shapes.update({f"{prefix}.{name}": shape for name, shape in layer.items()})
    shapes[names.norm] = (hidden,)
    shapes.update(dict.fromkeys(names.feature_norms, (config.target_hidden,)))
    if names.input_norm is not None:
        shapes[names.input_norm] = (features,)
    if names.lm_head is not None:
        assert config.draft_vocab_size is not None
        shapes[names.lm_head] = (config.draft_vocab_size, hidden)
    if names.embedding is not None:
        shapes[names.embedding] = (layers.vocab_size, hidden)
    return shapes


def eagle3_unread(config: HeadConfig) -> list[str]:
    """Tensors that an EAGLE3 file may carry besides its weights. The vocabulary is
    read apart, nothing else is."""
    unread = ["d2t", "t2d"]
    if config.draft_vocab_size is None:
        unread.append(_HEAD)  # null says that the target's is used
    if config.layout == SPECULATORS:
        unread += ["verifier_norm.weight", "verifier_lm_head.weight"]  # the target's, for training
    return unread


def _base(stored: frozenset[str]) -> str:
    return "model." if any(name.startswith("model.") for name in stored) else ""


def _fc_shapes(config: HeadConfig, name: str, columns: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (config.layers.hidden_size, columns)}
    if config.fc_bias:
        shapes[f"{name}.bias"] = (config.layers.hidden_size,)
    return shapes


def _feature_norms(config: HeadConfig, stored: frozenset[str], base: str) -> tuple[str, ...]:
    """The config decides; where it is silent, the stored names do."""
    names = tuple(f"{base}fc_norm.{index}.weight" for index in range(config.num_features))
    legacy = tuple(f"{base}{name}.weight" for name in _LEGACY_NORMS)
    if len(legacy) == config.num_features and stored & set(legacy):
        names = legacy
    wanted = config.feature_norms
    return names if wanted or (wanted is None and stored & set(names)) else ()
