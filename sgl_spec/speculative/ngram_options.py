"""What an NGRAM drafter is told: how large its trees are, what they follow, how much is kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_spec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """num_draft_tokens: nodes of a tree, root included. max_trie_depth: longest n-gram.
    min_bfs_breadth, max_bfs_breadth: children followed from the longest and the shortest n-gram,
    linear between. match_type: BFS (children by recency, nodes breadth first) or PROB (children by
    frequency, nodes by probability). capacity: most trie nodes."""

    num_draft_tokens: int = 12
    max_trie_depth: int = 18
    min_bfs_breadth: int = 1
    max_bfs_breadth: int = 10
    match_type: str = "BFS"
    capacity: int = 10_000_000

    def __post_init__(self) -> None:
        if not 2 <= self.num_draft_tokens <= 64:
            raise ConfigError(f"NGRAM draft tokens must be 2 to 64, got {self.num_draft_tokens}")
        if not 1 <= self.min_bfs_breadth <= self.max_bfs_breadth:
            raise ConfigError(
                "NGRAM needs 1 <= min BFS breadth <= max BFS breadth, got "
                f"{self.min_bfs_breadth} and {self.max_bfs_breadth}"
            )
        if self.match_type not in ("BFS", "PROB"):
            raise ConfigError(f"NGRAM match type must be BFS or PROB, got {self.match_type!r}")

    def breadth(self) -> npt.NDArray[np.int64]:
        """[max_trie_depth] most children followed from an n-gram of i tokens."""
        depth = self.max_trie_depth - 1
        slope = (self.max_bfs_breadth - self.min_bfs_breadth) / depth
        left = depth - np.arange(self.max_trie_depth)
        breadth: npt.NDArray[np.int64] = (left * slope + self.min_bfs_breadth).astype(np.int64)
        return breadth
