"""A rank other than 0 as a process: the calls of rank 0's engine, obeyed by one of its own."""

from __future__ import annotations

import logging

import torch

from sgl_spec.args import ResolvedArgs
from sgl_spec.engine.engine import Engine
from sgl_spec.engine.ranks import Follower, Plan, common_facts, ignore_interrupts
from sgl_spec.errors import ConfigError, SglSpecError
from sgl_spec.messages import (
    Abort,
    Control,
    Join,
    Joined,
    PrepareMore,
    RankFailed,
    Shutdown,
    Step,
    Submit,
    ToRank,
)

logger = logging.getLogger(__name__)


def main(args: ResolvedArgs, plan_addr: str, reports_addr: str) -> int:
    """Obey until `Shutdown`; returns the exit code. A failure is reported as `RankFailed`."""
    ignore_interrupts()
    torch.set_grad_enabled(False)
    plan = Plan(plan_addr, reports_addr)
    join = plan.receive()
    assert isinstance(join, Join)
    try:
        plan.report(Joined(join.rank, common_facts(args)))
        party = Follower(args, join, plan.receive)
        engine = Engine(args, party)
        while not isinstance(call := plan.receive(), Shutdown):
            obey(engine, call)
        party.close()
        return 0
    except Exception as error:
        # The boundary of the process: rank 0 must hear of whatever broke.
        config = isinstance(error, ConfigError)
        known = isinstance(error, SglSpecError)
        message = str(error) if known else f"{type(error).__name__}: {error}"
        logger.debug("Rank %d failed", join.rank, exc_info=True)
        plan.report(RankFailed(join.rank, message, config))
        return 1
    finally:
        plan.close()


def obey(engine: Engine, call: ToRank) -> None:
    """Do what rank 0's engine was told to do."""
    match call:
        case Step():
            engine.step()
        case Submit(request):
            engine.submit(request)
        case Abort(rid):
            engine.abort(rid)
        case PrepareMore():
            engine.prepare_more()
        case Control():
            engine.control(call.op, call.args)
        case _:
            raise RuntimeError(f"the ranks have come apart at {type(call).__name__}")
