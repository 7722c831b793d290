"""Flags that SGLang has and this server does not: each gets a sentence, not a parser's error.

A value that would change nothing here (`--tp-size 1`) is accepted and logged; any other is refused
with what to do instead. A launch line for SGLang thus works here, or says which part cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sgl_spec.errors import ConfigError
from sgl_spec.options import Declared, flag_of, near


@dataclass(frozen=True)
class ForeignFlag:
    """A known flag without an option here.

    advice: what to do instead. harmless: values that are accepted because they ask for nothing.
    ignored: any value is accepted, and advice says why it changes nothing.
    switch: the flag takes no value.
    """

    advice: str
    harmless: tuple[str, ...] = ()
    ignored: bool = False
    switch: bool = False


_ONE_PROCESS = "the model runs in one engine process; leave it out or set it to 1"
_WEIGHTS = "load the checkpoint in its own dtype, or choose one with --dtype"
_NO_LORA = "merge the adapter into the checkpoint first"
_PLAIN_TEXT = "the reply's text is returned whole; parse it in the client"
_JSON_BLANKS = "between tokens of JSON there is nothing, a space, or a line break and indentation"
_NO_GRAPHS = "there are no CUDA graphs to size or to turn off"
_OTHER_DRAFTER = (
    "drafters are NGRAM, EAGLE, EAGLE3, STANDALONE and those of --speculative-drafter-module"
)
_WHOLE_TEXT = "a draft model attends to all of the text; leave it out"
_PRUNED = "every round verifies only the drafts that pay at its load"
_ALL_SUFFIXES = "every suffix up to --speculative-ngram-max-trie-depth is matched"
_NO_CORPUS = "the trie learns from the prompts and outputs that it serves"
_SEEDED = "give each request a seed: equal seeds give equal tokens in any batch"
_ONE_ATTENTION = "there is one attention path per device; leave it out"

FOREIGN_FLAGS: dict[str, ForeignFlag] = {
    "--tp-size": ForeignFlag(_ONE_PROCESS, ("1",)),
    "--dp-size": ForeignFlag(_ONE_PROCESS, ("1",)),
    "--pp-size": ForeignFlag(_ONE_PROCESS, ("1",)),
    "--ep-size": ForeignFlag(_ONE_PROCESS, ("1",)),
    "--nnodes": ForeignFlag(_ONE_PROCESS, ("1",)),
    "--node-rank": ForeignFlag(_ONE_PROCESS, ("0",)),
    "--dist-init-addr": ForeignFlag("the server runs on one host; leave it out"),
    "--base-gpu-id": ForeignFlag("choose the GPU with CUDA_VISIBLE_DEVICES", ("0",)),
    "--enable-dp-attention": ForeignFlag(_ONE_PROCESS, switch=True),
    "--quantization": ForeignFlag(_WEIGHTS, ("none",)),
    "--torchao-config": ForeignFlag(_WEIGHTS, ("",)),
    "--kv-cache-dtype": ForeignFlag("the KV cache has the model's dtype; use auto", ("auto",)),
    "--trust-remote-code": ForeignFlag(
        "code from a checkpoint is never run; Llama, Mistral, Qwen2 and Qwen3 need none",
        switch=True,
    ),
    "--enable-lora": ForeignFlag(_NO_LORA, switch=True),
    "--lora-paths": ForeignFlag(_NO_LORA),
    "--max-loras-per-batch": ForeignFlag(_NO_LORA),
    "--lora-backend": ForeignFlag(_NO_LORA),
    "--is-embedding": ForeignFlag("only text generation is served", switch=True),
    "--enable-multimodal": ForeignFlag("only text is served", switch=True),
    "--skip-tokenizer-init": ForeignFlag("send input_ids to /generate instead", switch=True),
    "--tokenizer-mode": ForeignFlag("tokenizer.json is always used", ("auto",)),
    "--tool-call-parser": ForeignFlag(_PLAIN_TEXT),
    "--reasoning-parser": ForeignFlag(_PLAIN_TEXT),
    "--completion-template": ForeignFlag("send the whole prompt as text"),
    "--constrained-json-whitespace-pattern": ForeignFlag(_JSON_BLANKS),
    "--attention-backend": ForeignFlag(_ONE_ATTENTION),
    "--prefill-attention-backend": ForeignFlag(_ONE_ATTENTION),
    "--decode-attention-backend": ForeignFlag(_ONE_ATTENTION),
    "--sampling-backend": ForeignFlag("there is one sampling path; leave it out", ("pytorch",)),
    "--mem-fraction-static": ForeignFlag("size the KV pool in tokens with --max-total-tokens"),
    "--cpu-offload-gb": ForeignFlag("the weights must fit the device", ("0",)),
    "--schedule-conservativeness": ForeignFlag(
        "slots are reserved exactly, so there is no estimate to scale; leave it out", ("1", "1.0")
    ),
    "--enable-mixed-chunk": ForeignFlag("prefill chunks and rounds alternate", switch=True),
    "--enable-priority-scheduling": ForeignFlag("use --schedule-policy fcfs or lpm", switch=True),
    "--enable-deterministic-inference": ForeignFlag(_SEEDED, switch=True),
    "--enable-torch-compile": ForeignFlag("the forward is not compiled; leave it out", switch=True),
    "--disable-overlap-schedule": ForeignFlag(
        "every round is run to its end before the next", ignored=True, switch=True
    ),
    "--disable-cuda-graph": ForeignFlag(_NO_GRAPHS, ignored=True, switch=True),
    "--disable-cuda-graph-padding": ForeignFlag(_NO_GRAPHS, ignored=True, switch=True),
    "--cuda-graph-max-bs": ForeignFlag(_NO_GRAPHS, ignored=True),
    "--cuda-graph-max-bs-prefill": ForeignFlag(_NO_GRAPHS, ignored=True),
    "--cuda-graph-bs": ForeignFlag(_NO_GRAPHS, ignored=True),
    "--cuda-graph-bs-prefill": ForeignFlag(_NO_GRAPHS, ignored=True),
    "--cuda-graph-backend-decode": ForeignFlag(_NO_GRAPHS, ignored=True),
    "--cuda-graph-backend-prefill": ForeignFlag(_NO_GRAPHS, ignored=True),
    "--watchdog-timeout": ForeignFlag(
        "a dead engine ends the server at once; there is no timer to set", ignored=True
    ),
    "--log-level-http": ForeignFlag("--log-level sets it too"),
    "--log-requests": ForeignFlag("requests are not logged; use /metrics", switch=True),
    "--admin-api-key": ForeignFlag("--api-key protects every route"),
    "--preferred-sampling-params": ForeignFlag("see --sampling-defaults"),
    "--json-model-override-args": ForeignFlag("edit the checkpoint's config.json", ("{}",)),
    "--file-storage-path": ForeignFlag("no files are stored; leave it out"),
    "--disaggregation-mode": ForeignFlag("prefill and decode share one engine", ("null",)),
    "--enable-hierarchical-cache": ForeignFlag("the prefix cache is on the device", switch=True),
    "--enable-return-hidden-states": ForeignFlag("hidden states are not returned", switch=True),
    "--speculative-draft-attention-backend": ForeignFlag(_ONE_ATTENTION),
    "--speculative-draft-kv-cache-dtype": ForeignFlag(
        "the draft's KV cache has the model's dtype; use auto", ("auto",)
    ),
    "--speculative-draft-window-size": ForeignFlag(_WHOLE_TEXT),
    "--speculative-draft-sink-size": ForeignFlag(_WHOLE_TEXT),
    "--speculative-draft-model-quantization": ForeignFlag(_WEIGHTS, ("unquant",)),
    "--speculative-attention-mode": ForeignFlag(_ONE_ATTENTION, ("prefill",)),
    "--speculative-skip-dp-mlp-sync": ForeignFlag(_ONE_PROCESS, switch=True),
    "--speculative-adaptive": ForeignFlag(_PRUNED, switch=True),
    "--speculative-adaptive-config": ForeignFlag(_PRUNED),
    "--speculative-ngram-external-corpus-path": ForeignFlag(_NO_CORPUS),
    "--speculative-ngram-external-sam-budget": ForeignFlag(_NO_CORPUS, ("0",)),
    "--speculative-ngram-external-corpus-max-tokens": ForeignFlag(_NO_CORPUS, ignored=True),
    "--speculative-ngram-min-match-window-size": ForeignFlag(_ALL_SUFFIXES),
    "--speculative-ngram-max-match-window-size": ForeignFlag(_ALL_SUFFIXES),
    "--speculative-ngram-branch-length": ForeignFlag(
        "depth and breadth are --speculative-ngram-max-trie-depth and -max-bfs-breadth"
    ),
    "--speculative-dflash-block-size": ForeignFlag(_OTHER_DRAFTER),
    "--uno-lora-path": ForeignFlag(_OTHER_DRAFTER),
    "--enable-multi-layer-eagle": ForeignFlag(_OTHER_DRAFTER, switch=True),
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
    "--cuda-graph-max-bs-decode": "--cuda-graph-max-bs",
    "--cuda-graph-bs-decode": "--cuda-graph-bs",
    "--nccl-init-addr": "--dist-init-addr",
}


def lookup_foreign(flag: str) -> ForeignFlag | None:
    """The entry for a flag in either spelling."""
    return FOREIGN_FLAGS.get(FOREIGN_ALIASES.get(flag, flag))


def judge_foreign(flag: str, entry: ForeignFlag, value: str | None) -> str:
    """A sentence for the log when the value changes nothing; raises `ConfigError` otherwise."""
    if not entry.switch and value is None:
        raise ConfigError(f"{flag} needs a value and none was given.")
    if entry.switch and value is not None:
        raise ConfigError(f"{flag} is a switch and takes no value, got {value!r}.")
    seen = flag if value is None else f"{flag} {value}"
    if entry.ignored:
        return f"{seen} changes nothing here: {entry.advice}."
    if value is not None and value.lower() in entry.harmless:
        return f"{seen} changes nothing here."
    raise ConfigError(f"{seen} is not supported by this version: {entry.advice}.")


def unknown_flag(flag: str, own: Mapping[str, Declared]) -> ConfigError:
    """The error for a flag that nobody knows, with the nearest one of ours or of SGLang's."""
    if not flag.startswith("-"):
        return ConfigError(f"{flag!r} belongs to no flag; see --help.")
    flags = [name for opt in own.values() for name in opt.flags]
    hint = near(flag, flags) or near(flag, [*FOREIGN_FLAGS, *FOREIGN_ALIASES])
    return ConfigError(f"{flag} is not an option{hint}; see --help.")


def unknown_keyword(name: str, own: Mapping[str, Declared]) -> ConfigError:
    """The error for a keyword of `ServerArgs` that is no option."""
    foreign = lookup_foreign(flag_of(name))
    if foreign is not None:
        return ConfigError(
            f"{name} is not supported by this version: {foreign.advice}.", param=name
        )
    aliases = {alias: opt.name for opt in own.values() for alias in opt.about.aliases}
    known = aliases.get(flag_of(name))
    hint = f" (did you mean {known}?)" if known else near(name, own)
    return ConfigError(f"{name} is not an option{hint}.", param=name)
