"""What our adapters take for granted of the engines, one line each: it is read out of the engines' own source.

route   method and path of its HTTP           field   Class.name, function(parameter), function['word in it']
flag    an option of its command line         symbol  a class, function or constant
env     a variable that it reads              entry   an entry point, as group: name
does    function: a word that stands in it, with what we rely on when it does; lacks: one that does not
"""

from __future__ import annotations

from dataclasses import dataclass

V32, V33 = "0.32.0", "0.33.0"
BOTH = (V32, V33)
API, DRIVER = "agent.engines.vllm_api.VllmApi", "agent.engines.vllm"
GPU = "agent.engines.vllm_outside.VllmOutsideHandle"
PLACES = "agent.engines.vllm_places"
SAPI, SGL, SDRIVER = "agent.engines.sglang_api.SglangApi", "agent.engines.sglang_handle", "agent.engines.sglang"
OUTSIDE = "agent.engines.outside.OutsideHandle"
WORKER = "plugin.vllm.gpu_worker.RelightGPUWorker"
PAGES, MEMORY = "plugin.vllm.allocator", "plugin.vllm.gpu_memory"


@dataclass(frozen=True, slots=True)
class Contract:
    """`where` is a file, a folder that ends with `/`, or several with `|`; `used` the function of ours, by its path."""

    package: str
    versions: tuple[str, ...]
    kind: str
    what: str
    where: str
    used: str

    def __str__(self) -> str:
        return f"{self.package} {self.kind} {self.what}"


def _of(package: str, versions: tuple[str, ...], *lines: tuple[str, str, str, str]) -> tuple[Contract, ...]:
    return tuple(Contract(package, versions, *line) for line in lines)


_DEV, _RL = "vllm/entrypoints/serve/dev/", "vllm/entrypoints/rl/online/api_router.py"
_BASIC, _ARGS = "vllm/entrypoints/serve/instrumentator/", "vllm/engine/arg_utils.py"
_CLI = "vllm/entrypoints/launchers/cli_args.py|vllm/entrypoints/common/cli_args.py"
_COMPLETION = "vllm/entrypoints/openai/completion/protocol.py"
_LOGGERS, _ENVS = "vllm/v1/metrics/loggers.py", "vllm/envs.py"
_GPU_WORKER, _CORE, _EXECUTOR = "vllm/v1/worker/gpu_worker.py", "vllm/v1/engine/core.py", "vllm/v1/executor/abstract.py"
_ALLOCATORS = "vllm/device_allocator/"
_OPENMP = "vllm/utils/ompmultiprocessing.py"
_CUMEM = f"{_ALLOCATORS}cumem.py"

