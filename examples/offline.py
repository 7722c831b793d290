"""Generate without a server, and see that speculation changes the speed and not the text.

python examples/offline.py
"""

from __future__ import annotations

import argparse

from sgl_spec import LLM

PROMPTS = [
    "The capital of France is",
    "one, two, three, four, one, two, three, four, one, two,",
]


def main() -> None:
    """Complete two prompts plainly and with n-gram trees."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args()

    sampling = {"temperature": 0, "max_new_tokens": options.max_new_tokens}
    plain = LLM(options.model_path).generate(PROMPTS, sampling)
    trees = LLM(options.model_path, speculative_algorithm="NGRAM").generate(PROMPTS, sampling)
    for prompt, a, b in zip(PROMPTS, plain, trees, strict=True):
        assert a.output_ids == b.output_ids
        rounds = b.spec.verify_ct if b.spec else 0
        print(f"{prompt!r} -> {b.text!r}")
        print(f"  {len(b.output_ids)} tokens in {rounds} rounds, the same text as without drafts")


if __name__ == "__main__":
    main()
