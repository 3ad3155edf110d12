"""What a zygote imports of vLLM, and what a child forked from it has to set that an import would have read.

Importing vLLM, torch's compiler and the server takes 7 to 8 s of processor time, three times over in an ordinary start
(server, engine core, worker).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

MODULES = (
    "vllm.entrypoints.cli.main", "vllm.entrypoints.cli.openai", "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.cli.launch", "vllm.entrypoints.cli.benchmark.main", "vllm.entrypoints.cli.collect_env",
    "vllm.entrypoints.cli.download_kernels", "vllm.entrypoints.cli.preload", "vllm.entrypoints.cli.run_batch",
    "vllm.entrypoints.cli.snapshot", "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.launchers.api_server.routers", "vllm.entrypoints.launchers.api_server.app_state",
    "vllm.entrypoints.serve.dev.sleep.api_router", "vllm.entrypoints.rl.online.api_router",
    "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor", "vllm.v1.structured_output", "vllm.v1.sample.sampler",
    "vllm.model_executor.model_loader", "vllm.model_executor.models.registry",
    "vllm.entrypoints.launchers.run_batch", "vllm.renderers.hf", "vllm.transformers_utils.chat_templates.registry",
    "vllm.compilation.backends", "vllm.compilation.caching", "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.quantization.online.base", "vllm.model_executor.layers.fused_moe.oracle.int8",
    "vllm.model_executor.layers.fused_moe.oracle.mxfp8", "vllm.model_executor.layers.fused_moe.oracle.nvfp4",
    "vllm.v1.pool.flash_maxsim.flash_maxsim_rerank", "vllm.triton_utils.dispatcher", "vllm.utils.cpu_triton_utils",
    "torch._dynamo", "torch._dynamo.backends.inductor", "torch._inductor.compile_fx", "torch._inductor.hooks",
    "torch._inductor.codegen.memory_planning", "torch._functorch._aot_autograd.subclass_codegen",
    "torch.fx.experimental.validator", "setproctitle", "uvloop",
    "relight.plugin.vllm.register", "relight.plugin.vllm.aot",
)  # fmt: skip
"""What vLLM's server and engine core import on their way to the first token, much of it only when it is needed.

A release that moves one is told by name (ImportError), and starts are ordinary until this list follows it."""
CPU_MODULES = ("vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn", "relight.plugin.vllm.worker")
GPU_MODULES = ("vllm.v1.worker.gpu_worker", "relight.plugin.vllm.gpu_worker")
"""Imports alone: nothing in them may touch a device, which the zygote checks before it forks."""


_INDUCTOR = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
"""Where the zygote's own compiler works; read before a child's environment is laid over it."""
_EACH_ITS_OWN = frozenset({"--port", "--host", "--served-model-name"})


def preload() -> None:
    """Imports everything that an engine of any model needs. Raises ImportError, in which case starts are ordinary."""
    for name in MODULES:
        importlib.import_module(name)
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    for name in CPU_MODULES if on_cpu else GPU_MODULES:
        importlib.import_module(name)
    from torch._inductor import codecache
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    # Each of these is kept for the life of a process: how vLLM logs, its arguments with their help, a digest of torch's
    # own sources.
    configure_logging_if_needed(LoggingConfig())
    _parser()
    codecache.torch_key()
    if on_cpu:
        # It looks through every module for kernels to replace; what is replaced stays so in a child.
        current_platform.register_triton_kernel_overrides()


def _parser() -> Any:
    """Of `vllm serve`. Where it is made moved between 0.32.0 and 0.33.0."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    return make_arg_parser(FlexibleArgumentParser())


def in_child(env: Mapping[str, str]) -> None:
    """Sets what libraries read from the environment when they were loaded, and lets the engine fork its own children.

    A spawned engine core or worker would import everything again, which is what all of this saves.
    """
    import torch
    from vllm.platforms import current_platform

    torch.set_num_threads(max(int(env.get("OMP_NUM_THREADS") or 1), 1))
    platform = type(current_platform)
    checked = platform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: object) -> None:
        checked(cls, vllm_config)
        # The CPU's platform asks for `spawn` here, for the sake of an OpenMP that this process has not begun to use.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = classmethod(check_and_update_config)
    if current_platform.is_cpu():
        platform.register_triton_kernel_overrides = classmethod(lambda cls: None)
        _bind_workers()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def _bind_workers() -> None:
    """Workers get the processors that vLLM chose for them: it tells OpenMP by variables, which was loaded before."""
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    told: Callable[..., AbstractContextManager[None]] = OMPProcessManager.configure_omp_envs

    @contextmanager
    def configure_omp_envs(self: Any, rank: int, local_rank: int) -> Iterator[None]:
        with told(self, rank, local_rank):
            if self.skip_setup:
                yield
                return
            with bound(self.cpu_lists[local_rank]):
                yield

    OMPProcessManager.configure_omp_envs = configure_omp_envs


@contextmanager
def bound(cpus: Collection[int]) -> Iterator[None]:
    """What is forked meanwhile runs on `cpus` alone, with a thread of OpenMP for each. Raises OSError for one that is
    not this process's to use."""
    import torch

    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, cpus)
    try:
        torch.set_num_threads(len(cpus))
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def model_of(argv: Sequence[str]) -> str:
    """What engines of one model have in common: their command line without what is each one's own."""
    words, own = [], False
    for word in argv[3:]:
        name = word.partition("=")[0]
        if not own and name not in _EACH_ITS_OWN:
            words.append(word)
        own = name in _EACH_ITS_OWN and "=" not in word
    return " ".join(words)


def prepare(argv: Sequence[str]) -> None:
    """Reads a model's configuration, tokenizer and chat template, as the server will: vLLM keeps what it read."""
    from torch._inductor import cpu_vec_isa
    from vllm.config import CompilationMode
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.logger import configure_logging_from_args
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.renderers.hf import resolve_chat_template
    from vllm.tokenizers.registry import cached_tokenizer_from_config
    from vllm.usage.usage_lib import UsageContext

    arguments = _parser().parse_args(list(argv[4:]))
    arguments.model = arguments.model_tag or arguments.model
    configure_logging_from_args(arguments)
    load_general_plugins()
    config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
    tokenizer = cached_tokenizer_from_config(config.model_config)
    if tokenizer is not None:
        resolve_chat_template(tokenizer, None, None, model_config=config.model_config)
    ModelRegistry.resolve_model_cls(config.model_config.architectures, config.model_config)
    if current_platform.is_cpu() and config.compilation_config.mode != CompilationMode.NONE:
        # Which vector instructions work is found out by a compiled program and an interpreter for each: seconds, in a
        # place of the zygote's own, since the engine's is sealed as it is.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = _INDUCTOR
        cpu_vec_isa.pick_vec_isa()
