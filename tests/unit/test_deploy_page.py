"""docs/replicas.md: its flags, its arithmetic and its figures are those of the code and results."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from typing import Any

import pytest
from docs_commands import ROOT, Kind, commands

from sgl_spec.deploy.args import DeployArgs
from sgl_spec.deploy.plan import LLAMA_70B, Shard, open_requests, replicas
from sgl_spec.deploy.policy import CAPACITY
from sgl_spec.deploy.simulate import Routers, Shape, Speed, World, upkeep
from sgl_spec.options import declared, flag_table

PAGE = ROOT / "docs" / "replicas.md"
ANSWER, WRITES = 215, 9_183


def results(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "docs" / "results" / name).read_text())
    return loaded


def table(head: str, rows: Iterable[Iterable[object]]) -> str:
    rule = "|" + "---|" * (head.count("|") - 1)
    return "\n".join([head, rule, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def flags() -> str:
    return flag_table(declared(DeployArgs).values()).partition("\n\n")[2].strip()


def planned() -> str:
    rows = []
    for gpus in (2, 4, 8):
        shard = Shard(LLAMA_70B, gpus)
        sums = [f"{1e3 * shard.sums_s(rows):.1f} ms" for rows in (1, 48, 384)]
        sizes = f"{shard.sum_bytes(1) / 1024:.0f} KiB to {shard.sum_bytes(384) / 1e6:.1f} MB"
        room = f"{shard.kv_tokens / 1e6:.2f} million"
        facts = [f"{shard.weights / 1e9:.1f} GB", f"{shard.kv_token / 1024:.0f} KiB", room]
        rows.append(
            [gpus, *facts, f"{1e3 * shard.read_s():.1f} ms", f"{shard.sums} of {sizes}", *sums]
        )
    head = (
        "| GPUs | weights on each | KV of a token | tokens that fit | reading the weights | sums | "
        "1 row | 48 | 384 |"
    )
    return table(head, rows)


def router_cost() -> str:
    cost = results("router-simulated.json")["router"]
    bytes_known = cost["bytes_per_hash"] * CAPACITY / 1e6
    return (
        f"The policy takes {cost['route_us']:.0f} us of a core for a prompt of "
        f"{cost['hashes']} hashes (4 KiB) and 100 replicas: {cost['route_us'] / 100:.1f} cores at "
        f"10,000 requests/s.\nA hash takes {cost['bytes_per_hash']} bytes, so that the 2^20 hashes "
        f"(128 MiB of prompts) that a front remembers are {bytes_known:.0f} MB.\n"
        "What Ray itself does for a request takes longer than that, and was not measured."
    )


def simulated() -> str:
    rows = [
        (
            row["traffic"],
            row["route"] + (f", {row['routers']} routers" if row["routers"] > 1 else ""),
            f"{100 * row['cached_share']:.0f} %",
            f"{row['ttft_mean_ms']:.1f} ms",
            f"{row['ttft_p99_ms']:.0f} ms",
            f"{row['busiest_to_mean']:.2f}",
        )
        for row in results("router-simulated.json")["rows"]
    ]
    head = "| traffic | route | prompts cached | first token, mean | 99 % within | busiest |"
    return table(head, rows)


PARTS = {
    "deploy flags": flags,
    "planned": planned,
    "router cost": router_cost,
    "simulated": simulated,
}


def filled(page: str) -> str:
    for name, make in PARTS.items():
        before, mark, after = page.partition(f"<!-- {name} -->\n")
        assert mark, name
        _, end, after = after.partition("<!-- end -->")
        page = f"{before}{mark}{make()}\n{end}{after}"
    return page


def test_the_page_is_as_computed() -> None:
    """`python tests/unit/test_deploy_page.py` brings it up to date."""
    assert PAGE.read_text() == filled(PAGE.read_text())


def test_the_arithmetic_of_10_000_requests() -> None:
    page = PAGE.read_text()
    rate, stream = WRITES / ANSWER, WRITES / 48
    for said in (
        f"answer of {ANSWER} tokens",
        f"{10_000 * ANSWER / 1e6:.2f} million tokens/s",
        f"{rate:.1f} such requests/s",
        f"{replicas(10_000, ANSWER, WRITES)} replicas",
        f"{100 * rate:,.0f} requests/s",
        f"At {stream:.0f} tokens/s",
        f"takes {ANSWER / stream:.1f} s, and {open_requests(10_000, ANSWER / stream):,.0f} are",
    ):
        assert said in page.replace("\n", " "), said
    serving = (ROOT / "docs" / "measured.md").read_text()
    assert f"| {WRITES} |" in serving


def test_the_plan_by_hand() -> None:
    """2 x 80 layers x 1 of 8 heads x 128 numbers of 2 bytes; two sums a layer."""
    shard = Shard(LLAMA_70B, 8)
    assert shard.kv_token == 2 * 80 * 128 * 2
    assert shard.weights == pytest.approx(70.6e9 * 2 / 8 + 128_256 * 8192 * 2 * 7 / 8)
    assert shard.sums == 160
    assert shard.sums_s(1) == pytest.approx(160 * 10e-6)
    assert shard.sums_s(4096) == pytest.approx(160 * 4096 * 8192 * 2 * 2 * 7 / 8 / 450e9)
    assert Shard(LLAMA_70B, 1).sums == 0
    assert Shard(LLAMA_70B, 1).kv_tokens < 0


def test_routing_by_prefix_reads_less_and_none_is_left_idle() -> None:
    shape = Shape("small", 3, 512, 5.0, 200, 200, 1.0, 40.0)
    seen = {}
    for kind in ("round robin", "least loaded", "prefix"):
        world = World(shape, Speed(cache=60_000), 6, seed=1)
        seen[kind] = world.run(Routers(kind, 1, 6), 900).row()
        assert all(replica.load == 0 and replica.cache for replica in world.replicas)
    assert seen["prefix"]["cached_share"] > seen["round robin"]["cached_share"] + 0.1
    assert seen["prefix"]["ttft_mean_ms"] < seen["least loaded"]["ttft_mean_ms"]
    assert seen["prefix"]["busiest_to_mean"] < 3


def test_routers_of_their_own_agree_on_named_conversations() -> None:
    shape = Shape("small", 3, 512, 5.0, 200, 200, 1.0, 40.0)
    seen = {}
    for kind in ("prefix", "prefix and names"):
        world = World(shape, Speed(cache=60_000), 6, seed=1)
        seen[kind] = world.run(Routers(kind, 8, 6), 900).row()["cached_share"]
    assert seen["prefix and names"] > seen["prefix"]


def test_a_router_costs_little() -> None:
    cost = upkeep(20, seed=0, requests=200)
    assert 0 < cost["bytes_per_hash"] < 1_000
    assert 0 < cost["route_us"] < 5_000


def test_flags_of_commands_for_ray_exist() -> None:
    found = [one for one in commands(PAGE) if one.kind is Kind.RAY]
    assert len(found) == 2
    for command in found:
        words = shlex.split(command.text)
        args = DeployArgs.from_cli(words[2:])
        assert args.server


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
