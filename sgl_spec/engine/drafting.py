"""From flags to a drafter and the rule that judges its drafts."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from sgl_spec.args import ResolvedArgs
from sgl_spec.engine.policy import tree_reserve
from sgl_spec.engine.slots import SlotManager
from sgl_spec.errors import ConfigError
from sgl_spec.models.checkpoint import resolve_draft, resolve_token_map
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.draft import DraftModel
from sgl_spec.models.draft_loader import load_draft
from sgl_spec.speculative import model_drafter, ngram
from sgl_spec.speculative.base import (
    Drafter,
    DrafterContext,
    build_drafter,
    can_sample,
    registered_drafters,
)
from sgl_spec.speculative.ngram import IndexSize, NgramDrafter
from sgl_spec.speculative.plugin import build_plugin
from sgl_spec.speculative.rules import AcceptanceRule, FollowRule, make_rule
from sgl_spec.speculative.simulate import SimulatedRule
from sgl_spec.speculative.topology import Topology, topology
from sgl_spec.validate import BUILT_IN_DRAFTERS


def rule_of(args: ResolvedArgs) -> AcceptanceRule:
    """The rule that the flags ask for."""
    if args.speculative_algorithm is None:
        return FollowRule()
    rule = make_rule(
        threshold_single=args.speculative_accept_threshold_single,
        threshold_acc=args.speculative_accept_threshold_acc,
        rejection=args.speculative_use_rejection_sampling,
        block=args.speculative_use_block_verification,
    )
    mean = args.simulate_acc_len
    return rule if mean is None else SimulatedRule(rule, mean)


def topology_of(args: ResolvedArgs) -> Topology | None:
    """The shape of the trees where drafts are sampled, else None."""
    shape = args.shape if args.sampling_flag else None
    return None if shape is None else topology(shape.steps, shape.topk, shape.nodes)


def register_drafters(args: ResolvedArgs) -> None:
    """Make all drafters known, those of --speculative-drafter-module included; `ConfigError` if
    that cannot be imported or does not register what the flags name."""
    name = args.speculative_algorithm
    if name is None:
        return
    ngram.register()
    model_drafter.register()
    if args.speculative_drafter_module is not None:
        _import_module(args.speculative_drafter_module)
    if name not in registered_drafters():
        raise ConfigError(
            f"--speculative-algorithm must be none or one of "
            f"{', '.join(registered_drafters())}, got {name!r}."
        )


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """Where the draft model is, and its file of hot token ids."""

    directory: Path
    token_map: Path | None


def find_draft_model(args: ResolvedArgs) -> DraftFiles | None:
    """The files of EAGLE, EAGLE3 or STANDALONE, None for other drafters. Cheap beside a target, so
    it comes first. Errors as of `resolve_draft` and `resolve_token_map`."""
    path, token_map = args.speculative_draft_model_path, args.speculative_token_map
    if args.speculative_algorithm not in model_drafter.ALGORITHMS:
        return None
    assert path is not None, "checked with the flags"
    return DraftFiles(
        resolve_draft(path, args.speculative_draft_model_revision),
        None if token_map is None else resolve_token_map(token_map),
    )


def load_draft_model(
    args: ResolvedArgs, files: DraftFiles | None, target: Decoder, tokenizer_dir: Path
) -> DraftModel | None:
    """The draft model of these files, None without. Errors as of `load_draft`."""
    if files is None:
        return None
    return load_draft(
        str(args.speculative_algorithm),
        files.directory,
        target,
        tokenizer_dir=tokenizer_dir,
        token_map=files.token_map,
        load_format=args.speculative_draft_load_format or args.load_format,
    )


def device_index(args: ResolvedArgs, target: Decoder, context_length: int) -> IndexSize | None:
    """Size of NGRAM's index on the device; None where there is none."""
    if args.speculative_algorithm != "NGRAM" or target.kernels == "torch":
        return None
    longest = context_length + tree_reserve(args.round_slots)
    return IndexSize.of(args.speculative_ngram_capacity, longest, args.max_running_requests)


def make_drafter(
    args: ResolvedArgs,
    target: Decoder,
    slots: SlotManager,
    draft_model: DraftModel | None,
    index: IndexSize | None = None,
) -> Drafter | None:
    """The registered drafter that the flags name, for the rows and slots of `slots`; `ConfigError`
    if it cannot do what the flags ask. index: of `device_index`."""
    name = args.speculative_algorithm
    if name is None:
        return None
    if index is not None:
        rows, device = slots.table.num_rows, slots.table.device.device
        options = ngram.options_of(args.drafter_options(), args.tree_nodes)
        return NgramDrafter(rows, options, index, device, kernels=True)
    context = DrafterContext(
        num_rows=slots.table.num_rows,
        width=slots.table.width,
        draft_tokens=args.tree_nodes,
        vocab_size=target.config.vocab_size,
        options=args.drafter_options(),
        topology=topology_of(args),
        num_slots=slots.cache_slots,
        req_to_token=slots.table.device,
        target=target,
        draft_model=draft_model,
    )
    build = build_drafter if name in BUILT_IN_DRAFTERS else build_plugin
    drafter = build(name, context)
    flag = args.sampling_flag
    if flag is not None and not can_sample(drafter):
        raise ConfigError(
            f"{flag} needs a drafter that samples its drafts from a distribution and hands it "
            f"over; {name} does not say that it does (`samples = True`)."
        )
    return drafter


def _import_module(name: str) -> None:
    """Import a dotted module name or a .py file, for its registrations."""
    try:
        if not name.endswith(".py"):
            importlib.import_module(name)
            return
        spec = importlib.util.spec_from_file_location(Path(name).stem, name)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"--speculative-drafter-module {name} cannot be imported: {reason}"
        ) from error
