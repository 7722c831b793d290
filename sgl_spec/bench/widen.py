"""Write a model, an EAGLE or EAGLE3 head or a STANDALONE draft at the cost of a bigger one: the
same text and the same drafts, from an ordinary checkpoint of the asked shape.

A head is widened together with its target: give both the same --shape. The shape of a STANDALONE
draft is its own. --random-head writes an EAGLE3 head that nobody trained, where only its cost
matters.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from sgl_spec.bench.widen_heads import random_head, widen_head
from sgl_spec.bench.widen_parts import Noise, Size, check_size, parse_size
from sgl_spec.bench.widen_plan import HEAD, Widener, widened_keys, write_checkpoint, write_json
from sgl_spec.errors import ConfigError
from sgl_spec.models.checkpoint import resolve_checkpoint, resolve_draft
from sgl_spec.models.config import STORED_DTYPES, Keys, ModelConfig, read_json
from sgl_spec.models.draft_names import STANDALONE, kind_of
from sgl_spec.models.loader import expected_shapes
from sgl_spec.models.stored import StoredWeights

_COPIED = ("tokenizer*", "special_tokens_map.json", "generation_config.json", "*.jinja", "*.txt")


def widen_model(source: Path, out: Path, size: Size, noise: Noise) -> None:
    """Write the decoder in `source` at `size` into the empty directory `out`.

    Raises `ConfigError` or `UnsupportedModelError` naming what does not fit.
    """
    old = ModelConfig.from_hf(source)
    check_size(old, size, layers=size.layers)
    content = widened_keys(read_json(source / "config.json"), old, size)
    content |= {"num_hidden_layers": size.layers, "tie_word_embeddings": False}
    if isinstance(content.get("layer_types"), list):
        kinds = content["layer_types"]
        content["layer_types"] = kinds + [kinds[-1]] * (size.layers - len(kinds))
    wide = ModelConfig.from_keys(Keys(content, out / "config.json"))
    with StoredWeights(source) as stored:
        stored.check(expected_shapes(old), also=[HEAD] if old.tie_word_embeddings else [])
        plan = Widener(stored, old, size, noise).model(wide)
        assert {name: p.shape for name, p in plan.items()} == expected_shapes(wide)
        write_checkpoint(out, plan, content, noise.dtype)
    for pattern in _COPIED:
        for file in source.glob(pattern):
            shutil.copyfile(file, out / file.name)


def widen_draft(source: Path, target: ModelConfig, out: Path, size: Size, noise: Noise) -> None:
    """Write the draft in `source`, of any of the three kinds, at `size` into the empty directory
    `out`. target: of the narrow model that a head was trained for. Errors as of `widen_model`."""
    content = read_json(source / "config.json")
    with StoredWeights(source, pickled=True) as stored:
        kind = kind_of(content, stored.names)
        assert kind is not None
        if kind != STANDALONE:
            keys = Keys(content, source / "config.json")
            widen_head(kind, keys, stored, target, out, size, noise)
            return
    widen_model(source, out, size, noise)


def main(argv: Sequence[str]) -> None:
    """`python -m sgl_spec.bench widen`."""
    options = _parser().parse_args(argv)
    size = parse_size(options.shape)
    out = Path(options.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} must be a new or an empty directory.")
    # A head needs the narrow target's config alone; a model is copied with its tokenizer.
    alone = options.draft is None and options.random_head is None
    source = resolve_checkpoint(options.model_path, tokenizer=alone)
    noise = Noise(options.seed, getattr(torch, options.dtype))
    out.mkdir(parents=True, exist_ok=True)
    what = options.draft or options.model_path
    if alone:
        widen_model(source, out, size, noise)
    elif options.draft is not None:
        target = ModelConfig.from_hf(source)
        widen_draft(resolve_draft(options.draft), target, out, size, noise)
    else:
        content, target = read_json(source / "config.json"), ModelConfig.from_hf(source)
        random_head(content, target, options.random_head, out, size, noise)
        what = f"a random EAGLE3 head for {options.model_path}"
    said = {"source": what, "shape": str(size)}
    write_json(out / "widened.json", said | {"dtype": options.dtype, "seed": options.seed})
    print(f"{out}: {what} at {size} in {options.dtype}.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sgl_spec.bench widen", description=__doc__)
    parser.add_argument("out", metavar="OUT", help="a new or an empty directory")
    parser.add_argument("--model-path", default="smollm2", help="the model, or a head's target")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--draft", help="widen this draft instead: a shipped name, a directory")
    which.add_argument(
        "--random-head",
        type=int,
        metavar="COLUMNS",
        help="write an untrained EAGLE3 head with so many draft tokens instead",
    )
    parser.add_argument(
        "--shape", required=True, help="a name, or HIDDENxLAYERSxHEADSxKVHEADSxHEAD_DIMxINNER"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=STORED_DTYPES)
    parser.add_argument("--seed", type=int, default=0, help="of the weights that change nothing")
    return parser
