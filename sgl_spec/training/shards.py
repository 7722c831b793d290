"""Token sequences on disk: shards that are written as sequences finish, and a reader for training.

A data directory holds, for each part that a process wrote, `part-00.json` (its manifest) and its
shards `part-00-00000.safetensors`, `part-00-00001.safetensors`, ... A shard with n sequences:

    tokens         [sum of lengths]  uint16 or uint32, prompt and answer of one after the other
    offsets        [n + 1] int64     sequence i is tokens[offsets[i] : offsets[i + 1]]
    prompt_lens    [n] int32         how many of its first tokens are the prompt
    kinds          [n] uint8         index into the manifest's `kinds`
    temperatures   [n] float32       0 for a greedy answer
    jobs           [n] int64         which job of the part it is; a resumed run skips it
    prompt_hashes  [n] uint64        of the prompt's tokens; decides the held-out split

A shard is complete once it has its name, and counts once the manifest lists it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file
from torch import Tensor

from sgl_spec.errors import ConfigError
from sgl_spec.training.shard_files import (
    FORMAT,
    Arrays,
    manifest_paths,
    read_manifest,
    read_shard,
)

IntArray = npt.NDArray[np.int64]

# A run that is killed loses at most the sequences that finished within either bound.
_SHARD_TOKENS = 1 << 20
_SHARD_SECONDS = 30.0
_WINDOW = 64  # batches whose sequences are sorted by length together
# Two runs into one part must agree on these; other manifest entries are notes.
_IDENTITY = ("format", "target", "vocab_size", "kinds", "seed", "part", "parts")


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A prompt with its answer. tokens: ids, the end-of-text id included if the model gave it."""

    tokens: IntArray
    prompt_len: int
    kind: int
    temperature: float
    job: int


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """B sequences, padded with 0 on the right.

    tokens: [B, L] int64; lens, prompt_lens, kinds: [B] int64, lengths in tokens.
    """

    tokens: Tensor
    lens: Tensor
    prompt_lens: Tensor
    kinds: Tensor

    def answer_mask(self) -> Tensor:
        """[B, L] bool: positions that the model answered."""
        columns = torch.arange(self.tokens.shape[1])
        return (columns >= self.prompt_lens[:, None]) & (columns < self.lens[:, None])


def prompt_hash(tokens: IntArray) -> int:
    """64 bits that depend on the ids alone."""
    data = np.ascontiguousarray(tokens, dtype="<u4").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class ShardWriter:
    """Appends finished sequences to one part of a data directory.

    identity: manifest entries `target` (a name), `vocab_size`, `kinds` (names), `seed`, `part` and
    `parts`; a part that exists with other values is refused. notes: further manifest entries, of
    the last run. done: jobs that earlier runs finished.
    """

    def __init__(self, directory: Path, identity: dict[str, Any], notes: dict[str, Any]) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._stem = f"part-{identity['part']:02d}"
        self._path = directory / f"{self._stem}.json"
        self.manifest: dict[str, Any] = {"format": FORMAT, **identity, "shards": []}
        self._id_type = np.uint16 if identity["vocab_size"] <= 1 << 16 else np.uint32
        self._waiting: list[TokenSequence] = []
        self._waiting_tokens = 0
        self._flushed = time.monotonic()
        self.done: set[int] = set()
        if self._path.is_file():
            self._resume()
        self.manifest |= notes
        self._write_manifest(self.manifest)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, those not yet on disk included."""
        on_disk: int = sum(shard["tokens"] for shard in self.manifest["shards"])
        return on_disk + self._waiting_tokens

    def add(self, sequence: TokenSequence) -> None:
        """Take a finished sequence; writes a shard when enough are there or it is time."""
        self._waiting.append(sequence)
        self._waiting_tokens += len(sequence.tokens)
        late = time.monotonic() - self._flushed >= _SHARD_SECONDS
        if late or self._waiting_tokens >= _SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write what waits as a shard of its own.

        One that a signal interrupts may be called again: until the manifest is on disk nothing here
        changes, so the second call writes the same shard.
        """
        if not self._waiting:
            return
        arrays = _packed(self._waiting, self._id_type)
        name = f"{self._stem}-{len(self.manifest['shards']):05d}.safetensors"
        partial = self.directory / f".{name}.partial"
        save_file(arrays, str(partial))
        partial.rename(self.directory / name)
        answered = self._waiting_tokens - int(arrays["prompt_lens"].sum())
        shard = {
            "file": name,
            "sequences": len(self._waiting),
            "tokens": self._waiting_tokens,
            "answer_tokens": answered,
        }
        manifest = self.manifest | {"shards": [*self.manifest["shards"], shard]}
        self._write_manifest(manifest)
        self.done.update(sequence.job for sequence in self._waiting)
        self.manifest, self._waiting, self._waiting_tokens = manifest, [], 0
        self._flushed = time.monotonic()

    def _resume(self) -> None:
        found = read_manifest(self._path)
        for key in _IDENTITY:
            if found.get(key) != self.manifest[key]:
                raise ConfigError(
                    f"{self._path} was made with {key} = {found.get(key)!r}, this run has "
                    f"{self.manifest[key]!r}; use another --out."
                )
        self.manifest["shards"] = found["shards"]
        for shard in found["shards"]:
            self.done.update(read_shard(self.directory / shard["file"], found)["jobs"].tolist())

    def _write_manifest(self, manifest: dict[str, Any]) -> None:
        partial = self._path.with_name(f".{self._path.name}.partial")
        partial.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        partial.rename(self._path)


