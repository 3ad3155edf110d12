"""What keys say of environments, processors and models."""

from __future__ import annotations

import sys
from pathlib import Path

from relight.plugin import look

CPUINFO = """processor\t: 0
model name\t: Some CPU @ 2.0GHz
flags\t\t: fpu hypervisor sse4_2 avx2 avx512f avx512_bf16 amx_tile

processor\t: 1
flags\t\t: nothing
"""


def test_an_environment_tells_versions_places_and_the_plugins_own_code() -> None:
    said = look.environment()
    assert said["versions"]["python"] == sys.version.split()[0]
    assert "torch" not in said["versions"]
    assert Path(said["sources"]["relight.plugin"]).is_absolute()
    assert len(said["code"]["relight.plugin"]) == 32
    assert look.environment() == said


def test_only_what_was_asked_is_answered(tmp_path: Path) -> None:
    assert look.answer({}) == {}
    assert look.answer({"model": str(tmp_path / "absent")}) == {"model": {}}
    assert set(look.answer({"environment": True})) == {"versions", "sources", "code", "device", "missing"}


def test_a_processor_is_what_its_code_is_made_for(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO)
    said = look.processor(path, compiler="no-such-compiler")
    assert said["name"] == "Some CPU @ 2.0GHz"
    assert said["isa"] == "amx_tile avx2 avx512_bf16 avx512f sse4_2"
    assert said["compiler"] == ""
    path.write_text(CPUINFO.replace("hypervisor", "md_clear"))
    assert look.processor(path, compiler="no-such-compiler") == said
    assert look.processor(tmp_path / "absent", compiler="no-such-compiler")["isa"] == ""


def test_of_a_model_configuration_and_code_count_and_weights_do_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "modeling.py").write_text("x = 1")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = look.model_files(tmp_path)
    assert set(before) == {"config.json", "modeling.py"}
    (tmp_path / "model.safetensors").write_bytes(b"others")
    assert look.model_files(tmp_path) == before
    (tmp_path / "modeling.py").write_text("x = 2")
    assert look.model_files(tmp_path) != before
