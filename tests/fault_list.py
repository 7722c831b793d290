"""One-line faults that the tests must notice; see `faults`.

The list says what may go: a test is spared if every fault is caught without it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A line of a file, or the part of it that the file holds once, and what is wrong in its place.
    tests: the files that should notice, as `unit/scheduler`, the quickest first."""

    file: str
    line: str
    wrong: str
    tests: str


ENGINE = (
    # --- scheduler and requests
    Fault(
        "sgl_spec/engine/scheduler.py",
        "req.drafted = len(req.ids)",
        "pass",
        "unit/scheduler unit/overlap",
    ),
    Fault(
        "sgl_spec/engine/scheduler.py",
        "going_on = [r for r in self.running if r.remaining > r.in_flight]",
        "going_on = [r for r in self.running if r.remaining > 0]",
        "unit/overlap",
    ),
    Fault(
        "sgl_spec/engine/scheduler.py",
        "for req in [r for r in self._leaving if not r.in_flight]:",
        "for req in list(self._leaving):",
        "unit/overlap",
    ),
    Fault(
        "sgl_spec/engine/scheduler.py",
        "self._reserve = tree_reserve(limits.round_slots)",
        "self._reserve = limits.round_slots",
        "unit/overlap",
    ),
    Fault(
        "sgl_spec/engine/scheduler.py",
        "self.waiting.appendleft(req)",
        "self.waiting.append(req)",
        "unit/scheduler unit/overlap",
    ),
    Fault(
        "sgl_spec/engine/scheduler.py",
        "self.slots.release(req, min(self.worker.shareable(req), len(req.ids)))",
        "self.slots.release(req, min(req.held.committed_len, len(req.ids)))",
        "e2e/exact",
    ),
    Fault(
        "sgl_spec/engine/scheduler.py",
        "if self._flights:",
        "if False:",
        "unit/overlap",
    ),
    Fault(
        "sgl_spec/engine/req.py",
        "if token in self.stop_ids and taken >= first_end:",
        "if token in self.stop_ids and taken > first_end:",
        "unit/req unit/settings",
    ),
    Fault(
        "sgl_spec/engine/req.py",
        "if legal and self.output_len >= self.sampling.min_new_tokens:",
        "if legal:",
        "unit/req unit/settings",
    ),
    Fault(
        "sgl_spec/engine/req.py",
        "return min(self.unscored, len(self.ids) - 1)",
        "return len(self.ids) - 1",
        "unit/logprobs e2e/logprobs_engine",
    ),
    Fault(
        "sgl_spec/engine/replies.py",
        "kept = req.output_len - len(req.logprobs.output)",
        "kept = len(new.values)",
        "unit/logprobs e2e/logprobs_engine",
    ),
    Fault(
        "sgl_spec/engine/worker.py",
        "self._keep_path(rows, committed, tree.width, found)",
        "pass",
        "e2e/exact",
    ),
    Fault(
        "sgl_spec/engine/worker.py",
        "self.sampling.count(batch.rows, accepted)",
        "pass",
        "unit/settings",
    ),
    # --- slots and the prefix cache
    Fault(
        "sgl_spec/engine/slots.py",
        "return (ids[:-1] << 32) | ids[1:]",
        "return ids[:-1]",
        "unit/shared_slots e2e/exact",
    ),
    Fault(
        "sgl_spec/engine/slots.py",
        "own = self.table.slots(held.row, held.shared_len, held.allocated_len)",
        "own = self.table.slots(held.row, held.shared_len, held.committed_len)",
        "unit/scheduler",
    ),
    Fault(
        "sgl_spec/engine/slots.py",
        "self.table.write(held.row, 0, result.slots)",
        "pass",
        "unit/scheduler unit/shared_slots",
    ),
    Fault(
        "sgl_spec/engine/slots.py",
        "self.cache.lock(result.node)",
        "pass",
        "unit/scheduler",
    ),
    Fault(
        "sgl_spec/engine/kv_pool.py",
        "first, last = (changed[0], changed[-1] + 1) if len(changed) else (0, 0)",
        "first, last = (changed[0], changed[-1]) if len(changed) else (0, 0)",
        "unit/slot_table",
    ),
    Fault(
        "sgl_spec/engine/prefix_cache.py",
        "return common - common % self.page_size",
        "return common",
        "unit/prefix_cache",
    ),
    Fault(
        "sgl_spec/engine/prefix_cache.py",
        "head.locks, head.last_use = node.locks, node.last_use",
        "head.locks, head.last_use = 0, node.last_use",
        "unit/prefix_cache",
    ),
    Fault(
        "sgl_spec/engine/prefix_cache.py",
        "if self._evictable(node) and time == node.last_use:",
        "if self._evictable(node):",
        "unit/prefix_cache",
    ),
    Fault(
        "sgl_spec/engine/prefix_cache.py",
        "keep = max(len(leaf) - most, 0)",
        "keep = 0",
        "unit/prefix_cache",
    ),
    Fault(
        "sgl_spec/engine/policy.py",
        "if prefills_in_a_row == 0:",
        "if prefills_in_a_row < most_in_a_row:",
        "unit/policy",
    ),
    Fault(
        "sgl_spec/engine/policy.py",
        "key=lambda i: (output_lens[i], -prompt_lens[i], -i))",
        "key=lambda i: (output_lens[i], prompt_lens[i], -i))",
        "unit/policy",
    ),
)

