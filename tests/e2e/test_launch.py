"""The server's start as an operator meets it: Ctrl-C at any moment, TLS."""

from __future__ import annotations

import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from serving import READY_TIMEOUT_S, ROOT, start

TLS = ROOT / "tests" / "data" / "tls"
FILES = ("--ssl-keyfile", str(TLS / "key.pem"), "--ssl-certfile", str(TLS / "cert.pem"))


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0, 3.0])
def test_ctrl_c_in_the_first_seconds_leaves_no_traceback(
    tmp_path: Path, tiny_model_dir: Path, seconds: float
) -> None:
    """From where the server's modules are imported; before, Python itself is starting."""
    server = start(tmp_path, tiny_model_dir, PYTHONPROFILEIMPORTTIME="1")
    try:
        while b"sgl_spec.errors" not in server.stderr.read_bytes():
            assert server.process.poll() is None
            time.sleep(0.005)
        time.sleep(seconds)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) in (0, 130), server.report("exit code")
        assert "Traceback" not in server.stderr.read_text()
        assert not server.family()
    finally:
        server.kill()


def test_https(tmp_path: Path, tiny_model_dir: Path) -> None:
    server = start(tmp_path, tiny_model_dir, *FILES)
    server.client.close()
    server.url = server.url.replace("http://", "https://")
    trust = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    server.client = httpx.Client(base_url=server.url, verify=trust, trust_env=False, timeout=60)
    try:
        server.wait_until_ready(READY_TIMEOUT_S)
        body = {"text": "a b", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        assert server.client.post("/generate", json=body).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/health", trust_env=False)
        assert f"Ready: {tiny_model_dir} at https://127.0.0.1" in server.stdout.read_text()
        server.stop()
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (FILES[:2], "--ssl-keyfile and --ssl-certfile need each other"),
        ((*FILES[:3], "no.pem"), "--ssl-certfile no.pem: no such file."),
        ((*FILES[:3], str(TLS / "key.pem")), "cannot be used: "),
    ],
)
def test_a_certificate_that_cannot_be_used_ends_the_start(
    tiny_model_dir: Path, flags: tuple[str, ...], said: str
) -> None:
    command = [sys.executable, "launch_server.py", "--model-path", str(tiny_model_dir), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
