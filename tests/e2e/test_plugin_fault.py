"""A drafter from outside that breaks off ends the server as any fault of the engine does."""

from __future__ import annotations

from pathlib import Path

from serving import Launch

FAULTY = """
from examples.custom_drafter import PromptLookup
from sgl_spec import register_drafter

class Faulty(PromptLookup):
    def observe(self, batch, tree, accepted):
        raise ValueError("the notebook is full")

register_drafter("FAULTY", Faulty)
"""


def test_the_answer_and_the_last_words_name_drafter_and_method(
    launch: Launch, tmp_path: Path
) -> None:
    module = tmp_path / "faulty.py"
    module.write_text(FAULTY)
    flags = ("--speculative-drafter-module", str(module), "--speculative-algorithm", "FAULTY")
    server = launch(*flags, "--skip-server-warmup")
    reply = server.client.post(
        "/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 8}}
    )
    sentence = "The drafter FAULTY failed in observe: ValueError: the notebook is full."
    assert reply.status_code == 503
    assert reply.json()["error"]["message"] == sentence
    server.expect_end(1, traceback=True)
    assert sentence in server.stderr.read_text()
