"""Whether the trees of a drafter from outside are what they must be. Nothing behind looks again: a
wrong root would be followed, a wrong parent would show a node what it must not see."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sgl_spec.speculative.base import IntArray
from sgl_spec.speculative.tree import MAX_TREE_NODES, DraftProbs, TokenTree, narrow

_SUM_TOLERANCE = 1e-3  # of the float32 probabilities of a vocabulary


def checked(
    proposed: object, roots: IntArray, vocab_size: int, draft_tokens: int = MAX_TREE_NODES
) -> TokenTree:
    """A proposal, as narrow as it can be. roots: [B] each request's last token. draft_tokens: most
    nodes that are verified; trees that hold more are cut later, unless no tree may be so wide.

    Raises `ValueError` naming the first rule of `TokenTree` that it breaks.
    """
    if not isinstance(proposed, TokenTree):
        raise ValueError(f"it must return a TokenTree, got {_kind(proposed)}")
    _require_tensors(proposed)
    if proposed.allowed is not None:
        raise ValueError("TokenTree.allowed is the engine's to set, it must be None")
    tree = replace(proposed, draft=None).to(torch.device("cpu"))
    if tree.tokens.dim() == 2 and tree.width > MAX_TREE_NODES:
        raise ValueError(
            f"TokenTree.tokens is [B, N] with N from 1 to {MAX_TREE_NODES}, got "
            f"{list(tree.tokens.shape)}; of a tree this server verifies at most {draft_tokens} "
            "nodes, the root included (DrafterContext.draft_tokens)"
        )
    tree.validate(vocab_size)
    if tree.batch != len(roots):
        raise ValueError(f"a tree for each of the {len(roots)} requests is due, got {tree.batch}")
    _check_roots(tree.tokens[:, 0], torch.from_numpy(roots))
    if proposed.draft is not None:
        _check_draft(proposed.draft, tree, vocab_size)
    return narrow(proposed)


def _kind(value: object) -> str:
    return type(value).__name__


def _require_tensors(tree: TokenTree) -> None:
    fields = _tensors(tree, "TokenTree", ("tokens", "parents", "num_nodes", "scores"))
    if tree.draft is not None:
        if not isinstance(tree.draft, DraftProbs):
            raise ValueError(f"TokenTree.draft is a DraftProbs, got {_kind(tree.draft)}")
        fields += _tensors(tree.draft, "TokenTree.draft", ("probs", "row_of", "ids"))
    devices = sorted({str(field.device) for field in fields})
    if len(devices) > 1:
        raise ValueError(f"the tensors of a TokenTree lie on one device, got {', '.join(devices)}")


def _tensors(holder: object, where: str, names: tuple[str, ...]) -> list[Tensor]:
    """The fields of these names, of which the last may be None."""
    found = []
    for name in names:
        value = getattr(holder, name)
        if isinstance(value, Tensor):
            found.append(value)
        elif value is not None or name != names[-1]:
            raise ValueError(f"{where}.{name} is a tensor, got {_kind(value)}")
    return found


def _check_roots(found: Tensor, roots: Tensor) -> None:
    (wrong,) = (found != roots).nonzero(as_tuple=True)
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(
            f"tree {first} of the batch breaks a rule: node 0 holds the request's last token, "
            f"{int(roots[first])}, got {int(found[first])}"
        )


def _check_draft(draft: DraftProbs, tree: TokenTree, vocab_size: int) -> None:
    """See `DraftProbs`. tree: without it, on the CPU."""
    probs, row_of, ids = draft.probs, draft.row_of, draft.ids
    if ids is not None:
        whole = ids.dim() == 1 and ids.dtype == torch.int64
        if not whole or not _distinct(ids, vocab_size):
            raise ValueError(f"draft.ids is int64 [W], distinct tokens of 0 to {vocab_size - 1}")
    width = vocab_size if ids is None else len(ids)
    if probs.dtype != torch.float32 or probs.dim() != 2 or probs.shape[1] != width:
        raise ValueError(f"draft.probs is float32 [Q, {width}], got {_form(probs)}")
    if row_of.dtype != torch.int64 or row_of.shape != tree.tokens.shape:
        shape = list(tree.tokens.shape)
        raise ValueError(f"draft.row_of is int64 {shape}, as the tokens, got {_form(row_of)}")
    off = (probs.sum(1) - 1).abs()
    if not bool(((probs >= 0).all(1) & (off <= _SUM_TOLERANCE)).all()):
        raise ValueError("each row of draft.probs is a distribution: 0 or more, with the sum 1")
    above = tree.parents.where(tree.used(), -1)
    rows = row_of.cpu().gather(1, above.clamp(min=0))[above >= 0]
    if not bool(((rows >= 0) & (rows < len(probs))).all()):
        raise ValueError(f"draft.row_of of a node with children is 0 to {len(probs) - 1}")


def _distinct(ids: Tensor, vocab_size: int) -> bool:
    within = ((ids >= 0) & (ids < vocab_size)).all()
    return bool(within & (ids.sort().values.diff() > 0).all())


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
