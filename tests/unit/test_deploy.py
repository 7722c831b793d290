"""Where requests go, and what `sgl-spec deploy` is asked: without Ray."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest

from sgl_spec.deploy.args import DeployArgs
from sgl_spec.deploy.policy import CHUNK_BYTES, MAX_CHUNKS, PrefixPolicy, prefix_chain
from sgl_spec.errors import ConfigError

IDLE = {"a": 0, "b": 0, "c": 0}


def chain(**call: Any) -> tuple[int, ...]:
    return prefix_chain(json.dumps(call).encode())


def chat(*turns: str, **fields: Any) -> tuple[int, ...]:
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return chain(messages=said, **fields)


LONG = "".join(chr(97 + i % 26) for i in range(1000))


@pytest.mark.parametrize(
    ("first", "next_turn"),
    [
        ({"text": LONG}, {"text": LONG * 2}),
        ({"prompt": [LONG, "other"]}, {"prompt": [LONG * 2]}),
        ({"input_ids": list(range(400))}, {"input_ids": list(range(800))}),
        ({"prompt": [list(range(400))]}, {"prompt": list(range(800))}),
        ({"input": LONG, "instructions": "x"}, {"input": LONG, "instructions": "x", "top_p": 1}),
    ],
)
def test_what_follows_a_prompt_begins_with_its_hashes(
    first: dict[str, Any], next_turn: dict[str, Any]
) -> None:
    """What the unfinished chunk at a prompt's end will hold is not known, so it has no hash."""
    known = chain(**first)
    assert len(known) > 5
    assert chain(**next_turn)[: len(known)] == known


def test_the_next_turn_of_a_chat_begins_with_the_turn_before() -> None:
    one, two = chat(LONG), chat(LONG, "answer", "question")
    assert len(one) == 1040 // CHUNK_BYTES
    assert two[: len(one)] == one
    assert chat(LONG, tools=[{"type": "function"}])[0] != one[0]


def test_a_salt_makes_another_prompt() -> None:
    plain, one, other = chat(LONG), chat(LONG, cache_salt="1"), chat(LONG, cache_salt="2")
    assert not {*plain} & {*one}
    assert not {*one} & {*other}
    assert not {*plain} & {*chat(LONG, prompt_cache_key="a conversation")}


def test_a_difference_changes_all_hashes_behind_it() -> None:
    changed = LONG[:300] + "!" + LONG[301:]
    same = [one == other for one, other in zip(chain(text=LONG), chain(text=changed), strict=True)]
    assert same == [True, True] + [False] * (len(same) - 2)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"1", b'{"text": 5}', b'{"prompt": []}', b"{}"])
def test_what_cannot_be_read_has_no_hashes(body: bytes) -> None:
    assert prefix_chain(body) == ()


def test_long_prompts_are_known_by_their_beginning() -> None:
    assert len(chain(text=LONG * 200)) == MAX_CHUNKS


def test_a_prompt_goes_where_most_of_it_is() -> None:
    policy = PrefixPolicy()
    policy.routed([1, 2], "a", IDLE)
    policy.routed([1, 2, 3, 4], "b", IDLE)
    policy.routed([1], "c", IDLE)
    assert policy.choose([1, 2, 3, 9], IDLE) == "b"
    assert policy.choose([1, 2, 3, 9], {"a": 0, "b": 6, "c": 0}) == "b"  # the mean is 2
    assert policy.choose([1, 2, 3, 9], {"a": 0, "b": 7, "c": 0}) == "a"
    assert policy.choose([1, 2, 3, 9], {"a": 15, "b": 15, "c": 0}) == "c"
    assert policy.choose([1, 2, 3, 9], {"a": 90, "b": 124, "c": 86}) == "b"  # the mean is 100
    assert policy.choose([1, 2, 3, 9], {"a": 90, "b": 130, "c": 80}) == "a"


