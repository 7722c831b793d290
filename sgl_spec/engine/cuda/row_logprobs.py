"""Log-probabilities of emitted tokens on their way from a round to the requests that ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sgl_spec.engine.cuda.transfer import Fetched
from sgl_spec.layers.transfer import on_device
from sgl_spec.request import LogprobParams, Logprobs
from sgl_spec_kernels.logprobs import Found


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """places: where in the batch the requests stand that ask; params: what they ask for. The
    values are those of `levels` tokens for each of them."""

    places: list[int]
    params: list[LogprobParams]
    levels: int
    values: Fetched
    top_ids: Fetched
    top_values: Fetched
    id_values: Fetched

    @classmethod
    def fetch(
        cls, found: Found, levels: int, places: Sequence[int], params: Sequence[LogprobParams]
    ) -> RowLogprobs:
        """Copy what belongs to these requests before the next round overwrites it."""
        rows = np.array(places, dtype=np.int64)[:, None] * levels + np.arange(levels)
        at = on_device(rows.reshape(-1), found.values.device)
        top = max(one.top_logprobs_num for one in params)
        ids = max(len(one.token_ids_logprob) for one in params)
        return cls(
            list(places),
            list(params),
            levels,
            Fetched(found.values[at]),
            Fetched(found.top_ids[:, :top][at]),
            Fetched(found.top_values[:, :top][at]),
            Fetched(found.id_values[:, :ids][at]),
        )

    def read(self, counts: Sequence[int]) -> list[Logprobs | None]:
        """Per request of the batch. counts: [B] tokens that each was given."""
        read: list[Logprobs | None] = [None] * len(counts)
        columns = (self.values, self.top_ids, self.top_values, self.id_values)
        values, top_ids, top_values, id_values = (each.wait() for each in columns)
        for i, (place, asked) in enumerate(zip(self.places, self.params, strict=True)):
            rows = slice(i * self.levels, i * self.levels + counts[place])
            top, ids = asked.top_logprobs_num, len(asked.token_ids_logprob)
            read[place] = Logprobs(
                values[rows].tolist(),
                top_ids[rows, :top].tolist() if top else [],
                top_values[rows, :top].tolist() if top else [],
                id_values[rows, :ids].tolist() if ids else [],
            )
        return read
