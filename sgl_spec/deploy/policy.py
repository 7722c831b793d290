"""Which replica a request goes to: the one that holds the longest part of its prompt, as long as
that one is not busier than others. Pure: no Ray, no clock, no randomness.

A prompt is known by a chain of hashes, one for each `CHUNK_BYTES` of it, in which each stands for
all of the prompt up to there. So a flat table of hashes is a tree of prefixes.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import orjson

CHUNK_BYTES = 128
MAX_CHUNKS = 256  # prompts that agree so far go to one replica whatever follows
CAPACITY = 1 << 20
SLACK = 4
CONVERSATION = ("prompt_cache_key", "conversation_id")
_WORD = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, which spreads neighbours
_NOBODY: frozenset[str] = frozenset()


def prefix_chain(body: bytes) -> tuple[int, ...]:
    """The hashes of a request's prompt, () where there is none to read. They begin with its
    `cache_salt`, since the same text of two tenants is two prompts, and with the conversation's
    name, by which routers that know nothing of each other agree on its replica."""
    try:
        call = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ()  # the server words the 400
    if not isinstance(call, dict):
        return ()
    text = _prompt(call)
    names = [call.get(field) for field in ("cache_salt", *CONVERSATION)]
    state = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    chain = []
    for end in range(CHUNK_BYTES, len(text) + 1, CHUNK_BYTES)[:MAX_CHUNKS]:
        part = state + text[end - CHUNK_BYTES : end]
        state = hashlib.blake2b(part, digest_size=8).digest()
        chain.append(int.from_bytes(state))
    return tuple(chain)


def _prompt(call: dict[str, Any]) -> bytes:
    """What the next turn of a conversation repeats, in the order of the prompt. Of a batch it is
    the first prompt."""
    if "messages" in call or "input" in call:
        said = call.get("messages", call.get("input"))
        turns = said if isinstance(said, list) else [said]
        return b"".join(map(orjson.dumps, [call.get("tools"), call.get("instructions"), *turns]))
    prompt = call.get("text") or call.get("prompt") or call.get("input_ids") or ""
    if isinstance(prompt, list) and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt.encode(errors="surrogatepass")
    return orjson.dumps(prompt).removesuffix(b"]")


class PrefixPolicy:
    """What is known of the replicas' prefix caches, and the choice that follows from it.

    slack: how many more requests than the mean one may have and still be chosen; a quarter of the
    mean if that is more.
    capacity: hashes that are remembered; the least recently used are forgotten, the ends of prompts
    before their beginnings.
    """

    def __init__(self, slack: int = SLACK, capacity: int = CAPACITY) -> None:
        self.slack = slack
        self.capacity = capacity
        self._holders: OrderedDict[int, frozenset[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def choose(self, chain: Sequence[int], loads: Mapping[str, int]) -> str:
        """The replica for a prompt, of those in `loads` (requests that each has), at least one.

        Of several that hold as much of it the least loaded; a prompt that nobody holds goes by its
        first hash (rendezvous hashing).
        """
        mean = sum(loads.values()) / len(loads)
        limit = mean + max(self.slack, mean / 4)
        best = {replica for replica, load in loads.items() if load <= limit}
        known: frozenset[str] | None = None
        link = 0
        for link in chain:
            holders = self._holders.get(link, _NOBODY)
            if holders is not known:  # most links of a conversation share one set
                if best.isdisjoint(holders):
                    break
                best &= holders
                known = holders
        if chain and known is None:
            return min(best, key=lambda replica: _weight(chain[0], replica))
        return min(best, key=lambda replica: (loads[replica], _weight(link, replica)))

    def routed(self, chain: Sequence[int], replica: str, alive: Collection[str]) -> None:
        """Remember that `replica` now holds this prompt; replicas not `alive` hold nothing."""
        made: dict[frozenset[str], frozenset[str]] = {}
        for link in reversed(chain):
            before = self._holders.pop(link, _NOBODY)
            if before not in made:
                after = before.intersection(alive) | {replica}
                made[before] = before if after == before else after
            self._holders[link] = made[before]
        while len(self._holders) > self.capacity:
            self._holders.popitem(last=False)


def _weight(link: int, replica: str) -> int:
    """Puts the replicas into an order of their own for each prompt."""
    return ((link ^ _seed(replica)) * _ODD) & _WORD


@lru_cache(1 << 12)
def _seed(replica: str) -> int:
    return int.from_bytes(hashlib.blake2b(replica.encode(), digest_size=8).digest())
