"""Flags that SGLang has and this server does not: each gets a sentence, not a parser's error.

What cannot change an answer (`--log-requests`, `--tp-size 1`) is accepted and logged; what would is
refused with what to do instead, all such flags of a line at once. A launch line for SGLang thus
works here, or says which parts cannot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_spec.errors import ConfigError
from sgl_spec.options import (
    Declared,
    Words,
    flag_of,
    gather,
    lacks_value,
    nearest,
    no_value,
    stray,
    suggestion,
)
from sgl_spec.sglang_families import ABSENT, NO_SPEED


@dataclass(frozen=True)
class ForeignFlag:
    """A known flag without an option here.

    advice: what to do instead. harmless: values that are accepted because they ask for nothing.
    ignored: any value is accepted, and advice says why it changes nothing.
    switch: the flag takes no value. several: it may take more than one.
    """

    advice: str
    harmless: tuple[str, ...] = ()
    ignored: bool = False
    switch: bool = False
    several: bool = False

    @property
    def accepted(self) -> bool:
        """Whether there is a way to give it that works."""
        return self.ignored or bool(self.harmless)


def _ignored(why: str, *, several: bool = False) -> ForeignFlag:
    return ForeignFlag(why, ignored=True, several=several)


def _ignored_switch(why: str) -> ForeignFlag:
    return ForeignFlag(why, ignored=True, switch=True)


_ONE_PROCESS = "the model runs in one engine process; leave it out or set it to 1"
_NO_EXPERTS = "models with experts are not served"
_ONE_HOST = "the server runs on one host"
_WEIGHTS = "load the checkpoint in its own dtype, or choose one with --dtype"
_NO_LORA = "merge the adapter into the checkpoint first"
_PLAIN_TEXT = "the reply's text is returned whole; parse it in the client"
_JSON_BLANKS = "between tokens of JSON there is nothing, a space, or a line break and indentation"
_PROMPT_GRAPHS = "prompt chunks have CUDA graphs whose sizes are the server's own and cannot be set"
_GRAPHS_OFF = "CUDA graphs are turned off with --disable-cuda-graph"
_NOT_COMPILED = "the forward is not compiled"
_OTHER_DRAFTER = (
    "drafters are NGRAM, EAGLE, EAGLE3, STANDALONE and those of --speculative-drafter-module"
)
_WHOLE_TEXT = "a draft model attends to all of the text"
_PRUNED = "every round verifies only the drafts that pay at its load"
_ALL_SUFFIXES = "every suffix up to --speculative-ngram-max-trie-depth is matched"
_NO_CORPUS = "the trie learns from the prompts and outputs that it serves"
_SEEDED = (
    "give each request a seed: with --dtype float32 equal seeds give equal tokens in any batch, in "
    "bfloat16 the batch may decide between nearly equal logits (docs/measured.md, In bf16)"
)
_ONE_ATTENTION = "one backend serves all forwards; choose it with --attention-backend"
_NOT_LOGGED = "requests are not logged; /metrics counts them"
_ONE_CACHE = "the prefix cache is in the KV pool, with no second level"
_NO_TIMER = "a dead engine ends the server at once; there is no timer to set"
_NO_COLLECTIVES = "one process has nobody to exchange tensors with"
_NOT_BATCHED = "texts are tokenised one by one"

OWN_WORDS: dict[str, ForeignFlag] = {
    "--tp-size": ForeignFlag(_ONE_PROCESS, ("1",)),
    "--dp-size": ForeignFlag(_ONE_PROCESS, ("1",)),
    "--pp-size": ForeignFlag(_ONE_PROCESS, ("1",)),
    "--ep-size": ForeignFlag(_ONE_PROCESS, ("1",)),
    "--nnodes": ForeignFlag(_ONE_PROCESS, ("1",)),
    "--node-rank": ForeignFlag(f"{_ONE_HOST}; leave it out or set it to 0", ("0",)),
    "--dist-init-addr": _ignored(_ONE_HOST),
    "--dist-timeout": _ignored(_ONE_HOST),
    "--base-gpu-id": ForeignFlag("choose the GPU with CUDA_VISIBLE_DEVICES", ("0",)),
    "--attn-cp-size": ForeignFlag(_ONE_PROCESS, ("1",)),
    "--moe-dp-size": ForeignFlag(_ONE_PROCESS, ("1",)),
    "--dcp-size": ForeignFlag(_ONE_PROCESS, ("1",)),
    "--moe-a2a-backend": ForeignFlag(_NO_EXPERTS, ("none",)),
    "--moe-runner-backend": ForeignFlag(_NO_EXPERTS, ("auto",)),
    "--enable-dp-attention": ForeignFlag(_ONE_PROCESS, switch=True),
    "--disable-custom-all-reduce": _ignored_switch(_NO_COLLECTIVES),
    "--enable-nccl-nvls": _ignored_switch(_NO_COLLECTIVES),
    "--enable-symm-mem": _ignored_switch(_NO_COLLECTIVES),
    "--enable-p2p-check": _ignored_switch(_NO_COLLECTIVES),
    "--quantization": ForeignFlag(_WEIGHTS, ("none",)),
    "--torchao-config": ForeignFlag(_WEIGHTS, ("",)),
    "--kv-cache-dtype": ForeignFlag("the KV cache has the model's dtype; use auto", ("auto",)),
    "--trust-remote-code": _ignored_switch(
        "code from a checkpoint is never run; Llama, Mistral, Qwen2 and Qwen3 need none"
    ),
    "--model-impl": ForeignFlag("there is one implementation of a model", ("auto",)),
    "--model-loader-extra-config": ForeignFlag("a model is read in one way", ("{}",)),
    "--weight-version": ForeignFlag("use --served-model-name or --revision", ("default",)),
    "--weight-loader-disable-mmap": _ignored_switch("how weights are read is fixed"),
    "--enable-lora": ForeignFlag(_NO_LORA, switch=True),
    "--lora-paths": ForeignFlag(_NO_LORA, several=True),
    "--max-loras-per-batch": ForeignFlag(_NO_LORA),
    "--lora-backend": ForeignFlag(_NO_LORA),
    "--is-embedding": ForeignFlag("only text generation is served", switch=True),
    "--enable-multimodal": ForeignFlag("only text is served", switch=True),
    "--skip-tokenizer-init": ForeignFlag("send input_ids to /generate instead", switch=True),
    "--tokenizer-mode": ForeignFlag("tokenizer.json is always used", ("auto",)),
    "--tokenizer-backend": ForeignFlag("tokenizer.json is always used", ("huggingface",)),
    "--tokenizer-worker-num": _ignored("tokenizing is done in the API process"),
    "--enable-tokenizer-batch-encode": _ignored_switch(_NOT_BATCHED),
    "--disable-tokenizer-batch-decode": _ignored_switch(_NOT_BATCHED),
    "--fastapi-root-path": ForeignFlag("let the proxy cut the prefix off", ("",)),
    "--tool-call-parser": ForeignFlag(_PLAIN_TEXT),
    "--reasoning-parser": ForeignFlag(_PLAIN_TEXT),
    "--completion-template": ForeignFlag("send the whole prompt as text"),
    "--constrained-json-whitespace-pattern": ForeignFlag(_JSON_BLANKS),
    "--prefill-attention-backend": ForeignFlag(_ONE_ATTENTION, ("auto",)),
    "--decode-attention-backend": ForeignFlag(_ONE_ATTENTION, ("auto",)),
    "--sampling-backend": ForeignFlag(
        "there is one sampling path; leave it out", ("auto", "pytorch")
    ),
    "--cpu-offload-gb": ForeignFlag("the weights must fit the device", ("0", "0.0")),
    "--schedule-conservativeness": _ignored("slots are reserved exactly, there is no estimate"),
    "--enable-mixed-chunk": _ignored_switch("prefill chunks and rounds alternate"),
    "--num-continuous-decode-steps": _ignored("the scheduler looks for requests every round"),
    "--scheduler-recv-interval": _ignored("the scheduler looks for requests every round"),
    "--enable-priority-scheduling": ForeignFlag("use --schedule-policy fcfs or lpm", switch=True),
    "--enable-deterministic-inference": ForeignFlag(_SEEDED, switch=True),
    "--enable-torch-compile": _ignored_switch(_NOT_COMPILED),
    "--torch-compile-max-bs": _ignored(_NOT_COMPILED),
    "--disable-cuda-graph-padding": _ignored_switch(
        "batches are filled up to the sizes of --cuda-graph-bs"
    ),
    "--cuda-graph-max-bs-prefill": _ignored(_PROMPT_GRAPHS),
    "--cuda-graph-bs-prefill": _ignored(_PROMPT_GRAPHS, several=True),
    "--cuda-graph-backend-decode": _ignored(_GRAPHS_OFF),
    "--cuda-graph-backend-prefill": _ignored(_PROMPT_GRAPHS),
    "--watchdog-timeout": _ignored(_NO_TIMER),
    "--soft-watchdog-timeout": _ignored(_NO_TIMER),
    "--sleep-on-idle": _ignored_switch("an idle engine waits without spinning"),
    "--log-level-http": _ignored("--log-level sets it too"),
    "--log-requests": _ignored_switch(_NOT_LOGGED),
    "--log-requests-level": _ignored(_NOT_LOGGED),
    "--log-requests-format": _ignored(_NOT_LOGGED),
    "--crash-dump-folder": _ignored(_NOT_LOGGED),
    "--show-time-cost": _ignored_switch("/metrics has the latencies"),
    "--enable-request-time-stats-logging": _ignored_switch("/metrics has the latencies"),
    "--admin-api-key": ForeignFlag("--api-key protects every route"),
    "--preferred-sampling-params": ForeignFlag("see --sampling-defaults"),
    "--json-model-override-args": ForeignFlag("edit the checkpoint's config.json", ("{}",)),
    "--file-storage-path": _ignored("no files are stored"),
    "--download-dir": ForeignFlag("choose the folder of hub downloads with HF_HOME"),
    "--disaggregation-mode": ForeignFlag("prefill and decode share one engine", ("null",)),
    "--radix-eviction-policy": _ignored("the prefixes used longest ago go first"),
    "--disable-chunked-prefix-cache": _ignored_switch("prompt chunks read the KV pool in place"),
    "--enable-hierarchical-cache": _ignored_switch(_ONE_CACHE),
    "--hicache-ratio": _ignored(_ONE_CACHE),
    "--hicache-size": _ignored(_ONE_CACHE),
    "--hicache-write-policy": _ignored(_ONE_CACHE),
    "--hicache-io-backend": _ignored(_ONE_CACHE),
    "--hicache-mem-layout": _ignored(_ONE_CACHE),
    "--enable-return-hidden-states": ForeignFlag("hidden states are not returned", switch=True),
    "--speculative-draft-attention-backend": ForeignFlag(_ONE_ATTENTION, ("auto",)),
    "--speculative-attention-mode": _ignored("one kernel serves prompts and trees"),
    "--speculative-draft-kv-cache-dtype": ForeignFlag(
        "the draft's KV cache has the model's dtype; use auto", ("auto",)
    ),
    "--speculative-draft-window-size": _ignored(_WHOLE_TEXT),
    "--speculative-draft-sink-size": _ignored(_WHOLE_TEXT),
    "--speculative-draft-model-quantization": ForeignFlag(_WEIGHTS, ("unquant",)),
    "--speculative-skip-dp-mlp-sync": _ignored_switch(_NO_COLLECTIVES),
    "--speculative-adaptive": _ignored_switch(_PRUNED),
    "--speculative-adaptive-config": _ignored(_PRUNED),
    "--speculative-ngram-external-corpus-path": ForeignFlag(_NO_CORPUS),
    "--speculative-ngram-external-sam-budget": ForeignFlag(_NO_CORPUS, ("0",)),
    "--speculative-ngram-external-corpus-max-tokens": _ignored(_NO_CORPUS),
    "--speculative-ngram-min-match-window-size": _ignored(_ALL_SUFFIXES),
    "--speculative-ngram-max-match-window-size": _ignored(_ALL_SUFFIXES),
    "--speculative-ngram-branch-length": _ignored(
        "depth and breadth are --speculative-ngram-max-trie-depth and -max-bfs-breadth"
    ),
    "--speculative-dflash-block-size": ForeignFlag(_OTHER_DRAFTER),
    "--uno-lora-path": ForeignFlag(_OTHER_DRAFTER),
    "--enable-multi-layer-eagle": ForeignFlag(_OTHER_DRAFTER, switch=True),
}

FOREIGN_FLAGS = OWN_WORDS | {
    flag: ForeignFlag(family.advice, ignored=family.ignored, switch=switch, several=several)
    for family in (*NO_SPEED, *ABSENT)
    for flag, switch, several in family.flags()
}

# Both spellings that SGLang has used, where they differ.
FOREIGN_ALIASES: dict[str, str] = {
    "--tensor-parallel-size": "--tp-size",
    "--tp": "--tp-size",
    "--data-parallel-size": "--dp-size",
    "--dp": "--dp-size",
    "--pipeline-parallel-size": "--pp-size",
    "--pp": "--pp-size",
    "--expert-parallel-size": "--ep-size",
    "--ep": "--ep-size",
    "--nccl-init-addr": "--dist-init-addr",
    "--attention-context-parallel-size": "--attn-cp-size",
    "--moe-data-parallel-size": "--moe-dp-size",
}


class UnknownOption(ConfigError):
    """A flag or keyword that nobody knows. meant: the field of the option that it is near to, which
    is thus not as the user wants it."""

    def __init__(self, message: str, *, param: str | None = None, meant: str | None = None) -> None:
        super().__init__(message, param=param)
        self.meant = meant


# What users of vLLM write, and what means the same here.
VLLM_FLAGS: dict[str, str] = {
    "--max-model-len": "--context-length",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--max-num-seqs": "--max-running-requests",
    "--num-speculative-tokens": "--speculative-num-draft-tokens, which counts one more",
    "--speculative-config": "the --speculative-... flags",
}


def lookup_foreign(flag: str) -> ForeignFlag | None:
    """The entry for a flag in either spelling."""
    return FOREIGN_FLAGS.get(FOREIGN_ALIASES.get(flag, flag))


def read_foreign(
    groups: Sequence[Words], own: Mapping[str, Declared], refused: list[ConfigError]
) -> list[str]:
    """Sentences for the log about the flags of a command line that are no option of ours; those
    that are not supported or that nobody knows are `refused`, one error each."""
    notes: list[str] = []
    for flag, words in groups:
        entry = lookup_foreign(flag)
        taken = 1 if entry and not entry.switch and not entry.several else len(words)
        with gather(refused):
            notes.append(_judge(flag, words[:taken], own))
        refused += map(stray, words[taken:])
    return notes


def split_foreign(
    given: Mapping[str, Any], own: Mapping[str, Declared]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keywords without those of SGLang's flags, and these."""
    foreign = {
        name: value
        for name, value in given.items()
        if name not in own and lookup_foreign(flag_of(name))
    }
    return {name: value for name, value in given.items() if name not in foreign}, foreign


