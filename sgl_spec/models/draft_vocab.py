"""Whose tokens a draft's columns are: offsets, token maps, and the tokenizers of whole models."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sgl_spec.errors import ConfigError, UnsupportedModelError
from sgl_spec.models.stored import StoredWeights
from sgl_spec.models.torch_file import load_torch_file

logger = logging.getLogger(__name__)

_OFFSETS, _MARKS = "d2t", "t2d"
_INTEGERS = (torch.int64, torch.int32)


def read_offsets(weights: StoredWeights, columns: int, vocab_size: int) -> Tensor | None:
    """[columns] int64: the target token of each column of an EAGLE3 head, c + d2t[c]; None where
    there is no d2t because there is a column for each token. A t2d must agree with it."""
    ids = _offset_ids(weights, columns, vocab_size)
    if _MARKS in weights.names:
        _check_marks(weights, torch.arange(vocab_size) if ids is None else ids, vocab_size)
    return ids


def _offset_ids(weights: StoredWeights, columns: int, vocab_size: int) -> Tensor | None:
    where = weights.directory
    if _OFFSETS not in weights.names:
        if columns < vocab_size:
            raise UnsupportedModelError(
                f"{where} misses the tensor {_OFFSETS}: draft_vocab_size is {columns}, smaller "
                f"than vocab_size {vocab_size}, so it must say which tokens these are."
            )
        return None
    offsets = weights.raw(_OFFSETS)
    if offsets.dtype not in _INTEGERS or tuple(offsets.shape) != (columns,):
        raise UnsupportedModelError(
            f"{where}: {_OFFSETS} is {offsets.dtype} {list(offsets.shape)}; "
            f"allowed: int64 [{columns}], one for each of draft_vocab_size."
        )
    ids = offsets.long() + torch.arange(columns)
    _check_ids(ids, vocab_size, f"{where}: {_OFFSETS}")
    return ids


def _check_marks(weights: StoredWeights, ids: Tensor, vocab_size: int) -> None:
    """t2d says of each token of the target whether the head has a column for it; only training
    reads it, but one that names other tokens than d2t belongs to another vocabulary."""
    where, marks = weights.directory, weights.raw(_MARKS)
    if tuple(marks.shape) != (vocab_size,) or marks.dtype != torch.bool:
        logger.warning(
            "%s: %s is %s %s, not bool [%d]; it is not compared with %s.",
            *(where, _MARKS, marks.dtype, list(marks.shape), vocab_size, _OFFSETS),
        )
        return
    known = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    (differing,) = (marks != known).nonzero(as_tuple=True)
    if len(differing):
        first = int(differing[0])
        raise UnsupportedModelError(
            f"{where}: {_MARKS} contradicts {_OFFSETS} about {len(differing)} tokens; "
            f"{_MARKS}[{first}] = {bool(marks[first])} is not supported; allowed: "
            f"{bool(known[first])}, as {_OFFSETS} has {'a' if known[first] else 'no'} column for "
            "this token."
        )


def read_token_map(path: Path, vocab_size: int) -> Tensor:
    """[n] int64: the hot token ids in a file of `torch.save`, a list or a tensor."""
    found = load_torch_file(path, "--speculative-token-map")
    if isinstance(found, list) and all(type(item) is int for item in found):
        found = torch.tensor(found)
    if not isinstance(found, Tensor) or found.dtype not in _INTEGERS or found.dim() != 1:
        raise ConfigError(
            f"--speculative-token-map {path} must hold a list or a tensor of token ids."
        )
    if not len(found):
        raise ConfigError(f"--speculative-token-map {path} holds no token id.")
    ids = found.long()
    _check_ids(ids, vocab_size, f"--speculative-token-map {path}")
    return ids


def check_tokenizers(target_dir: Path, draft_dir: Path) -> int:
    """How many tokens the tokenizer of both has (one more than the highest id).

    Raises `UnsupportedModelError` naming the first token in which they differ.
    """
    paths = target_dir / "tokenizer.json", draft_dir / "tokenizer.json"
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{path} is needed to compare the vocabularies; there is none.")
    target = _tokens(paths[0])
    if paths[0].read_bytes() == paths[1].read_bytes():
        return max(target) + 1
    draft = _tokens(paths[1])
    differing = [id_ for id_ in target.keys() | draft.keys() if target.get(id_) != draft.get(id_)]
    if differing:
        first = min(differing)
        raise UnsupportedModelError(
            f"The vocabulary of {draft_dir} is another than the target's: token {first} is "
            f"{_shown(draft.get(first))} there and {_shown(target.get(first))} in {target_dir}; "
            f"{len(differing)} tokens differ. A STANDALONE draft needs the target's tokenizer.",
            param="vocab",
        )
    return max(target) + 1


def _tokens(path: Path) -> dict[int, tuple[str, bool]]:
    """Content of each id, and whether it is special."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise ConfigError(f"Cannot read {path}: {error}") from error
    tokens = {id_: (token, False) for token, id_ in tokenizer.get_vocab(True).items()}
    added = tokenizer.get_added_tokens_decoder()
    return tokens | {id_: (token.content, token.special) for id_, token in added.items()}


def _shown(token: tuple[str, bool] | None) -> str:
    if token is None:
        return "no token"
    return f"{token[0]!r}{' (special)' if token[1] else ''}"


def _check_ids(ids: Tensor, vocab_size: int, what: str) -> None:
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise UnsupportedModelError(
            f"{what} names the token {int(outside[0])}; allowed: 0 to {vocab_size - 1}."
        )
    ordered = ids.sort().values
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        raise UnsupportedModelError(f"{what} names the token {int(repeated[0])} more than once.")
