"""Engines with a draft model on a tiny target, and a watch on what the draft model is fed.

The reference for its logits is another program: transformers for the target's hidden states and for
a whole draft, `heads` for a head, each over the whole text at once.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from heads import (
    make_eagle,
    make_eagle3,
    normed,
    plain_eagle,
    plain_eagle3,
    plain_fuse,
    read_target,
)
from safetensors.torch import load_file, save_file
from tiny import make_tiny
from torch import Tensor

from sgl_spec import LLM, Completion, SamplingParams
from sgl_spec.engine.slots import SlotManager
from sgl_spec.layers.context import ForwardBatch, KVCache
from sgl_spec.request import TokenizedRequest
from sgl_spec.speculative.base import DraftBatch
from sgl_spec.speculative.model_drafter import ModelDrafter
from sgl_spec.speculative.tree import TokenTree

KINDS = ("EAGLE", "EAGLE3", "STANDALONE")
SHAPES = {"chain": (3, 1, 4), "tree": (5, 4, 8), "wide": (7, 8, 32)}


def make_draft(kind: str, directory: Path, target: Path) -> Path:
    """A random draft for `target`: a head, or a whole model of another size."""
    if kind == "EAGLE3":
        return make_eagle3(directory, target)
    if kind == "EAGLE":
        return make_eagle(directory, target)
    return make_tiny(directory, layers=1, hidden=32, heads=2, kv_heads=1, seed=9)


def disturbed(model: Path, directory: Path, size: float) -> Path:
    """A copy of a checkpoint whose output layer is off by `size` times its spread."""
    shutil.copytree(model, directory)
    file = directory / "model.safetensors"
    weights = load_file(file)
    head = weights["lm_head.weight"]
    generator = torch.Generator().manual_seed(3)
    head += size * head.std() * torch.randn(head.shape, generator=generator)
    save_file(weights, file, metadata={"format": "pt"})
    return directory


def shape_options(steps: int, topk: int, nodes: int) -> dict[str, Any]:
    """The flags of a tree's shape."""
    return {
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": nodes,
    }


def small_trees(kind: str, target: Path, directory: Path) -> dict[str, Any]:
    """Flags for trees of four nodes; the target drafts for itself under STANDALONE, so that all of
    its drafts are accepted. directory: for the draft."""
    options: dict[str, Any] = {"speculative_algorithm": kind}
    if kind == "NGRAM":
        return options | {"speculative_num_draft_tokens": 4}
    draft = target if kind == "STANDALONE" else make_draft(kind, directory, target)
    return options | {"speculative_draft_model_path": str(draft), **shape_options(2, 2, 4)}


def drafted(
    target: Path, kind: str | None, draft: Path | None = None, shape: str = "tree", **flags: Any
) -> LLM:
    """An engine that verifies whole trees and checks every slot after every step."""
    options: dict[str, Any] = {"max_total_tokens": 8192, "max_running_requests": 16}
    if kind is not None:
        options |= {"speculative_algorithm": kind, "speculative_draft_model_path": str(draft)}
        options |= {"speculative_verify_whole_trees": True} | shape_options(*SHAPES[shape])
    llm = LLM(str(target), **(options | flags))
    scheduler = llm.engine.scheduler
    scheduler.limits = dataclasses.replace(scheduler.limits, check_every_step=True)
    return llm


def finished(llm: LLM) -> None:
    """Every slot is back."""
    assert llm.engine.scheduler.flush()
    pages = llm.engine.slots.pages
    assert pages.free_slots == pages.total


@dataclass
class Watch:
    """Checks every forward of an engine's draft model, and keeps the logits of every root.

    roots: (text, logits [W]) of each request and round that was drafted for.
    """

    llm: LLM
    roots: list[tuple[list[int], Tensor]] = field(default_factory=list)
    forwards: int = 0
    shared: int = 0
    _first: Tensor | None = None

    def __post_init__(self) -> None:
        drafter = self.drafter
        drafter.kv.k.fill_(torch.nan)
        drafter.kv.v.fill_(torch.nan)
        model = drafter.model
        self._forward, self._logits = model.forward, model.logits
        self._propose = drafter.propose
        model.forward = self.forward  # type: ignore[method-assign]
        model.logits = self.logits  # type: ignore[method-assign]
        drafter.propose = self.propose  # type: ignore[method-assign]

    @property
    def drafter(self) -> ModelDrafter:
        drafter = self.llm.engine.drafter
        assert isinstance(drafter, ModelDrafter)
        return drafter

    @property
    def slots(self) -> SlotManager:
        return self.llm.engine.slots

    def forward(self, batch: ForwardBatch, features: Tensor | None, kv: KVCache) -> Tensor:
        """No shared slot is written, none twice, none is read before it is written."""
        cached = torch.from_numpy(self.slots.cache.all_slots())
        assert not torch.isin(batch.slots, cached).any(), "a shared slot is written"
        assert batch.slots.unique().numel() == batch.slots.numel(), "two rows write one slot"
        self.shared = max(self.shared, len(cached))
        self.forwards += 1
        hidden = self._forward(batch, features, kv)
        assert bool(hidden.isfinite().all()), "a slot that was never written is read"
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """The first logits of a proposal are the roots'."""
        logits = self._logits(hidden)
        if self._first is None:
            self._first = logits
        return logits

    def propose(self, batch: DraftBatch) -> TokenTree:
        """Note the roots."""
        self._first = None
        tree = self._propose(batch)
        (drafting,) = (batch.max_nodes > 1).nonzero()
        if len(drafting):
            assert self._first is not None
            for i, logits in zip(drafting, self._first, strict=True):
                text = batch.tokens[batch.rows[i], : batch.lengths[i]].tolist()
                self.roots.append((text, logits.clone()))
        return tree

    def check(self, reference: Reference, texts: Sequence[Sequence[int]]) -> int:
        """All roots' logits are the reference's; how many there were. texts: the finished ones."""
        known = {tuple(text): reference.logits(list(text)) for text in texts}
        for text, logits in self.roots:
            (expected, *_) = (k for whole, k in known.items() if list(whole[: len(text)]) == text)
            torch.testing.assert_close(logits, expected[len(text) - 1], atol=1e-4, rtol=1e-4)
        return len(self.roots)


