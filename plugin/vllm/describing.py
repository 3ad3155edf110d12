"""What a worker says of itself: what makes its bytes interchangeable with another's, and what a wake cannot change."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm import envs

LAYOUT_VERSION = "1"
"""Changes whenever the same engine would lay the same weights out differently."""


def layout(worker: Any, packing: str, device: str) -> dict[str, str]:
    """Of the worker's weights in memory. `packing` names what was done to them after they were loaded."""
    config, parallel = worker.model_config, worker.parallel_config
    fields = config.hf_config.to_dict()
    # Where the checkpoint lies says nothing about what lies in memory.
    for name in ("_name_or_path", "transformers_version"):
        fields.pop(name, None)
    text = json.dumps(fields, sort_keys=True, default=str)
    return {
        "engine": f"vllm {vllm_version}",
        "torch": torch.__version__,
        "relight_layout": LAYOUT_VERSION,
        "architectures": ",".join(config.hf_config.architectures or ()),
        "model_config": hashlib.sha256(text.encode()).hexdigest()[:16],
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": str(config.quantization or "none"),
        "packing": packing,
        "tensor_parallel": str(parallel.tensor_parallel_size),
        "pipeline_parallel": str(parallel.pipeline_parallel_size),
        "rank": str(worker.rank),
        "device": device,
    }


def kernels(config: Any) -> str:
    """What besides decides how vLLM arranges weights for its kernels on a GPU: equal arrangements have equal names."""
    parallel, speculative = config.parallel_config, config.speculative_config
    chosen = {
        "kernels": config.kernel_config.compute_hash(),
        "cache_dtype": str(config.cache_config.cache_dtype),
        "experts": [bool(parallel.enable_expert_parallel), str(parallel.expert_placement_strategy)],
        "data_parallel": parallel.data_parallel_size,
        "draft": None if speculative is None else speculative.compute_hash(),
        "environment": envs.compile_factors(),
    }
    text = json.dumps(chosen, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def runtime(worker: Any, cache_bytes: int) -> dict[str, str]:
    """What a guardian is bound to."""
    return {
        "max_model_len": str(worker.model_config.max_model_len),
        "kv_cache_bytes": str(cache_bytes),
        "max_num_seqs": str(worker.scheduler_config.max_num_seqs),
        "compile": str(worker.compilation_config.mode),
    }


def weight_bytes(model: torch.nn.Module) -> int:
    """Of parameters and buffers, tied ones once; their memory need not be there."""
    found = {}
    for tensor in (*model.parameters(), *model.buffers()):
        storage = tensor.untyped_storage()
        found[storage.data_ptr() or id(tensor)] = storage.nbytes()
    return sum(found.values())