TEXT = (
    # --- sampling, filters, penalties
    Fault(
        "sgl_spec/speculative/verify.py",
        "positions = committed_lens[alive] + depth + 1",
        "positions = committed_lens[alive] + 1",
        "unit/verify unit/settings",
    ),
    Fault(
        "sgl_spec/speculative/verify.py",
        "drawn = draw(logits, rows, positions, index, path=tokens[alive, :depth], masks=masks)",
        "drawn = draw(logits, rows, positions, index, path=None, masks=masks)",
        "unit/verify unit/settings",
    ),
    Fault(
        "sgl_spec/speculative/verify.py",
        "parents = torch.where(tree.used(), tree.parents, -1)",
        "parents = tree.parents",
        "unit/verify",
    ),
    Fault(
        "sgl_spec/speculative/sampling.py",
        "(early,) = torch.nonzero(positions < rows.end_from, as_tuple=True)",
        "(early,) = torch.nonzero(positions <= rows.end_from, as_tuple=True)",
        "unit/sampling unit/settings",
    ),
    Fault(
        "sgl_spec/speculative/filters.py",
        "top_p = torch.where(rows.top_p < 1, (upto - mass < limit).sum(1), mass.shape[1])",
        "top_p = torch.where(rows.top_p < 1, (upto < limit).sum(1), mass.shape[1])",
        "unit/sampling",
    ),
    Fault(
        "sgl_spec/speculative/filters.py",
        "return torch.minimum(torch.minimum(head.top_k, top_p), min_p)",
        "return torch.minimum(head.top_k, torch.maximum(top_p, min_p))",
        "unit/sampling",
    ),
    Fault(
        "sgl_spec/speculative/penalties.py",
        "count = count + (path[at] == token[:, None]).sum(1)",
        "count = count + (path[at] == token[:, None]).any(1)",
        "unit/penalties unit/settings",
    ),
    Fault(
        "sgl_spec/speculative/penalties.py",
        "return x - rows.frequency * count - rows.presence * (count > 0)",
        "return x - rows.frequency * count - rows.presence",
        "unit/penalties unit/settings",
    ),
    Fault(
        "sgl_spec/speculative/penalties.py",
        "self.output[row].zero_()",
        "pass",
        "unit/penalties unit/settings",
    ),
    Fault(
        "sgl_spec/speculative/penalties.py",
        "possible = (before > -torch.inf).any(1) & rows.has_forced",
        "possible = rows.has_forced",
        "unit/sampling unit/penalties unit/settings",
    ),
    # --- other rules
    Fault(
        "sgl_spec/speculative/prune.py",
        "useful &= np.arange(tree.width) < max_nodes[:, None]",
        "useful &= np.arange(tree.width) <= max_nodes[:, None]",
        "unit/prune unit/settings",
    ),
    Fault(
        "sgl_spec/speculative/prune.py",
        "if rate[count] < rate[0] * (1 + min_gain):",
        "if rate[count] < rate[0]:",
        "unit/prune",
    ),
    # --- grammars
    Fault(
        "sgl_spec/speculative/grammar.py",
        "if self._may_end and self.depth >= self.min_new_tokens:",
        "if self._may_end:",
        "unit/grammar unit/grammar_ends",
    ),
    Fault(
        "sgl_spec/speculative/grammar.py",
        "late = (found.row_of >= 0) & (depths >= least[:, None])",
        "late = (found.row_of >= 0) & (0 >= least[:, None])",
        "unit/grammar unit/grammar_ends",
    ),
    Fault(
        "sgl_spec/speculative/grammar.py",
        "legal[drafts] = allowed & (ends[drafts] | goes_on[row] | may_end[row])",
        "legal[drafts] = ends[drafts] | goes_on[row] | may_end[row]",
        "unit/grammar",
    ),
    Fault(
        "sgl_spec/speculative/grammar.py",
        "self.automaton = self.automaton.restart()",
        "pass",
        "unit/grammar unit/grammar_engine",
    ),
    # --- text and HTTP
    Fault(
        "sgl_spec/text.py",
        'self._carry = text[-self._keep :] if self._keep else ""',
        'self._carry = new[-self._keep :] if self._keep else ""',
        "unit/text",
    ),
    Fault(
        "sgl_spec/text.py",
        "if at >= 0 and (best is None or (at + len(stop), -len(stop)) < best[:2]):",
        "if at >= 0 and best is None:",
        "unit/text",
    ),
    Fault(
        "sgl_spec/server/answers.py",
        "self._quoted = self._escaped or char != '\"'",
        "self._quoted = char != '\"'",
        "unit/answers",
    ),
    Fault(
        "sgl_spec/server/answers.py",
        "sure = len(before) if last else len(before) - held_back(before, [opener])",
        "sure = len(before)",
        "unit/answers",
    ),
    Fault(
        "sgl_spec/server/frontend.py",
        "record.ids += chunk.ids",
        "record.ids = chunk.ids",
        "unit/frontend e2e/http_api",
    ),
    Fault(
        "sgl_spec/server/frontend.py",
        "if record.ticket is not None and not record.ended:",
        "if record.ticket is not None and record.ended:",
        "unit/frontend",
    ),
    Fault(
        "sgl_spec/server/http.py",
        "if size > MAX_BODY_BYTES:",
        "if size > MAX_DROPPED_BYTES:",
        "e2e/http_api",
    ),
    Fault(
        "sgl_spec/server/requests.py",
        "seeded = msgspec.structs.replace(sampling, seed=derive_seed(sampling.seed, choice))",
        "seeded = sampling",
        "unit/protocol_requests e2e/requests",
    ),
)

