"""Forwards that are filled up to the shape of a graph give what they give as they are, and write
nothing else. In the interpreter, launch by launch; on a GPU by replays of graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fused_runs import NEAR, assert_same_kv, batch_of, on
from heads import DraftRun, eagle3_config, eagle3_weights, read_target, write_head
from kernel_runs import INTERPRETED
from model_runs import Piece, Run
from tiny import make_tiny
from torch import Tensor

from sgl_spec.engine.cuda.forwards import Forwards, Shape, draft_role, target_role
from sgl_spec.engine.cuda.graphs import Rounds
from sgl_spec.engine.cuda.rounds import DraftParts, Parts
from sgl_spec.engine.cuda.state import DeviceRows
from sgl_spec.layers.context import ForwardBatch
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.draft_loader import load_draft
from sgl_spec.models.loader import load_model

# Attention leaves rows that no request owns as the memory was.
pytestmark = [
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
    pytest.mark.usefixtures("few_programs"),
]

REQUESTS, WIDTH, NODES = 5, 40, 6
LAYERS = 2
CAPTURE = (1, 0, LAYERS)
PARENTS = [-1, 0, 0, 1, 2, 4]
TARGET_STEPS = [
    [Piece(0, 0, range(5, 14)), Piece(2, 0, [9]), Piece(1, 0, [30, 31])],  # prompts
    [Piece(2, 1, [8, 3]), Piece(0, 9, [60])],  # a chunk of one
    [Piece(1, 2, [6, 7, 8, 9, 10, 11], PARENTS), Piece(0, 10, [1, 2], [-1, 0])],
    [Piece(0, 10, [3, 4, 5], PARENTS[:3]), Piece(2, 3, [7], [-1])],  # fewer rows, other requests
    [Piece(1, 2, [5], [-1]), Piece(2, 3, [7], [-1]), Piece(0, 10, [6], [-1])],  # decoding
    [Piece(2, 4, [11], [-1])],
    [Piece(i, p, [12], [-1]) for i, p in enumerate((11, 3, 5, 0, 0))],  # more than are captured
]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("target"), layers=LAYERS)


def load(directory: Path, device: str) -> Decoder:
    return load_model(directory, device=device, attention_backend="triton", dtype="float32")


def parts_of(run: Run, model: Decoder, draft: DraftParts | None = None) -> Parts:
    """The last table row is the filler."""
    rows = DeviceRows(REQUESTS, run.kv.k.device)
    return Parts(model, run.kv, run.table, rows, draft)


def rounds_on(device: str, sizes: tuple[int, ...] = (2, 4)) -> Rounds:
    rounds = Rounds(sizes, captures=device == "cuda")
    rounds.sizes = sizes
    return rounds


def check_target(directory: Path, device: str, made_on: str) -> None:
    """made_on: where the batches are made that are filled up."""
    model = load(directory, device)
    plain, run = (Run(model, REQUESTS + 1, WIDTH) for _ in range(2))
    for one in (plain, run):
        one.table = one.table.to(device)
    role = target_role(parts_of(run, model), CAPTURE, NODES)
    forwards = Forwards(parts_of(run, model), role, rounds_on(device), None)
    found, expected = [], []
    with torch.inference_mode():
        for pieces in TARGET_STEPS:
            batch = replace(
                on(torch.device(made_on), batch_of(run, *pieces)), req_to_token=run.table
            )
            found.append(forwards.run(batch))
            expected.append(model.forward_features(batch_of(plain, *pieces), plain.kv, CAPTURE))
    for mine, theirs in zip(found, expected, strict=True):  # those of the first step as well
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, **NEAR)
    assert_same_kv(run.kv, plain.kv)
    assert forwards.shapes == {
        Shape(64, 16, 64, words=False, tree=False),
        Shape(12, 2, NODES, words=True, tree=False),
        Shape(4, 4, 1, words=True, tree=False),
        Shape(2, 2, 1, words=True, tree=False),
    }
    check_more(forwards, batch_of(run, *TARGET_STEPS[-2]), found[-2][0])


def check_more(forwards: Forwards, batch: ForwardBatch, expected: Tensor) -> None:
    """What is made beforehand, no more than may be, and a forward that finds it there."""
    with torch.inference_mode():
        for make in forwards.later():
            make()
        made = set(forwards.shapes)
        assert len(made) > 6
        assert len(made) <= forwards.role.shapes
        assert torch.equal(forwards.run(batch)[0], expected)
    assert forwards.shapes == made


@INTERPRETED
def test_no_more_shapes_are_made_than_may_be(target_dir: Path) -> None:
    """Then a batch takes the smallest that holds it, and runs as it is if there is none."""
    model = load(target_dir, "cpu")
    run = Run(model, REQUESTS + 1, WIDTH)
    role = replace(target_role(parts_of(run, model), (), NODES), shapes=2)
    forwards = Forwards(parts_of(run, model), role, rounds_on("cpu"), None)
    large, small = Shape(24, 4, NODES, True, False), Shape(2, 2, 1, True, False)
    forwards.shapes = {large, small}
    trees = batch_of(run, *TARGET_STEPS[2])
    assert forwards._shape(trees) == large, "the smallest that fits was not made"
    assert forwards._shape(batch_of(run, *TARGET_STEPS[5])) == small
    assert forwards._shape(batch_of(run, *TARGET_STEPS[4])) == large
    forwards.shapes = {small}
    assert forwards._shape(trees) == Shape(12, 2, NODES, True, False), "there is room"
    forwards.shapes = {small, replace(large, words=False)}
    assert forwards._shape(trees) is None


@INTERPRETED
def test_the_target_gives_the_same_filled_up(target_dir: Path) -> None:
    check_target(target_dir, "cpu", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("made_on", ["cpu", "cuda"])
def test_graphs_of_the_target_give_the_same(target_dir: Path, made_on: str) -> None:
    check_target(target_dir, "cuda", made_on)


def check_head(directory: Path, where: Path, device: str) -> None:
    """The text in two pieces, then two levels of a tree, each fed with rows of what came before."""
    model = load(where, device)
    config = eagle3_config(read_target(where)[0])
    directory = write_head(directory, config, eagle3_weights(config))
    head = load_draft("EAGLE3", directory, model, tokenizer_dir=where)
    plain, run = (DraftRun(head, REQUESTS + 1, WIDTH) for _ in range(2))
    for one in (plain, run):
        one.table = one.table.to(device)
    none = run.table.new_zeros(0)
    draft = DraftParts(head, run.kv, none, steps=3, topk=2, nodes=NODES, shared_noise=True)
    parts = parts_of(run, model, draft)
    forwards = Forwards(parts, draft_role(draft), rounds_on(device), None)
    features = torch.randn(14, head.width, generator=torch.Generator().manual_seed(1)).to(device)
    steps = [
        ([Piece(0, 0, range(5, 12)), Piece(1, 0, range(30, 35))], features[:12], None),
        ([Piece(0, 7, [8, 9], [-1, 0]), Piece(1, 5, [7], [-1])], features[11:], None),
        ([Piece(0, 9, [1, 2], [-1, -1]), Piece(1, 6, [3, 4], [-1, -1])], [1, 1, 2, 2], 0),
        ([Piece(1, 6, [5, 6], [-1, -1])], [2, 3], 2),
    ]
    given: Tensor | None = None
    with torch.inference_mode():
        for pieces, fed, columns in steps:
            above = fed if isinstance(fed, Tensor) else given[fed]  # type: ignore[index]
            batch, other = (with_columns(batch_of(one, *pieces), columns) for one in (run, plain))
            given = head.forward(other, above, plain.kv)
            (mine,) = forwards.run(batch, above)
            torch.testing.assert_close(mine, given, **NEAR)
    assert_same_kv(run.kv, plain.kv)
    assert {(shape.rows, shape.longest, shape.tree) for shape in forwards.shapes} == {
        (64, 64, False),
        (4, 2, False),
        (4, 2, True),
    }


def with_columns(batch: ForwardBatch, columns: int | None) -> ForwardBatch:
    """Rows behind so many columns of a tree, which see themselves and the first of these."""
    if columns is None:
        return batch
    assert batch.mask_words is not None
    rows, prefix = (
        values.repeat_interleave(batch.q_starts.diff())
        for values in (batch.rows, batch.prefix_lens)
    )
    column = torch.arange(len(rows), device=rows.device) % 2 + columns  # two rows a request
    return replace(
        batch,
        slots=batch.req_to_token[rows, prefix + column].long(),
        mask_words=1 << column | (1 if columns else 0),
        tree_lens=torch.full_like(batch.rows, columns),
    )


@INTERPRETED
def test_a_head_gives_the_same_filled_up(tmp_path: Path, target_dir: Path) -> None:
    check_head(tmp_path, target_dir, "cpu")


@pytest.mark.gpu
def test_graphs_of_a_head_give_the_same(tmp_path: Path, target_dir: Path) -> None:
    check_head(tmp_path, target_dir, "cuda")