def read_keywords(
    foreign: Mapping[str, Any], own: Mapping[str, Declared], refused: list[ConfigError]
) -> list[str]:
    """Sentences for the log about SGLang's flags as keywords; `refused` as in `read_foreign`.

    None, False and an empty list ask for nothing, as an absent flag does.
    """
    notes: list[str] = []
    for name, value in foreign.items():
        empty = isinstance(value, (list, tuple, dict)) and not value
        if value is not None and value is not False and not empty:
            with gather(refused):
                notes.append(_judge(flag_of(name), _words(value), own))
    return notes


def _words(value: object) -> tuple[str, ...]:
    if value is True:
        return ()
    return tuple(map(str, value)) if isinstance(value, (list, tuple)) else (str(value),)


def _judge(flag: str, values: tuple[str, ...], own: Mapping[str, Declared]) -> str:
    """A sentence for the log when the flag changes nothing; raises `ConfigError` otherwise."""
    entry = lookup_foreign(flag)
    if entry is None:
        raise unknown_flag(flag, own)
    if not entry.switch and not values:
        raise lacks_value(flag)
    if entry.switch and values:
        raise no_value(flag, values)
    seen = " ".join((flag, *values))
    if len(values) > 1 and not entry.several:
        raise ConfigError(f"{flag} takes one value, got {' '.join(values)!r}.")
    if entry.ignored:
        return f"{seen} changes nothing here: {entry.advice}."
    if values and _plain(values[0]) in entry.harmless:
        return f"{seen} changes nothing here."
    raise ConfigError(f"{seen} is not supported by this version: {entry.advice}.")


