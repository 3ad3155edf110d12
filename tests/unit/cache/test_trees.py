"""What engines leave: on the CPU, and on GPUs (trees made as the engines' sources describe them)."""

from __future__ import annotations

from pathlib import Path

import pytest

from relight.agent.cache import trees
from relight.agent.cache.bundle import Limits, Manifest
from relight.agent.cache.install import install
from relight.agent.cache.key import CacheKey
from relight.agent.cache.sealing import sealing
from relight.agent.cache.signing import Signer
from relight.core.clock import SystemClock
from relight.core.errors import InvalidInput
from tests.support.cache import AOT, CPU_TREE, LEFT_OUT, SETTLED, contents, make_tree
from tests.unit.cache.test_bundles import Given

GPU_KEPT = {
    **{f"vllm/torch_compile_cache/0a1b2c3d4e/rank_{r}_0/backbone/{n}": bytes([r]) * 9 for r in range(8)
       for n in ("artifact_compile_range_1_8192_subgraph_0", "cache_key_factors.json", "computation_graph.py")},
    **{f"{AOT}/rank_{r}_0/model": bytes([r]) * 50 for r in range(8)},
    f"{AOT}/inductor_cache/triton/0/ABCDEF/triton_poi_fused_0.cubin": b"\x7fELF",
    "triton/XYZ123/fused_moe_kernel.cubin": b"\x7fELF",
    "triton/XYZ123/__grp__fused_moe_kernel.json": b"{}",
    "deep_gemm/cache/kernel.fp8_gemm.0123/kernel.cubin": b"\x7fELF",
    "flashinfer_autotune/0.6/100a/beef/autotune_configs_dp0_rank3.json": b"{}",
    "nv/0/1/cafe": b"cubin",
    "tilelang/kernel/a.so": b"so",
    "cute_dsl/k.mlir": b"mlir",
}  # fmt: skip
FLASHINFER = {
    "flashinfer/.cache/flashinfer/0.7.2/100a/cached_ops/batch_prefill/batch_prefill.so": b"so",
    "flashinfer/.cache/flashinfer/0.7.2/100a/cached_ops/batch_prefill/build.ninja": b"absolute paths",
}
GPU_LEFT_OUT = {
    "triton/tmp.pid_77_abc/kernel.ptx": b"half",
    "deep_gemm/cache/locks/fp8_gemm.lock": b"",
    "flashinfer/.cache/flashinfer/0.7.2/100a/cached_ops/batch_prefill/.ninja_lock": b"",
    "vllm/startup_plan/startup_plan_1.json": b"{}",
}


def _paths(root: Path, engine: str = "vllm") -> set[str]:
    return {f.path for f in trees.scan(root, engine).files}


def test_of_the_cpus_tree_artefacts_are_kept_and_the_rest_is_named(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "root", {**CPU_TREE, **LEFT_OUT})
    found = trees.scan(root, "vllm")
    assert {f.path for f in found.files} == set(CPU_TREE)
    assert set(found.left_out) == set(LEFT_OUT)
    assert not found.half_written


def test_of_a_gpus_tree_all_kinds_and_all_ranks_are_kept(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "root", {**GPU_KEPT, **FLASHINFER, **GPU_LEFT_OUT})
    assert _paths(root) == {*GPU_KEPT, *FLASHINFER}
    assert trees.scan(root, "vllm").half_written == ("triton/tmp.pid_77_abc/kernel.ptx",)


def test_the_environment_points_every_kind_below_the_root(tmp_path: Path) -> None:
    variables = trees.environment("vllm", tmp_path)
    assert variables["VLLM_CACHE_ROOT"] == str(tmp_path / "vllm")
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    assert variables["DG_JIT_CACHE_DIR"] == str(tmp_path / "deep_gemm")
    assert variables["FLASHINFER_WORKSPACE_BASE"] == str(tmp_path / "flashinfer")
    sglang = trees.environment("sglang", tmp_path)
    assert sglang["SGLANG_CACHE_DIR"] == sglang["FLASHINFER_WORKSPACE_BASE"] == str(tmp_path)
    for value in (*variables.values(), *sglang.values()):
        assert Path(value).is_relative_to(tmp_path)
    with pytest.raises(InvalidInput, match="vllm or sglang"):
        trees.environment("stub", tmp_path)


def test_sglangs_tree_lies_below_its_one_variable(tmp_path: Path) -> None:
    files = {"triton/A/k.cubin": b"1", "inductor/a.py": b"2", ".cache/flashinfer/0.7/90a/x.so": b"3",
             "deep_gemm/cache/k": b"4", "nv/1": b"5"}  # fmt: skip
    root = make_tree(tmp_path / "root", {**files, "deep_gemm/locks/k.lock": b"", "server.log": b""})
    assert _paths(root, "sglang") == set(files)


def _bundle(root: Path, key: CacheKey) -> tuple[Manifest, bytes]:
    with sealing(root, key, Signer.new(), SystemClock(), compile_seconds=1, limits=Limits()) as made:
        return made.manifest, made.body.read_bytes()


def test_what_remembers_its_place_is_left_out_elsewhere_and_said(tmp_path: Path) -> None:
    key = CacheKey({"engine": "vllm"})
    root = make_tree(tmp_path / "root", {**GPU_KEPT, **FLASHINFER})
    manifest, body = _bundle(root, key)
    elsewhere = install(Given(manifest, body), tmp_path / "elsewhere")
    assert contents(tmp_path / "elsewhere") == GPU_KEPT
    assert str(root) in elsewhere.left_out["flashinfer"]
    root.rename(tmp_path / "away")
    same = install(Given(manifest, body), root)
    assert contents(root) == {**GPU_KEPT, **FLASHINFER}
    assert not same.left_out
    ninja = root / next(iter(FLASHINFER))
    assert ninja.stat().st_mtime == SETTLED


def test_what_is_new_is_what_was_compiled_in_between(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "root")
    before = trees.scan(root, "vllm")
    assert not trees.scan(root, "vllm").new_since(before)
    make_tree(root, {"inductor/zz/new.so": b"1", f"{AOT}/rank_0_0/model": b"written again"}, SETTLED + 5)
    assert [f.path for f in trees.scan(root, "vllm").new_since(before)] == [
        "inductor/zz/new.so", f"{AOT}/rank_0_0/model",
    ]  # fmt: skip


def test_a_tree_is_quiet_once_nothing_was_written_for_a_while(tmp_path: Path) -> None:
    found = trees.scan(make_tree(tmp_path / "root"), "vllm")
    assert not found.quiet(SETTLED + 1.0)
    assert found.quiet(SETTLED + trees.QUIET_SECONDS)
    # A file of the future is not waited for: clocks of images and hosts differ.
    assert found.quiet(SETTLED - 60.0)


def test_a_root_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert trees.scan(tmp_path / "absent", "vllm") == trees.NOTHING
