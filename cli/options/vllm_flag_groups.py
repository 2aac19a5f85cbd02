"""Flags of ``vllm serve`` that share a reason: those without an effect here, and those refused.

A group has its reason, the flags without a value and those with one. Names are those of vLLM 0.33,
without the dashes before them. ``vllm_flags`` has the flags that are translated one by one.
"""

from __future__ import annotations

from collections.abc import Mapping

# The reason, names of flags without a value, and of flags with one.
_Group = tuple[str, str, str]

_IGNORED: tuple[_Group, ...] = (
    (
        "kernels are selected when an engine is built",
        "disable-cascade-attn disable-custom-all-reduce enable-flashinfer-autotune monokernel "
        "use-fp64-gumbel enable-batch-sharded-sampling jit-monitor-verbose enable-hc-sp "
        "dcp-q-replicate enable-nccl-comm-suspend enable-flash-late-interaction use-replayssm "
        "swa-bounded-replay enable-trace-replay fail-on-environ-validation",
        "attention-backend attention-config all2all-backend linear-backend moe-backend "
        "gdn-prefill-backend kda-decode-backend kda-prefill-backend mamba-backend kernel-config "
        "ir-op-priority performance-mode cudagraph-capture-sizes max-cudagraph-capture-size "
        "sparse-indexer-topk-backend mamba-ssu-algorithm additional-config dcp-comm-backend "
        "jit-monitor-mode replayssm-buffer-len engram-config expert-placement-strategy",
    ),
    (
        "weights are read once, when the engine is built",
        "allow-deprecated-quantization use-tqdm-on-load",
        "download-dir config-format hf-config-path code-revision tokenizer-revision hf-token "
        "ignore-patterns pt-load-map-location max-parallel-loading-workers model-impl "
        "safetensors-prefetch-block-size safetensors-prefetch-num-threads quantization-config",
    ),
    (
        "prompts and steps alternate by --prefill-rows-per-turn, and priority is always heard",
        "long-prefill-token-threshold-adaptive scheduler-reserve-full-isl",
        "scheduling-policy long-prefill-token-threshold max-num-scheduled-tokens stream-interval "
        "prefill-schedule-interval max-num-active-seqs max-num-queued-tokens",
    ),
    (
        "an engine and its server are one process",
        "aggregate-engine-logging numa-bind ray-workers-use-nsight enable-shm-tensor-arena "
        "disable-nccl-for-dp-synchronization enable-cumem-allocator",
        "api-server-count renderer-num-workers numa-bind-cpus numa-bind-nodes watchdog-config "
        "distributed-timeout-seconds cpu-distributed-timeout-seconds data-parallel-backend "
        "data-parallel-rpc-port dp-sync-interval cp-kv-cache-interleave-size "
        "dcp-kv-cache-interleave-size data-parallel-supervisor-port "
        "dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s "
        "dp-supervisor-probe-timeout-s",
    ),
    (
        "the manifest fixes the caches; see --kv-memory",
        "disable-hybrid-kv-cache-manager kv-cache-metrics kv-sharing-fast-prefill "
        "enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint",
        "prefix-caching-hash-algo num-gpu-blocks-override kv-cache-metrics-sample "
        "mamba-block-size mamba-cache-dtype mamba-cache-mode mamba-cache-philox-rounds "
        "mamba-ssm-cache-dtype prefix-cache-retention-interval prefix-match-unit "
        "kv-cache-dtype-skip-layers device-memory-utilization",
    ),
    (
        "only text is served",
        "skip-mm-profiling language-model-only interleave-mm-strings disable-chunked-mm-input "
        "mm-device-do-normalize trust-request-mm-kwargs",
        "media-io-kwargs allowed-local-media-path allowed-media-domains mm-encoder-attn-backend "
        "mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin "
        "mm-encoder-fp8-scale-save-path mm-encoder-tp-mode mm-hasher-algorithm "
        "mm-ipc-gpu-memory-gb mm-processor-cache-gb mm-processor-cache-type mm-processor-device "
        "mm-processor-kwargs mm-shm-cache-max-object-size-mb mm-tensor-ipc video-pruning-method "
        "video-pruning-rate",
    ),
    (
        "/metrics has all metrics",
        "cudagraph-metrics enable-mfu-metrics enable-layerwise-nvtx-tracing",
        "show-hidden-metrics-for-version custom-histogram-buckets",
    ),
    (
        "see --log-requests, --log-format and --log-stats; prompts and outputs are not logged",
        "enable-log-deltas enable-log-outputs enable-logging-iteration-details log-error-stack",
        "log-config-file logging-config log-level disable-access-log-for-endpoints",
    ),
    (
        "headers have at most 64 KiB, and streams no comments",
        "",
        "h11-max-header-count h11-max-incomplete-event-size sse-keep-alive-interval",
    ),
    (
        "--cors allows all methods and headers",
        "allow-credentials",
        "allowed-methods allowed-headers",
    ),
    ("/docs loads nothing from elsewhere", "disable-fastapi-docs", ""),
    (
        "at a signal open requests finish, and a second signal aborts them",
        "",
        "shutdown-timeout",
    ),
    ("the format of reasoning sets its markers", "", "reasoning-config"),
    ("vLLM's other interfaces are not served", "cohere-is-reasoning-model", "cohere-format"),
)
_REFUSED: tuple[_Group, ...] = (
    (
        "an engine has one model; build one engine for each",
        "fully-sharded-loras enable-mixed-moe-lora-format enable-moe-shared-loras "
        "enable-tower-connector-lora specialize-active-lora",
        "max-loras max-lora-rank max-cpu-loras max-lora-cls-labels lora-dtype lora-target-modules "
        "default-mm-loras",
    ),
    (
        "the GPUs of an engine share its layers on one host; run replicas (docs/scale.md)",
        "data-parallel-external-lb data-parallel-hybrid-lb data-parallel-multi-port-external-lb "
        "enable-expert-parallel enable-eplb enable-dbo enable-elastic-ep enable-ep-weight-filter "
        "enable-fault-tolerance headless",
        "data-parallel-address data-parallel-rank data-parallel-size-local "
        "data-parallel-start-rank decode-context-parallel-size prefill-context-parallel-size "
        "elastic-ep-max-dp-size eplb-config fault-tolerance-config nnodes node-rank master-addr "
        "master-port ubatch-size dbo-decode-token-threshold dbo-prefill-token-threshold",
    ),
    (
        "weights and caches must fit into the device; see specbuild estimate",
        "sleep-mode-offload-cudagraph",
        "cpu-offload-params kv-offloading-backend kv-offloading-size offload-backend "
        "offload-group-size offload-num-in-group offload-params offload-prefetch-step",
    ),
    (
        "an engine is loaded until the server ends",
        "enable-sleep-mode",
        "sleep-mode-backend sleep-preserve-parameter-names weight-transfer-config",
    ),
    (
        "prefill and decode run in one server",
        "tokens-only enable-scale-out",
        "ec-transfer-config ec-manager-config",
    ),
    ("the server generates text only", "mm-encoder-only", "convert pooler-config"),
    (
        "no code from elsewhere is run",
        "",
        "io-processor-plugin scheduler-cls worker-cls worker-extension-cls reasoning-parser-plugin "
        "tool-parser-plugin model-class-overrides tool-server",
    ),
    (
        "answers do not have these fields (docs/request-fields.md)",
        "enable-prompt-embeds enable-mm-embeds enable-return-routed-experts return-sampling-mask "
        "enable-per-request-metrics",
        "aux-output-config fingerprint-mode fingerprint-value per-request-spec-decode-metrics",
    ),
    (
        "requests set it, or generation_config.json and the chat template of the checkpoint",
        "",
        "override-generation-config default-chat-template-kwargs response-role logprobs-mode "
        "reasoning-effort-map anthropic-disabled-thinking-effort tool-strict-level",
    ),
    ("give one --speculative-config", "", "spec-method spec-model spec-tokens diffusion-config"),
    ("use --kv-events ENDPOINT", "", "kv-events-config"),
    ("use --device", "", "device-ids"),
    ("the checkpoint's windows stay", "disable-sliding-window", ""),
    ("the server needs a tokenizer for texts", "skip-tokenizer-init", ""),
    ("traces and profiles are not written", "", "otlp-traces-endpoint collect-detailed-traces "
     "profiler-config"),
    ("outputs are not watermarked", "", "watermark watermark-config"),
    ("the server speaks HTTP only", "grpc", "grpc-port"),
    (
        "restart the server for a new certificate, and let a proxy check those of clients",
        "enable-ssl-refresh",
        "ssl-ca-certs ssl-cert-reqs ssl-ciphers",
    ),
)  # fmt: skip


def _by_flag(groups: tuple[_Group, ...]) -> Mapping[str, tuple[int, str]]:
    """Return the number of values and the reason of each flag."""
    return {
        f"--{name}": (count, reason)
        for reason, *names in groups
        for count, flags in enumerate(names)
        for name in flags.split()
    }


IGNORED_FLAGS = _by_flag(_IGNORED)
REFUSED_FLAGS = _by_flag(_REFUSED)
