"""Chat with a running server through the `openai` client, streamed.

python examples/chat_openai.py "Name three rivers."
python examples/chat_openai.py --url http://127.0.0.1:30000 --temperature 0 "Hello!"
"""

from __future__ import annotations

import argparse
import os
import sys

try:
    from openai import APIConnectionError, APIStatusError, OpenAI
except ModuleNotFoundError:
    sys.exit("This example needs OpenAI's client: pip install openai")


def main() -> None:
    """Send one message and print the answer as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("message")
    parser.add_argument("--url", default=os.environ.get("SGL_SPEC_URL", "http://127.0.0.1:30000"))
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args()

    client = OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key)
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": options.message}],
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage:
            print(f"\n[{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens]")


if __name__ == "__main__":
    try:
        main()
    except APIStatusError as error:
        sys.exit(f"The server answers {error.status_code}: {error.response.text}")
    except APIConnectionError as error:
        sys.exit(f"No server answers ({error.__cause__}). Start one first, or name it with --url.")
