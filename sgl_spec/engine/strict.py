"""The self-check of --strict: the same text as plain decoding, a chain, a tree, chunks of a prompt
and beside others must give the same bits in every layer. docs/strict.md says what is promised."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_spec.errors import ConfigError
from sgl_spec.layers.context import ForwardBatch, KVCache
from sgl_spec.models.decoder import Decoder
from sgl_spec_kernels.silu_mul import silu_mul

logger = logging.getLogger(__name__)

_TESTED = 12  # rows at the end of a text, which are compared
_PREFIX = 58  # so that they lie on both sides of the end of a tile
_PREFIXES = (0, 1, 58, 314, 1500)
_BATCHES, _ALL_BATCHES = (8, 64), (2, 8, 48, 64)
_MANY_ROWS = 2048
_OTHERS = 63
_LEAST, _MOST = 1, 40  # tokens of a request beside the text


@dataclass(frozen=True, slots=True)
class Case:
    """Another way to compute the last rows of a text. name: what it is called in the log.

    chunks: of how many rows, None: as a tree's path. decoys: nodes beside each of the path. others:
    requests in the same forward, of `rows` rows each; last: whether the text comes behind them.
    """

    name: str
    chunks: tuple[int, ...] | None = None
    decoys: int = 0
    others: int = 0
    rows: int = 1
    last: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """The first part of a model whose bits are not those of plain decoding. rows: that differ."""

    case: str
    prefix: int
    part: str
    rows: int

    def __str__(self) -> str:
        return (
            f"{self.case} behind {self.prefix} tokens: {self.part} differs from plain decoding in "
            f"{self.rows} of {_TESTED} rows"
        )


def require_strict(model: Decoder, *, every: bool = False) -> None:
    """`ConfigError` unless the check finds equal bits. every: try many shapes, and log each."""
    found = check_strict(model, every=every)
    if found:
        raise ConfigError(
            f"--strict cannot be kept on this machine: {found[0]}. --no-strict serves without it.",
            param="strict",
        )


@torch.inference_mode()
def check_strict(model: Decoder, *, every: bool = False) -> list[Difference]:
    """What differs, one for each case; needs a model on the fused path."""
    found: list[Difference] = []
    for prefix in _PREFIXES if every else (_PREFIX,):
        if prefix + 8 * _TESTED > model.config.context_length:
            continue
        text = _Text(model, prefix)
        expected = text.plain()
        for case in _cases(prefix, every=every):
            difference = text.first_difference(case, expected)
            found += [] if difference is None else [difference]
            told = "equal" if difference is None else str(difference)
            logger.log(logging.INFO if every else logging.DEBUG, "strict, %s: %s", case.name, told)
    return found


def _cases(prefix: int, *, every: bool) -> Iterator[Case]:
    whole, steps = prefix + _TESTED, (1,) * _TESTED
    yield Case("a chain of drafts")
    yield Case("a tree", decoys=1)
    yield Case("a prompt in one chunk", chunks=(whole,))
    for batch in _ALL_BATCHES if every else _BATCHES:
        yield Case(f"first of {batch} requests", chunks=steps, others=batch - 1)
        yield Case(f"last of {batch} requests", chunks=steps, others=batch - 1, last=True)
    yield Case("a tree, last of 48 requests", decoys=1, others=47, last=True)
    if every:
        yield Case("a wide tree", decoys=4)
        yield Case("a prompt in chunks", chunks=(5, 5, 2))
        many = (_MANY_ROWS - whole) // _OTHERS
        yield Case("a prompt in 2048 rows", chunks=(whole,), others=_OTHERS, rows=many, last=True)


class _Text:
    """A text of random tokens; its KV lies in scattered slots, and is written anew for each case.

    Table row 0 is the text's, the others belong to the requests beside it.
    """

    def __init__(self, model: Decoder, prefix: int) -> None:
        self.model, self.prefix = model, prefix
        self.length = prefix + _TESTED
        generator = torch.Generator().manual_seed(prefix)
        beside = _MOST + _MANY_ROWS // _OTHERS
        width = max(self.length + 5 * _TESTED, beside)
        slots = torch.randperm(width + _OTHERS * beside, generator=generator).int()
        table = torch.zeros(1 + _OTHERS, width, dtype=torch.int32)
        table[0], table[1:, :beside] = slots[:width], slots[width:].view(_OTHERS, beside)
        self.table = table.to(model.device)
        vocab = model.config.vocab_size
        self.tokens = torch.randint(vocab, (1 + _OTHERS, width), generator=generator)
        lengths = torch.randint(_LEAST, _MOST, (1 + _OTHERS,), generator=generator)
        self.lengths: list[int] = lengths.tolist()
        self.kv = model.new_kv_cache(len(slots))

    def plain(self) -> dict[str, Tensor]:
        """The last rows, one forward each."""
        return self._run(Case("plain decoding", chunks=(1,) * _TESTED))

    def first_difference(self, case: Case, expected: dict[str, Tensor]) -> Difference | None:
        found = self._run(case)
        for part, right in expected.items():
            rows = int((found[part] != right).flatten(1).any(1).sum())
            if rows:
                return Difference(case.name, self.prefix, part, rows)
        return None

    def _run(self, case: Case) -> dict[str, Tensor]:
        chunks = (_TESTED,) if case.chunks is None else case.chunks
        begin = self.length - sum(chunks)
        for start in range(0, begin, _MANY_ROWS):
            stop = min(begin, start + _MANY_ROWS)
            self.model.forward(self._batch([(0, start, self._row(0, start, stop))]), self.kv)
        others = range(1, case.others + 1)
        if others:
            parts = [(row, 0, self._row(row, 0, self.lengths[row])) for row in others]
            self.model.forward(self._batch(parts), self.kv)
        found: list[dict[str, Tensor]] = []
        for chunk in chunks:
            found.append(self._step(case, begin, chunk))
            begin += chunk
        joined = {part: torch.cat([one[part] for one in found]) for part in found[0]}
        return {part: rows[-_TESTED:] for part, rows in joined.items()}

    def _step(self, case: Case, begin: int, chunk: int) -> dict[str, Tensor]:
        """One forward of the text and the requests beside it; the text's rows."""
        tree = case.chunks is None
        if tree:
            tokens, parents, kept = self._tree(case.decoys)
        else:
            tokens, parents = self._row(0, begin, begin + chunk), None
            kept = list(range(chunk))
        mine = (0, begin, tokens)
        others = []
        for row in range(1, case.others + 1):
            start = self.lengths[row]
            others.append((row, start, self._row(row, start, start + case.rows)))
        parts = [*others, mine] if case.last else [mine, *others]
        batch = self._batch(parts, parents=parents, tree_row=0 if tree else None)
        first = len(others) * case.rows if case.last else 0
        rows = torch.tensor(kept, device=self.model.device) + first
        parts_of = forward_parts(self.model, batch, self.kv)
        return {part: value.index_select(0, rows) for part, value in parts_of}

    def _tree(self, decoys: int) -> tuple[Tensor, list[int], list[int]]:
        """Tokens, parents and the places of the text's own rows: behind each of these come
        `decoys` siblings of the next."""
        text = self._row(0, self.prefix, self.length).tolist()
        vocab = self.model.config.vocab_size
        tokens, parents, kept = [text[0]], [-1], [0]
        for token in text[1:]:
            above = kept[-1]
            tokens += [(token + 1 + i) % vocab for i in range(decoys)]
            parents += [above] * (decoys + 1)
            tokens.append(token)
            kept.append(len(tokens) - 1)
        return torch.tensor(tokens), parents, kept

    def _row(self, row: int, start: int, stop: int) -> Tensor:
        return self.tokens[row, start:stop]

    def _batch(
        self,
        parts: Sequence[tuple[int, int, Tensor]],
        parents: Sequence[int] | None = None,
        tree_row: int | None = None,
    ) -> ForwardBatch:
        """parts: (table row, tokens before it, its new tokens). parents: of the tree of one of
        them; the others then are roots alone."""
        positions, words, slots = [], [], []
        for row, start, tokens in parts:
            own = parents if row == tree_row and parents is not None else None
            depths, seen = _depths(own if own is not None else range(-1, len(tokens) - 1))
            positions += [start + depth for depth in depths]
            words += seen
            slots.append(self.table[row, start : start + len(tokens)].long())
        device, lens = self.model.device, [len(tokens) for _, _, tokens in parts]

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return ForwardBatch(
            tokens=torch.cat([tokens for _, _, tokens in parts]).to(device),
            positions=ints(positions),
            slots=torch.cat(slots),
            req_to_token=self.table,
            rows=ints([row for row, _, _ in parts]),
            prefix_lens=ints([start for _, start, _ in parts]),
            q_starts=ints([0, *lens]).cumsum(0),
            mask_words=None if tree_row is None else ints(words),
            max_q_len=max(lens),
        )


