"""Fixtures that unit tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny

from sgl_spec.errors import SglSpecError
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.draft_loader import load_draft
from sgl_spec.models.loader import load_model


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with enough layers for a head to read three of them."""
    return make_tiny(tmp_path_factory.mktemp("target"), layers=4, hidden=32)


@pytest.fixture(scope="session")
def target(target_dir: Path) -> Decoder:
    """The same, loaded."""
    return load_model(target_dir)


@pytest.fixture
def refuses(target: Decoder, target_dir: Path) -> Callable[..., None]:
    """`refuses(algorithm, directory, *named)`: no draft for it, for a reason that names these."""

    def check(algorithm: str, directory: Path, *named: str, **options: Any) -> None:
        with pytest.raises(SglSpecError) as refusal:
            load_draft(algorithm, directory, target, tokenizer_dir=target_dir, **options)
        for part in named:
            assert part in refusal.value.message

    return check