def test_what_all_hold_goes_to_the_least_loaded() -> None:
    policy = PrefixPolicy()
    for replica in IDLE:
        policy.routed([1, 2], replica, IDLE)
    assert policy.choose([1, 2, 5], {"a": 2, "b": 1, "c": 2}) == "b"
    assert policy.choose([], {"a": 2, "b": 2, "c": 1}) == "c"


def test_what_nobody_holds_spreads_over_idle_replicas_alike_in_every_router() -> None:
    chosen = [PrefixPolicy().choose([link], IDLE) for link in range(300)]
    assert chosen == [PrefixPolicy().choose([link, 5], IDLE) for link in range(300)]
    assert min(chosen.count(replica) for replica in IDLE) > 60


def test_the_dead_hold_nothing() -> None:
    policy = PrefixPolicy()
    policy.routed([1, 2, 3], "a", IDLE)
    assert policy.choose([1, 2, 3], {"b": 0, "c": 0}) in ("b", "c")
    policy.routed([1, 2, 3], "b", {"b", "c"})
    assert policy.choose([1, 2, 3], IDLE) == "b"


def test_forgets_the_ends_of_old_prompts_first() -> None:
    policy = PrefixPolicy(capacity=6)
    policy.routed([1, 2, 3, 4], "a", IDLE)
    policy.routed([1, 2, 5, 6], "b", IDLE)
    policy.routed([1, 2, 7], "b", IDLE)
    assert len(policy) == 6
    assert policy.choose([1, 2, 3], IDLE) == "a"  # 4 went
    policy.routed([8, 9], "c", IDLE)
    assert len(policy) == 6
    assert policy.choose([1, 2, 3], IDLE) == "a" or policy.choose([1, 2, 5], IDLE) == "b"


def test_a_replica_that_holds_a_link_holds_all_before_it() -> None:
    """Whatever is routed and forgotten: a lookup that stops at a gap misses nothing."""
    luck, policy = random.Random(0), PrefixPolicy(capacity=40)
    chains: list[tuple[int, ...]] = [()]
    for step in range(2_000):
        alive = {"a", "b", "c"} if step % 500 < 400 else {"a", "c"}
        longer = (*luck.choice(chains[-20:]), step)
        chains.append(longer)
        chosen = policy.choose(longer, dict.fromkeys(sorted(alive), 0))
        policy.routed(longer, chosen, alive)
        kept = [policy._holders.get(link, frozenset()) & alive for link in longer[-40:]]
        assert all(one >= other for one, other in pairwise(kept[-min(len(longer), 40) :]))


def test_flags_of_the_server_go_through() -> None:
    args = DeployArgs.from_cli(["--replicas", "3", "--model-path", "m", "--page-size", "16"])
    assert (args.replicas, args.server) == (3, ("--model-path", "m", "--page-size", "16"))
    assert args.target == 48


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--replicas 0", "--replicas must be an integer >= 1, got '0'"),
        ("--replicas 3 --max-replicas 2", "--max-replicas 2 is less than --replicas 3."),
        ("--route best", "--route must be one of prefix, least-loaded"),
        ("--page-sice 16", "--page-sice"),
    ],
)
def test_bad_flags_are_told_before_anything_starts(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DeployArgs.from_cli(["--model-path", "m", *line.split()])
    assert said.replace("'", "") in caught.value.message.replace("'", "")


@pytest.mark.parametrize(
    ("flags", "present", "gpus"), [("", 0, 0), ("", 8, 1), ("--device cpu", 8, 0)]
)
def test_gpus_of_a_replica(flags: str, present: int, gpus: int) -> None:
    args = DeployArgs.from_cli(["--model-path", "m", *flags.split()])
    assert args.gpus(present) == gpus


def test_more_gpus_than_there_are_is_refused() -> None:
    args = DeployArgs.from_cli(["--model-path", "m", "--device", "cuda"])
    with pytest.raises(ConfigError, match="needs 1 GPUs"):
        args.gpus(0)
