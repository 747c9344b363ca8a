"""Options of vLLM and SGLang, each with its counterpart here, for servers and for benchmarks.

The names are those of `vllm serve` 0.33, `vllm bench serve` 0.33, `sglang.launch_server` 0.5.23 and
some older versions. `python -m nanovllm.cli.other_flags` prints the table in recipes/README.md.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

import click
from msgspec import Struct

Kind = Literal["use", "always on", "not offered", "not needed"]
NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmM]?)")  # vLLM's: 8k is 8000, 8K is 8192
SCALES = {"": 1, "k": 1000, "K": 1 << 10, "m": 1_000_000, "M": 1 << 20}
HOLE = re.compile(r"\{(\w+)\}")  # placeholder of the option's value in a replacement


class Row(Struct, frozen=True):
    """Options with one answer. `names` have no dashes, except `-tp`; `*` matches any text."""

    names: str
    kind: Kind
    text: str = ""  # kind "use": the replacement, with {N} for a value; otherwise a remark
    note: str = ""  # kind "use": a remark
    values: Mapping[str, str] = {}  # complete answers for some values

    def answer(self, value: str | None) -> str:
        """Return the advice for the option, with its value or None."""
        if value is not None and value in self.values:
            return self.values[value]
        if self.kind == "use":
            text = f"use {self.filled_in(value)}"
            return f"{text} ({self.note})" if self.note else text
        return f"{self.kind}: {self.text}" if self.text else self.kind

    def negation(self, name: str) -> str:
        """Return the answer to `--no-NAME`."""
        if self.kind == "always on":
            return f"{name} is always on and cannot be turned off"
        return "leave it out" if self.kind == "use" else f"leave it out; {name} is {self.kind}"

    def filled_in(self, value: str | None = None) -> str:
        """Return `text` with the option's value filled in, or the placeholder's name for None."""
        return HOLE.sub(lambda hole: hole[1] if value is None else converted(value), self.text)

    @property
    def in_markdown(self) -> str:
        typed = ", ".join(f"`{dashed(name)}`" for name in self.names.split())
        text = self.filled_in()
        if self.kind != "use":
            text = f"{self.kind}: {text}" if text else self.kind
        elif text.startswith("--"):
            text = f"`{text}`"
        return f"| {typed} | {text} ({self.note}) |" if self.note else f"| {typed} | {text} |"


def use(names: str, text: str, note: str = "", values: Mapping[str, str] = {}) -> Row:
    return Row(names, "use", text, note=note, values=values)


def always(names: str, text: str = "") -> Row:
    return Row(names, "always on", text)


def never(names: str, text: str = "") -> Row:
    return Row(names, "not offered", text)


def needless(names: str, text: str = "") -> Row:
    return Row(names, "not needed", text)


Table = Mapping[str, Sequence[Row]]  # by the subject of its rows
LEAVE_OUT = "leave it out, this is the default"
SERVERS: Table = {
    "Model and weights": (
        use("model model-path", "RECIPE", "`nanovllm serve --model X` also works"),
        needless("tokenizer tokenizer-path tokenizer-mode tokenizer-backend tokenizer-revision "
                 "tokenizer-pool-* skip-tokenizer-init hf-chat-template-name",
                 "the tokenizer is tokenizer.json in the model's folder"),
        use("chat-template completion-template", "chat_template.jinja in the model's folder"),
        use("dtype", "--set dtype={DTYPE}", "bfloat16 or float32", {
            "auto": LEAVE_OUT, "float": "use --set dtype=float32",
            **dict.fromkeys(("half", "float16"), "not offered: use bfloat16, the default on GPUs"),
        }),
        use("quantization -q quantization-config quantize-and-serve", "--set quantize=fp8",
            "for a checkpoint that is not quantised; others are recognised by config.json",
            dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin", "marlin", "bitsandbytes",
                           "gguf", "compressed-tensors", "mxfp4", "modelopt"),
                          "not offered: serve the unquantised checkpoint or its FP8 version")),
        use("seed random-seed", "--set load.seed={N}",
            "dummy weights only; sampling follows `seed` of a request"),
        never("revision code-revision",
              "run `hf download MODEL --revision R --local-dir DIR` and serve DIR"),
        use("download-dir hf-token", "the environment variables HF_HOME and HF_TOKEN"),
        use("hf-config-path", "--set config={PATH}", "with --load-format dummy"),
        never("hf-overrides json-model-override-args rope-scaling rope-theta "
              "model-class-overrides", "edit config.json in a copy of the model's folder"),
        needless("generation-config sampling-defaults",
                 "generation_config.json fills in what a request leaves out"),
        never("override-generation-config preferred-sampling-params",
              "edit generation_config.json, or set the fields in the request"),
        needless("trust-remote-code", "no code of a model is ever run"),
        needless("config-format model-config-parser model-impl model-loader-extra-config "
                 "load-format-* safetensors-* weight-loader-* weight-cache-* startup-weight-* "
                 "pt-load-map-location ignore-patterns use-tqdm-on-load custom-weight-loader "
                 "max-parallel-loading-workers model-checksum delete-ckpt-after-loading "
                 "enable-multithread-load", "safetensors are loaded by all ranks at once"),
        use("config", "RECIPE", "a YAML file: `nanovllm serve my.yaml`"),
        use("enable-lora lora-modules lora-paths", "--set adapters.folder=DIR",
            "with a folder for each adapter; a request names one as its model"),
        use("max-loras max-loras-per-batch", "--set adapters.slots={N}"),
        use("max-lora-rank", "--set adapters.max_rank={N}"),
        never("*lora* -*lora*", "only the keys of `adapters` in a recipe"),
        never("runner convert task is-embedding pooler-config pooling-* override-pooler-config "
              "mm-* *-mm-* *multimodal* *media* *image* *video* asr-* *encoder* "
              "language-model-only language-only limit-mm-* enable-mis enable-prompt-embeds "
              "enable-precise-embedding-* enable-flash-late-interaction cohere-* "
              "io-processor-plugin disable-mm-preprocessor-cache",
              "nanovllm generates text from text"),
    ),
    "Length, batch and cache": (
        use("max-model-len context-length", "--set server.max_model_tokens={N}"),
        use("gpu-memory-utilization mem-fraction-static device-memory-utilization",
            "--set cache.memory_fraction={SHARE}"),
        use("max-num-seqs max-running-requests max-num-active-seqs", "--set schedule.slots={N}"),
        use("max-num-batched-tokens max-num-scheduled-tokens chunked-prefill-size "
            "max-prefill-tokens", "--set schedule.step_tokens={N}", "", {
                "-1": "not offered: long prompts are always computed in chunks",
            }),
        always("enable-chunked-prefill enable-mixed-chunk enable-dynamic-chunking"),
        use("long-prefill-token-threshold* max-num-partial-prefills max-long-partial-prefills "
            "prefill-schedule-interval prefill-max-requests prefill-decode-interval* "
            "prefill-delayer-* enable-prefill-delayer scheduler-delay-factor",
            "--set schedule.mixed_step_tokens={N}",
            "the most tokens of a step that also decodes; by default it adapts"),
        use("block-size page-size", "--set cache.page_tokens={N}"),
        use("num-gpu-blocks-override", "--set cache.pages={N}"),
        use("max-total-tokens", "--set cache.pages=PAGES", "of cache.page_tokens tokens each"),
        use("kv-cache-dtype", "--set cache.dtype=fp8", "", {
            **dict.fromkeys(("auto", "bf16", "bfloat16"), LEAVE_OUT),
            **dict.fromkeys(("fp8", "fp8_e4m3"), "use --set cache.dtype=fp8"),
            "fp8_e5m2": "not offered: use --set cache.dtype=fp8, which is e4m3",
        }),
        use("kv-cache-memory-bytes", "--set cache.pages=PAGES",
            "or cache.memory_fraction; on a CPU --set cache.cpu_gib=GIB"),
        always("enable-prefix-caching"),
        use("no-enable-prefix-caching disable-radix-cache", "--set cache.prefix=false"),
        needless("prefix-caching-hash-algo prefix-cache-retention-interval prefix-match-unit "
                 "radix-cache-backend radix-eviction-policy* use-v2-block-manager",
                 "the pages used longest ago are reused first"),
        use("kv-offloading-size hicache-size swap-space enable-hierarchical-cache enable-hicache "
            "enable-lmcache", "--set cache.host_gib=GIB", "of host memory for each rank"),
        use("hicache-storage-backend", "--set 'cache.disk={path: DIR, gib: N}'",
            "below cache.host_gib"),
        never("hicache-* lmcache-* hierarchical-* kv-offloading-* enable-flexkv flexkv-* "
              "hisparse-* enable-hisparse unified-cache-* enable-unified-*",
              "only cache.host_gib and cache.disk"),
        never("cpu-offload-* offload-* enable-cumem-allocator enable-shm-tensor-arena "
              "enable-weights-cpu-backup kt-* ple-offload-* weight-offload-* *paged-experts*",
              "weights stay in the GPU's memory"),
        use("mamba-ssm-cache-dtype mamba-ssm-dtype mamba-cache-dtype",
            "--set cache.state_dtype={DTYPE}", "float32 or bfloat16"),
        use("mamba-full-memory-ratio", "--set cache.checkpoint_fraction={SHARE}"),
        use("max-mamba-cache-size", "--set cache.checkpoints={N}"),
        needless("mamba-* *-mamba-* linear-attn-* *replayssm* gdn-prefill-backend kda-*-backend",
                 "recurrent layers have one kernel each"),
        use("max-num-queued-reqs max-queued-requests", "--set schedule.max_queue={N}"),
        always("enable-priority-scheduling",
               "requests with a lower `priority` go first"),
        needless("scheduling-policy schedule-policy preemption-mode disable-priority-preemption "
                 "schedule-low-priority-values-first default-priority-value",
                 "requests go by `priority` (lower first), then by arrival"),
        always("async-scheduling"),
        use("no-async-scheduling disable-overlap-schedule disable-async-output-proc",
            "--set schedule.depth=0"),
        needless("stream-interval incremental-streaming-output num-scheduler-steps "
                 "num-continuous-decode-steps multi-step-stream-outputs",
                 "every token is sent at once; a request may set stream_interval"),
        never("allow-auto-truncate", "a prompt that is too long gets 400"),
    ),
    "Several GPUs": (
        use("tensor-parallel-size tp-size tp -tp", "--tp {N}"),
        use("data-parallel-size dp-size dp -dp", "--dp {N}"),
        use("enable-expert-parallel -ep", "--set parallel.ep=N", "the number of --tp"),
        use("expert-parallel-size ep-size ep max-ep-size", "--set parallel.ep={N}"),
        use("enable-dp-attention attention-data-parallel-size attn-dp-size",
            "--set parallel.ep=N", "with --tp 1: each GPU has the attention of its own requests"),
        use("enable-eplb eplb-config init-expert-location expert-placement-strategy "
            "ep-num-redundant-experts", "--set experts.placement=FILE",
            "a file of `nanovllm bench --expert-load FILE`"),
        never("eplb-* ep-* *elastic-ep* enable-elastic-* elastic-* expert-distribution-* "
              "expert-balancedness-* enable-ep-weight-filter moe-dense-tp-size moe-dp-size "
              "moe-data-parallel-size *two-batch-overlap *single-batch-overlap tbo-* *dbo* "
              "dwdp-size shared-experts-tp-size", "experts stay where they were placed"),
        never("pipeline-parallel-size pp-size -pp pp-*", "use --tp"),
        never("*context-parallel-size -dcp -pcp dcp-* cp-* attn-cp-size *-cp-* enable-prefill-cp "
              "ubatch-size", "use --tp, or parallel.ep for data-parallel attention"),
        never("nnodes node-rank -n -r master-addr master-port dist-init-addr nccl-* "
              "data-parallel-* -dpa -dpb -dpe -dph -dpl -dpm -dpn -dpp -dpr headless "
              "dp-supervisor-* enable-scale-out", "a server runs on one host"),
        needless("distributed-executor-backend worker-use-ray use-ray ray-* worker-cls "
                 "worker-extension-cls", "every rank is a process of this host"),
        needless("disable-custom-all-reduce enable-*allreduce* *allreduce-fusion* "
                 "disable-nccl-* enable-nccl-* enable-mscclpp enable-symm-mem "
                 "enable-torch-symm-mem enable-quant-communications pre-warm-nccl "
                 "enable-p2p-check all2all-backend moe-a2a-backend deepep-* flashinfer-a2a-* "
                 "cpu-distributed-timeout-seconds distributed-timeout-seconds dist-timeout",
                 "sums between GPUs use a kernel of ours up to 8 MiB, NCCL above"),
        use("api-server-count -asc tokenizer-worker-num detokenizer-worker-num "
            "renderer-num-workers", "--set server.workers={N}"),
        needless("load-balance-method load-publish-* load-snapshot-*",
                 "a request goes to the engine where it costs least"),
        use("base-gpu-id gpu-id-step device-ids", "the environment variable CUDA_VISIBLE_DEVICES"),
        never("numa-*", "start the server with numactl"),
    ),
    "Kernels and graphs": (
        use("enforce-eager", "--eager",
            "plain torch; kernels without graphs: --set kernels.cuda_graphs=false"),
        use("disable-cuda-graph disable-decode-cuda-graph", "--set kernels.cuda_graphs=false"),
        use("disable-prefill-cuda-graph", "--set kernels.mixed_graph_tokens=0"),
        needless("cudagraph-* cuda-graph-* max-cudagraph-capture-size max-seq-len-to-capture "
                 "disable-cuda-graph-padding enable-profile-cuda-graph debug-cuda-graph "
                 "enable-cudagraph-gc", "sizes follow schedule.slots; see capture-graphs"),
        use("attention-backend decode-attention-backend prefill-attention-backend -ac",
            "--set kernels.attention={NAME}", "torch, triton or flash; auto is best", {
                **dict.fromkeys(("auto", "AUTO"), LEAVE_OUT),
                **dict.fromkeys(("FLASH_ATTN", "flash_attn", "fa3", "fa4"),
                                "use --set kernels.attention=flash"),
                **dict.fromkeys(("TRITON_ATTN", "triton_attn", "triton"),
                                "use --set kernels.attention=triton"),
                **dict.fromkeys(("TORCH_SDPA", "torch_native"),
                                "use --set kernels.attention=torch"),
            }),
        needless("moe-backend moe-runner-backend linear-backend sampling-backend *gemm-* "
                 "kernel-config ir-op-priority attention-config *-attention-backend "
                 "triton-attention-* flashinfer-* fp4-* enable-flashinfer-* *megamoe* "
                 "disable-flashinfer-* *monokernel* nsa-* dsa-* *-dsa-* dsv4-* qsa-* "
                 "sparse-indexer-* enable-lean-attention disable-cascade-attn enable-mfu-metrics "
                 "enable-fused-* disable-shared-experts-fusion disable-chunked-prefix-cache "
                 "disable-sliding-window *shared-experts-* *swa-* mm-attention-backend",
                 "`auto` chooses every kernel; a recipe's `kernels` overrides it"),
        never("compilation-config optimization-level -O* -cc *torch-compile* jit-monitor-* "
              "performance-mode", "`auto` chooses every kernel, and graphs are captured"),
        use("enable-deterministic-inference rl-on-policy-target", "--set kernels.invariant=true"),
        use("device", "--device {NAME}", "auto, cuda or cpu"),
    ),
    "Speculative decoding": (
        use("speculative-config -sc speculative-algorithm spec-method",
            "--set 'speculate={method: ngram, tokens: 3}'",
            "or methods draft_model and eagle3, with model, a folder; or mtp", {
                **dict.fromkeys(("NGRAM", "ngram"), "use --set speculate.method=ngram"),
                **dict.fromkeys(("STANDALONE", "draft_model"),
                                "use --set speculate.method=draft_model"),
                **dict.fromkeys(("EAGLE3", "eagle3"), "use --set speculate.method=eagle3"),
                **dict.fromkeys(("NEXTN", "mtp"), "use --set speculate.method=mtp"),
                **dict.fromkeys(("EAGLE", "DFLASH", "eagle", "medusa", "suffix"),
                                "not offered: only ngram, draft_model, eagle3 and mtp"),
            }),
        use("num-speculative-tokens speculative-num-draft-tokens spec-tokens "
            "speculative-num-steps", "--set speculate.tokens={N}"),
        use("ngram-prompt-lookup-min", "--set speculate.min_match={N}"),
        use("ngram-prompt-lookup-max", "--set speculate.max_match={N}"),
        use("speculative-draft-model-path spec-model", "--set speculate.model={FOLDER}"),
        never("speculative-* spec-* *eagle* decoupled-spec-* enable-draft-* "
              "num-lookahead-slots *-draft-* spec-decoding-*",
              "only the keys of `speculate` in a recipe"),
        always("per-request-spec-decode-metrics", "see /metrics and `nanovllm bench`"),
    ),
    "API and parsers": (
        use("served-model-name", "--set server.served_name={NAME}"),
        needless("tool-call-parser reasoning-parser",
                 "the parser follows from the model; --set server.parser=NAME overrides it"),
        always("enable-auto-tool-choice enable-reasoning tool-strict-level enable-strict-thinking"),
        needless("chat-template-content-format", "text parts are joined"),
        never("default-chat-template-kwargs reasoning-config reasoning-effort-map "
              "anthropic-disabled-thinking-effort", "give chat_template_kwargs in the request"),
        needless("structured-outputs-config guided-decoding-backend grammar-backend",
                 "xgrammar compiles every grammar"),
        never("constrained-json-*", "set `structured_outputs` in the request"),
        always("enable-prompt-tokens-details enable-cache-report enable-request-id-headers"),
        never("enable-force-include-usage stream-response-default-include-usage",
              "the client sets stream_options.include_usage"),
        never("return-tokens-as-token-ids return-output-ids return-input-ids",
              "a request sets return_token_ids or return_tokens_as_token_ids"),
        needless("max-logprobs", "top_logprobs may be up to 20"),
        never("logprobs-mode logits-processors logits-processor-pattern "
              "enable-custom-logit-processor *return-hidden-* *return-routed-* *return-indexer-* "
              "*aux-* return-hidden-* return-sampling-mask sampling-mask-max-tokens"),
        never("trust-request-chat-template", "templates come from the model's folder alone"),
        never("response-role exclude-tools-when-tool-choice-none", "the template decides"),
        never("tool-server tool-parser-plugin reasoning-parser-plugin enable-response-store "
              "file-storage-path enable-tokenizer-info-endpoint tokens-only *session*",
              "routes are /v1/chat/completions and /v1/models"),
        never("grpc grpc-* smg-* enable-http2 http2-* sidecar*", "HTTP/1.1 only"),
    ),
    "Server and security": (
        use("host", "--host {ADDRESS}"), use("port", "--port {N}"),
        use("api-key", "--api-key {KEY}", "or the environment variable NANOVLLM_API_KEY"),
        use("load-format", "--load-format {FORMAT}", "auto, safetensors or dummy"),
        use("allowed-origins", "--set 'server.allowed_origins={LIST}'"),
        needless("allow-credentials allowed-methods allowed-headers",
                 "pages of allowed origins may send what the API needs"),
        never("uds", "use --host and --port"),
        never("ssl-* enable-ssl-*", "put a proxy with TLS in front"),
        never("root-path fastapi-root-path", "let the proxy strip its prefix"),
        never("middleware admin-api-key disable-frontend-multiprocessing"),
        use("h11-max-incomplete-event-size", "--set server.max_header_bytes={N}"),
        use("h11-max-header-count", "--set server.max_headers={N}"),
        use("shutdown-timeout", "--set server.shutdown_s={S}"),
        use("watchdog-timeout soft-watchdog-timeout watchdog-config",
            "--set server.stall_s={S}"),
        needless("sse-keep-alive-interval", "a quiet stream gets a comment every 10 s"),
        needless("disable-fastapi-docs enable-offline-docs", "there are no such pages"),
        never("*sleep-mode* sleep-* enable-memory-saver weight-transfer-config weight-version "
              "remote-instance-* modelexpress-* checkpoint-engine-* rl-* enable-trace-replay",
              "restart the server for other weights"),
        needless("sleep-on-idle", "an idle engine uses no CPU"),
        always("skip-server-warmup warmups enable-flashinfer-autotune",
               "the engine warms up before /ready"),
    ),
    "Logs and metrics": (
        use("log-level uvicorn-log-level log-level-http", "the environment variable NANOVLLM_LOG"),
        use("log-config-file logging-config log-requests-format log-format",
            "--log-format json", "one object a line; else text"),
        always("log-requests enable-log-requests", "one line a request, never with its text"),
        use("disable-log-requests disable-uvicorn-access-log disable-access-log-* "
            "uvicorn-access-log-*", "the environment variable NANOVLLM_LOG=warning"),
        never("log-requests-* enable-log-outputs enable-log-deltas max-log-len log-error-stack "
              "enable-logging-* enable-request-time-stats-logging show-time-cost",
              "prompts and answers are never logged"),
        needless("disable-log-stats aggregate-engine-logging decode-log-interval",
                 "the log has no statistics; see /metrics"),
        always("enable-metrics enable-server-load-tracking enable-metrics-* cudagraph-metrics "
               "kv-cache-metrics* enable-per-request-metrics expert-parallel-metrics",
               "see /metrics"),
        never("bucket-* *-buckets custom-histogram-buckets extra-metric-labels "
              "tokenizer-metrics-* show-hidden-metrics-* export-metrics-* forward-pass-metrics-* "
              "enable-forward-pass-metrics", "names and buckets are vLLM's"),
        never("otlp-* enable-trace trace-* collect-detailed-traces profiler-config *nvtx* "
              "crash-dump-folder debug-* enable-layerwise-* gc-* msprobe-* kv-canary* "
              "fingerprint-*", "see /debug/steps, and nsys or py-spy"),
    ),
    "Other": (
        use("kv-events-config", "--set kv_events.endpoint=ADDRESS", "tcp://HOST:PORT; a section"),
        use("kv-transfer-config disaggregation-mode", "--role ROLE",
            "prefill or decode, with a recipe's section transfer"),
        never("kv-sharing-* disaggregation-* ec-* "
              "mooncake-* enable-pd* pdmux-* enable-kv-cache-sharding enable-linker-* "
              "num-reserved-decode-tokens", "use --role and a recipe's section transfer"),
        never("dllm-* diffusion-config engram-config modelopt-* forward-hooks additional-config "
              "scheduler-cls *nsight* sm-group-num aux-output-config task "
              "*fault-tolerance* fail-on-environ-validation decrypted-* engine-info-* "
              "optimistic-prefill-attempts gated-launch-port max-num-queued-tokens "
              "quantization-param-path kv-cache-dtype-skip-layers mlx-* strip-thinking-cache"),
        needless("watermark watermark-config enable-watermark schedule-conservativeness "
                 "retraction-policy scheduler-* min-free-slots-delay batch-notify-size "
                 "abort-on-priority-when-disabled priority-scheduling-preemption-threshold",
                 "a request without pages goes back to the queue and is computed again"),
        needless("*dynamic-batch-tokenizer* *tokenizer-batch-* enable-http-worker-reuseport "
                 "disable-outlines-disk-cache dp-sync-interval enable-batch-sharded-sampling",
                 "the server does this its own way"),
        needless("enable-hc-sp use-fp64-gumbel allow-deprecated-quantization "
                 "disable-hybrid-kv-cache-manager -dc boundary-reduction c128-page-size "
                 "context-bucket *-attn-tp* enable-deepseek-* enable-dp-* *-lm-head* "
                 "enable-layernorm-sp enable-nvidia-megakernel enable-page-major-kv-layout "
                 "enable-scattered-sconv enable-tf32-matmul enable-waterfill fuseep-mode "
                 "prefill-kv-cache-dequant-dtype prefill-only-disable-kv-cache",
                 "every model has one way to be computed"),
    ),
}  # fmt: skip
# The only source of prompts.
RANDOM = "prompts are random words of exactly --input-len tokens, no two alike"
BENCH: Table = {
    "Server": (
        use("base-url", "--url {URL}"),
        use("host", "--url http://{ADDRESS}:8000"), use("port", "--url http://127.0.0.1:{N}"),
        needless("endpoint backend endpoint-type", "the chat API is driven; --offline for none"),
        needless("model served-model-name tokenizer tokenizer-* tokenize-prompt",
                 "the server names its model and counts its tokens"),
        needless("trust-remote-code skip-tokenizer-init skip-chat-template apply-chat-template"),
        use("lora-modules lora-name", "--adapters N", "N of the server's adapters in turn"),
        never("header insecure lora-* *lora* extra-body extra-request-body request-id-prefix "
              "chat-template-kwargs bench-mode pd-separated profile profile-*"),
        needless("ready-check-timeout-sec", "--start waits until the server is ready"),
        needless("flush-cache", "no two prompts are alike"),
    ),
    "Load": (
        use("random-input-len random-input sonnet-input-len", "--input-len {N}"),
        use("random-output-len random-output *-output-len", "--output-len {N}"),
        use("random-range-ratio", "--range-ratio {SHARE}", "lengths vary within +- this share"),
        use("max-concurrency", "--concurrency {N}"),
        use("num-warmups warmup-requests", "--warmup {N}"),
        use("dataset-name dataset", "--input-len N --output-len N", RANDOM),
        never("dataset-path disable-shuffle *prefix-len *prefix-* hf-* custom-* sharegpt-* "
              "blazedit-* bfcl-* spec-bench-* speed-bench-* timed-trace-* asr-* self-timed "
              "*multimodal* random-mm-* random-batch-size no-oversample no-reranker gsp-* "
              "image-* mooncake-*", RANDOM),
        never("ramp-up-* probe-request-rate", "--sweep runs one concurrency after the other"),
        needless("no-stream disable-stream", "answers are always streamed"),
        use("disable-ignore-eos", "--no-ignore-eos"),
        never("top-k top-p min-p frequency-penalty presence-penalty repetition-penalty "
              "use-beam-search logprobs return-logprob n", "only --temperature is sampled with"),
    ),
    "Results": (
        use("result-dir", "--results-dir {FOLDER}"),
        use("result-filename output-file", "--json-out {FILE}"),
        always("save-result", "each run writes a record; --json-out FILE for vLLM's keys"),
        never("save-detailed output-details append-result metadata label tag *plot-* timeline-*",
              "the record has the percentiles"),
        needless("percentile-metrics metric-percentiles",
                 "mean, p50, p90, p95, p99 of each latency are always shown"),
        needless("disable-tqdm", "the bar is written to stderr"),
    ),
}  # fmt: skip


def converted(value: str) -> str:
    """Return a value in the notation of recipes: 8000 for 8k, auto for -1, 0.9 for 0.9."""
    number = NUMBER.fullmatch(value)
    if number is not None and number[2]:
        return str(round(float(number[1]) * SCALES[number[2]]))
    return "auto" if value == "-1" else value


def dashed(name: str) -> str:
    return name if name.startswith("-") else f"--{name}"


def find(name: str, table: Table, *, exactly: bool = False) -> Row | None:
    """Return the row of an option. Exact names take precedence over patterns."""
    rows = [row for section in table.values() for row in section]
    for matches in (operator.eq,) if exactly else (operator.eq, fnmatchcase):
        for row in rows:
            if any(matches(name, pattern) for pattern in row.names.split()):
                return row
    return None


def answer(typed: str, value: str | None, table: Table) -> str | None:
    """Return the advice for an option; None if the table does not have it.

    Underscores count as dashes, and text after a dot is a key of the option. vLLM does the same.
    """
    name = typed.partition(".")[0].replace("_", "-").removeprefix("--")
    plain = name.removeprefix("no-")
    is_negated = plain != name and find(name, table, exactly=True) is None
    row = find(plain if is_negated else name, table)
    if row is None:
        return None
    return row.negation(f"--{plain}") if is_negated else row.answer(value)


def markdown(table: Table = SERVERS, kinds: Sequence[Kind] = ("use", "always on")) -> str:
    """Return a Markdown table of these kinds of rows, for recipes/README.md."""
    rows = [row.in_markdown for section in table.values() for row in section if row.kind in kinds]
    return "\n".join(["| vLLM, SGLang | nanovllm |", "|---|---|", *rows])


if __name__ == "__main__":
    click.echo(markdown())
