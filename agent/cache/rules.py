"""Which arguments and variables of an engine change what it compiles. Data, with its sources; no I/O.

A variable that counts and should not makes every pod compile for itself; one that should and does not puts a bundle
where the engine will not select it, which is found and named at each start (agent/cache/outcome.py). So variables are
let in by family, and left out by name: what vLLM 0.32.0 leaves out of its own hash (`vllm.envs.compile_factors`), and
what only says where something lies, listens or logs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

FAMILIES = (
    "VLLM_", "SGLANG_", "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "TRITON_", "DG_", "FLASHINFER_", "TVM_",
    "TILELANG_", "CUTE_", "NVCC_",
)  # fmt: skip
"""Variables of engines and of the compilers under them."""
COMPILERS = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPATH", "CUDA_HOME", "OMP_NUM_THREADS")
"""Counted by name. Inductor writes the number of threads into the C++ that it generates
(torch/_inductor/codegen/cpp.py, `parallel_num_threads`); vLLM's own hash leaves it out."""

_VLLM_LEAVES_OUT = """
VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_RPC_BASE_PATH VLLM_USE_MODELSCOPE VLLM_RINGBUFFER_WARNING_INTERVAL
VLLM_DEBUG_DUMP_PATH VLLM_PORT VLLM_CACHE_ROOT VLLM_ENABLE_STARTUP_PLAN VLLM_XLA_CACHE_PATH VLLM_CONFIG_ROOT
VLLM_SERVER_DEV_MODE VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_RANDOMIZE_DP_DUMMY_INPUTS
VLLM_MODEL_REDIRECT_PATH VLLM_HOST_IP VLLM_ELASTIC_EP_SCALE_UP_LAUNCH VLLM_FORCE_AOT_LOAD VLLM_API_KEY
VLLM_USAGE_STATS_SERVER VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX
VLLM_LOGGING_STREAM VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_COLOR VLLM_LOG_STATS_INTERVAL
VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_TUNED_CONFIG_FOLDER VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR
VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT
VLLM_AUDIO_FETCH_TIMEOUT VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS
VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MEDIA_LOADING_THREAD_COUNT
VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_EMBED_DECODE_BYTES
VLLM_MAX_IMAGE_PIXELS VLLM_VIDEO_LOADER_BACKEND VLLM_MEDIA_CONNECTOR VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME
VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_WORKER_MULTIPROC_METHOD VLLM_ENABLE_V1_MULTIPROCESSING
VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_CPU_KVCACHE_SPACE VLLM_CPU_MOE_PREPACK VLLM_ZENTORCH_WEIGHT_PREPACK
VLLM_TEST_FORCE_LOAD_FORMAT VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_CUDA_COMPATIBILITY_PATH
VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_SKIP_VERSION_SUFFIX
"""
_PLACES_AND_SECRETS = """
TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR TRITON_HOME TRITON_DUMP_DIR TRITON_OVERRIDE_DIR DG_JIT_CACHE_DIR
FLASHINFER_WORKSPACE_BASE TVM_FFI_CACHE_DIR TILELANG_CACHE_DIR CUTE_DSL_CACHE_DIR SGLANG_CACHE_DIR SGLANG_DG_CACHE_DIR
SGLANG_CUTE_AOT_CACHE_DIR SGLANG_JIT_CACHE_DIR SGLANG_API_KEY SGLANG_ADMIN_API_KEY SGLANG_HOST_IP SGLANG_PORT
TORCH_LOGS TORCH_LOGS_OUT TORCH_TRACE TORCH_HOME PYTORCH_KERNEL_CACHE_PATH TORCHINDUCTOR_CACHE_KEY_TAG
"""
LEFT_OUT = frozenset((*_VLLM_LEAVES_OUT.split(), *_PLACES_AND_SECRETS.split()))
SERVICE_LINK = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
"""What Kubernetes puts into every pod for each Service: one named `vllm` makes names that look like vLLM's own."""

ALIASES: Mapping[str, str] = {
    "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size",
    "-q": "--quantization", "-cc": "--compilation-config", "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size", "--pp-size": "--pipeline-parallel-size", "--dp-size": "--data-parallel-size",
}  # fmt: skip
_SERVING = (
    "--host", "--port", "--uds", "--api-key", "--admin-api-key", "--served-model-name", "--seed", "--random-seed",
    "--load-format", "--log-level",
)  # fmt: skip
ARGUMENTS_LEFT_OUT: Mapping[str, frozenset[str]] = {
    # Measured with vLLM 0.32.0: its own key stays the same. The worker's class is not among them although vLLM leaves
    # it out: a worker decides what is traced.
    "vllm": frozenset(
        (
            *_SERVING, "--model-loader-extra-config", "--distributed-executor-backend", "--kv-cache-memory-bytes",
            "--gpu-memory-utilization", "--enable-prefix-caching", "--no-enable-prefix-caching",
            "--weight-transfer-config", "--ssl-keyfile", "--ssl-certfile", "--disable-log-stats", "--root-path",
            "--enable-log-requests", "--no-enable-log-requests",
        )
    ),
    "sglang": frozenset((*_SERVING, "--nccl-port", "--dist-init-addr", "--mem-fraction-static", "--enable-metrics")),
}  # fmt: skip
"""By engine; an engine that is not here counts them all."""


def counts(variable: str) -> bool:
    """Whether an environment variable changes what is compiled."""
    if variable in LEFT_OUT or SERVICE_LINK.search(variable):
        return False
    return variable in COMPILERS or variable.startswith(FAMILIES)
