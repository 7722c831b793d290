"""Flags that SGLang has and this server does not: each gets a sentence, not a parser's error.

What cannot change an answer (`--gc-warning-threshold-secs`) is accepted and logged; what would is
refused with what to do instead. A launch line for SGLang thus works here, or says which parts
cannot.
"""

from __future__ import annotations

import re
from argparse import SUPPRESS
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sgl_spec.errors import ConfigError
from sgl_spec.options import FlagParser, Option, flag_of, nearest, suggestion, takes

# Why, and the flags without their dashes. NAME! is a switch, NAME+ takes several values, and
# NAME=A|B is accepted with the values A and B, because they ask for nothing.

# Any value is accepted: what is asked for has an effect on speed or logs alone.
IGNORED = {
    "the server runs on one host": "dist-init-addr dist-timeout",
    "one process has nobody to exchange tensors with": """
        disable-custom-all-reduce! enable-nccl-nvls! enable-symm-mem! enable-p2p-check!
        speculative-skip-dp-mlp-sync! enable-mscclpp! enable-torch-symm-mem! pre-warm-nccl!
        enable-dp-lm-head! enable-flashinfer-allreduce-fusion!
        enforce-disable-flashinfer-allreduce-fusion! enable-aiter-allreduce-fusion!
        enable-attn-tp-input-scattered! enable-dynamic-chunking! prefill-round-robin-balance!
        enable-two-batch-overlap! enable-single-batch-overlap! nccl-port pp-max-micro-batch-size
        pp-async-batch-depth load-balance-method load-watch-interval gpu-id-step
        flashinfer-allreduce-fusion-backend tbo-token-distribution-threshold
    """,
    "code from a checkpoint is never run; Llama, Mistral, Qwen2 and Qwen3 need none": """
        trust-remote-code!
    """,
    "how weights are read is fixed": """
        weight-loader-disable-mmap! weight-loader-prefetch-checkpoints!
        weight-loader-drop-cache-after-load! weight-loader-prefetch-num-threads
    """,
    "texts are tokenised one by one, in the API process": """
        tokenizer-worker-num
        enable-tokenizer-batch-encode! disable-tokenizer-batch-decode!
        enable-dynamic-batch-tokenizer! dynamic-batch-tokenizer-batch-size
        dynamic-batch-tokenizer-batch-timeout detokenizer-worker-num batch-notify-size
    """,
    "one backend serves all forwards, that of --attention-backend": """
        prefill-attention-backend decode-attention-backend speculative-draft-attention-backend
        speculative-attention-mode
    """,
    "there is one sampling path": "sampling-backend",
    "the scheduler reserves slots exactly and alternates prompt chunks and rounds": """
        schedule-conservativeness enable-mixed-chunk! num-continuous-decode-steps
        scheduler-recv-interval
        enable-prefill-delayer! prefill-max-requests prefill-delayer-max-delay-passes
        prefill-decode-interval prefill-delayer-token-usage-low-watermark
        prefill-delayer-queue-min-ratio prefill-delayer-max-delay-ms num-reserved-decode-tokens
        min-free-slots-delay retraction-policy prefill-delayer-forward-passes-buckets+
        prefill-delayer-wait-seconds-buckets+
    """,
    "the forward is not compiled": """
        enable-torch-compile! enable-torch-compile-debug-mode! torch-compile-max-bs
    """,
    "batches are filled up to the sizes of --cuda-graph-bs": "disable-cuda-graph-padding!",
    "prompt chunks have CUDA graphs whose sizes are the server's own and cannot be set": """
        enforce-piecewise-cuda-graph! cuda-graph-max-bs-prefill cuda-graph-backend-prefill
        piecewise-cuda-graph-compiler piecewise-cuda-graph-max-tokens
        cuda-graph-prefill-max-context cuda-graph-max-seq-len-prefill cuda-graph-tc-compiler
        cuda-graph-bs-prefill+ piecewise-cuda-graph-tokens+
    """,
    "CUDA graphs are turned off with --disable-cuda-graph": """
        disable-piecewise-cuda-graph! disable-prefill-cuda-graph! disable-decode-cuda-graph!
        enable-profile-cuda-graph! enable-cudagraph-gc! debug-cuda-graph!
        cuda-graph-backend-decode
    """,
    "kernels choose their own shapes": """
        triton-attention-reduce-in-fp32! flashinfer-mla-disable-ragged!
        disable-flashinfer-autotune! enable-fused-qk-norm-rope! triton-attention-num-kv-splits
        triton-attention-split-tile-size fp8-gemm-backend fp8-gemm-runner-backend fp4-gemm-backend
        fp4-gemm-runner-backend bf16-gemm-backend flashinfer-autotune-skip-ops+
    """,
    "a hung engine shows its stacks and ends, see --watchdog-timeout": "soft-watchdog-timeout",
    "an idle engine waits without spinning": "sleep-on-idle!",
    "--log-level sets it too": "log-level-http",
    "a request is logged in lines of text": "log-requests-format",
    "/metrics has the latencies": "show-time-cost! enable-request-time-stats-logging!",
    "logs and metrics have one form": """
        enable-mfu-metrics! enable-metrics-for-all-schedulers! collect-tokens-histogram!
        enable-layerwise-nvtx-marker! gc-warning-threshold-secs
        tokenizer-metrics-custom-labels-header log-requests-target+
        uvicorn-access-log-exclude-prefixes+ bucket-time-to-first-token+
        bucket-inter-token-latency+ bucket-e2e-request-latency+ prompt-tokens-buckets+
        generation-tokens-buckets+ tokenizer-metrics-allowed-custom-labels+
    """,
    "no files are stored": "file-storage-path crash-dump-folder disable-outlines-disk-cache!",
    "the prefixes used longest ago go first": "radix-eviction-policy",
    "prompt chunks read the KV pool in place": "disable-chunked-prefix-cache!",
    "there is one KV pool, for all layers alike": """
        disable-hybrid-swa-memory! swa-full-tokens-ratio hybrid-kvcache-ratio
    """,
    "the prefix cache is in the KV pool, with no second level": """
        enable-hierarchical-cache! enable-lmcache! enable-flexkv! hicache-ratio hicache-size
        hicache-write-policy hicache-io-backend hicache-mem-layout hicache-storage-backend
        hicache-storage-prefetch-policy lmcache-config-file hicache-storage-backend-extra-config
        hicache-host-memory-mode flexkv-config-file
    """,
    "a draft model attends to all of the text": """
        speculative-draft-window-size speculative-draft-sink-size
    """,
    "every round verifies only the drafts that pay at its load": """
        speculative-adaptive! speculative-adaptive-config
    """,
    "every suffix up to --speculative-ngram-max-trie-depth is matched": """
        speculative-ngram-min-match-window-size speculative-ngram-max-match-window-size
    """,
    "depth and breadth are --speculative-ngram-max-trie-depth and -max-bfs-breadth": """
        speculative-ngram-branch-length
    """,
    "no corpus is read": "speculative-ngram-external-corpus-max-tokens",
    "where processes run is the system's affair: numactl and taskset": "numa-node+ gc-threshold+",
}

