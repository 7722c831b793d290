"""As much of curl as the documents use, for machines that have none. Anything else is an error."""

from __future__ import annotations

import argparse
import sys

import httpx


def main() -> int:
    """Send one request, write the body as it comes; 22, as curl's --fail, if refused."""
    parser = argparse.ArgumentParser("curl")
    parser.add_argument("url")
    parser.add_argument("-s", "--silent", action="store_true")
    parser.add_argument("-S", "--show-error", action="store_true")
    parser.add_argument("-N", "--no-buffer", action="store_true")
    parser.add_argument("-X", "--request")
    parser.add_argument("-H", "--header", action="append", default=[])
    parser.add_argument("-d", "--data")
    args = parser.parse_args()
    given = (header.split(":", 1) for header in args.header)
    headers = {"content-type": "application/x-www-form-urlencoded"} if args.data else {}
    headers |= {name.strip().lower(): value.strip() for name, value in given}
    method = args.request or ("GET" if args.data is None else "POST")
    request = {"headers": headers, "content": args.data, "timeout": 300, "trust_env": False}
    with httpx.stream(method, args.url, **request) as reply:
        for piece in reply.iter_bytes():
            sys.stdout.buffer.write(piece)
    return 22 if reply.status_code >= 400 else 0


if __name__ == "__main__":
    sys.exit(main())
