"""What transformers' `generate` answers, and how close a disagreement is to a tie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

TIE = 1e-3  # logits of two tokens closer than this may swap by rounding


class Reference:
    """Greedy fp32 `generate` of transformers on one checkpoint."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.model.eval()

    def encode(self, text: str) -> list[int]:
        """Token ids as transformers has them."""
        ids: list[int] = self.tokenizer(text).input_ids
        return ids

    def generate(
        self, prompts: Sequence[list[int]], new_tokens: int, batch: int = 8
    ) -> list[list[int]]:
        """New ids of each prompt, the end-of-sequence token included; `batch` at a time."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        outputs: dict[int, list[int]] = {}
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            new = self._generate([prompts[i] for i in part], new_tokens)
            outputs.update(zip(part, new, strict=True))
        return [outputs[i] for i in range(len(prompts))]

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt) :] = torch.tensor(prompt)
            mask[i, width - len(prompt) :] = 1
        out = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False
        )
        return [self._until_end(row[width:].tolist()) for row in out]

    def _until_end(self, ids: list[int]) -> list[int]:
        ends = self.model.generation_config.eos_token_id
        ends = {ends} if isinstance(ends, int) else set(ends)
        stop = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
        return ids[:stop]

    @torch.inference_mode()
    def explain(self, prompt: list[int], expected: list[int], got: list[int]) -> str | None:
        """None if the first difference is a tie that rounding may decide, else what is wrong."""
        pairs = zip(expected, got, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(got)))
        if at == min(len(expected), len(got)):
            return f"lengths differ: {len(got)} ids, transformers {len(expected)}"
        logits = self.model(torch.tensor([prompt + expected[:at]])).logits[0, -1]
        values, tokens = logits.topk(2)
        gap = float(values[0] - values[1])
        where = (
            f"token {at}: {got[at]}, transformers {expected[at]}; the top two are {gap:.2e} apart"
        )
        print(where)
        return None if gap < TIE and got[at] in tokens.tolist() else where