class TokenShards:
    """All sequences of one or more data directories, in memory (2 or 4 bytes a token).

    tokens: all ids in a row; offsets: [n + 1] int64; prompt_lens, kinds, jobs: [n] int64;
    temperatures: [n] float32; kind_names: what the numbers in `kinds` mean; target, vocab_size: of
    the model that answered. held_out: the share of prompts (by hash of their tokens, so that every
    answer to a prompt falls on one side) that training never sees.
    """

    def __init__(self, directories: Path | Sequence[Path], held_out: float = 0.02) -> None:
        if not 0 <= held_out < 1:
            raise ConfigError(f"--held-out {held_out} is out of range; allowed: 0 and below 1.")
        listed = [directories] if isinstance(directories, Path) else list(directories)
        manifests = [(path, read_manifest(path)) for path in manifest_paths(listed)]
        first_path, first = manifests[0]
        for path, manifest in manifests:
            for key in ("target", "vocab_size", "kinds"):
                if manifest.get(key) != first.get(key):
                    raise ConfigError(
                        f"{path} has {key} = {manifest.get(key)!r}, {first_path} has "
                        f"{first.get(key)!r}; they cannot be trained on together."
                    )
        self.target = str(first["target"])
        self.vocab_size = int(first["vocab_size"])
        self.kind_names: tuple[str, ...] = tuple(first["kinds"])
        shards = [
            read_shard(path.parent / shard["file"], manifest)
            for path, manifest in manifests
            for shard in manifest["shards"]
        ]
        if not shards:
            raise ConfigError(f"{listed[0]} holds no finished shard yet.")
        self._join(shards)
        self._share = held_out
        self._held_out = self._hashes < np.uint64(int(held_out * 2**64))

    def __len__(self) -> int:
        return len(self.prompt_lens)

    @property
    def lens(self) -> IntArray:
        """[n] tokens of each sequence."""
        return np.diff(self.offsets)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.offsets[-1])

    def training(self) -> IntArray:
        """Indices of the sequences to train on."""
        return np.flatnonzero(~self._held_out)

    def held_out(self) -> IntArray:
        """Indices of the sequences that training never sees."""
        return np.flatnonzero(self._held_out)

    def require_held_out(self) -> None:
        """`ConfigError` if no sequence is held out: nothing could be judged then."""
        if not self._held_out.any():
            raise ConfigError(
                f"--held-out {self._share} keeps no prompt of the data apart; raise it."
            )

    def require_training(self) -> None:
        """`ConfigError` if every sequence is held out: nothing could be learned then."""
        if self._held_out.all():
            raise ConfigError(
                f"--held-out {self._share} keeps every prompt of the data apart; lower it."
            )

    def sequence(self, index: int) -> IntArray:
        """Ids of one sequence, prompt and answer."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]].astype(np.int64)

    def gather(self, indices: IntArray, length: int) -> TokenBatch:
        """The sequences as one batch of `length` columns; longer ones are cut at their end."""
        lens = np.minimum(self.lens[indices], length)
        columns = np.arange(length)
        inside = columns < lens[:, None]
        ids = self.tokens[np.where(inside, self.offsets[indices][:, None] + columns, 0)]
        return TokenBatch(
            tokens=torch.from_numpy(np.where(inside, ids, 0).astype(np.int64)),
            lens=torch.from_numpy(lens),
            prompt_lens=torch.from_numpy(np.minimum(self.prompt_lens[indices], lens)),
            kinds=torch.from_numpy(self.kinds[indices]),
        )

    def batches(
        self,
        indices: IntArray,
        *,
        tokens: int,
        max_len: int,
        seed: int,
        multiple: int = 64,
    ) -> Iterator[TokenBatch]:
        """One pass over `indices` in random batches of sequences that are about equally long.

        tokens: most of B x L in a batch. max_len: longer sequences are cut at their end. multiple:
        L is rounded up to one of it. The order depends on the arguments alone.
        """
        if max_len > tokens or tokens < 1:
            raise ConfigError(f"A batch of {tokens} tokens cannot hold one of {max_len}.")
        rng = np.random.default_rng(seed)
        order = rng.permutation(indices)
        padded = -(-np.minimum(self.lens[order], max_len) // multiple) * multiple
        padded = np.minimum(padded, max_len)
        window = max(
            1, round(_WINDOW * tokens / max(1.0, float(padded.mean() if len(order) else 1)))
        )
        for start in range(0, len(order), window):
            part, widths = order[start : start + window], padded[start : start + window]
            by_length = np.argsort(widths, kind="stable")
            groups = list(_groups(part[by_length], widths[by_length], tokens))
            for chosen in rng.permutation(len(groups)):
                yield self.gather(*groups[chosen])

    def _join(self, shards: list[Arrays]) -> None:
        def joined(key: str) -> npt.NDArray[Any]:
            return np.concatenate([shard[key] for shard in shards])

        self.tokens = joined("tokens")
        lens = np.concatenate([np.diff(shard["offsets"]) for shard in shards])
        self.offsets: IntArray = np.concatenate(([0], np.cumsum(lens))).astype(np.int64)
        self.prompt_lens: IntArray = joined("prompt_lens").astype(np.int64)
        self.kinds: IntArray = joined("kinds").astype(np.int64)
        self.temperatures: npt.NDArray[np.float32] = joined("temperatures")
        self.jobs: IntArray = joined("jobs")
        self._hashes: npt.NDArray[np.uint64] = joined("prompt_hashes")


def _groups(indices: IntArray, widths: IntArray, tokens: int) -> Iterator[tuple[IntArray, int]]:
    """Runs of `indices` (widths ascending) that fit into `tokens` at their last width."""
    start = 0
    for end in range(1, len(indices) + 1):
        full = end == len(indices) or (end - start + 1) * widths[end] > tokens
        if full:
            yield indices[start:end], int(widths[end - 1])
            start = end


def _packed(sequences: list[TokenSequence], id_type: Any) -> Arrays:
    lens = [len(sequence.tokens) for sequence in sequences]
    hashes = [prompt_hash(item.tokens[: item.prompt_len]) for item in sequences]
    return {
        "tokens": np.concatenate([item.tokens for item in sequences]).astype(id_type),
        "offsets": np.concatenate(([0], np.cumsum(lens))).astype(np.int64),
        "prompt_lens": np.array([item.prompt_len for item in sequences], dtype=np.int32),
        "kinds": np.array([item.kind for item in sequences], dtype=np.uint8),
        "temperatures": np.array([item.temperature for item in sequences], dtype=np.float32),
        "jobs": np.array([item.job for item in sequences], dtype=np.int64),
        "prompt_hashes": np.array(hashes, dtype=np.uint64),
    }
