"""The shortest use from Python: one completion with n-gram trees.

python examples/quick.py
"""

from sgl_spec import LLM

PROMPT = "one, two, three, four, one, two, three, four, one, two,"

with LLM("smollm2", speculative_algorithm="NGRAM") as llm:
    (done,) = llm.generate(PROMPT, {"temperature": 0, "max_new_tokens": 48})
    print(done.text)
    print(f"{len(done.output_ids)} tokens in {done.spec.verify_ct} rounds")
