"""EAGLE3, EAGLE and STANDALONE on the embedded model: the text, greedy or seeded, is the text
without speculation, token for token. CI tries a few shapes, pages and chunks, `make slow` all.

The EAGLE3 head and the standalone draft are those that the package brings; the EAGLE head is a
random one in EAGLE-2's layout. Whole trees are verified, so that no run depends on how fast the
machine is.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import real_prompts
from heads import make_eagle
from serving import Launch
from talk import accepted, generate, together

from sgl_spec import LLM

NEW = 20
SHAPES = ((5, 1, 6), (3, 1, 4), (5, 4, 8), (7, 8, 32))
KINDS = ("EAGLE3", "EAGLE", "STANDALONE")
ROWS = 96  # that a round of this test verifies at most: the time that a wide tree takes


@dataclass(frozen=True)
class Setup:
    """How an engine is started. chunk: -1 is off."""

    kind: str
    shape: tuple[int, int, int]
    page: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}-{'.'.join(map(str, self.shape))}-page{self.page}-chunk{self.chunk}"


ALL = [Setup(*a) for a in itertools.product(KINDS, SHAPES, (1, 16), (32, -1))]
# On a tiny model `test_exact` lets every two settings meet; here each is met once.
FEW = [
    Setup("EAGLE3", (5, 4, 8), 16, 32),
    Setup("EAGLE3", (7, 8, 32), 1, -1),
    Setup("EAGLE", (3, 1, 4), 1, 32),
    Setup("STANDALONE", (5, 1, 6), 16, -1),
]


@dataclass
class Texts:
    """Prompts as ids, how each is sampled, and what the plain engine gives."""

    prompts: list[list[int]]
    sampling: list[dict[str, Any]]
    outputs: list[list[int]]

    def part(self, count: int) -> Texts:
        """A spread of `count` prompts at most."""
        chosen = range(0, len(self.prompts), -(-len(self.prompts) // count))
        return Texts(*([v[i] for i in chosen] for v in (self.prompts, self.sampling, self.outputs)))


def sampling_of(number: int) -> dict[str, Any]:
    """Greedy, temperature 1, and filtered in turn."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    )
    return {"seed": number, "max_new_tokens": NEW, **kinds[number % 4]}


class World:
    """The plain engine's answers to two rounds of prompts, and the drafts.

    second: prompts that begin as the first ones and part from them, or go on behind their answers.
    """

    def __init__(self, target: Path, directory: Path) -> None:
        self.eagle = make_eagle(directory / "eagle", target)
        plain = LLM("smollm2", max_total_tokens=16000, max_running_requests=12)
        document = plain.encode(real_prompts.chats()[82])[24:]
        few = [real_prompts.chats()[i] for i in (0, 5, 49, 94)]
        texts = [*real_prompts.RAW[1:12:2], real_prompts.REPEAT, *few]
        prompts = [plain.encode(text) for text in texts]
        prompts += [[504], *real_prompts.edge_prompts(document)[2:6], document[:300]]
        self.first = answered(plain, prompts)
        pairs = zip(prompts, self.first.outputs, strict=True)
        self.second = answered(
            plain,
            [
                [*prompt, *output, 28, 339] if i % 2 else [*prompt[: -(len(prompt) // 4)], 198, 504]
                for i, (prompt, output) in enumerate(pairs)
            ],
        )

    def engine(self, setup: Setup) -> LLM:
        steps, topk, nodes = setup.shape
        draft = {"speculative_draft_model_path": str(self.eagle)} if setup.kind == "EAGLE" else {}
        return LLM(
            "smollm2",
            speculative_algorithm=setup.kind,
            speculative_num_steps=steps,
            speculative_eagle_topk=topk,
            speculative_num_draft_tokens=nodes,
            speculative_verify_whole_trees=True,
            page_size=setup.page,
            chunked_prefill_size=setup.chunk,
            max_running_requests=12,
            max_total_tokens=16000,
            **draft,
        )


def answered(plain: LLM, prompts: list[list[int]]) -> Texts:
    sampling = [sampling_of(i) for i in range(len(prompts))]
    outputs = [one.output_ids for one in plain.generate(prompts, sampling)]
    return Texts(prompts, sampling, outputs)


@pytest.fixture(scope="module")
def world(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(smollm2_dir, tmp_path_factory.mktemp("heads"))


def check(world: World, setup: Setup) -> None:
    llm = world.engine(setup)
    rounds = accepted = hits = 0
    for texts in (world.first, world.second):
        part = texts.part(max(3, ROWS // setup.shape[2]))
        done = llm.generate(part.prompts, part.sampling)
        assert [one.output_ids for one in done] == part.outputs
        rounds += sum(one.spec.verify_ct for one in done if one.spec)
        accepted += sum(one.spec.accepted for one in done if one.spec)
        hits += sum(one.cached_tokens for one in done)
    assert hits > 0
    if setup.kind != "EAGLE":
        assert accepted > 0.3 * rounds


@pytest.mark.parametrize("setup", FEW, ids=str)
def test_the_text_is_the_target_s(world: World, setup: Setup) -> None:
    check(world, setup)


@pytest.mark.parametrize("kind", ["EAGLE3", "STANDALONE"])
def test_the_command_line_needs_no_more_than_the_algorithm(
    launch: Launch, world: World, kind: str
) -> None:
    """The embedded model's own draft and the automatic shape, over HTTP."""
    pool = ("--max-total-tokens", "16000", "--max-running-requests", "12")
    server = launch("--speculative-algorithm", kind, *pool, model="smollm2")
    texts = world.first
    calls = [
        functools.partial(generate, server, prompt, **sampling)
        for prompt, sampling in zip(texts.prompts, texts.sampling, strict=True)
    ]
    replies = together(calls, 12)
    assert [reply["output_ids"] for reply in replies] == texts.outputs
    assert sum(map(accepted, replies)) > 20
    info = server.client.get("/server_info").json()
    shape = [info[f"speculative_{n}"] for n in ("num_steps", "eagle_topk", "num_draft_tokens")]
    assert shape == ([5, 4, 8] if kind == "EAGLE3" else [3, 1, 4])
    server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("setup", ALL, ids=str)
def test_full_matrix(world: World, setup: Setup) -> None:
    check(world, setup)
