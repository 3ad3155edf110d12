"""Run by test_gpu_memory.py with a model's directory: a real vLLM in this process, with its weights described in place.

Prints as JSON what is described, and what comes of vLLM's own reload on another thread, as the disk rung runs it.
"""

from __future__ import annotations

import json
import os
import sys
import threading

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

import torch
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config

from relight.core.fingerprint import Fingerprint
from relight.plugin.vllm import describing
from relight.plugin.vllm.device_weights import DeviceWeights
from tests.unit.transfer.fake_cuda import FakeCuda

NOBODY = Fingerprint({}, {}, {})
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def main(path: str) -> None:
    llm = LLM(
        path, dtype="bfloat16", enforce_eager=True, max_model_len=256, max_num_seqs=4, kv_cache_memory_bytes=33554432,
        distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
    )  # fmt: skip
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    model, failed = worker.get_model(), list[str]()
    weights = DeviceWeights({"": model}, FakeCuda(0), "cpu")
    ask = lambda: list(llm.generate([{"prompt_token_ids": [1, 2, 3]}], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)  # noqa: E731
    before = ask()
    weights.settle([])
    first = weights.describe(NOBODY)
    described = {name for entry in weights.table.values() for name in (entry.name, *entry.aliases)}
    missing = sorted({name for name, p in model.named_parameters() if p.numel()} - described)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.zero_()

    def reload() -> None:
        try:
            with torch.no_grad(), set_current_vllm_config(worker.vllm_config):
                worker.model_runner.reload_weights(weights_path=path)
            weights.restore_places()
        except Exception as error:  # noqa: BLE001 - whatever it was, it is told
            failed.append(repr(error))

    zeroed = weights.describe(NOBODY)
    thread = threading.Thread(target=reload)
    thread.start()
    thread.join()
    second = weights.describe(NOBODY)
    said = {
        "unfit": weights.unfit, "left_out": weights.left_out, "missing": missing, "tensors": len(weights.table),
        "failed": failed, "gone": zeroed.content_digest() != first.content_digest(),
        "same": second.content_digest() == first.content_digest(), "answers": ask() == before,
        "kernels": [describing.kernels(worker.vllm_config) for _ in range(2)],
    }  # fmt: skip
    print(json.dumps(said), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
