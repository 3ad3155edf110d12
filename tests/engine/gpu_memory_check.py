"""Run by test_gpu_memory.py in the engine environment: prints what it found about sleeps and wakes on a device.

A sleeper in this process and sources in others, each a worker of Relight's around vLLM's own sleep mode
(gpu_standin.py).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from relight.core.errors import RelightError
from relight.transfer import grants
from tests.engine.gpu_standin import DEVICE, GRANULE, Tensors, on_device, settings

CACHE_BYTES = 4 * GRANULE
NOBODYS = bytes(range(200)) * 7
PEERS = ("peer_nvlink", "peer_tcp")
LEFT_OUT = "block.counter"


class Kernel:
    """Keeps a tensor in a plain object, as vLLM's kernels do."""

    __module__ = "vllm.made_up"

    def __init__(self, scales: torch.Tensor) -> None:
        self.scales = scales


class Elsewhere:
    """Memory of no device, for a model that is read anew."""

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def free(self, length: int) -> None:
        return


class Block(nn.Module):
    """One of each way in which a model holds what it computes with."""

    def __init__(self, seed: int, memory: Tensors | Elsewhere) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        random = lambda *shape: torch.randn(*shape, generator=draw).to(torch.bfloat16)  # noqa: E731
        weight = lambda tensor: nn.Parameter(memory.like(tensor), requires_grad=False)  # noqa: E731
        self.wide = weight(random(700, 1000))
        memory.free(700_000)
        self.column = weight(random(64, 96).t())
        self.head = weight(random(40, 64))
        self.tied = self.head
        self.register_buffer("table", memory.like(random(33)), persistent=False)
        self.absorbed = memory.like(random(8, 5))
        self.several = [memory.like(random(3)), {"inner": memory.like(random(4))}]
        self.kernel = Kernel(memory.like(random(6).float()))
        self.tiny = memory.like(torch.full((), float(seed), dtype=torch.int64))
        self.register_buffer("counter", memory.like(torch.zeros(4, dtype=torch.int32)), persistent=False)
        self.outside = random(300) if isinstance(memory, Elsewhere) else DEVICE.beside(random(300))
        self.k_scale_float = 0.25 * seed
        self.kv_cache = [torch.zeros(4)]

    def run(self) -> None:
        self.counter += 1


class Model(nn.Module):
    def __init__(self, seed: int, memory: Tensors | Elsewhere) -> None:
        super().__init__()
        self.block = Block(seed, memory)


