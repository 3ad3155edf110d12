"""An engine on a GPU, in a process of its own: python graphs_engine.py MODEL FILE. Writes what it saw, as JSON.

Run by test_graphs.py with an interpreter that has vLLM for GPUs. The engine's core runs in this process.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

PROMPTS = [[1, 17, 5, 99, 42, 7, 250, 3 + n] for n in range(24)]
BATCHES = (1, 3, 7, 24)
TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=1, ignore_eos=True)
HALF_FREE = 0.5
Answers = list[list[tuple[int, float]]]


def answers(outputs: list[Any]) -> Answers:
    return [
        [(int(token), float(at[token].logprob)) for token, at in zip(o.token_ids, o.logprobs, strict=True)]
        for o in (output.outputs[0] for output in outputs)
    ]


def ask(llm: LLM) -> list[Answers]:
    """The answers to batches of several sizes."""
    batches = ([{"prompt_token_ids": p} for p in PROMPTS[:size]] for size in BATCHES)
    return [answers(llm.generate(batch, GREEDY, use_tqdm=False)) for batch in batches]


def between_steps(llm: LLM) -> Answers:
    """The answers of requests that run while pieces are captured, one between each two steps."""
    engine, done = llm.llm_engine, {}
    for n, prompt in enumerate(PROMPTS[:5]):
        engine.add_request(f"between-{n}", {"prompt_token_ids": prompt}, GREEDY)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        llm.collective_rpc("relight_complete")
    return answers([done[name] for name in sorted(done)])


def timed(call: Any) -> tuple[float, Any]:
    begun = time.perf_counter()
    got = call()
    torch.cuda.synchronize()
    return time.perf_counter() - begun, got


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this interpreter's torch sees no GPU")
    make = lambda: LLM(  # noqa: E731 - timed
        model=sys.argv[1], worker_cls="relight.plugin.vllm.gpu_worker.RelightGPUWorker", enable_sleep_mode=True,
        dtype="bfloat16", max_model_len=512, max_num_seqs=64, gpu_memory_utilization=HALF_FREE,
        enable_prefix_caching=False,
    )  # fmt: skip
    ready, llm = timed(make)
    graphs = lambda: llm.collective_rpc("relight_graphs")[0]  # noqa: E731
    found: dict[str, Any] = {"ready": ready, "at_start": graphs()}
    one = SamplingParams(temperature=0, max_tokens=1)
    found["first_request"], _ = timed(lambda: llm.generate([{"prompt_token_ids": PROMPTS[0]}], one, use_tqdm=False))
    found["early"] = ask(llm)
    found["early_captures"] = graphs()["captures"]
    found["between"] = between_steps(llm)
    found["pieces"] = []
    left = 1
    while left:
        seconds, (left,) = timed(lambda: llm.collective_rpc("relight_complete"))
        found["pieces"].append(seconds)
    found["whole"] = graphs()
    found["free"] = torch.cuda.mem_get_info()[0]
    found["cache_blocks"] = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    found["late"] = ask(llm)
    llm.sleep(level=1)
    found["wake"], _ = timed(llm.wake_up)
    found["awake"] = ask(llm)
    found["after_wake"] = graphs()
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