def _plain(value: str) -> str:
    """A value as `harmless` has it: in lower case, JSON without blanks."""
    return "".join(value.split()) if value.lstrip().startswith("{") else value.lower()


def unknown_flag(flag: str, own: Mapping[str, Declared]) -> ConfigError:
    """The error for a flag that nobody knows, with the nearest one that would be accepted."""
    if not re.match("--?[A-Za-z]", flag) or " " in flag:
        return stray(flag)
    flags = {name: opt.name for opt in own.values() for name in opt.flags}
    known = [*FOREIGN_FLAGS, *FOREIGN_ALIASES]
    accepted = [name for name in known if FOREIGN_FLAGS[FOREIGN_ALIASES.get(name, name)].accepted]
    meant = VLLM_FLAGS.get(flag) or nearest(flag, flags) or nearest(flag, accepted)
    message = f"{flag} is not an option{suggestion(meant)}; see --help."
    return UnknownOption(message, meant=None if meant is None else flags.get(_first(meant)))


def _first(words: str) -> str:
    """The option alone: what a flag of vLLM means here comes with a remark."""
    return words.split()[0].rstrip(",")


def unknown_keyword(name: str, own: Mapping[str, Declared]) -> ConfigError:
    """The error for a keyword of `ServerArgs` that is no option."""
    foreign = lookup_foreign(flag_of(name))
    if foreign is not None:
        return ConfigError(
            f"{name} is not supported by this version: {foreign.advice}.", param=name
        )
    aliases = {alias: opt.name for opt in own.values() for alias in opt.about.aliases}
    of_vllm = VLLM_FLAGS.get(flag_of(name), "").replace("--", "").replace("-", "_")
    meant = aliases.get(flag_of(name)) or of_vllm or nearest(name, own)
    message = f"{name} is not an option{suggestion(meant)}."
    return UnknownOption(message, param=name, meant=None if meant is None else _first(meant))