def _depths(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Depths and signed 64-bit ancestor words; of more than 64 nodes only the depths mean
    anything."""
    depths: list[int] = []
    words: list[int] = []
    for node, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        above = 0 if parent < 0 else words[parent]
        word = (above | 1 << min(node, 63)) & (2**64 - 1)
        words.append(word)
    return depths, [word - 2**64 if word >= 2**63 else word for word in words]


def forward_parts(model: Decoder, batch: ForwardBatch, kv: KVCache) -> Iterator[tuple[str, Tensor]]:
    """A forward by the fused path, part by part: (name, rows [T, ...])."""
    fused, eps = model.stack.fused, model.config.rms_norm_eps
    assert fused is not None, "plain torch has no such check"
    first = model.stack.layers[0].input_norm
    assert first is not None
    stream, x = fused.begin(model.embedding, batch.tokens, first, eps)
    added: Tensor | None = None
    steps = fused.each(batch, model.stack.caches(kv))
    for index, (layer, k_cache, v_cache, shared) in enumerate(steps):
        if added is not None:
            assert layer.input_norm is not None
            x = fused.norm(added, layer.input_norm, layer.eps, stream)
        attended = fused.attend(layer, x, k_cache, v_cache, shared)
        name = f"layer {index}, "
        yield (
            name + "the product of queries, keys and values",
            torch.cat((k_cache[batch.slots], v_cache[batch.slots]), 1),
        )
        yield name + "attention", attended
        output = layer.output(attended)
        yield name + "the output product", output
        x = fused.norm(output, layer.post_norm, layer.eps, stream)
        inner = layer.gate_up.gated(x)
        inner = silu_mul(layer.gate_up(x)) if inner is None else inner
        yield name + "the gate-up product", inner
        added = layer.down(inner)
        yield name + "the down product", added
    assert added is not None
    hidden = fused.norm(added, model.norm, eps, stream)
    yield "the last norm", hidden
    yield "the head's product", model.raw_logits(hidden)
