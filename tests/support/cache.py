"""Compile caches for tests: trees as engines leave them, keys, and a ring of nodes on loopback."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from relight.agent.cache.bundle import Limits
from relight.agent.cache.key import CacheKey, EngineStart, describe
from relight.agent.cache.node import CacheNode
from relight.agent.cache.placement import Membership
from relight.agent.cache.ring import Ring
from relight.agent.cache.sealing import SealedTree, sealing
from relight.agent.cache.signing import Signer, Trust
from relight.agent.cache.store import Store
from relight.core.clock import Clock, SystemClock
from relight.transfer import grants

AOT = "vllm/torch_compile_cache/torch_aot_compile/738a30ed97512971cd45f470bdc4bcc911768d2c68c2047770b90a6289405263"
CPU_TREE: Mapping[str, bytes] = {
    "vllm/modelinfos/vllm-model_executor-models-llama-LlamaForCausalLM.json": b'{"hash": "1"}',
    f"{AOT}/rank_0_0/model": b"graph" * 1000,
    f"{AOT}/inductor_cache/24/c244b2.cpp": b"int main() {}",
    f"{AOT}/inductor_cache/24/c244b2.so": bytes(range(256)) * 40,
    f"{AOT}/inductor_cache/fxgraph/b7/fb7kipt/dtjrsu": b"fx",
    f"{AOT}/inductor_cache/empty": b"",
    "inductor/ab/cabcd.py": b"# sampler",
}
"""What vLLM 0.32.0 left on the CPU, shortened."""
LEFT_OUT: Mapping[str, bytes] = {
    f"{AOT}/inductor_cache/locks/c244b2.lock": b"",
    "vllm/startup_plan/startup_plan_1.json": b"{}",
    "vllm/gpu_p2p_access_cache_for_0,1.json": b"{}",
    "inductor/__pycache__/x.pyc": b"",
    "notes.txt": b"not the engine's",
}
SETTLED = 1_700_000_000
START = EngineStart(
    "vllm", "/models/smollm2", ("--dtype=bfloat16", "--max-model-len", "2048"),
    {"VLLM_PLUGINS": "relight", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    versions={"vllm": "0.32.0", "torch": "2.13.0+cpu"}, sources={"vllm": "/opt/engine/vllm/__init__.py"},
    device={"kind": "cpu", "isa": "avx2 avx512f"}, model_files={"config.json": "0" * 32},
)  # fmt: skip
GRANT_KEY = grants.new_key()


def make_tree(root: Path, files: Mapping[str, bytes] = CPU_TREE, at: int = SETTLED) -> Path:
    """A tree whose files are all of time `at`; shared objects are executable."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755 if name.endswith(".so") else 0o644)
        os.utime(path, (at, at))
    return root


def contents(root: Path) -> dict[str, bytes]:
    """Every regular file below a directory."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def a_key(n: int = 0) -> CacheKey:
    return describe(replace(START, model=f"/models/m{n}"))


@contextmanager
def sealed_tree(
    directory: Path, signer: Signer, key: CacheKey | None = None, files: Mapping[str, bytes] = CPU_TREE,
    clock: Clock | None = None, limits: Limits | None = None,
) -> Iterator[SealedTree]:  # fmt: skip
    root = make_tree(directory / "compiled", files)
    try:
        with sealing(
            root, key or a_key(), signer, clock or SystemClock(), compile_seconds=100.0, limits=limits or Limits()
        ) as tree:
            yield tree
    finally:
        shutil.rmtree(root)


@dataclass
class Nodes:
    """A ring of cache nodes in this process. Which nodes there are changes by `start` and `kill`."""

    directory: Path
    signer: Signer = field(default_factory=Signer.new)
    clock: Clock = field(default_factory=SystemClock)
    quota: int = 1 << 30
    replicas: int = 2
    limits: Limits = field(default_factory=Limits)
    nodes: dict[str, CacheNode] = field(default_factory=dict)
    stores: dict[str, Store] = field(default_factory=dict)
    revision: int = 0

    @property
    def trust(self) -> Trust:
        return Trust([self.signer.public])

    def start(self, *names: str) -> None:
        """Starts nodes; a name that was there before finds its disk again."""
        for name in names:
            store = Store(self.directory / name, self.trust, self.clock, quota=self.quota, limits=self.limits)
            self.stores[name] = store
            self.nodes[name] = CacheNode(name, store, GRANT_KEY, self.clock, host="127.0.0.1")
        self.tell()

    def kill(self, name: str, *, forget: bool = True) -> None:
        """Ends a node. Unless `forget`, the others do not hear that it is no member any more."""
        self.nodes.pop(name).close()
        if forget:
            self.tell()

    def tell(self) -> None:
        self.revision += 1
        self.members = Membership(self.revision, {n: node.address for n, node in self.nodes.items()}, self.replicas)
        for node in self.nodes.values():
            node.set_members(self.members)

    def grant(self, node: str) -> str:
        return grants.mint(GRANT_KEY, grants.Claims(node, 0, "", "tests", self.clock.now() + 60))

    def ring(self, holder: str = "tests", **options: float) -> Ring:
        return Ring(
            self.members, self.grant, self.trust, self.clock, holder=holder, limits=self.limits, **options
        )  # type: ignore[arg-type]  # fmt: skip

    def repair(self) -> None:
        for node in self.nodes.values():
            node.repair(self.grant)

    def holders(self, bundle: str) -> list[str]:
        """Nodes that run and hold a bundle."""
        return sorted(n for n in self.nodes if any(h.bundle == bundle for h in self.stores[n].entries()))

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()
