"""Several answers to one prompt, each of which comes again with its seed.

python examples/choices.py
"""

from __future__ import annotations

import argparse

from sgl_spec import LLM, LogprobParams


def main() -> None:
    """Draw three continuations, repeat the second, and score a text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    options = parser.parse_args()

    with LLM(options.model_path, speculative_algorithm="NGRAM", dp_size=1) as llm:
        prompt = "The best thing about the sea is"
        sampling = {"temperature": 0.8, "max_new_tokens": options.max_new_tokens}
        answers = llm.generate(prompt, sampling_params={**sampling, "n": 3})
        for answer in answers:
            print(f"seed {answer.seed}: {answer.text!r}")

        (again,) = llm.generate(prompt, {**sampling, "seed": answers[1].seed})
        assert again.output_ids == answers[1].output_ids

        text = "Paris is the capital of France."
        ask = LogprobParams(logprob_start_len=0)
        (scored,) = llm.generate(text, {"max_new_tokens": 0}, ask)
        print(f"log-probability of {text!r}: {sum(scored.prompt_logprobs.values):.2f}")


if __name__ == "__main__":
    main()
