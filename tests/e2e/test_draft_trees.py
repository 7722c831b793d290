"""`return_draft_trees`: what is shown of each round is what happened."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import Reference
from scoring import TOLERANCE, rescore
from serving import Launch, Server
from talk import drained, stream_events

PROMPT = "The harbour master kept a ledger of every boat that came in"
NEW = 40
GREEDY = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
SAMPLED = {"temperature": 0.7, "seed": 3, "max_new_tokens": NEW, "ignore_eos": True}
PENALISED = {**GREEDY, "frequency_penalty": 0.5}


@pytest.fixture(scope="module")
def tiny(tiny_model_dir: Path) -> Reference:
    return Reference(tiny_model_dir)


@pytest.fixture(scope="module")
def server(launch_shared: Launch) -> Iterator[Server]:
    flags = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")
    server = launch_shared(*flags, "--speculative-verify-whole-trees")
    yield server
    drained(server)


def post(server: Server, route: str = "/generate", **body: Any) -> Any:
    reply = server.client.post(route, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def shown(server: Server, sampling: dict[str, Any]) -> Any:
    return post(server, text=PROMPT, sampling_params=sampling, return_draft_trees=True)


def node_paths(tree: dict[str, Any]) -> list[list[int]]:
    """The drafted tokens on the way to each node, its own included."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(tree["tokens"][1:], tree["parents"][1:], strict=True):
        paths.append([*paths[parent], token])
    return paths


@pytest.mark.parametrize(
    "sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"]
)
def test_rounds_are_the_text(server: Server, sampling: dict[str, Any]) -> None:
    """The rounds follow each other without a gap, and their pieces are the text."""
    reply = shown(server, sampling)
    ids, rounds = reply["output_ids"], reply["meta_info"]["draft_trees"]
    text, last = reply["text"], ids[0]
    at, place = rounds[0]["text_start"], 1
    for one in rounds:
        assert (one["start"], one["text_start"], one["tokens"][0]) == (place, at, last)
        emitted = one["output_ids"]
        assert ids[place : place + len(emitted)] == emitted
        assert "".join(one["output_texts"]) == text[at : at + len("".join(one["output_texts"]))]
        paths = node_paths(one)
        accepted = [paths[node][-1] for node in one["accepted"]]
        assert accepted == emitted[: len(accepted)]
        assert len(emitted) in (len(accepted), len(accepted) + 1)
        for node, above in zip(one["accepted"], [0, *one["accepted"]], strict=False):
            assert one["parents"][node] == above
        place, last, at = place + len(emitted), emitted[-1], at + len("".join(one["output_texts"]))
    assert place == len(ids)
    meta = reply["meta_info"]
    assert meta["spec_verify_ct"] == len(rounds)
    assert meta["spec_num_proposed_drafts"] == sum(len(one["tokens"]) - 1 for one in rounds) > 0
    assert meta["spec_num_correct_drafts"] == sum(len(one["accepted"]) for one in rounds) > 0


def test_probabilities_are_the_models_own(server: Server, tiny: Reference) -> None:
    """Of every node and every emitted token, by one forward over the text on its path."""
    reply = shown(server, PENALISED)
    text = tiny.encode(PROMPT) + reply["output_ids"]
    begin, drafted = len(text) - NEW, 0
    for one in reply["meta_info"]["draft_trees"]:
        before = text[: begin + one["start"]]
        assert len(one["probs"]) == len(one["tokens"])
        for path, prob in zip(node_paths(one)[1:], one["probs"][1:], strict=True):
            row = rescore(tiny, before + path)[-2]
            assert abs(float(row[path[-1]].exp()) - prob) < TOLERANCE
            drafted += 1
        whole = before + one["output_ids"]
        rows = rescore(tiny, whole)[len(before) - 1 : -1]
        wanted = rows.gather(1, torch.tensor(one["output_ids"])[:, None]).exp()[:, 0]
        assert (wanted - torch.tensor(one["output_probs"])).abs().max() < TOLERANCE
    assert drafted


def test_times_and_scores(server: Server) -> None:
    for one in shown(server, GREEDY)["meta_info"]["draft_trees"]:
        assert one["batch_size"] == 1
        assert one["verify_ms"] > 0
        assert one["draft_ms"] > 0
        assert one["host_ms"] > 0
        assert (one["source"] is None) == (len(one["tokens"]) == 1)
        for node, (score, parent) in enumerate(zip(one["scores"], one["parents"], strict=True)):
            assert 0 <= score <= (one["scores"][parent] if node else 1)


def test_nothing_is_shown_unasked_and_asking_changes_nothing(server: Server) -> None:
    asked = shown(server, GREEDY)
    reply = post(server, text=PROMPT, sampling_params=GREEDY)
    assert "draft_trees" not in reply["meta_info"]
    assert reply["output_ids"] == asked["output_ids"]
    plain = shown(server, {**GREEDY, "speculation": False})
    assert plain["output_ids"] == asked["output_ids"]
    for one in plain["meta_info"]["draft_trees"]:
        assert (len(one["tokens"]), one["accepted"], one["source"]) == (1, [], None)


def test_a_stop_cuts_the_round(server: Server) -> None:
    """What was accepted behind a stop is not shown."""
    whole = shown(server, GREEDY)
    longest = max(whole["meta_info"]["draft_trees"], key=lambda one: len(one["output_ids"]))
    stop = longest["start"] + len(longest["output_ids"]) - 2
    cut = shown(server, {**GREEDY, "max_new_tokens": stop})
    assert cut["output_ids"] == whole["output_ids"][:stop]
    rounds = cut["meta_info"]["draft_trees"]
    assert rounds[0]["start"] + sum(len(one["output_ids"]) for one in rounds) == stop
    assert all(len(one["accepted"]) <= len(one["output_ids"]) for one in rounds)


BODIES = {
    "/generate": {"text": PROMPT, "sampling_params": GREEDY},
    "/v1/completions": {"prompt": PROMPT, "temperature": 0, "max_tokens": NEW, "ignore_eos": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": NEW,
        "ignore_eos": True,
    },
}


def trees_of(reply: Any) -> list[Any]:
    found = reply["meta_info"] if "meta_info" in reply else reply.get("sglext", {})
    trees: list[Any] = found.get("draft_trees", [])
    return trees


@pytest.mark.parametrize("route", BODIES)
def test_a_stream_tells_what_is_new(server: Server, route: str) -> None:
    """Its rounds are whole and in order, on each route."""
    body = {**BODIES[route], "return_draft_trees": True}
    events = stream_events(server, {**body, "stream": True}, route)
    rounds = list(itertools.chain(*map(trees_of, events)))
    assert len(list(filter(None, map(trees_of, events)))) > 1
    emitted = [token for one in rounds for token in one["output_ids"]]
    assert len(emitted) == NEW - rounds[0]["start"] == NEW - 1
    starts = [one["start"] for one in rounds]
    assert starts == [1 + sum(len(r["output_ids"]) for r in rounds[:i]) for i in range(len(rounds))]
    whole = trees_of(post(server, route, **body))
    assert [t for one in whole for t in one["output_ids"]] == emitted


def test_choices_have_a_list_each(server: Server) -> None:
    body = {**BODIES["/v1/completions"], "n": 2, "temperature": 1.0, "seed": 5}
    trees = trees_of(post(server, "/v1/completions", **body, return_draft_trees=True))
    first, second = ([t for one in each for t in one["output_ids"]] for each in trees)
    assert len(first) == len(second) == NEW - 1
    assert first != second
