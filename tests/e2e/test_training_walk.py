"""The walk-through of docs/training.md, from data to a served head, with a tiny model."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from docs_commands import ROOT, Kind, commands
from serving import free_port
from training_data import VOCAB, make_target

from sgl_spec.training import data, eagle3, standalone
from sgl_spec.training import eval as evaluation

SMALL = "--hidden 32 --intermediate 64 --num-layers 2 --heads 2 --kv-heads 1 --head-dim 16"
LIMIT_S = 120
DOCUMENT = ROOT / "docs" / "training.md"


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the script wrote to, and what it printed."""
    root = tmp_path_factory.mktemp("walk")
    model, out = make_target(root / "model"), root / "out"
    settings = {
        "PYTHON": sys.executable,
        "PORT": str(free_port()),
        "TOKENS": "12000",
        "PROMPTS": "300",
        "SECONDS_EACH": "6",
        "HELD_OUT": "0.2",
        "DATA_FLAGS": "--max-new-tokens 24 --batch-size 16",
        "TRAIN_FLAGS": "--batch-tokens 2048 --max-len 512 --lr 5e-3",
        "EAGLE3_FLAGS": "--draft-vocab 128",
        "STANDALONE_FLAGS": SMALL,
        "EVAL_FLAGS": "--limit 1 --max-new-tokens 16",
    }
    begun = time.monotonic()
    done = subprocess.run(
        ["bash", "examples/train_eagle3.sh", str(model), str(out)],
        cwd=ROOT,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=3 * LIMIT_S,
    )
    output = done.stdout.decode()
    assert done.returncode == 0, output[-4000:]
    assert time.monotonic() - begun < LIMIT_S
    return out, output


def test_both_drafts_are_there(walked: tuple[Path, str]) -> None:
    out, _ = walked
    head = json.loads((out / "eagle3" / "config.json").read_text())
    assert head["architectures"] == ["LlamaForCausalLMEagle3"]
    assert head["draft_vocab_size"] == 128
    small = json.loads((out / "standalone" / "model" / "config.json").read_text())
    assert small["architectures"] == ["LlamaForCausalLM"]
    assert small["vocab_size"] == VOCAB
    for name in ("eagle3", "standalone"):
        origin = json.loads((out / name / "provenance.json").read_text())
        assert origin["target"] == "model"
        assert origin["steps"] > 0
        assert origin["held_out_figures"]["(5,4,8)"] >= 1.0
        assert str(out) not in json.dumps(origin)


def test_what_it_prints(walked: tuple[Path, str]) -> None:
    """A table for each draft, and an answer that was speculated on."""
    _, output = walked
    means = re.findall(r"^5,\d,\d +mean +\d+ +\d+ +\d+ +([\d.]+)", output, re.MULTILINE)
    assert len(means) == 4
    assert all(1.0 <= float(value) <= 6.0 for value in means)
    (answer,) = re.findall(r'^\{"text".*$', output, re.MULTILINE)
    meta = json.loads(answer)["meta_info"]
    assert meta["completion_tokens"] == 32
    assert 0 < meta["spec_verify_ct"] < 32


def test_flags_of_the_document_exist() -> None:
    """Each command is parsed by its own parser; unknown flags and values end the process."""
    parsers = {
        "eagle3": eagle3.parser().parse_args,
        "standalone": standalone.parser().parse_args,
        "eval": evaluation.parser().parse_args,
        "data": lambda flags: data.parse(flags),
    }
    found = [command for command in commands(DOCUMENT) if command.kind is Kind.TRAINING]
    script = (ROOT / "examples" / "train_eagle3.sh").read_text()
    seen = set()
    for command in found:
        words = shlex.split(command.text)
        if "-m" not in words:
            given = [word.partition("=")[0] for word in words if re.match("[A-Z0-9_]+=", word)]
            assert given
            assert all(f"${{{name}:-" in script for name in given), given
        else:
            name, *flags = words[words.index("-m") + 2 :]
            seen.add(name)
            parsers[name](flags)
    assert seen == set(parsers)
