"""Every example runs and does what its first line says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from serving import ROOT, Launch, Server
from solo import Solo
from talk import accepted, drained, generate

EXAMPLES = ROOT / "examples"
GREEDY = {"temperature": 0}
QUESTION = "one, two, three, four, one, two, three, four, one, two,"


def run(name: str, *args: str, url: str = "") -> str:
    """The output of an example."""
    done = subprocess.run(
        [sys.executable, f"examples/{name}", *args],
        cwd=ROOT,
        env=os.environ | {"SGL_SPEC_URL": url},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()  # not text mode: the tiny model says carriage returns


@pytest.fixture(scope="module")
def server(launch_shared: Launch) -> Server:
    """Serves with the drafter of `custom_drafter.py`."""
    return launch_shared(
        *("--speculative-drafter-module", "examples/custom_drafter.py"),
        *("--speculative-algorithm", "PROMPT_LOOKUP"),
        "--speculative-verify-whole-trees",  # the same rounds each time
    )


def test_every_example_is_run_here() -> None:
    tested = {"chat_openai.py", "stream_generate.py", "offline.py", "custom_drafter.py"}
    tested.add("train_eagle3.sh")  # by test_training_walk.py
    tested |= {"quick.py", "choices.py"}
    tested |= {"make_prompts.py", "prompt_grammar.json"}  # by test_training_data.py
    tested.add("widen.py")  # by test_widen.py
    tested |= {"tp_bench.sh", "tp_texts.py"}  # by test_ranks_bench.py
    tested.add("ray_serve.py")  # by test_deploy_ray.py
    tested |= {"experiment.toml", "multi_turn.py"}  # by test_docs.py, as the documents show them
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix} == tested


def test_custom_drafter(server: Server, tiny_model_dir: Path) -> None:
    """Its text is the plain text, and it does draft."""
    solo = Solo(tiny_model_dir)
    prompts = [QUESTION, [5, 6, 7], list(range(60, 73)) * 3, [9]]
    replies = [generate(server, p, max_new_tokens=80, **GREEDY) for p in prompts]
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply["output_ids"] == solo.ids(prompt, max_new_tokens=80, **GREEDY)
    assert sum(map(accepted, replies)) > 0
    drained(server)


def test_stream_generate(server: Server) -> None:
    output = run("stream_generate.py", QUESTION, "--max-new-tokens", "40", url=server.url)
    reply = generate(server, QUESTION, max_new_tokens=40, **GREEDY)
    text, figures = output.rsplit("\n[40 tokens, finish: length]\n", 1)
    assert text == reply["text"]
    rounds = reply["meta_info"]["spec_verify_ct"]
    assert figures.startswith(f"[{rounds} rounds, accept length ")


def test_stream_generate_reads_what_is_new_too(server: Server, launch: Launch) -> None:
    wanted = run("stream_generate.py", QUESTION, url=server.url)
    other = launch("--incremental-streaming-output")
    text, _ = wanted.rsplit("\n[64 tokens, finish: length]\n", 1)
    assert run("stream_generate.py", QUESTION, url=other.url).startswith(f"{text}\n[64 tokens, ")


def test_chat_openai(server: Server) -> None:
    options = ("--temperature", "0", "--max-tokens", "24")
    output = run("chat_openai.py", *options, "Name three rivers.", url=server.url)
    request = {
        "messages": [{"role": "user", "content": "Name three rivers."}],
        "temperature": 0,
        "max_tokens": 24,
    }
    reply = server.client.post("/v1/chat/completions", json=request).json()
    usage = f"[{reply['usage']['prompt_tokens']} + 24 tokens]"
    assert output == f"{reply['choices'][0]['message']['content']}\n{usage}\n"


def test_quick() -> None:
    output = run("quick.py")
    assert output.startswith(" three, four, one, two,")
    (rounds,) = re.findall(r"\n48 tokens in (\d+) rounds\n", output)
    assert int(rounds) < 24


def test_choices(tiny_model_dir: Path) -> None:
    output = run("choices.py", "--model-path", str(tiny_model_dir), "--max-new-tokens", "8")
    assert len(set(re.findall(r"^seed (\d+): ", output, re.MULTILINE))) == 3
    (score,) = re.findall(r"log-probability of 'Paris .*': (-\d+\.\d\d)\n", output)
    assert float(score) < 0


def test_examples_that_talk_carry_the_key(launch: Launch) -> None:
    server = launch("--api-key", "sesame", "--speculative-algorithm", "NGRAM")
    for name in ("stream_generate.py", "chat_openai.py"):
        assert run(name, "--api-key", "sesame", "Hello", url=server.url)
        with pytest.raises(AssertionError, match="401"):
            run(name, "Hello", url=server.url)


@pytest.mark.parametrize("name", ["stream_generate.py", "chat_openai.py"])
def test_examples_say_in_a_line_that_nobody_answers(name: str) -> None:
    with pytest.raises(AssertionError, match=r"No server answers \(.*refused.*\)") as raised:
        run(name, "Hello", url="http://127.0.0.1:9")
    assert "Traceback" not in str(raised.value)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ('data: {"error": {"message": "The engine has ended."}}', "gave up: The engine has ended."),
        ("", "The stream broke off."),
    ],
)
def test_a_stream_that_fails_is_told_in_a_line(end: str, told: str) -> None:
    class Fails(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send("{}")

        def do_POST(self) -> None:
            self.send(f'data: {{"text": " Par", "meta_info": {{}}}}\n\n{end}\n\n')

        def send(self, body: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

    with HTTPServer(("127.0.0.1", 0), Fails) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        with pytest.raises(AssertionError, match=re.escape(told)) as raised:
            run("stream_generate.py", "Hello", url=url)
        server.shutdown()
    assert "Traceback" not in str(raised.value)


def test_offline(tiny_model_dir: Path) -> None:
    output = run("offline.py", "--model-path", str(tiny_model_dir), "--max-new-tokens", "32")
    solo = Solo(tiny_model_dir)
    text = solo.run(QUESTION, max_new_tokens=32, **GREEDY).text
    assert f"{QUESTION!r} -> {text!r}" in output
    rounds = re.findall(r"32 tokens in (\d+) rounds, the same text", output)
    assert len(rounds) == 2
    assert all(1 <= int(n) <= 31 for n in rounds)
