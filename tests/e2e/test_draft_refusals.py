"""The real command line with drafts and shapes that cannot work: each ends the start within a
minute, with one sentence that names what is wrong, before the port serves. Whatever is accepted
instead serves the target's text.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from draft_rig import KINDS, make_draft
from serving import ROOT, Launch, free_port
from solo import Solo
from talk import drained, generate, together
from tiny import make_tiny

ALGORITHM, PATH = "--speculative-algorithm", "--speculative-draft-model-path"
STEPS, TOPK = "--speculative-num-steps", "--speculative-eagle-topk"
NODES = "--speculative-num-draft-tokens"
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def drafts(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A draft of each kind, and whole models whose vocabulary is another one: fewer tokens, and the
    same tokens in another order."""
    root = tmp_path_factory.mktemp("drafts")
    found = {kind: make_draft(kind, root / kind, tiny_model_dir) for kind in KINDS}
    found["fewer"] = make_tiny(root / "fewer", vocab=300)
    found["permuted"] = permuted(make_tiny(root / "permuted"))
    return found


def permuted(model: Path) -> Path:
    """Exchange two tokens of a tokenizer."""
    file = model / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content), encoding="utf-8")
    return model


def refusals(drafts: dict[str, Path]) -> list[tuple[list[str], str]]:
    """Flags, and what the sentence says."""

    def flags(kind: str, draft: str, *more: str) -> list[str]:
        return [ALGORITHM, kind, PATH, str(drafts[draft]), *more]

    shape = functools.partial(flags, "EAGLE3", "EAGLE3")
    return [
        *(
            (flags(kind, other), f"{ALGORITHM} {kind} needs a")
            for kind in KINDS
            for other in KINDS
            if kind != other
        ),
        (flags("STANDALONE", "fewer"), "tokenizer"),
        (flags("STANDALONE", "permuted"), "tokenizer"),
        ([ALGORITHM, "EAGLE3", PATH, "no/such"], PATH),
        ([ALGORITHM, "EAGLE3"], f"{ALGORITHM} EAGLE3 needs {PATH}"),
        ([ALGORITHM, "NEXTN"], "own checkpoint (NEXTN) are not loaded"),
        (shape(STEPS, "0"), STEPS),
        (shape(STEPS, "-1"), STEPS),
        (shape(STEPS, "64"), STEPS),
        (shape(STEPS, "1", TOPK, "4", NODES, "8"), NODES),
        (shape(STEPS, "1", TOPK, "4", NODES, "1"), NODES),
        (shape(STEPS, "1", TOPK, "4", NODES, "64"), NODES),
        (shape(STEPS, "3", TOPK, "4"), NODES),
        (shape(STEPS, "17", TOPK, "5", NODES, "8"), f"{STEPS} and {TOPK}"),
        (shape(TOPK, "4"), f"{TOPK} 4 needs {STEPS}"),
        (shape("--speculative-ngram-capacity", "2048"), "--speculative-ngram-capacity"),
        (shape("--speculative-token-map", "hot.pt"), "--speculative-token-map"),
        (
            flags("EAGLE", "EAGLE", "--speculative-token-map", "no/such.pt"),
            "--speculative-token-map",
        ),
        (shape("--max-total-tokens", "20"), "--max-total-tokens"),
    ]


def test_each_is_refused_by_name(tiny_model_dir: Path, drafts: dict[str, Path]) -> None:
    def run(flags: list[str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "launch_server.py", "--model-path", str(tiny_model_dir)]
        command += ["--port", str(free_port()), "--log-level", "error", *flags]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    cases = refusals(drafts)
    runs = together([functools.partial(run, flags) for flags, _ in cases], 2)
    for (flags, named), done in zip(cases, runs, strict=True):
        assert done.returncode == 2, (flags, done.stdout, done.stderr)
        assert named in done.stderr, (flags, done.stderr)
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert "Ready" not in done.stdout


@pytest.fixture(scope="module")
def solo(tiny_model_dir: Path) -> Solo:
    return Solo(tiny_model_dir)


@pytest.mark.parametrize(
    "shape",
    [
        [STEPS, "1", TOPK, "1"],
        [STEPS, "63", TOPK, "1", NODES, "8"],
        [STEPS, "9", TOPK, "8", NODES, "64"],
        [STEPS, "1", TOPK, "64", NODES, "64"],
    ],
    ids=" ".join,
)
def test_the_smallest_and_largest_shapes_serve(
    launch: Launch, solo: Solo, tiny_model_dir: Path, shape: list[str]
) -> None:
    """With the target as its own draft, which accepts."""
    pool = ["--max-total-tokens", "4000", "--max-running-requests", "5"]
    server = launch(ALGORITHM, "STANDALONE", PATH, str(tiny_model_dir), *shape, *pool)
    prompts = [list(range(70 + i, 80 + 2 * i)) for i in range(5)]
    calls = [functools.partial(generate, server, p, max_new_tokens=60, **GREEDY) for p in prompts]
    rounds = emitted = 0
    for prompt, reply in zip(prompts, together(calls, 5), strict=True):
        assert reply["output_ids"] == solo.ids(prompt, max_new_tokens=60, **GREEDY)
        rounds += reply["meta_info"]["spec_verify_ct"]
        emitted += len(reply["output_ids"]) - 1
    assert emitted > 1.05 * rounds
    drained(server)
    server.stop()