class Reference:
    """What a draft says after every prefix of a text."""

    def __init__(self, kind: str, target: Path, draft: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.kind = kind
        whole = draft if kind == "STANDALONE" else target
        self.model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).eval()
        self.target = read_target(target)[1]
        self.config, self.weights = read_target(draft)

    @torch.inference_mode()
    def logits(self, text: list[int]) -> Tensor:
        """[N, W]: row n - 1 predicts what follows the first n tokens; a head has none for n = 1."""
        out = self.model(torch.tensor([text]), output_hidden_states=True)
        if self.kind == "STANDALONE":
            return out.logits[0]
        hidden = [rows[0, :-1] for rows in out.hidden_states]
        tokens, embedding = torch.tensor(text[1:]), self.target["model.embed_tokens.weight"]
        if self.kind == "EAGLE":
            rows = plain_eagle(self.config, self.weights, embedding, tokens, hidden[-1])
            logits = rows @ self.target["lm_head.weight"].T
        else:
            # The outputs of these layers, -1 being the embedding.
            layers = self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
            captured = torch.cat([hidden[layer + 1] for layer in layers], dim=-1)
            features = plain_fuse(self.config, self.weights, captured)
            rows = plain_eagle3(self.config, self.weights, embedding, tokens, features)
            rows = normed(rows, self.weights["norm.weight"], self.config["rms_norm_eps"])
            logits = rows @ self.weights["lm_head.weight"].T
        return F.pad(logits, (0, 0, 1, 0))


class World:
    """The target, a draft of each kind, and texts without speculation."""

    def __init__(self, target: Path, directory: Path) -> None:
        self.target = target
        self.drafts = {kind: make_draft(kind, directory / kind, target) for kind in KINDS}
        self.plain = drafted(target, None)
        self._references: dict[str, Reference] = {}

    def engine(self, kind: str, shape: str = "tree", **flags: Any) -> LLM:
        return drafted(self.target, kind, self.drafts[kind], shape, **flags)

    def reference(self, kind: str) -> Reference:
        if kind not in self._references:
            self._references[kind] = Reference(kind, self.target, self.drafts[kind])
        return self._references[kind]

    def texts(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[dict[str, Any]]
    ) -> list[list[int]]:
        return [one.output_ids for one in self.plain.generate(prompts, sampling)]


class Steps:
    """An engine driven step by step, requests coming and going in between."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine
        self.found: list[list[int]] = []
        self.hits: list[int] = []
        self.ends: dict[int, str] = {}

    def submit(self, prompt: list[int], sampling: dict[str, Any] | SamplingParams) -> int:
        rid = len(self.found)
        self.found.append([])
        self.hits.append(0)
        params = SamplingParams(**sampling) if isinstance(sampling, dict) else sampling
        self.engine.submit(TokenizedRequest(rid=str(rid), input_ids=prompt, sampling=params))
        return rid

    def steps(self, count: int) -> None:
        for _ in range(count):
            for chunk in self.engine.step():
                rid = int(chunk.rid)
                self.found[rid] += chunk.ids
                self.hits[rid] = chunk.cached_tokens
                if chunk.finish is not None:
                    assert rid not in self.ends
                    self.ends[rid] = chunk.finish.kind

    def finish(self) -> None:
        while self.engine.has_work:
            self.steps(1)

    @property
    def outputs(self) -> list[list[int]]:
        return self.found

    @property
    def cached(self) -> list[int]:
        return self.hits


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 512) for _ in range(count)]


def settings(count: int, new: int, **more: Any) -> list[dict[str, Any]]:
    """Greedy and seeded requests in turn."""
    return [
        {"temperature": float(i % 2), "seed": i, "max_new_tokens": new, "ignore_eos": True, **more}
        for i in range(count)
    ]


def whole(prompts: Sequence[list[int]], done: Sequence[Completion]) -> list[list[int]]:
    return [prompt + one.output_ids for prompt, one in zip(prompts, done, strict=True)]
