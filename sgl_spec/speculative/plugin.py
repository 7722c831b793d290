"""Drafters from outside: what they lack is named before they run, and what they do wrong is named
after them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from sgl_spec.errors import ConfigError, DrafterError
from sgl_spec.speculative.base import (
    Drafter,
    DrafterContext,
    build_drafter,
    follows_kv,
    protocol_methods,
    require_protocol,
)
from sgl_spec.speculative.tree import TokenTree

KV_ATTRIBUTES = ("capture", "reads_ahead")


def build_plugin(name: str, context: DrafterContext) -> Drafter:
    """Build a drafter that somebody else wrote; see `Guarded`. `ConfigError` if that fails or if
    the object has not the protocol's methods."""
    try:
        drafter = build_drafter(name, context)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"The drafter {name} cannot be built: {type(error).__name__}: {error}."
        ) from error
    require_protocol(name, drafter)
    if follows_kv(drafter):
        _require_attributes(name, drafter)
    guarded: Any = Guarded(name, drafter)
    return guarded  # type: ignore[no-any-return]


def _require_attributes(name: str, drafter: Drafter) -> None:
    lacks = [each for each in KV_ATTRIBUTES if not hasattr(drafter, each)]
    if lacks:
        raise ConfigError(
            f"The drafter {name} lacks {', '.join(lacks)}; one that follows the target's KV has "
            f"the attributes {', '.join(KV_ATTRIBUTES)}."
        )


class Guarded:
    """A drafter whose errors are `DrafterError`s that name it and the method."""

    def __init__(self, name: str, drafter: Drafter) -> None:
        self._drafter = drafter
        for method in protocol_methods(drafter):
            setattr(self, method, _guarded(name, method, getattr(drafter, method)))

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._drafter, attribute)


def _guarded(name: str, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def guarded(*args: Any) -> Any:
        try:
            result = call(*args)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise DrafterError(f"The drafter {name} failed in {method}: {reason}.") from error
        if method == "propose" and not isinstance(result, TokenTree):
            raise DrafterError(
                f"The drafter {name} failed in propose: it must return a TokenTree, "
                f"got {type(result).__name__}."
            )
        return result

    return guarded