DRAFTS = (
    # --- n-grams
    Fault(
        "kernels/sgl_spec_kernels/ngram_ref.py",
        "known = (at - own)[:, None] >= _ALL_ORDERS",
        "known = (at - own)[:, None] >= 0",
        "unit/trie unit/ngram kernels/ngram_trees",
    ),
    Fault(
        "kernels/sgl_spec_kernels/ngram_ref.py",
        "same[..., :-1] &= mine[:, None] > 0",
        "same[..., :-1] &= True",
        "unit/trie unit/ngram kernels/ngram_trees",
    ),
    Fault(
        "kernels/sgl_spec_kernels/ngram_ref.py",
        "tried = known & (words & ~(1 << node) & wrong == 0)",
        "tried = known",
        "unit/trie unit/ngram kernels/ngram_trees",
    ),
    Fault(
        "kernels/sgl_spec_kernels/ngram_ref.py",
        "alive: npt.NDArray[np.int32] = tokens * np.minimum.accumulate(tokens > 0, axis=2)",
        "alive: npt.NDArray[np.int32] = tokens",
        "unit/trie unit/ngram kernels/ngram_trees",
    ),
    Fault(
        "sgl_spec/speculative/ngram.py",
        "start = self._reserve(most + 2 * self.nodes)  # rounds may run ahead of its end",
        "start = self._reserve(most)",
        "unit/ngram",
    ),
    Fault(
        "sgl_spec/speculative/ngram.py",
        "if begin < free + size and free < end:",
        "if free < begin and end < free + size:",
        "unit/ngram",
    ),
    # --- draft models
    Fault(
        "sgl_spec/speculative/grow.py",
        "words = self._words.gather(1, parents) | (1 << column)",
        "words = self._words.gather(1, parents * 0) | (1 << column)",
        "unit/grow",
    ),
    Fault(
        "sgl_spec/speculative/grow.py",
        "scores = self._scores[:, :, None] + log_probs.view(batch, rows, -1)",
        "scores = log_probs.view(batch, rows, -1)",
        "unit/grow",
    ),
    Fault(
        "sgl_spec/speculative/grow.py",
        "positions = self.lengths[request] + self.depth",
        "positions = self.lengths[request]",
        "unit/grow e2e/exact",
    ),
    Fault(
        "sgl_spec/speculative/model_drafter.py",
        "above = above[request, edge.parents.flatten()]",
        "above = above[request, 0 * edge.parents.flatten()]",
        "unit/draft_heads e2e/exact",
    ),
    Fault(
        "sgl_spec/speculative/model_drafter.py",
        "late = rows[self.known[rows] - self.written[rows] >= WAITING_ROWS]",
        "late = rows[self.known[rows] - self.written[rows] >= 2 * WAITING_ROWS]",
        "e2e/exact",
    ),
    Fault(
        "sgl_spec/speculative/model_drafter.py",
        "forward = replace(forward, tokens=on_device(following, self.device))",
        "pass",
        "e2e/exact",
    ),
    Fault(
        "sgl_spec/speculative/model_drafter.py",
        "self.last[forward.rows] = hidden[on_device(todo.ends, self.device)]",
        "self.last[forward.rows] = hidden[on_device(todo.ends * 0, self.device)]",
        "e2e/exact",
    ),
    # --- the controller
    Fault(
        "sgl_spec/engine/control.py",
        "counted = sorted(recent)[(len(recent) - 1) // 2]",
        "counted = ms",
        "unit/control",
    ),
    Fault(
        "sgl_spec/engine/control.py",
        "account.debt += lost - decision.charged",
        "account.debt += 0.0",
        "unit/control",
    ),
    Fault(
        "sgl_spec/engine/control.py",
        "account.debt = max(0.0, account.debt - SHARE * counted)",
        "account.debt = max(0.0, account.debt - SHARE / 16 * counted)",
        "unit/control",
    ),
    Fault(
        "sgl_spec/engine/control.py",
        "if lead is None or lead not in rates or rates[best] > rates[lead] * (1 + MARGIN):",
        "if lead is None or lead not in rates or rates[best] > rates[lead] * (4 + MARGIN):",
        "unit/control",
    ),
)