class Engine:
    """A worker of Relight's with a model on the device, started as vLLM starts it, but for what needs a GPU."""

    def __init__(self, directory: Path, instance: str, revision: str = "r1", seed: int = 1, **odd: Any) -> None:
        from vllm.device_allocator.cumem import CuMemAllocator
        from vllm.v1.worker.gpu_worker import Worker

        from relight.plugin.vllm.gpu_worker import RelightGPUWorker

        os.environ.update(settings(directory, instance, revision))
        self.directory, self.allocator = directory, CuMemAllocator.get_instance()
        worker = self.worker = RelightGPUWorker.__new__(RelightGPUWorker)
        memory = Tensors(self.allocator, "weights")
        self.model = Model(seed, memory)
        self.nobodys = memory.nobodys(NOBODYS)
        self.cache = Tensors(self.allocator, "kv_cache", CACHE_BYTES).like(torch.zeros(1000))
        worker.model_runner = SimpleNamespace(
            model=self.model, get_model=lambda: self.model, get_draft_model=lambda: None, reload_weights=self.reload
        )
        worker.vllm_config, worker.model_config = _config(**odd)
        worker.parallel_config, worker.scheduler_config = (
            worker.vllm_config.parallel_config,
            SimpleNamespace(max_num_seqs=4),
        )
        worker.compilation_config, worker.device, worker.rank = SimpleNamespace(mode=3), torch.device("cpu"), 0
        worker._sleep_saved_buffers, worker._sleep_saved_parameters, worker._sleep_saved_draft_buffers = {}, {}, {}
        worker._sleep_mode_backend, worker._relight_cache_bytes = None, CACHE_BYTES
        Worker.load_model = lambda *a, **k: None
        worker.load_model()
        self.model.block.run()
        worker._relight_listen()
        self.seed = seed

    def reload(self, weights_path: str) -> None:
        """As vLLM's own: parameters are filled in place, what is computed of them is made anew, elsewhere; buffers that
        no checkpoint has stay as they are."""
        seed = int(Path(weights_path).read_text())
        fresh = Model(seed, Elsewhere())
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(fresh.get_parameter(name))
        self.model.block.absorbed = fresh.block.absorbed.clone()

    def content(self) -> dict[str, Any]:
        """Everything that a step reads."""
        block = self.model.block
        tensors = [
            block.wide, block.column, block.head, block.tied, block.table, block.absorbed, block.several[0],
            block.several[1]["inner"], block.kernel.scales, block.tiny, block.counter, block.outside,
        ]  # fmt: skip
        found = [bytes(t.contiguous().reshape(-1).view(torch.uint8).tolist()).hex() for t in tensors]
        import ctypes

        return {
            "tensors": found,
            "scale": block.k_scale_float,
            "nobodys": ctypes.string_at(self.nobodys, len(NOBODYS)).hex(),
        }

    def places(self) -> list[int]:
        """Where a captured graph would read."""
        block = self.model.block
        return [t.data_ptr() for t in (block.wide, block.table, block.absorbed, block.kernel.scales, block.outside)]

    def call(self, operation: str, **arguments: Any) -> Any:
        """As the agent's end of the control socket."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(self.directory / "worker-0.sock"))
            sock.sendall(json.dumps({"op": operation, "args": arguments}).encode() + b"\n")
            with sock.makefile("rb") as lines:
                for line in lines:
                    said = json.loads(line)
                    if "error" in said:
                        raise RuntimeError(f"{said['error']['code']}: {said['error']['message']}")
                    if "ok" in said:
                        return said["ok"]
        raise RuntimeError("no answer")

    def refill(
        self, kind: str, sources: list[dict[str, Any]] | None = None, revision: str = "r1", path: str = ""
    ) -> Any:
        return self.call("refill", kind=kind, revision=revision, sources=sources or [], path=path, share=True)

    def wake(self, *arguments: Any, **options: Any) -> Any:
        said = self.refill(*arguments, **options)
        self.worker.wake_up()
        return said

    @property
    def mapped(self) -> int:
        return sum(length for length, _ in DEVICE.mapped.values())


def _config(**odd: Any) -> tuple[Any, Any]:
    hashed = SimpleNamespace(compute_hash=lambda: "k")
    model = SimpleNamespace(
        enable_sleep_mode=True, sleep_mode_backend="cumem", enable_nccl_comm_suspend=False, dtype=torch.bfloat16,
        sleep_preserve_parameter_names=None, quantization=None, max_model_len=64, enforce_eager=True,
        hf_config=SimpleNamespace(to_dict=dict, architectures=["MadeUp"]),
    )  # fmt: skip
    parallel = SimpleNamespace(
        world_size=1, tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, enable_eplb=False,
        enable_expert_parallel=False, expert_placement_strategy="linear",
    )  # fmt: skip
    offload = SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0))
    values = {
        "model_config": model, "parallel_config": parallel, "offload_config": offload, "lora_config": None,
        "kernel_config": hashed, "cache_config": SimpleNamespace(cache_dtype="auto"), "speculative_config": None,
    }  # fmt: skip
    return SimpleNamespace(**(values | odd)), model


@contextmanager
def source(directory: Path, revision: str = "r1", seed: int = 1) -> Iterator[dict[str, Any]]:
    """Another process that serves such an engine."""
    argv = [sys.executable, __file__, "source", str(directory), revision, str(seed)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = ""
            while not line.startswith("{"):
                line = process.stdout.readline()
                assert line, "the source ended"
            yield json.loads(line)
        finally:
            process.kill()


def serve(directory: Path, revision: str, seed: int) -> None:
    engine = Engine(directory, "i-source", revision, seed)
    # Some requests before anybody reads it: what changes with them is no weight.
    engine.model.block.run()
    key = grants.new_key()
    engine.call("set_canary", prompt_token_ids=[1], token_ids=[seed], logprobs=[-0.5])
    offer = engine.call("open_source", key=key)
    claims = grants.Claims("i-source", offer["generation"], offer["manifest_digest"], "i-sleeper", 4e9)
    references = {
        f"peer_{transport}": {
            "instance": "i-source", "slot": "a", "generation": offer["generation"], "grant": grants.mint(key, claims),
            "manifest_digest": offer["manifest_digest"], "content_digest": offer["content_digest"], "address": address,
        }
        for transport, address in offer["addresses"].items()
    }  # fmt: skip
    print(json.dumps({"references": references, "closed": offer["closed"]} | engine.content()), flush=True)
    sys.stdin.read()


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except (RelightError, RuntimeError) as error:
        return str(error)
    return ""


def found(scratch: Path) -> dict[str, Any]:
    engine = Engine(scratch / "sleeper", "i-sleeper")
    worker, before, places = engine.worker, engine.content(), engine.places()
    awake, said = engine.mapped, engine.call("describe")
    out: dict[str, Any] = {
        "unfit": said["unfit"], "state": said["state"], "resident": engine.call("resident"), "kv": said["kv_bytes"],
        "weight_bytes": said["weight_bytes"], "left_out": list(worker._relight_memory._weights.left_out),
        "tensors": sorted(worker._relight_memory.table), "phases": [p["name"] for p in said["phases"]],
        "aliases": worker._relight_memory.table["block.head"].aliases,
    }  # fmt: skip
    engine.call("set_canary", prompt_token_ids=[1], token_ids=[1], logprobs=[-0.5])
    checkpoint = scratch / "checkpoint"
    checkpoint.write_text("1")

    def same() -> bool:
        return engine.content() == before and engine.places() == places and engine.mapped == awake

    with source(scratch / "a") as peer, source(scratch / "b", "r2", 2) as other:
        out["closed"], out["served"] = peer["closed"], sorted(peer["references"])
        out["awake_refill"] = _refused(lambda: engine.refill("peer_tcp", [peer["references"]["peer_tcp"]]))
        worker.sleep(2)
        out["asleep"] = {"mapped": engine.mapped, "resident": engine.call("resident")}
        out["no_refill"] = [_refused(worker.wake_up), _refused(lambda: worker.wake_up(["weights"]))]
        out["no_copy"] = _refused(lambda: engine.refill("host_copy"))
        out["rungs"] = {}
        for kind in PEERS:
            got = engine.wake(kind, [peer["references"][kind]])
            out["rungs"][kind] = {"same": same(), "detail": got["detail"], "phases": [p["name"] for p in got["phases"]]}
            worker.sleep(2)
        got = engine.wake("disk", path=str(checkpoint))
        out["rungs"]["disk"] = {"same": same(), "detail": got["detail"], "phases": [p["name"] for p in got["phases"]]}
        worker.sleep(1)
        out["level_1"] = engine.call("resident")
        got = engine.wake("host_copy")
        out["rungs"]["host_copy"] = {
            "same": same(),
            "detail": got["detail"],
            "phases": [p["name"] for p in got["phases"]],
        }
        out["after_copy"] = engine.call("resident")

        # What goes wrong.
        worker.sleep(1)
        backup = next(d for d in engine.allocator.pointer_to_data.values() if d.tag == "weights").cpu_backup_tensor
        backup[64] ^= 1
        out["altered_copy"] = _refused(lambda: engine.refill("host_copy"))
        backup[64] ^= 1
        engine.call("suspend")
        out["suspended"] = {"mapped": engine.mapped, "resident": engine.call("resident")}
        engine.wake("host_copy")
        out["copy_again"] = same()
        worker.sleep(2)
        checkpoint.write_text("3")
        out["wrong_checkpoint"] = _refused(lambda: engine.refill("disk", path=str(checkpoint)))
        checkpoint.write_text("1")
        engine.wake("disk", path=str(checkpoint))
        out["right_checkpoint"] = same()
        worker.sleep(2)
        DEVICE.fail_at = 1
        out["full"] = _refused(lambda: engine.refill("peer_tcp", [peer["references"]["peer_tcp"]]))
        engine.call("suspend")
        out["full_mapped"] = engine.mapped
        engine.refill("peer_tcp", [peer["references"]["peer_tcp"]])
        DEVICE.fail_at = 0
        out["full_cache"] = _refused(worker.wake_up)
        out["full_state"] = engine.call("describe")["state"]
        worker.wake_up()
        out["after_full"] = same()
        DEVICE.neighbour = 1 << 30
        worker.sleep(2)
        out["neighbour"] = engine.mapped
        DEVICE.neighbour = 0
        out["other_content"] = _refused(lambda: engine.refill("peer_tcp", [other["references"]["peer_tcp"]]))
        engine.refill("peer_nvlink", [other["references"]["peer_nvlink"]], revision="r2")
        # A rung that comes after another finds memory mapped, and what the other has proven in it stays.
        worker._relight._memory.pages.bring_back()
        # Its own counter, and memory that is nobody's, are no content.
        theirs, ours = other["tensors"], engine.content()["tensors"]
        out["new_content"] = [a == b for n, (a, b) in enumerate(zip(theirs, ours, strict=True)) if n != 10]
        worker.wake_up()
        out["new_scale"] = engine.content()["scale"]
        out["new_revision"] = engine.call("describe")["fingerprint"]["content"]
        opened = engine.call("open_source", key=grants.new_key())
        out["onward"] = sorted(opened["addresses"])
        engine.call("close_source", deadline_seconds=0.0)
        out["discard"] = _refused(lambda: worker.discard(("weights",)))
    return out


def odd(scratch: Path, kind: str) -> dict[str, Any]:
    """An engine whose weights cannot be given back, or not be passed on."""
    changed = {"lora": {"lora_config": object()}}.get(kind, {})
    DEVICE.passes_on = kind != "no handles"
    engine = Engine(scratch, "i-odd", **changed)
    opened = engine.call("open_source", key=grants.new_key())
    said = {
        "unfit": engine.call("describe")["unfit"],
        "served": sorted(opened["addresses"]),
        "closed": opened["closed"],
    }
    engine.call("close_source", deadline_seconds=0.0)
    return said | {
        "sleep": _refused(lambda: engine.worker.sleep(2)),
        "weight_bytes": engine.call("describe")["weight_bytes"],
    }


def main() -> None:
    with on_device():
        if sys.argv[1:2] == ["source"]:
            serve(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
            return
        scratch = Path(tempfile.mkdtemp(prefix="rl-"))
        if sys.argv[1:]:
            print(json.dumps(odd(scratch / "odd", sys.argv[1])))
        else:
            print(json.dumps(found(scratch)))


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # noqa: BLE001 - whatever it was, it is shown
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
