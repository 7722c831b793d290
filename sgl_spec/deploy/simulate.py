"""The router in front of many replicas, simulated: `python -m sgl_spec.deploy.simulate`.

Conversations begin at random and go on turn by turn. A replica reads prompts one after the other,
less what its cache holds, and writes answers side by side. The routers are those that serve.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
import sys
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sgl_spec.bench.report import provenance, say
from sgl_spec.deploy.policy import PrefixPolicy

CHUNK = 128  # tokens; coarser than the router's, to be quick
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Shape:
    """A kind of traffic. system: tokens that all conversations with one of the `systems` begin
    with; turns, asked, answered: means; think_s: from an answer to the next turn."""

    name: str
    systems: int
    system: int
    turns: float
    asked: float
    answered: float
    think_s: float
    requests_per_s: float


@dataclass(frozen=True)
class Speed:
    """One replica, about a 70 B model on 8 H200s (see `plan`). cache: tokens of KV; read, write:
    tokens/s of prompts, and of one answer."""

    cache: int = 2_500_000
    read: float = 20_000.0
    write: float = 100.0


SHAPES = (
    Shape("chat", 20, 512, 2.0, 70, 215, 6.0, 600.0),
    Shape("agents", 5, 3_072, 10.0, 600, 150, 1.0, 300.0),
)


@dataclass
class Replica:
    """Its cache by chunk, least recently used first, its requests, and when it has read all."""

    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    load: int = 0
    free_at: float = 0.0

    def reads(self, chain: Sequence[int], speed: Speed) -> int:
        """Chunks of a prompt that are not cached; from now on they are."""
        new = next((i for i, link in enumerate(chain) if link not in self.cache), len(chain))
        self.keeps(chain, speed)
        return len(chain) - new

    def keeps(self, chain: Sequence[int], speed: Speed) -> None:
        """Put a text into the cache."""
        for link in reversed(chain):
            self.cache.pop(link, None)
            self.cache[link] = None
        while len(self.cache) * CHUNK > speed.cache:
            self.cache.popitem(last=False)


@dataclass
class Talk:
    """A conversation: what it has so far, and the turns that it will still have."""

    name: int
    chain: list[int]
    turns: int


@dataclass
class Seen:
    """What came of the requests."""

    waits: list[float] = field(default_factory=list)
    prompt: int = 0
    read: int = 0
    spread: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """In figures."""
        cuts = statistics.quantiles(self.waits, n=100)
        return {
            "cached_share": round(1 - self.read / self.prompt, 3),
            "ttft_mean_ms": round(1e3 * statistics.mean(self.waits), 1),
            "ttft_p99_ms": round(1e3 * cuts[98], 1),
            "busiest_to_mean": round(statistics.mean(self.spread), 2),
        }


# Names: requests tell which conversation they belong to.
ROUTES = (
    ("round robin", 1),
    ("least loaded", 1),
    ("prefix", 1),
    ("prefix", 8),
    ("prefix and names", 8),
)


class Routers:
    """`count` routers of one kind, each of which knows only the requests that came by it."""

    def __init__(self, kind: str, count: int, replicas: int) -> None:
        self.kind = kind
        self._turn = itertools.cycle(range(replicas))
        self._names = [f"replica-{i}" for i in range(replicas)]
        self._policies = [PrefixPolicy() for _ in range(count)]

    def route(self, talk: Talk, replicas: Sequence[Replica], luck: random.Random) -> int:
        """The replica of a request."""
        chain = talk.chain
        if self.kind == "round robin":
            return next(self._turn)
        if self.kind == "least loaded":
            return min(range(len(replicas)), key=lambda i: (replicas[i].load, luck.random()))
        if self.kind == "prefix and names":
            chain = [hash((talk.name, link)) & _WORD for link in chain]
        policy = luck.choice(self._policies)
        loads = {name: one.load for name, one in zip(self._names, replicas, strict=True)}
        chosen = policy.choose(chain, loads)
        policy.routed(chain, chosen, loads.keys())
        return self._names.index(chosen)


class World:
    """One run of `requests` requests, of which the first third is not counted. Every replica has
    all system prompts cached at the start, as one that has served for a while."""

    def __init__(self, shape: Shape, speed: Speed, replicas: int, seed: int) -> None:
        self.shape, self.speed = shape, speed
        self.luck = random.Random(seed)
        self.replicas = [Replica() for _ in range(replicas)]
        for replica, system in itertools.product(self.replicas, range(shape.systems)):
            replica.keeps(self._system(system), speed)
        self._ids = itertools.count(1 << 20)
        self._order = itertools.count()
        self._events: list[tuple[float, int, int, Talk, int]] = []

    def run(self, routers: Routers, requests: int) -> Seen:
        """Events in the order of time: a turn arrives (replica -1), or an answer has ended."""
        seen, arrived = Seen(), 0
        self._begin(0.0)
        for now, _, ended, talk, fresh in self._take():
            if ended >= 0:
                self._end(now, ended, talk)
                continue
            if fresh and arrived < requests:
                rate = self.shape.requests_per_s / self.shape.turns
                self._begin(now + self.luck.expovariate(rate))
            arrived += 1
            chosen = routers.route(talk, self.replicas, self.luck)
            counted = seen if arrived * 3 > requests and arrived <= requests else Seen()
            self._serve(now, chosen, talk, counted)
        return seen

    def _take(self) -> Iterator[tuple[float, int, int, Talk, int]]:
        while self._events:
            yield heapq.heappop(self._events)

    def _put(self, when: float, ended: int, talk: Talk, fresh: int = 0) -> None:
        heapq.heappush(self._events, (when, next(self._order), ended, talk, fresh))

    def _begin(self, when: float) -> None:
        """A conversation's first turn. Some system prompts are had by many, most by few."""
        system = min(int(self.luck.paretovariate(1.0)) - 1, self.shape.systems - 1)
        chain = self._system(system)
        turns = 1 + int(self.luck.expovariate(1 / max(self.shape.turns - 1, 1e-9)) + 0.5)
        talk = Talk(next(self._ids), chain, turns)
        self._grow(talk, self.shape.asked)
        self._put(when, -1, talk, fresh=1)

    def _system(self, number: int) -> list[int]:
        return list(range(number << 10, (number << 10) + self.shape.system // CHUNK))

    def _grow(self, talk: Talk, mean: float) -> int:
        """Add a text of a random length, most of them short; its tokens."""
        tokens = max(1, int(self.luck.lognormvariate(0.0, 1.0) / 1.6487 * mean))
        talk.chain.extend(itertools.islice(self._ids, -(-tokens // CHUNK)))
        return tokens

    def _serve(self, now: float, chosen: int, talk: Talk, seen: Seen) -> None:
        replica = self.replicas[chosen]
        new = replica.reads(talk.chain, self.speed)
        replica.free_at = max(now, replica.free_at) + max(new, 1) * CHUNK / self.speed.read
        replica.load += 1
        seen.waits.append(replica.free_at - now)
        seen.prompt += len(talk.chain)
        seen.read += new
        if len(seen.waits) % 32 == 0:
            loads = [one.load for one in self.replicas]
            seen.spread.append(max(loads) * len(loads) / sum(loads))
        tokens = self._grow(talk, self.shape.answered)
        self._put(replica.free_at + tokens / self.speed.write, chosen, talk)

    def _end(self, now: float, replica: int, talk: Talk) -> None:
        self.replicas[replica].load -= 1
        self.replicas[replica].keeps(talk.chain, self.speed)
        talk.turns -= 1
        if talk.turns:
            self._grow(talk, self.shape.asked)
            self._put(now + self.luck.expovariate(1 / self.shape.think_s), -1, talk)


def rows(replicas: int, requests: int, seed: int) -> Iterator[dict[str, object]]:
    """All kinds of traffic under all routers."""
    for shape in SHAPES:
        for kind, count in ROUTES:
            world = World(shape, Speed(), replicas, seed)
            seen = world.run(Routers(kind, count, replicas), requests)
            yield {"traffic": shape.name, "route": kind, "routers": count, **seen.row()}


def upkeep(replicas: int, seed: int, requests: int = 4_000, length: int = 32) -> dict[str, float]:
    """What one request costs a router: microseconds of a core for prompts of `length` hashes, the
    first half of them known, and bytes of memory for each hash that is remembered."""
    luck, policy = random.Random(seed), PrefixPolicy()
    loads = {f"replica-{i}": luck.randrange(20) for i in range(replicas)}
    known = [[luck.getrandbits(64) for _ in range(length // 2)] for _ in range(requests // 10)]
    chains = [
        [*luck.choice(known), *(luck.getrandbits(64) for _ in range(length - length // 2))]
        for _ in range(2 * requests)
    ]

    def route(some: Sequence[list[int]]) -> None:
        for chain in some:
            policy.routed(chain, policy.choose(chain, loads), loads.keys())

    start = time.process_time()
    route(chains[:requests])
    spent = time.process_time() - start
    held = len(policy)
    tracemalloc.start()
    route(chains[requests:])
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "hashes": length,
        "route_us": round(1e6 * spent / requests, 1),
        "bytes_per_hash": round(grown / (len(policy) - held)),
    }


def main(argv: Sequence[str]) -> int:
    """Show the rows; --json writes them with their conditions."""
    parser = argparse.ArgumentParser(prog="python -m sgl_spec.deploy.simulate")
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(argv)
    router = upkeep(asked.replicas, asked.seed)
    say(json.dumps(router))
    found = []
    for row in rows(asked.replicas, asked.requests, asked.seed):
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        found.append(row)
    if asked.json is not None:
        words = ["python", "-m", "sgl_spec.deploy.simulate", *argv]
        facts = provenance(words, asked.seed) | {
            "replicas": asked.replicas,
            "requests": asked.requests,
            "speed": asdict(Speed()),
            "shapes": [asdict(shape) for shape in SHAPES],
            "router": router,
            "rows": found,
        }
        asked.json.write_text(json.dumps(facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