VLLM = _of(
    "vllm", BOTH,
    ("symbol", "OMPProcessManager.configure_omp_envs", _OPENMP, "plugin.vllm.preload._bind_workers"),
    ("does", "OMPProcessManager.configure_omp_envs: skip_setup", _OPENMP, "plugin.vllm.preload._bind_workers"),
    ("does", "OMPProcessManager.configure_omp_envs: cpu_lists", _OPENMP, "plugin.vllm.preload._bind_workers"),
    ("route", "GET /health", _BASIC, f"{API}.healthy"),
    ("route", "GET /version", _BASIC, f"{API}.version"),
    ("does", "attach_router: /metrics", f"{_BASIC}metrics.py", f"{API}.load"),
    ("route", "POST /sleep", _DEV, f"{API}.sleep"),
    ("field", "sleep(level)", f"{_DEV}sleep/api_router.py", f"{API}.sleep"),
    ("field", "sleep(mode)", f"{_DEV}sleep/api_router.py", f"{API}.sleep"),
    ("route", "POST /wake_up", _DEV, f"{API}.wake_up"),
    ("field", "wake_up['tags']", f"{_DEV}sleep/api_router.py", f"{API}.wake_up"),
    ("field", "wake_up['status']", f"{_DEV}sleep/api_router.py", f"{API}.wake_up"),
    ("field", "wake_up['awake']", f"{_DEV}sleep/api_router.py", f"{API}.wake_up"),
    ("route", "GET /is_sleeping", _DEV, f"{API}.asleep"),
    ("field", "is_sleeping['is_sleeping']", f"{_DEV}sleep/api_router.py", f"{API}.asleep"),
    ("route", "POST /collective_rpc", _DEV, f"{API}.rpc"),
    ("field", "collective_rpc['method']", f"{_DEV}rpc/api_router.py", f"{API}.rpc"),
    ("field", "collective_rpc['kwargs']", f"{_DEV}rpc/api_router.py", f"{API}.rpc"),
    ("field", "collective_rpc['results']", f"{_DEV}rpc/api_router.py", f"{API}.rpc"),
    ("route", "POST /weight_checker", _RL, f"{API}.checksums"),
    ("field", "weight_checker(action)", _RL, f"{API}.checksums"),
    ("field", "weight_checker['checksum']", _RL, f"{API}.checksums"),
    ("field", "weight_checker['checksums']", _RL, f"{API}.checksums"),
    ("route", "POST /v1/completions", "vllm/entrypoints/openai/completion/", f"{API}.complete"),
    *(("field", f"CompletionRequest.{name}", _COMPLETION, f"{API}.complete") for name in (
        "model", "prompt", "temperature", "max_tokens", "logprobs", "ignore_eos", "add_special_tokens",
        "return_token_ids", "cache_salt",
    )),
    ("field", "CompletionLogProbs.token_logprobs", _COMPLETION, f"{API}.generate"),
    ("field", "CompletionResponseChoice.token_ids", _COMPLETION, f"{API}.generate"),
    ("field", "CompletionResponseChoice.logprobs", _COMPLETION, f"{API}.generate"),
    ("field", "CompletionResponse.choices", _COMPLETION, f"{API}.generate"),
    ("symbol", "Worker.compute_weight_checksums", _GPU_WORKER, f"{GPU}._digests"),
    ("does", "PrometheusStatLogger: vllm:num_requests_running", _LOGGERS, f"{API}.load"),
    ("does", "PrometheusStatLogger: vllm:num_requests_waiting", _LOGGERS, f"{API}.load"),
    ("does", "PrometheusStatLogger: vllm:generation_tokens", _LOGGERS, f"{API}.load"),
    ("does", "PrometheusStatLogger: vllm:prompt_tokens", _LOGGERS, f"{API}.load"),
    *(("flag", name, _ARGS, f"{DRIVER}.VllmDriver.command") for name in (
        "--worker-cls", "--load-format", "--model", "--enable-sleep-mode", "--tensor-parallel-size", "-tp",
        "--pipeline-parallel-size", "-pp", "--data-parallel-size", "--enable-expert-parallel", "-ep",
        "--distributed-executor-backend", "--served-model-name", "--enable-lora", "--max-loras",
    )),
    *(("flag", name, _CLI, f"{DRIVER}.VllmDriver.command") for name in ("--host", "--port", "--uds", "--lora-modules")),
    ("flag", "--kv-cache-memory-bytes", _ARGS, f"{DRIVER}._cache_bytes"),
    ("flag", "--gpu-memory-utilization", _ARGS, f"{PLACES}.place"),
    ("flag", "--compilation-config", _ARGS, f"{PLACES}.arranged"),
    ("flag", "-cc", _ARGS, f"{PLACES}.arranged"),
    ("field", "CompilationConfig.cudagraph_mode", "vllm/config/compilation.py", f"{PLACES}.arranged"),
    *(("env", name, _ENVS, f"{DRIVER}.VllmDriver._environment") for name in (
        "VLLM_PLUGINS", "VLLM_SERVER_DEV_MODE", "VLLM_NO_USAGE_STATS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CACHE_ROOT",
    )),
    ("does", "load_plugins_by_group: VLLM_PLUGINS", "vllm/plugins/__init__.py", f"{PLACES}.place"),
    ("symbol", "PLATFORM_PLUGINS_GROUP", "vllm/plugins/__init__.py", f"{PLACES}.place"),
    # What a sleep and a start beside others rest on.
    ("does", "Worker.sleep: assert", _GPU_WORKER, f"{GPU}._release"),
    ("does", "Worker.sleep: get_memory_info", _GPU_WORKER, f"{GPU}._release"),
    ("does", "Worker.sleep: named_buffers", _GPU_WORKER, f"{GPU}._release"),
    ("does", "Worker.determine_available_memory: kv_cache_memory_bytes", _GPU_WORKER, f"{PLACES}.wrong"),
    ("does", "request_memory: gpu_memory_utilization", "vllm/v1/worker/utils.py", f"{PLACES}.place"),
    ("does", "request_memory: raise", "vllm/v1/worker/utils.py", f"{PLACES}.place"),
    ("symbol", "Worker.reload_weights", _GPU_WORKER, f"{GPU}._reload"),
    ("field", "GPUModelRunner.reload_weights(weights_path)", "vllm/v1/worker/gpu_model_runner.py", f"{GPU}._reload"),
    ("field", "GPUModelRunner.reload_weights(weights_path)", "vllm/v1/worker/gpu/model_runner.py", f"{GPU}._reload"),
    ("field", "EngineCore.sleep(mode)", _CORE, f"{GPU}._release"),
    ("does", "EngineCore.sleep: pause_scheduler", _CORE, f"{GPU}._pause"),
    ("does", "EngineCore.wake_up: resume_scheduler", _CORE, f"{GPU}._continue"),
    ("does", "EngineCore.wake_up: is_sleeping", _CORE, f"{GPU}._bring_back"),
    ("does", "SLEEP_TAGS: weights", _EXECUTOR, f"{GPU}._bring_back"),
    ("does", "SLEEP_TAGS: kv_cache", _EXECUTOR, f"{GPU}._bring_back"),
    ("does", "Executor.sleep: sleeping_tags", _EXECUTOR, f"{OUTSIDE}.suspend"),
    ("does", "CuMemAllocator: is_asleep", "vllm/device_allocator/cumem.py", f"{OUTSIDE}.suspend"),
    # What moves weights on a device from inside.
    *(("field", f"AllocationData.{name}", f"{_ALLOCATORS}__init__.py", f"{PAGES}.Allocator.of") for name in (
        "handle", "tag", "is_asleep", "cpu_backup_tensor",
    )),
    ("does", "CuMemAllocator: pointer_to_data", _CUMEM, f"{PAGES}.Allocator.of"),
    ("does", "CuMemAllocator: allocator_and_pools", _CUMEM, f"{PAGES}.Allocator.live"),
    ("field", "CuMemAllocator.sleep(offload_tags)", _CUMEM, f"{PAGES}.AllocatorPages.give_back"),
    ("does", "CuMemAllocator.wake_up: cpu_backup_tensor", _CUMEM, f"{PAGES}.AllocatorPages.bring_back"),
    ("does", "CuMemAllocator.wake_up: is_asleep", _CUMEM, f"{PAGES}.AllocatorPages.bring_back"),
    *(("does", f"CuMemBackend.suspend: {tag}", f"{_ALLOCATORS}sleep_mode_backend.py",
       f"{PAGES}.AllocatorPages.give_back") for tag in ("runtime", "cudagraph")),
    ("does", "Worker.load_model: weights", _GPU_WORKER, f"{PAGES}.AllocatorPages.keep"),
    ("does", "Worker.wake_up: weights", _GPU_WORKER, f"{PAGES}.AllocatorPages.bring_back"),
    ("does", "Worker.wake_up: _sleep_saved_buffers", _GPU_WORKER, f"{PAGES}.AllocatorPages.bring_back"),
    ("symbol", "Worker.get_draft_model", _GPU_WORKER, f"{MEMORY}.GpuMemory._find"),
    ("does", "Executor.wake_up: is_sleeping", _EXECUTOR, f"{WORKER}.wake_up"),
    *(("field", f"ModelConfig.{name}", "vllm/config/model.py", f"{MEMORY}.obstacle") for name in (
        "enable_sleep_mode", "sleep_mode_backend", "enable_nccl_comm_suspend",
    )),
    ("field", "ParallelConfig.enable_eplb", "vllm/config/parallel.py", f"{MEMORY}.obstacle"),
    ("field", "UVAOffloadConfig.cpu_offload_gb", "vllm/config/offload.py", f"{MEMORY}.obstacle"),
    ("field", "PrefetchOffloadConfig.offload_group_size", "vllm/config/offload.py", f"{MEMORY}.obstacle"),
    *(("field", f"ParallelConfig.{name}", "vllm/config/parallel.py", "plugin.vllm.describing.kernels") for name in (
        "enable_expert_parallel", "expert_placement_strategy", "data_parallel_size",
    )),
    *(("field", f"VllmConfig.{name}", "vllm/config/vllm.py", "plugin.vllm.describing.kernels") for name in (
        "kernel_config", "cache_config", "speculative_config",
    )),
    ("symbol", "KernelConfig.compute_hash", "vllm/config/kernel.py", "plugin.vllm.describing.kernels"),
    ("symbol", "SpeculativeConfig.compute_hash", "vllm/config/speculative.py", "plugin.vllm.describing.kernels"),
    ("symbol", "compile_factors", _ENVS, "plugin.vllm.describing.kernels"),
    ("symbol", "Worker.wake_up", _GPU_WORKER, f"{WORKER}.wake_up"),
    ("symbol", "Worker.discard", _GPU_WORKER, f"{WORKER}.discard"),
    ("symbol", "Worker.compile_or_warm_up_model", _GPU_WORKER, f"{WORKER}.compile_or_warm_up_model"),
    ("field", "Worker.load_model(load_dummy_weights)", _GPU_WORKER, f"{WORKER}.load_model"),
    ("field", "VllmConfig.compilation_config", "vllm/config/vllm.py", "plugin.vllm.describing.runtime"),
)  # fmt: skip

