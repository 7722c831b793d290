"""What to run next and for whom: pure functions of counts, no tensors, no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_spec.engine.kv_pool import ceil_page

# Room kept free for every running request when a new one is admitted. Without it a request
# retracted from a full pool would be let in again at once and throw the next one out.
GROWTH_TOKENS = 64

# A prompt that shares at least this many uncached tokens with one being prefilled waits for its
# pages.
SHARED_PREFILL_TOKENS = 32

# Waiting requests that one step looks at, from the head of the queue. Each costs a walk through the
# prefix cache, which a long queue must not add to every token of those that run.
TRIED_PER_STEP = 128


# Forwards that a prompt being computed lets shorter ones go first.
PATIENCE = 8


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Slots as the policy sees them. free: owned by nobody. evictable: cached and used by
    nobody."""

    free: int
    evictable: int
    page_size: int

    @property
    def available(self) -> int:
        """Slots that could be handed out."""
        return self.free + self.evictable


@dataclass(frozen=True, slots=True)
class Need:
    """A request's claim on slots. have: slots it holds. tokens: positions it must have slots for.
    remaining: tokens it may still generate."""

    have: int
    tokens: int
    remaining: int


def tree_reserve(round_slots: int) -> int:
    """Slots beyond committed_len that a decode round is given: 2 A.

    A = `round_slots` is the most slots one round writes, in the target's cache or in a drafter's,
    and the most tokens it accepts. Twice, because a round may be launched while the host still
    knows the committed length of the round before.
    """
    return 2 * round_slots


def can_admit(need: Need, running: Sequence[Need], pool: PoolCounts) -> bool:
    """Whether a new request fits beside the running ones, with room for everybody to grow a
    little."""
    page = pool.page_size
    claim = ceil_page(need.tokens, page) - need.have
    if not running:
        return claim <= pool.available
    growth = sum(_growth(other, page) for other in running) + _growth(need, page)
    return claim + growth <= pool.available


def _growth(need: Need, page: int) -> int:
    later = need.tokens + min(need.remaining, GROWTH_TOKENS)
    return max(0, ceil_page(later, page) - max(ceil_page(need.tokens, page), need.have))


def retract_order(output_lens: Sequence[int], prompt_lens: Sequence[int]) -> list[int]:
    """Indices in the order in which requests give way: least output first (least work lost), then
    the longest prompt (most slots won), then the latest."""
    return sorted(range(len(output_lens)), key=lambda i: (output_lens[i], -prompt_lens[i], -i))


def prefill_order(unfilled: Sequence[int], passed: Sequence[int]) -> list[int]:
    """Indices of the prompts being computed, in the order in which the next forward takes them:
    the fewest missing tokens first, equals in order of admission.

    Of a burst that is computed one after the other most first tokens then come early, and the last
    one no later than in any other order. So that a long prompt is not passed over for ever, one
    that PATIENCE forwards went past comes before all others, such prompts in order of admission.
    """
    late = [count >= PATIENCE for count in passed]
    return sorted(range(len(unfilled)), key=lambda i: (not late[i], 0 if late[i] else unfilled[i]))


PREFILL_REQUESTS_CUDA = 16
"""Prompts of one forward on a GPU: its graphs are made for so many, and a forward of more would be
launched kernel by kernel, which takes longer than to run two."""


def split_prefill(unfilled: Sequence[int], budget: int, *, chunked: bool) -> list[int]:
    """How many tokens of each prefilling request the next forward takes, in order.

    A forward holds at most `budget` tokens, and prompts go whole while they fit: the end of one
    that is cut waits for the next forward, so the tokens of its beginning would only make this one
    longer for the others. Chunked, the next prompt is cut all the same if the forward would be less
    than half full, which wastes the machine. Otherwise a prompt longer than the budget goes alone.
    """
    takes: list[int] = []
    left = budget
    for want in unfilled:
        if want <= left:
            takes.append(want)
            left -= want
            continue
        if chunked and left > budget // 2:
            takes.append(left)
        elif not chunked and not takes:
            takes.append(want)
        break
    return takes


PREFILLS_IN_A_ROW_CUDA = 3
"""See `prefill_next`. On a GPU a chunk takes some tens of milliseconds, on a CPU seconds, so there
chunks and rounds alternate whatever waits."""


def prefill_next(
    *, prefilling: int, decoding: int, prefills_in_a_row: int, most_in_a_row: int = 1
) -> bool:
    """Whether the next forward is a prefill chunk. While both wait, a chunk follows every round, so
    that first tokens do not stall for longer than that, and further chunks follow it, up to
    `most_in_a_row`, as long as more requests wait for their prompts than for a round: a round of
    few costs nearly as much as one of all."""
    if prefilling == 0 or decoding == 0:
        return prefilling > 0
    if prefills_in_a_row == 0:
        return True
    return prefilling > decoding and prefills_in_a_row < most_in_a_row


def prefill_tokens(budget: int, pause_tokens: int | None, *, prefilling: int, decoding: int) -> int:
    """Prompt tokens of the next chunk. budget: of a chunk that no stream waits for. pause_tokens:
    of one between the rounds of at least as many streams as there are requests that wait for their
    prompts; while more wait, they gain more by a large chunk than the few streams lose."""
    if pause_tokens is None or decoding < prefilling:
        return budget
    return min(budget, pause_tokens)


def waits_for_prefix(ids: Sequence[int], matched: int, prefilling: Sequence[Sequence[int]]) -> bool:
    """Whether a prompt should wait because one being prefilled will soon put more of it in the
    cache.

    So a burst with one system prompt computes it once. matched: tokens of `ids` already cached.
    """
    end = matched + SHARED_PREFILL_TOKENS
    if len(ids) <= end:
        return False
    head = list(ids[:end])
    return any(list(other[:end]) == head for other in prefilling)


def admission_order(cached: Sequence[int], schedule_policy: str) -> list[int]:
    """Order in which waiting requests are tried: "fcfs" keeps theirs, "lpm" puts the longest cached
    prefix first (ties in arrival order)."""
    order = list(range(len(cached)))
    if schedule_policy == "lpm":
        order.sort(key=lambda i: -cached[i])
    return order