# Refused, but for the values that are written here.
REFUSED = {
    "the model runs in one engine process; leave it out or set it to 1": """
        enable-dp-attention! dp-size=1 pp-size=1 ep-size=1 nnodes=1 attn-cp-size=1
        moe-dp-size=1 dcp-size=1
    """,
    "the server runs on one host; leave it out or set it to 0": "node-rank=0",
    "choose the GPU with CUDA_VISIBLE_DEVICES": "base-gpu-id=0",
    "load the checkpoint in its own dtype, or choose one with --dtype": """
        enable-fp32-lm-head! quantize-and-serve! enable-quant-communications! quantization=none
        torchao-config= speculative-draft-model-quantization=unquant quantization-param-path
        modelopt-quant modelopt-checkpoint-restore-path modelopt-checkpoint-save-path
        modelopt-export-path rl-quant-profile
    """,
    "the KV cache has the model's dtype; use auto": "kv-cache-dtype=auto",
    "the draft's KV cache has the model's dtype; use auto": "speculative-draft-kv-cache-dtype=auto",
    "there is one implementation of a model": "model-impl=auto",
    "a model is read in one way": "model-loader-extra-config={}",
    "use --served-model-name or --revision": "weight-version=default",
    "edit the checkpoint's config.json": "json-model-override-args={}",
    "choose the folder of hub downloads with HF_HOME": "download-dir",
    "weights are read once, from a directory or the hub, and stay where they are": """
        delete-ckpt-after-loading! enable-memory-saver! enable-weights-cpu-backup!
        enable-draft-weights-cpu-backup! checkpoint-engine-wait-weights-before-ready!
        remote-instance-weight-loader-start-seed-via-transfer-engine! model-checksum
        decrypted-config-file decrypted-draft-config-file weight-cache-mode
        remote-instance-weight-loader-seed-instance-ip remote-instance-weight-loader-backend
        remote-instance-weight-loader-seed-instance-service-port startup-weight-load-mode
        remote-instance-weight-loader-send-weights-group-ports custom-weight-loader+
    """,
    "the weights must fit the device": """
        cpu-offload-gb=0|0.0 offload-group-size offload-num-in-group offload-prefetch-step
        offload-mode kt-weight-path kt-method kt-cpuinfer kt-threadpool-count kt-num-gpu-experts
        kt-max-deferred-experts-per-token
    """,
    "merge the adapter into the checkpoint first": """
        enable-lora! enable-lora-overlap-loading! lora-use-virtual-experts! lora-strict-loading!
        experts-shared-outer-loras! max-loras-per-batch lora-backend max-lora-rank
        max-loaded-loras lora-eviction-policy max-lora-chunk-size lora-drain-wait-threshold
        lora-paths+ lora-target-modules+
    """,
    "models with experts, sparse or linear attention are not served": """
        enable-eplb! enable-elastic-expert-backup! enable-deepep-waterfill! enable-waterfill!
        elastic-ep-rejoin! enable-ep-moe! enable-deepep-moe! enable-flashinfer-cutlass-moe!
        enable-flashinfer-cutedsl-moe! enable-flashinfer-trtllm-moe! enable-triton-kernel-moe!
        enable-flashinfer-mxfp4-moe! enable-fused-grouped-gemm-combine!
        disable-flashinfer-cutlass-moe-fp4-allgather! disable-shared-experts-fusion!
        enforce-shared-experts-fusion! enable-return-routed-experts! enable-return-indexer-topk!
        enable-dsa-prefill-context-parallel! enable-nsa-prefill-context-parallel! enable-hisparse!
        enable-expert-distribution-metrics! enable-w4a4-mxfp4-megamoe!
        speculative-enable-w4a4-mxfp4-megamoe! moe-a2a-backend=none moe-runner-backend=auto
        flashinfer-mxfp4-moe-precision deepep-mode deepep-dispatcher-output-dtype deepep-config
        ep-num-redundant-experts ep-dispatch-algorithm init-expert-location eplb-algorithm
        eplb-rebalance-num-iterations eplb-rebalance-layers-per-chunk
        eplb-min-rebalancing-utilization-threshold expert-distribution-recorder-mode
        expert-distribution-recorder-buffer-size moe-dense-tp-size elastic-ep-backend
        mooncake-ib-device speculative-moe-runner-backend speculative-moe-a2a-backend
        speculative-dsa-topk-backend dsa-prefill-backend dsa-decode-backend nsa-prefill-backend
        nsa-decode-backend dsa-prefill-cp-mode nsa-prefill-cp-mode hisparse-config
        hierarchical-sparse-attention-extra-config max-mamba-cache-size mamba-ssm-dtype
        mamba-full-memory-ratio mamba-scheduler-strategy mamba-track-interval mamba-backend
        linear-attn-backend linear-attn-decode-backend linear-attn-prefill-backend dllm-algorithm
        dllm-algorithm-config
    """,
    "only text is generated, from text": """
        is-embedding! enable-multimodal! disable-fast-image-processor! keep-mm-feature-on-device!
        encoder-only! language-only! language-model-only! enable-broadcast-mm-inputs-process!
        mm-enable-dp-encoder! enable-mm-global-cache! enable-prefix-mm-cache!
        enable-precise-embedding-interpolation! mm-attention-backend mm-max-concurrent-calls
        mm-per-request-timeout mm-process-config limit-mm-data-per-request
        encoder-transfer-backend encoder-bootstrap-port image-processor-backend
        asr-max-buffer-seconds asr-max-concurrent-sessions encoder-urls+ encoder-register-urls+
        allowed-media-domains+
    """,
    "send input_ids to /generate instead": "skip-tokenizer-init!",
    "tokenizer.json is always used": "tokenizer-mode=auto tokenizer-backend=huggingface",
    "let the proxy cut the prefix off": "fastapi-root-path=",
    "the reply's text is returned whole; parse it in the client": """
        enable-strict-thinking! strip-thinking-cache!
        tool-server
    """,
    "send the whole prompt as text": "completion-template",
    "between tokens of JSON there is nothing, a space, or a line break and indentation": """
        constrained-json-disable-any-whitespace! constrained-json-whitespace-pattern
        constrained-json-max-whitespace-cnt
    """,
    "use --schedule-policy fcfs or lpm": """
        enable-priority-scheduling! abort-on-priority-when-disabled!
        schedule-low-priority-values-first! disable-priority-preemption!
        priority-scheduling-preemption-threshold default-priority-value
    """,
    "--api-key protects every route": "admin-api-key",
    "see --sampling-defaults": "preferred-sampling-params",
    "prefill and decode share one engine": """
        disaggregation-decode-enable-offload-kvcache! enable-pdmux!
        disaggregation-decode-enable-radix-cache! disaggregation-mode=null
        disaggregation-transfer-backend disaggregation-bootstrap-port disaggregation-ib-device
        disaggregation-decode-polling-interval pdmux-config-path sm-group-num
    """,
    "hidden states are not returned": "enable-return-hidden-states!",
    "the trie learns from the prompts and outputs that it serves": """
        speculative-ngram-external-corpus-path speculative-ngram-external-sam-budget=0
    """,
    "drafters are NGRAM, EAGLE, EAGLE3, STANDALONE and those of --speculative-drafter-module": """
        enable-multi-layer-eagle! speculative-dspark-align-verify-tokens-to-graph-tier!
        speculative-dflash-block-size uno-lora-path speculative-dspark-block-size
        speculative-dspark-sps-table-path speculative-dspark-confidence-sts-path
        speculative-domino-candidate-pool-size spec-trace-dir
    """,
    "HTTP/1.1 is served; put a proxy in front for anything else": """
        ssl-ca-certs
        grpc-mode! smg-grpc-mode! enable-http2! enable-ssl-refresh! grpc-port sidecar
        http2-max-concurrent-streams
    """,
    "nobody's code but a drafter's is run (--speculative-drafter-module)": """
        enable-custom-logit-processor! warmups forward-hooks msprobe-dump-config
        custom-sigquit-handler
    """,
    "figures come from /metrics and /server_info, profiles from /start_profile": """
        enable-trace! export-metrics-to-file! enable-forward-pass-metrics! otlp-traces-endpoint
        otlp-service-name trace-modules export-metrics-to-file-dir kv-events-config
        extra-metric-labels debug-tensor-dump-output-folder debug-tensor-dump-input-file
        debug-tensor-dump-inject debug-tensor-dump-layers+
    """,
    "logits are not searched for NaN": "enable-nan-detection! crash-on-nan!",
    "send stream_options and chat_template_kwargs with each request": """
        stream-response-default-include-usage! default-chat-template-kwargs
    """,
    "/generate takes and gives token ids": "return-input-ids! return-output-ids!",
    "a request is answered and forgotten": """
        enable-response-store! enable-streaming-session! enable-session-radix-cache!
    """,
    "name the template's file with --chat-template": """
        trust-request-chat-template! hf-chat-template-name
    """,
    "write the flags on the command line": "config",
    "each text is scored by itself": "multi-item-scoring-delimiter",
}

