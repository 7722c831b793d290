"""What a server says of itself whose acceptance is simulated: every reply and metric is marked."""

from __future__ import annotations

import json

from serving import Launch

MARK = "simulated_accept_length"


def test_replies_and_metrics_are_marked(launch: Launch) -> None:
    flags = ("--speculative-algorithm", "NGRAM", "--enable-metrics")
    server = launch(*flags, "--simulate-acc-len", "1.5")
    client, params = server.client, {"max_new_tokens": 24, "ignore_eos": True}
    body = {"text": "one two one two one two", "sampling_params": params}
    whole = client.post("/generate", json=body).json()["meta_info"]
    assert whole[MARK] == 1.5
    assert whole["spec_accept_length"] >= 1
    with client.stream("POST", "/generate", json=body | {"stream": True}) as reply:
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: {")]
    assert len(lines) > 2
    assert all(json.loads(line)["meta_info"][MARK] == 1.5 for line in lines)
    short = client.post("/generate", json=body | {"sampling_params": {"max_new_tokens": 1}})
    assert short.json()["meta_info"][MARK] == 1.5
    asked = {"model": "default", "max_tokens": 8, "return_spec_tokens_details": True}
    completion = client.post("/v1/completions", json=asked | {"prompt": "a b a b"}).json()
    assert completion[MARK] == completion["sglext"]["spec_tokens_details"][MARK] == 1.5
    chat = asked | {"messages": [{"role": "user", "content": "a b a b"}], "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=chat) as reply:
        events = [line[6:] for line in reply.iter_lines() if line.startswith("data: {")]
    assert all(json.loads(event)[MARK] == 1.5 for event in events)
    made = client.post("/v1/responses", json={"input": "a b a b", "max_output_tokens": 8})
    assert made.json()[MARK] == 1.5
    info = client.get("/server_info").json()
    assert info["simulate_acc_len"] == info["internal_states"][0][MARK] == 1.5
    assert info["acceptance_rule"] == "follow, simulated accept length 1.5"
    families = client.get("/metrics").text.splitlines()
    values = [line for line in families if line.startswith("sglang:")]
    assert values
    assert all(f'{MARK}="1.5"' in line for line in values)