def foreign_tables() -> str:
    """Two Markdown tables: what is accepted and changes nothing, and what is refused. Flags with
    the same reason share a row."""
    accepted: dict[tuple[str, str], list[str]] = {}
    refused: dict[tuple[str, str], list[str]] = {}
    for flag, entry in FOREIGN_FLAGS.items():
        names = [f"`{flag}`", *(f"`{a}`" for a, name in FOREIGN_ALIASES.items() if name == flag)]
        values = ", ".join(f"`{value}`" if value else "an empty value" for value in entry.harmless)
        if entry.ignored:
            accepted.setdefault(("any value, or none", entry.advice), []).extend(names)
            continue
        if values:
            accepted.setdefault((values, _ASKS_NOTHING), []).extend(names)
        refused.setdefault(("other values" if values else "always", entry.advice), []).extend(names)
    return _TABLES.format(
        accepted=_table(("flags", "accepted with", "because"), accepted),
        refused=_table(("flags", "refused", "because"), refused),
    )


def _table(head: Sequence[str], rows: Mapping[tuple[str, str], list[str]]) -> str:
    lines = [" | ".join(head), "|".join("---" for _ in head)]
    lines += [f"{', '.join(flags)} | {when} | {why}" for (when, why), flags in rows.items()]
    return "\n".join(f"| {line} |" if line[0] != "-" else f"|{line}|" for line in lines)


_ASKS_NOTHING = "it asks for what is done anyway"
_TABLES = """
## SGLang's other flags

These are accepted and change no answer; the log says so. As keywords of `sgl_spec.LLM` too.

{accepted}

These are refused, with the same words.

{refused}
"""