_HTTP, _IO = "sglang/srt/entrypoints/http_server.py", "sglang/srt/managers/io_struct.py"
_SCHEDULER = "sglang/srt/managers/scheduler.py"
_MANAGER = "SchedulerWeightUpdaterManager"
_UPDATER, _FIELDS = "sglang/srt/managers/scheduler_components/weight_updater.py", "sglang/srt/arg_groups/fields/"
_TOKENIZER, _ENVIRON = "sglang/srt/managers/tokenizer_manager.py", "sglang/srt/environ.py"
_REMOTE = "sglang/srt/model_loader/remote_instance_weight_loader_utils.py"
_MEMORY = "sglang/srt/managers/scheduler_components/memory_usage.py"

SGLANG = _of(
    "sglang", ("0.5.23",),
    ("symbol", "run_server", "sglang/launch_server.py", f"{SDRIVER}.SglangDriver.command"),
    ("route", "GET /ready", _HTTP, f"{SAPI}.ready"),
    ("does", "ready: is_ready", _HTTP, f"{SAPI}.ready"),
    ("does", "TokenizerManager.is_ready: is_pause", _TOKENIZER, f"{SAPI}.ready"),
    ("does", "TokenizerManager.is_ready: is_healthy", _TOKENIZER, f"{SAPI}.ready"),
    ("route", "GET /v1/loads", "sglang/srt/entrypoints/v1_loads.py", f"{SAPI}.loads"),
    ("field", "get_loads(include)", "sglang/srt/entrypoints/v1_loads.py", f"{SAPI}.loads"),
    ("field", "get_loads['loads']", "sglang/srt/entrypoints/v1_loads.py", f"{SAPI}.loads"),
    ("does", "LoadSnapshot: core", "sglang/srt/managers/load_snapshot.py", f"{SAPI}.loads"),
    *(("field", f"LoadSnapshot.{name}", "sglang/srt/managers/load_snapshot.py", f"{SAPI}.loads") for name in (
        "timestamp", "num_running_reqs", "num_waiting_reqs",
    )),
    ("does", "Scheduler.on_idle: publish_load_snapshot", _SCHEDULER, f"{SAPI}.loads"),
    ("route", "GET /model_info", _HTTP, f"{SAPI}.model"),
    ("field", "model_info['load_format']", _HTTP, f"{SGL}.SglangHandle._read"),
    ("field", "model_info['architectures']", _HTTP, f"{SGL}.SglangHandle._read"),
    ("route", "GET /server_info", _HTTP, f"{SAPI}.server"),
    ("field", "server_info['internal_states']", _HTTP, f"{SGL}.SglangHandle._read"),
    ("field", "server_info['version']", _HTTP, f"{SGL}.SglangHandle._read"),
    ("does", "build_server_info: resolved_dict", "sglang/srt/utils/common.py", f"{SGL}.SglangHandle._read"),
    ("does", "SchedulerInternalStateController._add_memory_usage: memory_usage",
     "sglang/srt/managers/scheduler_components/internal_state.py", f"{SGL}.SglangHandle._read"),
    ("field", "build_memory_usage['weight']", _MEMORY, f"{SGL}.SglangHandle._read"),
    ("field", "build_memory_usage['kvcache']", _MEMORY, f"{SGL}.SglangHandle._read"),
    *(("flag", f"--{name}", _FIELDS, f"{SGL}.SglangHandle._read") for name in (
        "dtype", "quantization", "context-length", "attention-backend",
    )),
    ("route", "POST /weights_checker", _HTTP, f"{SAPI}.checksums"),
    ("field", "CheckWeightsReqInput.action", _IO, f"{SAPI}.checksums"),
    ("field", "ChecksumInfo.checksums", _IO, f"{SAPI}.checksums"),
    ("field", "check_weights['ranks']", _HTTP, f"{SAPI}.checksums"),
    ("does", "WeightChecker.handle: checksum", "sglang/srt/utils/weight_checker.py", f"{SAPI}.checksums"),
    ("does", "WeightChecker._model_state: named_buffers", "sglang/srt/utils/weight_checker.py", f"{SAPI}.checksums"),
    ("route", "POST /pause_generation", _HTTP, f"{SAPI}.pause"),
    ("field", "PauseGenerationReqInput.mode", _IO, f"{SAPI}.pause"),
    ("does", "PauseGenerationReqInput: abort", _IO, f"{SGL}.SglangHandle._pause"),
    ("does", "PauseGenerationReqInput: retract", _IO, f"{SGL}.SglangHandle._pause"),
    ("does", "Scheduler.pause_generation: _engine_paused", _SCHEDULER, f"{SGL}.SglangHandle._pause"),
    ("does", "TokenizerManager.pause_generation: abort", _TOKENIZER, f"{SGL}.SglangHandle._pause"),
    ("route", "POST /continue_generation", _HTTP, f"{SAPI}.resume_requests"),
    ("field", "ContinueGenerationReqInput.torch_empty_cache", _IO, f"{SAPI}.resume_requests"),
    ("route", "POST /release_memory_occupation", _HTTP, f"{SAPI}.release"),
    ("field", "ReleaseMemoryOccupationReqInput.tags", _IO, f"{SAPI}.release"),
    ("does", f"{_MANAGER}.release_memory_occupation: assert", _UPDATER, f"{SGL}.SglangHandle._release"),
    ("does", f"{_MANAGER}.release_memory_occupation: ignore_waiting", _UPDATER,
     f"{SGL}.SglangHandle._pause"),
    ("does", f"{_MANAGER}.release_memory_occupation: _export_static_state", _UPDATER,
     f"{SGL}.SglangHandle._release"),
    ("route", "POST /resume_memory_occupation", _HTTP, f"{SAPI}.bring_back"),
    ("field", "ResumeMemoryOccupationReqInput.tags", _IO, f"{SAPI}.bring_back"),
    ("does", f"{_MANAGER}.resume_memory_occupation: remove", _UPDATER,
     f"{OUTSIDE}._changing"),
    ("does", "GPU_MEMORY_TYPE_WEIGHTS: weights", "sglang/srt/constants.py", f"{SGL}.SglangHandle"),
    ("does", "GPU_MEMORY_TYPE_KV_CACHE: kv_cache", "sglang/srt/constants.py", f"{SGL}.SglangHandle"),
    ("does", "GPU_MEMORY_TYPE_CUDA_GRAPH: cuda_graph", "sglang/srt/constants.py", f"{SGL}.SglangHandle"),
    ("route", "POST /update_weights_from_disk", _HTTP, f"{SAPI}.load_from_disk"),
    *(("field", f"UpdateWeightFromDiskReqInput.{name}", _IO, f"{SAPI}.load_from_disk") for name in (
        "model_path", "load_format", "weight_version", "flush_cache",
    )),
    ("field", "update_weights_from_disk['success']", _HTTP, f"{SAPI}.load_from_disk"),
    ("does", "TokenizerManager.update_weights_from_disk: is_pause", _TOKENIZER, f"{SGL}.SglangHandle._reload"),
    ("does", "WeightUpdater.update_weights_from_disk: DefaultModelLoader",
     "sglang/srt/model_executor/model_runner_components/weight_updater.py", f"{SGL}.SglangHandle._reload"),
    ("route", "POST /generate", _HTTP, f"{SAPI}.generate"),
    *(("field", f"GenerateReqInput.{name}", _IO, f"{SAPI}.generate") for name in (
        "input_ids", "rid", "return_logprob", "sampling_params", "extra_key",
    )),
    *(("field", f"SamplingParams.{name}", "sglang/srt/sampling/sampling_params.py", f"{SAPI}.generate") for name in (
        "temperature", "max_new_tokens", "ignore_eos",
    )),
    ("does", "TokenizerManager: meta_info", _TOKENIZER, f"{SAPI}.generate"),
    ("does", "TokenizerManager: output_token_logprobs", _TOKENIZER, f"{SAPI}.generate"),
    # Who may call what.
    ("does", "release_memory_occupation: tokenizer_manager", _HTTP, f"{SDRIVER}.SglangDriver.command"),
    ("does", "decide_request_auth: admin_api_key", "sglang/srt/utils/auth.py", f"{SGL}.new_key"),
    ("does", "decide_request_auth: /ready", "sglang/srt/utils/auth.py", f"{SAPI}.ready"),
    ("lacks", "server_info: auth_level", _HTTP, f"{SGL}.new_key"),
    ("does", "ConfigArgumentMerger: --config", "sglang/srt/utils/server_args_config_parser.py", f"{SGL}.new_key"),
    ("flag", "--config", "sglang/srt/server_args.py", f"{SDRIVER}.SglangDriver.command"),
    *(("flag", name, _FIELDS, f"{SDRIVER}.SglangDriver.command") for name in (
        "--model-path", "--model", "--host", "--port", "--served-model-name", "--admin-api-key", "--api-key",
        "--enable-memory-saver", "--enable-weights-cpu-backup", "--weight-version", "--tp-size",
        "--tensor-parallel-size", "--ep-size", "--expert-parallel-size", "--ep", "--dp-size",
        "--data-parallel-size", "--nnodes", "--base-gpu-id", "--skip-server-warmup", "--engine-info-bootstrap-port",
    )),
    *(("flag", name, _FIELDS, f"{SDRIVER}._check") for name in (
        "--load-format", "--weight-cache-mode", "--startup-weight-load-mode", "--enable-lora", "--lora-paths",
        "--remote-instance-weight-loader-backend", "--speculative-algorithm",
    )),
    *(("env", name, _ENVIRON, f"{SDRIVER}.SglangDriver._environment") for name in (
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "SGLANG_MEMORY_SAVER_CUDA_GRAPH", "SGLANG_CACHE_DIR",
        "SGLANG_DG_CACHE_DIR",
    )),
    # The traps.
    ("does", "health_generate: SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", _HTTP,
     f"{SDRIVER}.SglangDriver._environment"),
    ("does", "health_generate: generate_request", _HTTP, f"{SGL}.SglangHandle._ready"),
    ("does", "FullCudaGraphBackend: SGLANG_MEMORY_SAVER_CUDA_GRAPH",
     "sglang/srt/model_executor/runner_backend/full_cuda_graph_backend.py", f"{SDRIVER}.SglangDriver._environment"),
    ("does", "validate_transfer_engine: enable_memory_saver", "sglang/srt/arg_groups/model_path_hook.py",
     f"{SDRIVER}._check"),
    ("lacks", "trigger_init_weights_send_group_for_remote_instance_request: headers", _REMOTE, f"{SDRIVER}._check"),
    ("lacks", "trigger_transferring_weights_request: headers", _REMOTE, f"{SDRIVER}._check"),
    ("does", "_set_envs_and_config: spawn", "sglang/srt/entrypoints/engine.py", f"{SDRIVER}.SglangDriver.zygote"),
    ("does", f"{_MANAGER}: _assert_weight_cache_inactive", _UPDATER, f"{SDRIVER}._check"),
)  # fmt: skip

