"""vLLM's own classes around its graphs, on a machine without a GPU: only the primitive that captures is replaced.

Real: the worker's start, both runners' capture_model and capture loops, CudaGraphManager, CudagraphDispatcher,
CUDAGraphWrapper, the workspace, process groups. Made up: the model, its inputs, torch.cuda.CUDAGraph, torch.cuda.graph.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import vllm.distributed as distributed
import vllm.v1.worker.gpu.cudagraph_utils as v2
import vllm.v1.worker.gpu_model_runner as v1_runner
import vllm.v1.worker.gpu_worker as gpu_worker
from vllm.compilation import cuda_graph, monitor
from vllm.compilation.counter import compilation_counter
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import BatchDescriptor, get_forward_context, set_forward_context
from vllm.platforms import current_platform
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2Runner

from relight.core.clock import SystemClock
from relight.core.records import Mode
from relight.plugin.settings import Settings
from relight.plugin.stages import Stages
from relight.plugin.vllm.gpu_worker import RelightGPUWorker
from relight.plugin.vllm.graphs import v1 as v1_graphs

SIZES = [1, 2, 4, 8, 16, 24, 32, 40, 48, 64]
SEQS = 32
WIDTH = 4
GRAPH_BYTES = 3 << 20
HISTOGRAM = {1: 5.0, 3: 40.0, 12: 30.0, 20: 10.0, 60: 1.0, 500: 9.0}


class Capturing:
    """What takes the place of CUDA's capturing: a trace of (mode, tokens), and a fault on demand."""

    def __init__(self) -> None:
        self.now, self.trace, self.fail_at, self.grow_at = False, [], -1, -1

    @contextlib.contextmanager
    def graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Iterator[None]:
        if len(self.trace) == self.fail_at:
            self.fail_at = -1
            raise torch.OutOfMemoryError("no memory for a graph")
        if len(self.trace) == self.grow_at:
            workspace.current_workspace_manager().get_simultaneous(((1 << 20,), torch.uint8))
        assert not self.now
        self.now = True
        try:
            yield
        finally:
            self.now = False


class FakeGraph:
    replays = 0

    def replay(self) -> None:
        FakeGraph.replays += 1


CAPTURING = Capturing()


