"""The options of speculation."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_spec.draft_shape import DRAFT_TOKENS
from sgl_spec.options import NOT_EMPTY, Check, at_least, between, fraction, option
from sgl_spec.serving_options import ServingOptions


def _algorithm(name: str) -> str | None:
    return None if name.upper() == "NONE" else name.upper()


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions(ServingOptions):
    """They follow those of serving in --help and docs/flags.md."""

    speculative_algorithm: str | None = option(
        None,
        help="Who drafts: `none`, `NGRAM`, `EAGLE`, `EAGLE3`, `STANDALONE` (a whole model), or a "
        "name that --speculative-drafter-module registers.",
        group="speculation",
        aliases=("--speculative-algo",),
        normalize=_algorithm,
        metavar="NAME",
    )
    speculative_drafter_module: str | None = option(
        None,
        help="Python module or .py file, imported at start, that registers drafters.",
        group="speculation",
        check=NOT_EMPTY,
    )
    speculative_draft_model_path: str | None = option(
        None,
        help="The draft model: `smollm2-eagle3` and `smollm2-draft` (for the embedded target), a "
        "directory, or a hub id.",
        group="speculation",
        aliases=("--speculative-draft-model",),
        check=NOT_EMPTY,
        unset="the one of `smollm2`, for EAGLE3 and STANDALONE",
    )
    speculative_draft_model_revision: str | None = option(
        None,
        help="Branch, tag or commit of the draft model's hub id.",
        group="speculation",
        check=NOT_EMPTY,
        unset="main",
    )
    speculative_draft_load_format: str | None = option(
        None,
        help="As --load-format, for the draft model.",
        group="speculation",
        choices=("auto", "safetensors", "dummy"),
        unset="that of --load-format",
    )
    speculative_num_steps: int | None = option(
        None,
        help="Steps of a draft model, the depth of its trees.",
        group="speculation",
        check=at_least(1),
        unset="with topk and draft tokens 5, 4, 8 for EAGLE and EAGLE3 on Llama, else 3, 1, 4; "
        "sampled chains: 5 and 3",
    )
    speculative_eagle_topk: int | None = option(
        None,
        help="Branches that a draft model keeps per step; 1 drafts chains of steps + 1 nodes.",
        group="speculation",
        check=between(1, 64),
        unset="1 beside --speculative-num-steps",
    )
    speculative_num_draft_tokens: int | None = option(
        None,
        help="Most nodes of a draft tree, the root included.",
        group="speculation",
        check=between(2, 64),
        unset=f"{DRAFT_TOKENS} for NGRAM and your own drafters; for chains steps + 1",
    )
    speculative_draft_sampling: str = option(
        "shared-noise",
        help="Which tokens a draft model proposes at temperature > 0: those that the target's own "
        "noise favours, or simply its most probable ones. The text is the same.",
        group="speculation",
        choices=("shared-noise", "topk"),
    )
    speculative_verify_whole_trees: bool = option(
        False,
        help="Verify every drafted node, also those that do not pay for their rows; to measure "
        "acceptance.",
        group="speculation",
    )
    speculative_token_map: str | None = option(
        None,
        help="For EAGLE: a .pt file with the ids of the frequent tokens, the only ones drafted.",
        group="speculation",
        check=NOT_EMPTY,
    )
    speculative_ngram_index: str | None = option(
        None,
        help="Where NGRAM looks drafts up: in a trie on the host, which gives trees, or in an "
        "index on the GPU, which gives chains and for which no round waits.",
        group="speculation",
        choices=("trie", "device"),
        unset="device on a GPU, but trie where one of the trie's flags is given",
    )
    speculative_ngram_max_trie_depth: int = option(
        18, help="Longest n-gram that NGRAM keeps.", group="speculation", check=between(2, 64)
    )
    speculative_ngram_min_bfs_breadth: int = option(
        1, help="Fewest children NGRAM follows per node.", group="speculation", check=at_least(1)
    )
    speculative_ngram_max_bfs_breadth: int = option(
        10, help="Most children NGRAM follows per node.", group="speculation", check=at_least(1)
    )
    speculative_ngram_match_type: str = option(
        "BFS",
        help="Which continuations NGRAM takes: recent ones breadth first, or probable ones.",
        group="speculation",
        choices=("BFS", "PROB"),
    )
    speculative_ngram_capacity: int = option(
        10_000_000,
        help="Most n-grams that NGRAM keeps; a trie's memory grows with use.",
        group="speculation",
        check=at_least(1024),
    )
    speculative_accept_threshold_single: float = option(
        1.0,
        help="Below 1 LOSSY: accept every draft that the target gives at least this probability.",
        group="speculation",
        check=fraction(),
    )
    speculative_accept_threshold_acc: float = option(
        1.0,
        help="Below 1 LOSSY: divide the target's chance of accepting drafts by this.",
        group="speculation",
        check=fraction(),
    )
    speculative_use_rejection_sampling: bool = option(
        False,
        help="Sample the drafts and judge them by p/q, on chains and trees; refused with NGRAM.",
        group="speculation",
    )
    speculative_use_block_verification: bool = option(
        False,
        help="Rejection sampling that judges a chain of drafts as a whole; refused with NGRAM.",
        group="speculation",
    )
    simulate_acc_len: float | None = option(
        None,
        help="To measure rounds, NOT for text: give out this many tokens a round on average, "
        "whatever the target says of the drafts. Replies and metrics are marked.",
        group="speculation",
        check=Check("a number from 1 to 64", lambda value: bool(1 <= value <= 64)),
    )
