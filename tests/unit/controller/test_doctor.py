"""Every rule speaks of a bad example and is silent about a good one; published configurations get reviewed verdicts."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.controller.doctor import model_rules, slot_rules
from relight.controller.doctor.arguments import Arguments, known_flags, unknown_flags
from relight.controller.doctor.case import ModelCase, Severity, SlotCase
from relight.controller.doctor.fleet import judge_fleet
from relight.controller.doctor.judge import judge_model, judge_slot, rank, rules, worst_first
from relight.controller.flight.timeline import GATEWAY, Timeline
from relight.controller.plan.devices import FreeDevices
from relight.core.records import CacheReport, DeviceReport, Mode, PcieLink, Phase, Snapshot, StartCache
from support.planning import SPEC, slot

GIB = 1 << 30
Record = Callable[[str, object], None]
PUBLIC: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("public_configurations.toml").read_text())


def _case(*args: str, **known: Any) -> ModelCase:
    return ModelCase("default/m", "vllm", args=args, **known)


def _start(*phases: Phase, cache: StartCache | None = None) -> Timeline:
    end = max(p.end for p in phases)
    return Timeline(
        "t", "i", 1, "default/m", Mode.NORMAL, "normal/peer_shm", "cpu", "", 0.0, end, True, "", end, phases=phases,
        cache=cache,
    )  # fmt: skip


COMPILED = StartCache("k", "compiled", "", compiled=3, changed=("environment.VLLM_PLUGINS",))
FAST = _start(Phase("process", 0.0, 4.0), Phase("serve", 4.0, 5.0))
BESIDE = {"beside": 2, "device_bytes": 80 * GIB, "kind": "nvidia"}

MODELS: dict[str, tuple[ModelCase, ModelCase]] = {
    "prefix_caching_off": (_case("--no-enable-prefix-caching"), _case("--enable-prefix-caching")),
    "eager_mode": (_case("--enforce-eager"), _case("--no-enforce-eager")),
    "graphs_off": (
        _case("--compilation-config", '{"cudagraph_mode": "NONE"}'),
        _case("-cc", '{"cudagraph_mode": "FULL"}'),
    ),
    "all_graphs_at_start": (
        _case("--max-cudagraph-capture-size", "2048", mode=Mode.NORMAL),
        _case("--max-cudagraph-capture-size", "2048", mode=Mode.LAZY),
    ),
    "big_blocks": (_case("--block-size", "256"), _case("--block-size", "16")),
    "few_sequences": (_case("--max-num-seqs", "4"), _case("--max-num-seqs", "256")),
    "batch_below_context": (
        _case("--max-num-batched-tokens", "8k", "--max-model-len", "32768", "--no-enable-chunked-prefill"),
        _case("--max-num-batched-tokens", "8k", "--max-model-len", "32768"),
    ),
    "prompts_whole": (_case("--no-enable-chunked-prefill"), _case("--enable-chunked-prefill")),
    "quantisation_and_format": (
        _case("-q", "bitsandbytes", "--load-format", "gguf"),
        _case("-q", "awq_marlin", uri="/m/Qwen3-32B-AWQ"),
    ),
    "dummy_weights": (_case("--load-format", "dummy"), _case("--load-format", "auto")),
    "caches_off": (_case(env={"VLLM_DISABLE_COMPILE_CACHE": "1"}), _case(ring=True)),
    "cache_key_by_accident": (_case(env={"USER": "pod-7"}), _case(uri="/models/m", start=FAST)),
    "memory_beside_guardians": (
        _case("--gpu-memory-utilization", "0.95", residual_bytes=4 * GIB, **BESIDE),
        _case("--gpu-memory-utilization", "0.85", residual_bytes=4 * GIB, **BESIDE),
    ),
    "profiles_beside_others": (_case(**BESIDE), _case("--kv-cache-memory-bytes", "20G", **BESIDE)),
    "control_routes_open": (
        _case("--api-key", "$KEY", env={"VLLM_SERVER_DEV_MODE": "1"}, listens=""),
        _case("--host", "127.0.0.1", env={"VLLM_SERVER_DEV_MODE": "1"}),
    ),
    "secret_on_command_line": (_case("--api-key=sk-1"), _case("--api-key", "$(KEY)")),
    "foreign_code": (_case("--trust-remote-code", uri="a/b"), _case("--trust-remote-code", uri="/models/b")),
    "slow_tokenizer": (_case("--tokenizer-mode", "slow"), _case(start=FAST)),
    "image_not_there": (_case(image="r:5000/vllm"), _case(image="r:5000/vllm:v1", pull_policy="IfNotPresent")),
    "flags_that_do_not_exist": (
        _case("--swap-space", "4", version="0.32.0+cpu"),
        _case("--max_model_len", "4k", "-O3", "--enable-prefix-c", "-cc.mode=3", version="0.32.0"),
    ),
    "tensor_parallel_over_hosts": (_case("-tp", "16", devices=8), _case("-tp", "8", devices=8)),
    "visible_devices_contradict": (
        _case(env={"CUDA_VISIBLE_DEVICES": "0", "XPU_VISIBLE_DEVICES": "1"}),
        _case(env={"CUDA_VISIBLE_DEVICES": "0", "XPU_VISIBLE_DEVICES": "0"}),
    ),
    "no_slot_of_its_versions": (_case(locked="driver is 550"), _case()),
    "rdma_forbidden": (_case(env={"NCCL_IB_DISABLE": "1"}), _case(env={"NCCL_IB_DISABLE": "0"})),
}  # fmt: skip


def _slot(*devices: DeviceReport, shared: dict[str, tuple[str, ...]] | None = None, **known: Any) -> SlotCase:
    return SlotCase(dataclasses.replace(slot("a", devices=devices), **known), shared or {})


DEVICE = DeviceReport("GPU-1", "nvidia", "GPU-1", 80 * GIB, 0)
CACHE = CacheReport("a:1", "k", bytes=99, quota=100)


def _linked(width: int) -> DeviceReport:
    return dataclasses.replace(DEVICE, pcie=PcieLink(1, width, 5, 16))


SLOTS: dict[str, tuple[SlotCase, SlotCase]] = {
    "pcie_below_its_best": (_slot(_linked(8)), _slot(_linked(16))),
    "card_far_from_device": (
        _slot(dataclasses.replace(DEVICE, nic="mlx5_3", nic_distance="SYS")),
        _slot(dataclasses.replace(DEVICE, nic="mlx5_3", nic_distance="PIX")),
    ),
    "tcp_where_rdma_could_be": (_slot(transports={"rdma": "its link is DOWN"}), _slot(transports={"rdma": ""})),
    "locked_memory_too_small": (
        _slot(DEVICE, transports={"rdma": ""}, facts={"memlock": "65536"}),
        _slot(DEVICE, transports={"rdma": ""}, facts={"memlock": "unlimited"}),
    ),
    "device_of_two_slots": (_slot(DEVICE, shared={"GPU-1": ("b",)}), _slot(DEVICE)),
    "device_held_by_others": (_slot(dataclasses.replace(DEVICE, healthy=False, reason="7 holds it")), _slot(DEVICE)),
    "versions_do_not_match": (_slot(facts={"refused/vllm": "driver is 550"}), _slot(facts={"driver": "580"})),
    "version_locks_ignored": (_slot(facts={"ignored_locks": "vllm-on-cpu"}), _slot()),
    "images_not_there_beforehand": (_slot(images_seconds=95.0), _slot(images_seconds=2.0)),
    "cache_nearly_full": (_slot(cache=CACHE), _slot(cache=dataclasses.replace(CACHE, bytes=10))),
}


def test_every_rule_has_a_predicate_and_an_example() -> None:
    assert set(rules()) == set(MODELS) | set(SLOTS)
    assert len(rules()) >= 15
    for name in rules():
        assert callable(getattr(model_rules, name, None) or getattr(slot_rules, name, None))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_rule_of_models_fires_on_a_bad_example_and_is_silent_on_a_good_one(
    name: str, record_property: Record
) -> None:
    record_property("doctor_rules", name)
    bad, good = MODELS[name]
    (found,) = [f for f in judge_model(bad) if f.rule == name]
    assert found.evidence
    assert found.cost
    assert found.fix
    assert found.about == "default/m"
    assert name not in [f.rule for f in judge_model(good)]


@pytest.mark.parametrize("name", sorted(SLOTS))
def test_a_rule_of_slots_fires_on_a_bad_example_and_is_silent_on_a_good_one(name: str, record_property: Record) -> None:
    record_property("doctor_rules", name)
    bad, good = SLOTS[name]
    assert [f.rule for f in judge_slot(bad)] == [name]
    assert judge_slot(bad)[0].evidence
    assert judge_slot(good) == ()


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_published_configuration_gets_the_verdict_that_was_reviewed(name: str, record_property: Record) -> None:
    record_property("doctor_cases", name)
    told = dict(PUBLIC[name])
    assert " " in told.pop("source")
    expected = told.pop("says")
    case = ModelCase(name, "vllm", **{"version": "0.32.0", "listens": "", **told, "args": tuple(told["args"])})
    assert sorted(f.rule for f in judge_model(case)) == sorted(expected)


def test_there_are_twenty_published_configurations_from_several_projects() -> None:
    assert len(PUBLIC) >= 20
    assert len({told["source"].partition("/")[0] for told in PUBLIC.values()}) >= 8


def test_what_is_not_known_is_not_judged() -> None:
    assert judge_model(ModelCase("default/m", "vllm")) == ()
    assert judge_model(ModelCase("default/m", "stub", args=("--enforce-eager", "--whatever"), version="1")) == ()


def test_the_evidence_names_what_was_seen_and_what_took_its_place() -> None:
    (found,) = judge_model(_case("--cuda-graph-sizes", "8", "--swap-space=4", version="0.32.0"))
    assert "--cudagraph-capture-sizes" in found.evidence
    assert "--swap-space (KV cache is never swapped" in found.evidence
    (open_,) = judge_model(MODELS["control_routes_open"][0])
    assert "--api-key does not cover" in open_.evidence


def test_a_residual_that_was_measured_counts_and_else_a_published_one() -> None:
    told = {"beside": 1, "device_bytes": 80 * GIB, "kind": "nvidia"}
    calm = ("--gpu-memory-utilization", "0.95", "--kv-cache-memory-bytes", "9G")
    assert judge_model(_case(*calm, residual_bytes=GIB, **told)) == ()
    assert "as measured" in judge_model(_case(*calm, residual_bytes=16 * GIB, **told))[0].evidence
    assert "as published" in judge_model(_case("--gpu-memory-utilization", "0.99", *calm[2:], **told))[0].evidence


def test_a_start_that_compiled_again_names_what_differed() -> None:
    start = _start(Phase("process", 0.0, 1.0), cache=COMPILED)
    (found,) = judge_model(_case(uri="/m", start=start))
    assert "environment.VLLM_PLUGINS" in found.evidence


def test_a_model_whose_slots_have_versions_that_do_not_match_is_told_so_and_placed_nowhere() -> None:
    locked = dataclasses.replace(slot("a", devices=(DEVICE,)), engines={}, facts={"refused/stub": "driver is 550"})
    snapshot = Snapshot(0.0, 1, 1, (), (locked,), ())
    assert [f.rule for f in judge_fleet(snapshot, [], [SPEC])] == ["no_slot_of_its_versions", "versions_do_not_match"]
    chosen, why = FreeDevices(snapshot).find(SPEC, ())
    assert not chosen
    assert "without matching versions (driver is 550)" in why


def test_two_slots_of_a_host_that_have_one_device_are_told_of_each_other() -> None:
    pair = tuple(slot(name, devices=(DEVICE,)) for name in ("a", "b"))
    found = judge_fleet(Snapshot(0.0, 1, 1, (), pair, ()), [], [])
    assert [(f.about, f.evidence) for f in found] == [("a", "GPU-1: also of b"), ("b", "GPU-1: also of a")]


def test_dangers_come_first() -> None:
    case = _case("--enforce-eager", "--api-key", "k", "--block-size", "256")
    assert [f.severity for f in judge_model(case)] == [Severity.DANGER, Severity.WARNING, Severity.ADVICE]
    assert worst_first(reversed(judge_model(case))) == judge_model(case)


def test_an_eight_minute_start_is_ranked_by_its_phases_with_a_knob_for_each() -> None:
    start = _start(
        Phase("dispatch", 0.0, 0.1), Phase("process", 0.1, 30.0), Phase("model", 30.0, 90.0),
        Phase("compile", 90.0, 400.0), Phase("graphs", 400.0, 470.0), Phase("serve", 470.0, 480.0),
        Phase("first token", 480.0, 490.0, GATEWAY),
    )  # fmt: skip
    ranked = rank(dataclasses.replace(start, ended_at=480.0, seconds=480.0))
    assert [p.name for p in ranked] == ["compile", "graphs", "model", "process", "serve", "dispatch"]
    assert ranked[0].share == pytest.approx(310 / 480)
    assert "compile-cache ring" in ranked[0].knob
    assert "mode: lazy" in ranked[1].knob
    assert all(p.what for p in ranked)


def test_a_phase_that_nobody_described_is_ranked_all_the_same() -> None:
    (ranked,) = rank(_start(Phase("something new", 0.0, 2.0)))
    assert (ranked.name, ranked.knob) == ("something new", "")


def test_arguments_are_read_as_engines_read_them() -> None:
    found = Arguments(
        ["-tp", "4", "--max_model_len=32k", "--enforce-eager", "--max-num-seqs", "8", "--max-num-seqs", "9"]
    )
    assert found.number("--tensor-parallel-size") == 4
    assert found.number("--max-model-len") == 32000
    assert Arguments(["--max-model-len", "32K"]).number("--max-model-len") == 32768
    assert Arguments(["--kv-cache-memory-bytes", "1.5g"]).number("--kv-cache-memory-bytes") == 1.5e9
    assert found.on("enforce-eager") is True
    assert found.number("--max-num-seqs") == 9
    assert found.on("enable-prefix-caching") is None
    nested = Arguments(["-cc.cudagraph_mode", "NONE", "--compilation-config", '{"level": 3}'])
    assert nested.config("--compilation-config") == {"level": 3, "cudagraph_mode": "NONE"}
    assert Arguments(["--compilation-config", "{broken"]).config("--compilation-config") == {}


def test_a_flag_that_takes_several_values_has_them_all() -> None:
    found = Arguments(["--cudagraph-capture-sizes", "1", "2", "4", "--max-num-seqs", "8"])
    assert found.text("--cudagraph-capture-sizes") == "1 2 4"
    assert found.number("--max-num-seqs") == 8


@given(
    st.lists(st.sampled_from([*known_flags("vllm", "0.32.0")]) | st.text(max_size=20), max_size=8), st.text(max_size=9)
)
def test_whatever_somebody_writes_is_judged_without_an_error(args: list[str], engine: str) -> None:
    for name in ("vllm", engine):
        judge_model(ModelCase("n/m", name, uri=engine, args=tuple(args), version=engine, beside=1, device_bytes=1))


def test_odd_values_are_no_numbers_and_no_configuration() -> None:
    assert Arguments(["--a", "inf", "--b", "nan", "--c", "1e999k"]).number("--a") is None
    assert Arguments(["--c", "1e999k"]).number("--c") is None
    assert Arguments(["--compilation-config", "[" * 4096]).config("--compilation-config") == {}


def test_flags_are_judged_by_lists_of_versions_and_never_without_one() -> None:
    assert len(known_flags("vllm", "0.32.0+cpu")) > 300
    assert unknown_flags(Arguments(["--sleep-mode-backend", "x"]), "vllm", "0.32.0") == ("--sleep-mode-backend",)
    assert unknown_flags(Arguments(["--sleep-mode-backend", "x"]), "vllm", "0.33.0") == ()
    assert unknown_flags(Arguments(["--enable-memory-saver", "--swap-space"]), "sglang", "0.5.23") == ("--swap-space",)
    assert unknown_flags(Arguments(["--nonsense"]), "vllm", "0.1.0") == ()
    assert unknown_flags(Arguments(["--nonsense"]), "vllm", "0.32.0") == ("--nonsense",)