DEVICE = (
    # --- kernels, their twins, and rounds on the device
    Fault(
        "kernels/sgl_spec_kernels/tree_attn_ref.py",
        "own = (words[:, :, None] >> new.clamp(0, 63)[:, None, :]) & 1",
        "own = (words[:, :, None] >> new.clamp(0, 63)[:, None, :]) | 1",
        "kernels/tree_attn unit/model_logits",
    ),
    Fault(
        "kernels/sgl_spec_kernels/tree_attn_ref.py",
        "return self._additive(column[None, :] <= row[:, None])",
        "return self._additive(column[None, :] <= row[:, None] + 1)",
        "kernels/tree_attn unit/model_logits",
    ),
    Fault(
        "kernels/sgl_spec_kernels/kv_move.py",
        "cache.index_copy_(1, targets, cache.index_select(1, sources))",
        "cache.index_copy_(1, targets, cache.index_select(1, targets))",
        "kernels/kv_move",
    ),
    Fault(
        "kernels/sgl_spec_kernels/compact.py",
        "table += tl.load(committed_lens + request)",
        "table += tl.load(committed_lens + request) * 0",
        "kernels/kv_move kernels/device_rounds",
    ),
    Fault(
        "kernels/sgl_spec_kernels/settings.py",
        "for node in range(1, WIDTH):",
        "for node in range(2, WIDTH):",
        "kernels/row_settings",
    ),
    Fault(
        "kernels/sgl_spec_kernels/settings.py",
        "goes_on = early & (no_ends > nothing)",
        "goes_on = early",
        "kernels/row_settings",
    ),
    Fault(
        "kernels/sgl_spec_kernels/sample.py",
        "child = tl.min(tl.where((parent == node) & (token == drawn), lane, LANES), 0)",
        "child = tl.min(tl.where(token == drawn, lane, LANES), 0)",
        "kernels/sample_kernels",
    ),
    Fault(
        "kernels/sgl_spec_kernels/sample.py",
        "tl.store(arrived + row, 0)  # as the next launch needs it",
        "pass",
        "kernels/sample_kernels",
    ),
    Fault(
        "kernels/sgl_spec_kernels/round_state.py",
        "word = (tl.full([LANES], 2, tl.int64) << j.to(tl.int64)) - 1",
        "word = (tl.full([LANES], 1, tl.int64) << j.to(tl.int64)) | 1",
        "kernels/round_state",
    ),
    Fault(
        "kernels/sgl_spec_kernels/tree_build.py",
        "word |= tl.where(used, tl.gather(word, link, 0), 0)",
        "word |= tl.where(used, 1, 0)",
        "kernels/draft_kernels",
    ),
    Fault(
        "sgl_spec/engine/cuda/round.py",
        "count_tokens(rows.settings, mine.rows, self.walked, rows.filler)",
        "pass",
        "kernels/device_settings",
    ),
    Fault(
        "sgl_spec/engine/cuda/round.py",
        "self.draft.hidden.index_copy_(0, mine.rows, hidden)",
        "pass",
        "kernels/device_rounds",
    ),
    Fault(
        "sgl_spec/engine/cuda/round.py",
        "move_path(kv.k, kv.v, table, mine.rows, mine.at.committed, out.path, out.counts)",
        "pass",
        "kernels/device_rounds",
    ),
    Fault(
        "sgl_spec/engine/cuda/round.py",
        "self._host.fill(-1)",
        "pass",
        "kernels/device_settings",
    ),
)

FAULTS = (*ENGINE, *TEXT, *DRAFTS, *DEVICE)