SAVER = _of(
    "torch-memory-saver", ("0.0.10",),
    ("symbol", "TorchMemorySaver.pause", "torch_memory_saver/entrypoint.py", f"{SGL}.SglangHandle._release"),
    ("symbol", "TorchMemorySaver.resume", "torch_memory_saver/entrypoint.py", f"{SGL}.SglangHandle._bring_back"),
    ("field", "TorchMemorySaver.region(enable_cpu_backup)", "torch_memory_saver/entrypoint.py", f"{SDRIVER}._memory"),
    ("field", "TorchMemorySaver.cuda_graph(tag)", "torch_memory_saver/entrypoint.py",
     f"{SDRIVER}.SglangDriver._environment"),
    ("does", "_sanity_checks: expandable_segments:True", "torch_memory_saver/entrypoint.py", f"{SDRIVER}._check"),
)  # fmt: skip

_KUNLUN = "vllm_kunlun/platforms/kunlun.py"
KUNLUN = _of(
    "vllm-kunlun", ("0.11.1",),
    ("entry", "vllm.platform_plugins: kunlun", "", f"{PLACES}.place"),
    ("entry", "vllm.general_plugins: kunlun_model", "", f"{PLACES}.place"),
    ("entry", "vllm.general_plugins: kunlun_reasoning_parser", "", f"{PLACES}.place"),
    ("entry", "vllm.general_plugins: kunlun_tool_parser", "", f"{PLACES}.place"),
    ("does", "KunlunPlatform.get_device_name: kunlun", _KUNLUN, "agent.engines.visible.compiled_for"),
    ("does", "KunlunPlatform.check_and_update_config: vllm.v1.worker.gpu_worker.Worker", _KUNLUN, f"{PLACES}.place"),
    ("does", "KunlunPlatform.get_device_total_memory: virtual_memory", _KUNLUN, f"{PLACES}.wrong"),
    ("symbol", "_custom_import", "vllm_kunlun/__init__.py", f"{PLACES}.place"),
    # It says that it can sleep and has no allocator that gives memory back.
    ("does", "KunlunPlatform: is_sleep_mode_available", _KUNLUN, f"{PLACES}.sleeps"),
    ("lacks", "vllm_kunlun/: CuMemAllocator", "vllm_kunlun/", f"{PLACES}.sleeps"),
)  # fmt: skip

CONTRACTS = (*VLLM, *SGLANG, *SAVER, *KUNLUN)
