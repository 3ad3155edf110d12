"""Which directories an engine compiles into, and what of them belongs in a bundle.

All of them lie below one root that is private to one start; the environment points the engine there. Nothing is ever
compiled into a directory that two engines share. Facts: vLLM 0.32.0 and 0.33.0, SGLang 0.5.23, by reading and (the
CPU's directories) by running.

What stays out: locks and half-written files; what describes this node and not the code (start-up plans, peer-access
probes); whatever is no regular file. Directories per rank (`rank_0_0`) stay apart: a rank's device is baked in.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from relight.core.errors import FieldError, InvalidInput

QUIET_SECONDS = 3.0
"""A tree in which nothing was written for so long is sealed: compilers write a kernel's files within well under one."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One cache of an engine.

    `place` is its directory below the root; `variables` are set to that directory, or to its part that lies before
    `below`. `only` names what of its top level belongs in (empty: all). A `bound` one remembers where it was built, and
    is of no use elsewhere.
    """

    name: str
    place: str
    variables: tuple[str, ...]
    only: tuple[str, ...] = ()
    bound: bool = False
    below: str = ""


VLLM = (
    # `startup_plan/` is a memory profile of this node, `gpu_p2p_access_cache*` its links: both left out.
    Kind("vllm", "vllm", ("VLLM_CACHE_ROOT",), only=("torch_compile_cache", "modelinfos")),
    # vLLM points Inductor into its own directory while it compiles the model; what the sampler compiles at the first
    # request with log-probabilities may come before that.
    Kind("inductor", "inductor", ("TORCHINDUCTOR_CACHE_DIR",)),
    Kind("triton", "triton", ("TRITON_CACHE_DIR",)),
    # Its kernels are named by a compile command with absolute paths of site-packages: in the key as `source.*`.
    Kind("deep_gemm", "deep_gemm", ("DG_JIT_CACHE_DIR",)),
    # build.ninja and .ninja_log hold absolute paths of this very directory: elsewhere ninja builds all again.
    Kind("flashinfer", "flashinfer/.cache/flashinfer", ("FLASHINFER_WORKSPACE_BASE",), bound=True, below="flashinfer"),
    Kind("flashinfer_autotune", "flashinfer_autotune", ("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR",)),
    Kind("tilelang", "tilelang", ("TILELANG_CACHE_DIR",)),
    Kind("tvm_ffi", "tvm_ffi", ("TVM_FFI_CACHE_DIR",)),
    Kind("cute_dsl", "cute_dsl", ("CUTE_DSL_CACHE_DIR",)),
    Kind("cuda", "nv", ("CUDA_CACHE_PATH",)),
)
SGLANG = (
    # SGLANG_CACHE_DIR sets the variables of all others itself (srt/environ); they are set all the same, to the same.
    Kind("triton", "triton", ("TRITON_CACHE_DIR",)),
    Kind("inductor", "inductor", ("TORCHINDUCTOR_CACHE_DIR",)),
    Kind("deep_gemm", "deep_gemm", ("SGLANG_DG_CACHE_DIR", "DG_JIT_CACHE_DIR")),
    Kind("flashinfer", ".cache/flashinfer", ("FLASHINFER_WORKSPACE_BASE", "SGLANG_CACHE_DIR"), bound=True, below="."),
    Kind("tilelang", "tilelang", ("TILELANG_CACHE_DIR",)),
    Kind("cuda", "nv", ("CUDA_CACHE_PATH",)),
)
ENGINES: Mapping[str, tuple[Kind, ...]] = {"vllm": VLLM, "sglang": SGLANG}
_HALF_WRITTEN = ("*.tmp", "*.tmp.*", "tmp.*", "*.part", "*.pid_*")
_LEFT_OUT = ("*.lock", ".ninja_lock", "__pycache__", "locks", "*.pyc")


def kinds(engine: str) -> tuple[Kind, ...]:
    """The caches of an engine. Raises InvalidInput for one whose directories are not known."""
    try:
        return ENGINES[engine]
    except KeyError:
        known = " or ".join(ENGINES)
        raise InvalidInput("no compile cache", [FieldError("engine", known, repr(engine)[:80])]) from None


def environment(engine: str, root: Path) -> dict[str, str]:
    """The variables that make an engine compile below `root` (absolute), and nowhere else."""
    return {variable: str(root / (kind.below or kind.place)) for kind in kinds(engine) for variable in kind.variables}


def kind_of(engine: str, path: str) -> Kind | None:
    """The cache that a path below the root (POSIX) belongs to; None when it is no place of this engine's."""
    for kind in kinds(engine):
        if path.startswith(f"{kind.place}/"):
            rest = path[len(kind.place) + 1 :]
            if not kind.only or rest.partition("/")[0] in kind.only:
                return kind
    return None


@dataclass(frozen=True, slots=True)
class Found:
    """One file of a tree, as it was when looked at."""

    path: str
    executable: bool
    mtime_ns: int
    bytes: int
    inode: int


@dataclass(frozen=True, slots=True)
class Tree:
    """What lies below a root: `files` that belong in a bundle, by path; what does not and why; files that are being
    written."""

    files: tuple[Found, ...]
    left_out: Mapping[str, str]
    half_written: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum(f.bytes for f in self.files)

    def new_since(self, before: Tree) -> tuple[Found, ...]:
        """The files that are not in `before`, or are no longer the ones that were: what was compiled in between."""
        known = {(f.path, f.inode, f.mtime_ns, f.bytes) for f in before.files}
        return tuple(f for f in self.files if (f.path, f.inode, f.mtime_ns, f.bytes) not in known)

    def quiet(self, now: float, seconds: float = QUIET_SECONDS) -> bool:
        """Whether nothing was written for `seconds`, and nothing is being written. `now` is the time of day."""
        newest = max((f.mtime_ns for f in self.files), default=0) / 1e9
        return not self.half_written and not newest <= now < newest + seconds


NOTHING = Tree((), {}, ())


def scan(root: Path, engine: str) -> Tree:
    """Looks at everything below `root`, follows no links. A root that is not there holds nothing."""
    files: list[Found] = []
    left_out: dict[str, str] = {}
    half: list[str] = []
    for path, status in _walk(root, ""):
        parts = path.split("/")
        if kind_of(engine, path) is None:
            left_out[path] = "not an artefact of this engine's code"
        elif _any(parts, _LEFT_OUT):
            left_out[path] = "a lock, or made anew by whoever reads it"
        elif _any(parts, _HALF_WRITTEN):
            half.append(path)
        elif not stat.S_ISREG(status.st_mode):
            left_out[path] = "not a regular file"
        else:
            executable = bool(status.st_mode & 0o100)
            files.append(Found(path, executable, status.st_mtime_ns, status.st_size, status.st_ino))
    return Tree(tuple(sorted(files, key=lambda f: f.path)), left_out, tuple(half))


def _any(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(part, pattern) for part in parts for pattern in patterns)


def _walk(directory: Path, above: str) -> Iterator[tuple[str, os.stat_result]]:
    try:
        entries = sorted(os.scandir(directory), key=lambda e: e.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        path = f"{above}{entry.name}"
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            # Compilers remove what they wrote beside the result; it was nobody's artefact.
            continue
        if stat.S_ISDIR(status.st_mode):
            yield from _walk(Path(entry.path), f"{path}/")
        else:
            yield path, status
