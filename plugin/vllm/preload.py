"""What a zygote imports of vLLM, and what a child forked from it has to set that an import would have read.

Importing vLLM, torch's compiler and the server takes 7 to 8 s of processor time, three times over in an ordinary start
(server, engine core, worker).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping

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
    "torch._dynamo", "torch._inductor.compile_fx", "uvloop",
)  # fmt: skip
CPU_MODULES = ("vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn", "relight.plugin.vllm.worker")
GPU_MODULES = ("vllm.v1.worker.gpu_worker",)
"""Imports alone: nothing in them may touch a device, which the zygote checks before it forks."""


def preload() -> None:
    """Imports everything that an engine of any model needs. Raises ImportError, in which case starts are ordinary."""
    for name in MODULES:
        importlib.import_module(name)
    from vllm.platforms import current_platform

    for name in CPU_MODULES if current_platform.is_cpu() else GPU_MODULES:
        importlib.import_module(name)


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
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
