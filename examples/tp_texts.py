"""Texts of a model that GPUs share, to be compared with those of one GPU.

    python examples/tp_texts.py one.json --model-path smollm2 --tp-size 1
    python examples/tp_texts.py two.json --model-path smollm2 --tp-size 2
    python examples/tp_texts.py --compare one.json two.json

Half of the answers are greedy, half are sampled with a fixed seed. The ranks compare their
decisions after every step. Sums of parts round otherwise than the whole does, so in bfloat16 a text
may go another way where two tokens are about equally likely; on how many prompts is what is shown.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import sgl_spec.bench
from sgl_spec import LLM
from sgl_spec.args import ServerArgs
from sgl_spec.errors import ConfigError

DATA = Path(sgl_spec.bench.__file__).parent / "data" / "bench96.jsonl"


def write(path: Path, options: argparse.Namespace, args: ServerArgs) -> None:
    """The texts of one engine, as token ids."""
    lines = [json.loads(line) for line in DATA.read_text().splitlines()]
    chats = [line["prompt"] for line in lines]
    prompts = [chats[i % len(chats)] + "\n" * (i // len(chats)) for i in range(options.prompts)]
    sampling = [
        {"temperature": float(i % 2), "seed": i, "max_new_tokens": options.max_tokens}
        for i in range(len(prompts))
    ]
    given = {name: value for name, value in vars(args).items() if name != "without_effect"}
    given["check_ranks"] = args.tp_size > 1
    with LLM(**{name: value for name, value in given.items() if value is not None}) as llm:
        done = llm.generate(prompts, sampling)
    path.write_text(json.dumps([one.output_ids for one in done]))
    print(f"{path}: {len(done)} texts, --tp-size {args.tp_size}")


def compare(first: Path, others: list[Path]) -> None:
    """How many texts are the first file's, and where the others leave them."""
    expected = json.loads(first.read_text())
    for path in others:
        pairs = list(zip(expected, json.loads(path.read_text()), strict=True))
        apart = [parting(*pair) for pair in pairs if pair[0] != pair[1]]
        where = f", the others leave it after {sorted(apart)} tokens" if apart else ""
        print(f"{path}: {len(pairs) - len(apart)} of {len(pairs)} texts as in {first}{where}")


def parting(one: list[int], other: list[int]) -> int:
    """Tokens that two texts have in common at their beginnings."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=64)
    options, server = parser.parse_known_args()
    try:
        if options.compare:
            compare(options.files[0], options.files[1:])
        else:
            write(options.files[0], options, ServerArgs.from_cli(server))
    except ConfigError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
