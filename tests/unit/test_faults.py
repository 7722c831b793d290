"""The list of faults fits the tree: each can be planted, and its tests are there."""

from __future__ import annotations

import ast

import pytest
from fault_list import FAULTS, Fault
from faults import ROOT, files_of, planted


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.file.rpartition("/")[2])
def test_a_fault_can_be_planted(fault: Fault) -> None:
    ast.parse(planted(fault, ROOT))
    assert [file for file in files_of(fault) if not (ROOT / file).is_file()] == []


def test_there_are_enough() -> None:
    assert len(FAULTS) == len(set(FAULTS)) >= 60