class Model(torch.nn.Module):
    """Rows of the token ids, by way of a compiled part that has a wrapper of its own, as pieces of vLLM's models do."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__()
        self.piece = CUDAGraphWrapper(self.compiled, config, CUDAGraphMode.PIECEWISE)

    def compiled(self, ids: torch.Tensor) -> torch.Tensor:
        if CAPTURING.now:
            mode = get_forward_context().cudagraph_runtime_mode
            name = "PIECEWISE" if mode == CUDAGraphMode.PIECEWISE else "FULL"
            CAPTURING.trace.append((name, ids.shape[0]))
        return ids.float().unsqueeze(1).repeat(1, WIDTH)

    def forward(self, input_ids: torch.Tensor, **rest: Any) -> torch.Tensor:
        return self.piece(input_ids)


@contextlib.contextmanager
def no_gpu() -> Iterator[None]:
    """The stand-ins for what needs a device."""
    with contextlib.ExitStack() as stack:
        put = lambda *a: stack.enter_context(patch.object(*a))  # noqa: E731
        put(torch.cuda, "CUDAGraph", FakeGraph)
        put(torch.cuda, "graph", CAPTURING.graph)
        for name in ("synchronize", "empty_cache"):
            put(torch.accelerator, name, lambda *a: None)
        put(torch.accelerator, "get_memory_info", lambda *a: ((1 << 40) - len(CAPTURING.trace) * GRAPH_BYTES, 1 << 40))
        pool = classmethod(lambda cls: (0, 1))
        stack.enter_context(patch.object(type(current_platform), "graph_pool_handle", pool, create=True))
        for module in (v2, v1_runner, v1_graphs):
            put(module, "graph_capture", lambda device: contextlib.nullcontext())
        for module in (v2, cuda_graph):
            put(module, "capture_pool", lambda pool, config: contextlib.nullcontext(pool))
            put(module, "current_stream", lambda: None)
        put(cuda_graph, "weak_ref_tensors", lambda tensors: tensors)
        put(v2, "has_compiled_submodule", lambda model: True)
        put(v2, "prepare_inputs_to_capture", lambda *a, **k: v2.AttentionState(None, None))
        put(gpu_worker, "kernel_warmup", lambda worker: None)
        put(gpu_worker, "set_random_seed", lambda *a: None)
        yield


def join(rank: int, ranks: int, rendezvous: str) -> None:
    """The process groups of a tensor parallel engine, by gloo."""
    # Shared memory of the ranks is found by this name, which a server makes up.
    os.environ["VLLM_DIST_IDENT"] = Path(rendezvous).parent.name
    with set_current_vllm_config(VllmConfig()):
        distributed.init_distributed_environment(ranks, rank, f"file://{rendezvous}", rank, "gloo")
        distributed.initialize_model_parallel(ranks, 1, backend="gloo")


def join_alone() -> None:
    join(0, 1, str(Path(tempfile.mkdtemp()) / "meet"))


def configured(mode: CUDAGraphMode) -> VllmConfig:
    config = VllmConfig()
    compilation = config.compilation_config
    compilation.mode, compilation.cudagraph_mode = CompilationMode.VLLM_COMPILE, mode
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = list(SIZES), max(SIZES)
    compilation.splitting_ops, compilation.cudagraph_num_of_warmups = list(compilation._attention_ops), 1
    compilation.backend = "eager"
    config.scheduler_config.max_num_seqs = SEQS
    config.kernel_config.enable_jit_warmup = False
    object.__setattr__(
        config,
        "model_config",
        SimpleNamespace(enforce_eager=False, seed=0, is_hybrid=False, is_attention_free=False),
    )
    return config


class V1Runner(v1_runner.GPUModelRunner):
    """The real runner without its __init__; a dummy run is the real dispatch and the model, without its inputs."""

    def _dummy_run(self, num_tokens: int, cudagraph_runtime_mode: Any = None, uniform_decode: bool = False, **k: Any):
        mode, desc = CUDAGraphMode.NONE, BatchDescriptor(num_tokens)
        if cudagraph_runtime_mode != CUDAGraphMode.NONE:
            mode, desc = self.cudagraph_dispatcher.dispatch(num_tokens, uniform_decode)
        assert cudagraph_runtime_mode in (None, mode), f"asked for {cudagraph_runtime_mode}, got {mode}"
        return self.run(mode, desc), None

    def run(self, mode: Any, desc: Any) -> torch.Tensor:
        with set_forward_context(None, self.vllm_config, num_tokens=desc.num_tokens, cudagraph_runtime_mode=mode,
                                 batch_descriptor=desc):  # fmt: skip
            return self.model(input_ids=torch.zeros(desc.num_tokens, dtype=torch.long))

    def _dummy_sampler_run(self, hidden_states: Any) -> None:
        pass


def _v1(config: VllmConfig, mode: CUDAGraphMode) -> Any:
    runner = V1Runner.__new__(V1Runner)
    model = Model(config)
    runner.cudagraph_dispatcher = CudagraphDispatcher(config)
    runner.cudagraph_dispatcher.initialize_cudagraph_keys(mode, 1)
    runner.model = CUDAGraphWrapper(model, config, CUDAGraphMode.FULL) if mode.has_full_cudagraphs() else model
    runner.load_config = SimpleNamespace(use_tqdm_on_load=False)
    runner.max_model_len, runner.max_num_tokens = 512, 2048
    runner.encoder_cudagraph_manager, runner.supports_mm_inputs, runner.is_pooling_model = None, False, False
    return runner


def _v2(config: VllmConfig, mode: CUDAGraphMode) -> Any:
    runner = V2Runner.__new__(V2Runner)
    runner.model = Model(config)
    runner.cudagraph_manager = v2.ModelCudaGraphManager(config, torch.device("cpu"), mode, 1)
    runner.model_state = SimpleNamespace(
        supports_mm_inputs=False, prepare_dummy_inputs=lambda *a: {}, capture_inner_cudagraphs=lambda *a: None
    )
    ids = torch.zeros(max(SIZES), dtype=torch.long)
    runner.input_buffers = SimpleNamespace(input_ids=ids, positions=ids, is_padding=torch.zeros(max(SIZES)))
    runner.pcp_manager = runner.intermediate_tensors = runner.block_tables = runner.attn_groups = None
    runner.kv_cache_config = runner.speculator = runner.adaptive_verification = None
    runner.use_aux_hidden_state_outputs = False
    runner.kv_connector = SimpleNamespace(reset_capture_state=lambda: None)
    return runner


class Engine:
    """One worker of Relight's around one of vLLM's runners, from just before its warm-up on."""

    def __init__(self, runner: str, mode: CUDAGraphMode, start: Mode, histogram: dict[int, float]) -> None:
        self.kind, self.config = runner, configured(mode)
        CUDAGraphWrapper._all_instances.clear()
        workspace.reset_workspace_manager()
        workspace.init_workspace_manager(torch.device("cpu"))
        workspace.current_workspace_manager().get_simultaneous(((256,), torch.uint8))
        monitor.set_cudagraph_capturing_enabled(True)
        CAPTURING.trace = []
        compilation_counter.num_cudagraph_captured = 0
        made = (_v1 if runner == "v1" else _v2)(self.config, mode)
        made.vllm_config, made.compilation_config = self.config, self.config.compilation_config
        made.parallel_config, made.device = self.config.parallel_config, torch.device("cpu")
        made.lora_config = made.execute_model_state = None
        self.runner = made
        worker = self.worker = RelightGPUWorker.__new__(RelightGPUWorker)
        worker.vllm_config, worker.model_config, worker.model_runner = self.config, self.config.model_config, made
        worker.compilation_config, worker.parallel_config = made.compilation_config, made.parallel_config
        worker.scheduler_config, worker.observability_config = self.config.scheduler_config, None
        worker.cache_config, worker.device = SimpleNamespace(kv_cache_memory_bytes=1), made.device
        worker.use_v2_model_runner = runner == "v2"
        worker.profiler = SimpleNamespace(capture_cuda_graphs=contextlib.nullcontext)
        # Its weights are of no interest here.
        worker._relight_stages, worker._relight_listen = Stages(SystemClock()), lambda: None
        worker._relight_settings = Settings(
            "i", Path("/x"), "h", "r", 2, mode=start, sizes=tuple(sorted(histogram.items()))
        )

    def start(self) -> None:
        self.worker.compile_or_warm_up_model()

    def graphs(self) -> list[tuple[str, ...]]:
        """Every graph that there is, by vLLM's own books."""
        found = [("FULL", str(desc)) for desc in getattr(getattr(self.runner, "cudagraph_manager", None), "graphs", ())]
        for wrapper in CUDAGraphWrapper._all_instances:
            entries = wrapper.concrete_cudagraph_entries.items()
            found += [(wrapper.runtime_mode.name, str(key)) for key, entry in entries if entry.cudagraph is not None]
        return sorted(found)

    def steps(self) -> list[tuple[int, bool, str, int]]:
        """Runs a step of every size, of decoding and of anything else: (tokens, decoding, mode, tokens of the graph).

        A step never captures.
        """
        before = compilation_counter.num_cudagraph_captured
        ran = []
        for tokens in range(1, max(SIZES) + 3):
            for decode in (True, False):
                if decode and tokens > SEQS:
                    continue
                mode, size = (self._step_v1 if self.kind == "v1" else self._step_v2)(tokens, decode)
                ran.append((tokens, decode, mode, size))
        assert compilation_counter.num_cudagraph_captured == before, "a step captured a graph"
        assert all(size >= tokens for tokens, _, _, size in ran)
        return ran

    def _step_v1(self, tokens: int, decode: bool) -> tuple[str, int]:
        mode, desc = self.runner.cudagraph_dispatcher.dispatch(tokens, decode)
        self.runner.run(mode, desc)
        return mode.name, desc.num_tokens

    def _step_v2(self, tokens: int, decode: bool) -> tuple[str, int]:
        manager = self.runner.cudagraph_manager
        reqs = tokens if decode else 1
        desc = manager.dispatch(reqs, tokens, 1 if decode else None, 0, 1 if decode else None)
        if desc.cg_mode == CUDAGraphMode.FULL:
            assert manager.run_fullgraph(desc).shape[0] == desc.num_tokens
        else:
            key = BatchDescriptor(num_tokens=desc.num_tokens)
            with set_forward_context(None, self.config, num_tokens=desc.num_tokens, cudagraph_runtime_mode=desc.cg_mode,
                                     batch_descriptor=key):  # fmt: skip
                manager.run_pw_graph(self.runner.model, {"input_ids": torch.zeros(desc.num_tokens, dtype=torch.long)})
        return desc.cg_mode.name, desc.num_tokens
