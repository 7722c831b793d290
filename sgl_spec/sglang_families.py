"""More of SGLang's flags, family by family: each has one reason for all of its flags.

`sglang_flags` makes its table of these and of the flags that need words or values of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Flags, without their dashes, that are refused or (ignored) accepted for the same reason.

    switches: those without a value; values: those with one; lists: those that take several.
    """

    advice: str
    switches: str = ""
    values: str = ""
    lists: str = ""
    ignored: bool = False

    def flags(self) -> Iterator[tuple[str, bool, bool]]:
        """Each flag, whether it is a switch, and whether it takes several values."""
        for names, switch, several in (
            (self.switches, True, False),
            (self.values, False, False),
            (self.lists, False, True),
        ):
            yield from ((f"--{name}", switch, several) for name in names.split())


NO_SPEED = (  # what is asked for has an effect on speed or logs alone
    Family(
        "one process has nobody to exchange tensors with",
        switches="enable-mscclpp enable-torch-symm-mem pre-warm-nccl enable-dp-lm-head "
        "enable-flashinfer-allreduce-fusion enforce-disable-flashinfer-allreduce-fusion "
        "enable-aiter-allreduce-fusion enable-attn-tp-input-scattered enable-dynamic-chunking "
        "prefill-round-robin-balance enable-two-batch-overlap enable-single-batch-overlap",
        values="nccl-port pp-max-micro-batch-size pp-async-batch-depth load-balance-method "
        "load-watch-interval gpu-id-step flashinfer-allreduce-fusion-backend "
        "tbo-token-distribution-threshold",
        ignored=True,
    ),
    Family(
        "prompt chunks have CUDA graphs whose sizes are the server's own and cannot be set",
        switches="enforce-piecewise-cuda-graph",
        values="piecewise-cuda-graph-compiler piecewise-cuda-graph-max-tokens "
        "cuda-graph-prefill-max-context cuda-graph-max-seq-len-prefill cuda-graph-tc-compiler",
        lists="piecewise-cuda-graph-tokens",
        ignored=True,
    ),
    Family(
        "CUDA graphs are turned off with --disable-cuda-graph",
        switches="disable-piecewise-cuda-graph disable-prefill-cuda-graph "
        "disable-decode-cuda-graph enable-profile-cuda-graph enable-cudagraph-gc debug-cuda-graph",
        ignored=True,
    ),
    Family(
        "the forward is not compiled",
        switches="enable-torch-compile-debug-mode",
        ignored=True,
    ),
    Family(
        "kernels choose their own shapes",
        switches="triton-attention-reduce-in-fp32 flashinfer-mla-disable-ragged "
        "disable-flashinfer-autotune enable-fused-qk-norm-rope",
        values="triton-attention-num-kv-splits triton-attention-split-tile-size fp8-gemm-backend "
        "fp8-gemm-runner-backend fp4-gemm-backend fp4-gemm-runner-backend bf16-gemm-backend",
        lists="flashinfer-autotune-skip-ops",
        ignored=True,
    ),
    Family(
        "the scheduler reserves slots exactly and alternates prompt chunks and rounds",
        switches="enable-prefill-delayer",
        values="prefill-max-requests prefill-delayer-max-delay-passes prefill-decode-interval "
        "prefill-delayer-token-usage-low-watermark prefill-delayer-queue-min-ratio "
        "prefill-delayer-max-delay-ms num-reserved-decode-tokens min-free-slots-delay "
        "retraction-policy",
        lists="prefill-delayer-forward-passes-buckets prefill-delayer-wait-seconds-buckets",
        ignored=True,
    ),
    Family(
        "there is one KV pool, for all layers alike",
        switches="disable-hybrid-swa-memory",
        values="swa-full-tokens-ratio hybrid-kvcache-ratio",
        ignored=True,
    ),
    Family(
        "the prefix cache is in the KV pool, with no second level",
        switches="enable-lmcache enable-flexkv",
        values="hicache-storage-backend hicache-storage-prefetch-policy lmcache-config-file "
        "hicache-storage-backend-extra-config hicache-host-memory-mode flexkv-config-file",
        ignored=True,
    ),
    Family(
        "texts are tokenised one by one",
        switches="enable-dynamic-batch-tokenizer",
        values="dynamic-batch-tokenizer-batch-size dynamic-batch-tokenizer-batch-timeout "
        "detokenizer-worker-num batch-notify-size",
        ignored=True,
    ),
    Family(
        "how weights are read is fixed",
        switches="weight-loader-prefetch-checkpoints weight-loader-drop-cache-after-load",
        values="weight-loader-prefetch-num-threads",
        ignored=True,
    ),
    Family(
        "logs and metrics have one form",
        switches="enable-mfu-metrics enable-metrics-for-all-schedulers collect-tokens-histogram "
        "enable-layerwise-nvtx-marker",
        values="gc-warning-threshold-secs tokenizer-metrics-custom-labels-header",
        lists="log-requests-target uvicorn-access-log-exclude-prefixes bucket-time-to-first-token "
        "bucket-inter-token-latency bucket-e2e-request-latency prompt-tokens-buckets "
        "generation-tokens-buckets tokenizer-metrics-allowed-custom-labels",
        ignored=True,
    ),
    Family(
        "where processes run is the system's affair: numactl and taskset",
        lists="numa-node gc-threshold",
        ignored=True,
    ),
    Family(
        "grammars are compiled by llguidance, with nothing kept on disk",
        switches="disable-outlines-disk-cache",
        ignored=True,
    ),
)

