"""Drafters from outside: what they lack is named before they run, what they do wrong is named after
them, and nothing that they do to what they are shown changes a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import torch

from sgl_spec.errors import ConfigError, DrafterError
from sgl_spec.speculative.base import (
    DraftBatch,
    Drafter,
    DrafterContext,
    build_drafter,
    follows_kv,
    protocol_methods,
    require_protocol,
)
from sgl_spec.speculative.plugin_tree import checked
from sgl_spec.speculative.propose import require_sampled
from sgl_spec.speculative.sampling import SamplingRows
from sgl_spec.speculative.tree import TokenTree

KV_ATTRIBUTES = ("capture", "reads_ahead")
OPTIONAL_METHODS = ("settle",)  # see `base.DefersWork`


def build_plugin(name: str, context: DrafterContext) -> Drafter:
    """Build a drafter that somebody else wrote; see `Guarded`. `ConfigError` if that fails or if
    the object has not the protocol's methods."""
    try:
        drafter = build_drafter(name, context)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"The drafter {name} cannot be built: {type(error).__name__}: {error}."
        ) from error
    require_protocol(name, drafter)
    if follows_kv(drafter):
        _require_attributes(name, drafter)
    guarded: Any = Guarded(name, drafter, context)
    return guarded  # type: ignore[no-any-return]


def _require_attributes(name: str, drafter: Drafter) -> None:
    lacks = [each for each in KV_ATTRIBUTES if not hasattr(drafter, each)]
    if lacks:
        raise ConfigError(
            f"The drafter {name} lacks {', '.join(lacks)}; one that follows the target's KV has "
            f"the attributes {', '.join(KV_ATTRIBUTES)}."
        )


class Guarded:
    """A drafter whose errors are `DrafterError`s that name it and the method, whose trees are
    checked (`plugin_tree`), and which is shown texts and batches that it cannot change."""

    def __init__(self, name: str, drafter: Drafter, context: DrafterContext) -> None:
        self._name = name
        self._drafter = drafter
        self._context = context
        self._sampling: tuple[SamplingRows, SamplingRows] | None = None  # the engine's, a copy
        optional = [method for method in OPTIONAL_METHODS if hasattr(drafter, method)]
        for method in (*protocol_methods(drafter), *optional):
            call = self._guarded(method, getattr(drafter, method))
            if method == "propose":
                call = self._proposing(call)
            setattr(self, method, call)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._drafter, attribute)

    def _guarded(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def guarded(*args: Any) -> Any:
            shown = [self._shown(each) for each in args]
            try:
                return call(*shown)
            except (Exception, SystemExit) as error:
                reason = f"{type(error).__name__}: {error}"
                raise self._failed(method, reason) from error

        return guarded

    def _proposing(self, call: Callable[[DraftBatch], Any]) -> Callable[..., Any]:
        """`propose` with its trees checked."""

        @wraps(call)
        def proposing(batch: DraftBatch) -> TokenTree:
            tree = call(batch)
            try:
                most = self._context.draft_tokens
                tree = checked(tree, batch.roots(), self._context.vocab_size, most)
                if self._context.topology is not None:
                    require_sampled(tree, self._context.topology)
            except ValueError as error:
                raise self._failed("propose", str(error)) from error
            return tree

        return proposing

    def _failed(self, method: str, reason: str) -> DrafterError:
        return DrafterError(f"The drafter {self._name} failed in {method}: {reason}.")

    def _shown(self, value: Any) -> Any:
        """What the drafter gets for an argument of the engine's. The text of all requests is too
        much to copy; what torch makes of a read-only array it can write to, but it warns."""
        if isinstance(value, np.ndarray):
            view = value.view()
            view.flags.writeable = False
            return view
        if not isinstance(value, DraftBatch):
            return value
        return replace(
            value,
            rows=value.rows.copy(),
            lengths=value.lengths.copy(),
            max_nodes=value.max_nodes.copy(),
            tokens=self._shown(value.tokens),
            sampling=self._own(value.sampling),
        )

    def _own(self, sampling: SamplingRows | None) -> SamplingRows | None:
        """A copy of the parameters, made once for each batch that the engine puts together."""
        if sampling is None:
            return None
        if self._sampling is None or self._sampling[0] is not sampling:
            every = torch.arange(sampling.count, device=sampling.seed.device)
            self._sampling = sampling, sampling.select(every)
        return self._sampling[1]
