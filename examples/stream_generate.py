"""Read the native `/generate` stream with nothing but the standard library.

    python examples/stream_generate.py "The capital of France is"

Each event holds all text so far, or what is new if the server was started with
--incremental-streaming-output. The last one tells how the speculation went.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any


def ask(url: str, api_key: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
    """The response to a GET, or to a POST of a body."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(url, data, headers)
    response: http.client.HTTPResponse = urllib.request.urlopen(request)
    return response


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The decoded events of a stream; one that tells of an error, or a stream without an end, ends
    the program."""
    with response:
        for line in response:
            text = line.decode().strip()
            if text == "data: [DONE]":
                return
            event = json.loads(text.removeprefix("data: ")) if text else {}
            if "error" in event:
                sys.exit(f"\nThe server gave up: {event['error']['message']}")
            if event:
                yield event
    sys.exit("\nThe stream broke off.")


def main() -> None:
    """Print the text as it grows, then the request's figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--url", default=os.environ.get("SGL_SPEC_URL", "http://127.0.0.1:30000"))
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    url = options.url.rstrip("/")

    body = {
        "stream": True,
        "text": options.prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": options.max_new_tokens},
    }
    with ask(f"{url}/server_info", options.api_key) as reply:
        incremental = json.load(reply).get("incremental_streaming_output", False)
    shown = 0
    last: dict[str, Any] = {}
    for last in events(ask(f"{url}/generate", options.api_key, body)):
        print(last["text"][shown:], end="", flush=True)
        shown = 0 if incremental else len(last["text"])
    meta = last["meta_info"]
    print(f"\n[{meta['completion_tokens']} tokens, finish: {meta['finish_reason']['type']}]")
    if "spec_verify_ct" in meta:
        print(f"[{meta['spec_verify_ct']} rounds, accept length {meta['spec_accept_length']:.2f}]")


if __name__ == "__main__":
    try:
        main()
    except urllib.error.HTTPError as error:
        sys.exit(f"The server answers {error.code}: {error.read().decode()}")
    except urllib.error.URLError as error:
        sys.exit(f"No server answers ({error.reason}). Start one first, or name it with --url.")