# Other spellings that SGLang has used.
ALIASES = {
    "dp_size": ("data_parallel_size", "dp"),
    "pp_size": ("pipeline_parallel_size", "pp"),
    "ep_size": ("expert_parallel_size", "ep"),
    "dist_init_addr": ("nccl_init_addr",),
    "attn_cp_size": ("attention_context_parallel_size",),
    "moe_dp_size": ("moe_data_parallel_size",),
}

# What users of vLLM write, and what means the same here.
VLLM = {
    "max_model_len": "--context-length",
    "gpu_memory_utilization": "--mem-fraction-static",
    "max_num_seqs": "--max-running-requests",
    "num_speculative_tokens": "--speculative-num-draft-tokens, which counts one more",
    "speculative_config": "the --speculative-... flags",
}


@dataclass(frozen=True)
class ForeignFlag:
    """One flag of the tables. accepted: values that ask for nothing; None: any."""

    why: str
    switch: bool
    several: bool
    accepted: tuple[str, ...] | None


def _flags() -> dict[str, ForeignFlag]:
    found = {}
    for table in (IGNORED, REFUSED):
        for why, words in table.items():
            for word in words.split():
                flag, stated, values = word.partition("=")
                accepted = tuple(values.split("|")) if stated else ()
                found[flag.rstrip("!+").replace("-", "_")] = ForeignFlag(
                    why,
                    switch=flag.endswith("!"),
                    several=flag.endswith("+"),
                    accepted=None if table is IGNORED else accepted,
                )
    return found