ABSENT = (
    Family(
        "load the checkpoint in its own dtype, or choose one with --dtype",
        switches="enable-fp32-lm-head quantize-and-serve enable-quant-communications",
        values="quantization-param-path modelopt-quant modelopt-checkpoint-restore-path "
        "modelopt-checkpoint-save-path modelopt-export-path rl-quant-profile",
    ),
    Family(
        "weights are read once, from a directory or the hub, and stay where they are",
        switches="delete-ckpt-after-loading enable-memory-saver enable-weights-cpu-backup "
        "enable-draft-weights-cpu-backup checkpoint-engine-wait-weights-before-ready "
        "remote-instance-weight-loader-start-seed-via-transfer-engine",
        values="model-checksum decrypted-config-file decrypted-draft-config-file weight-cache-mode "
        "remote-instance-weight-loader-seed-instance-ip remote-instance-weight-loader-backend "
        "remote-instance-weight-loader-seed-instance-service-port startup-weight-load-mode "
        "remote-instance-weight-loader-send-weights-group-ports",
        lists="custom-weight-loader",
    ),
    Family(
        "the weights must fit the device",
        values="offload-group-size offload-num-in-group offload-prefetch-step offload-mode "
        "kt-weight-path kt-method kt-cpuinfer kt-threadpool-count kt-num-gpu-experts "
        "kt-max-deferred-experts-per-token",
    ),
    Family(
        "merge the adapter into the checkpoint first",
        switches="enable-lora-overlap-loading lora-use-virtual-experts lora-strict-loading "
        "experts-shared-outer-loras",
        values="max-lora-rank max-loaded-loras lora-eviction-policy max-lora-chunk-size "
        "lora-drain-wait-threshold",
        lists="lora-target-modules",
    ),
    Family(
        "models with experts, sparse or linear attention are not served",
        switches="enable-eplb enable-elastic-expert-backup enable-deepep-waterfill "
        "enable-waterfill elastic-ep-rejoin enable-ep-moe enable-deepep-moe "
        "enable-flashinfer-cutlass-moe enable-flashinfer-cutedsl-moe "
        "enable-flashinfer-trtllm-moe enable-triton-kernel-moe "
        "enable-flashinfer-mxfp4-moe enable-fused-grouped-gemm-combine "
        "disable-flashinfer-cutlass-moe-fp4-allgather disable-shared-experts-fusion "
        "enforce-shared-experts-fusion enable-return-routed-experts enable-return-indexer-topk "
        "enable-dsa-prefill-context-parallel enable-nsa-prefill-context-parallel enable-hisparse "
        "enable-expert-distribution-metrics enable-w4a4-mxfp4-megamoe "
        "speculative-enable-w4a4-mxfp4-megamoe",
        values="flashinfer-mxfp4-moe-precision deepep-mode deepep-dispatcher-output-dtype "
        "deepep-config ep-num-redundant-experts ep-dispatch-algorithm init-expert-location "
        "eplb-algorithm eplb-rebalance-num-iterations eplb-rebalance-layers-per-chunk "
        "eplb-min-rebalancing-utilization-threshold expert-distribution-recorder-mode "
        "expert-distribution-recorder-buffer-size moe-dense-tp-size elastic-ep-backend "
        "mooncake-ib-device speculative-moe-runner-backend speculative-moe-a2a-backend "
        "speculative-dsa-topk-backend dsa-prefill-backend dsa-decode-backend nsa-prefill-backend "
        "nsa-decode-backend dsa-prefill-cp-mode nsa-prefill-cp-mode hisparse-config "
        "hierarchical-sparse-attention-extra-config max-mamba-cache-size mamba-ssm-dtype "
        "mamba-full-memory-ratio mamba-scheduler-strategy mamba-track-interval mamba-backend "
        "linear-attn-backend linear-attn-decode-backend linear-attn-prefill-backend "
        "dllm-algorithm dllm-algorithm-config",
    ),
    Family(
        "only text is served",
        switches="disable-fast-image-processor keep-mm-feature-on-device encoder-only "
        "language-only language-model-only enable-broadcast-mm-inputs-process mm-enable-dp-encoder "
        "enable-mm-global-cache enable-prefix-mm-cache enable-precise-embedding-interpolation",
        values="mm-attention-backend mm-max-concurrent-calls mm-per-request-timeout "
        "mm-process-config limit-mm-data-per-request encoder-transfer-backend "
        "encoder-bootstrap-port image-processor-backend asr-max-buffer-seconds "
        "asr-max-concurrent-sessions",
        lists="encoder-urls encoder-register-urls allowed-media-domains",
    ),
    Family(
        "prefill and decode share one engine",
        switches="disaggregation-decode-enable-offload-kvcache enable-pdmux "
        "disaggregation-decode-enable-radix-cache",
        values="disaggregation-transfer-backend disaggregation-bootstrap-port "
        "disaggregation-ib-device disaggregation-decode-polling-interval pdmux-config-path "
        "sm-group-num",
    ),
    Family(
        "drafters are NGRAM, EAGLE, EAGLE3, STANDALONE and those of --speculative-drafter-module",
        switches="speculative-dspark-align-verify-tokens-to-graph-tier",
        values="speculative-dspark-block-size speculative-dspark-sps-table-path "
        "speculative-dspark-confidence-sts-path speculative-domino-candidate-pool-size "
        "spec-trace-dir",
    ),
    Family(
        "HTTP/1.1 is served, unencrypted; put a proxy in front for anything else",
        switches="grpc-mode smg-grpc-mode enable-http2 enable-ssl-refresh",
        values="grpc-port ssl-keyfile ssl-certfile ssl-ca-certs ssl-keyfile-password sidecar "
        "http2-max-concurrent-streams",
    ),
    Family(
        "nobody's code but a drafter's is run (--speculative-drafter-module)",
        switches="enable-custom-logit-processor",
        values="warmups forward-hooks msprobe-dump-config custom-sigquit-handler",
    ),
    Family(
        "use --schedule-policy fcfs or lpm",
        switches="abort-on-priority-when-disabled schedule-low-priority-values-first "
        "disable-priority-preemption",
        values="priority-scheduling-preemption-threshold default-priority-value",
    ),
    Family(
        "figures come from /metrics and /server_info, profiles from /start_profile",
        switches="enable-trace export-metrics-to-file enable-forward-pass-metrics",
        values="otlp-traces-endpoint otlp-service-name trace-modules export-metrics-to-file-dir "
        "kv-events-config extra-metric-labels debug-tensor-dump-output-folder "
        "debug-tensor-dump-input-file debug-tensor-dump-inject",
        lists="debug-tensor-dump-layers",
    ),
    Family(
        "logits are not searched for NaN",
        switches="enable-nan-detection crash-on-nan",
    ),
    Family(
        "between tokens of JSON there is nothing, a space, or a line break and indentation",
        switches="constrained-json-disable-any-whitespace",
        values="constrained-json-max-whitespace-cnt",
    ),
    Family(
        "the reply's text is returned whole; parse it in the client",
        switches="enable-strict-thinking strip-thinking-cache",
        values="tool-server",
    ),
    Family(
        "send stream_options and chat_template_kwargs with each request",
        switches="stream-response-default-include-usage",
        values="default-chat-template-kwargs",
    ),
    Family(
        "/generate takes and gives token ids",
        switches="return-input-ids return-output-ids",
    ),
    Family(
        "a request is answered and forgotten",
        switches="enable-response-store enable-streaming-session enable-session-radix-cache",
    ),
    Family(
        "name the template's file with --chat-template",
        switches="trust-request-chat-template",
        values="hf-chat-template-name",
    ),
    Family("write the flags on the command line", values="config"),
    Family("each text is scored by itself", values="multi-item-scoring-delimiter"),
)