FLAGS = _flags()
NAMES = {alias: name for name, aliases in ALIASES.items() for alias in aliases}


def add_foreign(parser: FlagParser) -> None:
    """Let the parser read SGLang's flags too, unlisted in --help."""
    for name, entry in FLAGS.items():
        flags = [flag_of(word) for word in (name, *ALIASES.get(name, ()))]
        how = takes(switch=entry.switch, several=entry.several)
        parser.add_argument(*flags, dest=name, help=SUPPRESS, **how)


def find(name: str) -> ForeignFlag | None:
    """The entry of a flag by field name, in either spelling."""
    return FLAGS.get(NAMES.get(name, name))


def judge(name: str, value: object) -> str | None:
    """A sentence for the log about a flag of `FLAGS` that changes nothing; raises `ConfigError` for
    one that is refused. None, False and an empty list ask for nothing, as an absent flag does."""
    entry = find(name)
    assert entry is not None
    if value is None or value is False or (isinstance(value, (list, tuple, dict)) and not value):
        return None
    words = [str(one) for one in value] if isinstance(value, (list, tuple)) else [str(value)]
    seen = flag_of(name) if value is True else " ".join((flag_of(name), *words))
    if entry.switch and value is not True:
        raise ConfigError(f"{flag_of(name)} is a switch and takes no value, got {value!r}.")
    if not entry.switch and value is True:
        raise ConfigError(f"{flag_of(name)} takes a value, got {value!r}.")
    if len(words) > 1 and not entry.several:
        raise ConfigError(f"{flag_of(name)} takes one value, got {' '.join(words)!r}.")
    if entry.accepted is None:
        return f"{seen} changes nothing here: {entry.why}."
    if not entry.switch and _plain(words[0]) in entry.accepted:
        return f"{seen} changes nothing here."
    raise ConfigError(f"{seen} is not supported by this version: {entry.why}.")


def _plain(value: str) -> str:
    """A value as the table has it: in lower case, JSON without blanks."""
    return "".join(value.split()) if value.lstrip().startswith("{") else value.lower()


def unknown_words(words: Sequence[str], own: Mapping[str, Option]) -> list[ConfigError]:
    """The errors for what no flag of a command line takes: unknown flags with the nearest one that
    would be accepted, and words before any such flag."""
    found = []
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("--") and len(flag) > 2 and " " not in flag:
            name = flag[2:].replace("-", "_")
            known = [*(f for opt in own.values() for f in opt.flags), *_acceptable()]
            meant = VLLM.get(name) or nearest(flag, known)
            found.append(ConfigError(f"{flag} is not an option{suggestion(meant)}; see --help."))
        elif re.match("-[A-Za-z]", word):
            hint = f"a value that begins with a dash is written --flag={word}"
            found.append(ConfigError(f"{word} is not an option; {hint}."))
        elif not found:
            found.append(ConfigError(f"{word!r} belongs to no flag; see --help."))
    return found


def _acceptable() -> Iterable[str]:
    """SGLang's flags of which some use is accepted."""
    for name, entry in FLAGS.items():
        if entry.accepted != ():
            yield from map(flag_of, (name, *ALIASES.get(name, ())))


def unknown_keyword(name: str, own: Mapping[str, Option]) -> ConfigError:
    """The error for a keyword that is no option."""
    aliases = {alias: opt.name for opt in own.values() for alias in opt.aliases}
    of_vllm = VLLM.get(name, "").replace("--", "").replace("-", "_")
    meant = aliases.get(flag_of(name)) or of_vllm or nearest(name, own)
    return ConfigError(f"{name} is not an option{suggestion(meant)}.", param=name)


def foreign_table() -> str:
    """What becomes of every flag, in Markdown: a row per reason."""
    rows = [_HEAD]
    for table, fate in ((IGNORED, "changes nothing"), (REFUSED, "refused")):
        for why, words in table.items():
            flags = ", ".join(_shown(re.sub("[!+]|=.*", "", word)) for word in words.split())
            rows.append(f"| {flags} | {fate} | {why} |")
    return "\n".join(rows) + "\n"


def _shown(flag: str) -> str:
    name = flag.replace("-", "_")
    spelled = ", ".join(f"`{flag_of(word)}`" for word in (name, *ALIASES.get(name, ())))
    free = " or ".join(f"`{value}`" if value else "nothing" for value in FLAGS[name].accepted or ())
    return f"{spelled} (but for {free})" if free else spelled


_HEAD = """
## SGLang's other flags

What changes nothing is accepted, with any value; the log says so. So is a value that asks for what
is done anyway, named behind its flag. As keywords of `sgl_spec.LLM` too.

| flags | here | because |
|---|---|---|"""
