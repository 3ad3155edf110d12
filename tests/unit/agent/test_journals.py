"""Journals survive torn and corrupt lines, and refuse what they cannot understand by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.agent.journal import InstanceRecord, Journal
from relight.agent.linelog import LineLog
from relight.core.errors import InvalidInput
from relight.core.records import Assignment, Desired, InstanceAssignment, ModelSpec
from relight.core.states import State, Step

SPEC = ModelSpec("default", "tiny", "/m", "r1", "stub")
WANTED = InstanceAssignment("i-a", SPEC.key, SPEC, 0, 1, ("cpu-0",), Desired.READY)
RECORD = InstanceRecord(
    WANTED, 3, 7, State.READY, 1.0, 2, 2, 99, 1234, (Step(State.NONE, State.STARTING, "test", 0.5),)
)


def _filled(path: Path) -> None:
    journal = Journal(path)
    journal.begin("boot")
    journal.accept(Assignment("a", 3, 7, (WANTED,)))
    journal.keep(RECORD)
    journal.close()


def test_a_journal_gives_back_what_it_was_given(tmp_path: Path) -> None:
    _filled(tmp_path / "j")
    again = Journal(tmp_path / "j")
    assert (again.epoch, again.boot_id, again.instances) == (3, "boot", {"i-a": RECORD})
    assert again.assignment == Assignment("a", 3, 7, (WANTED,))
    again.forget("i-a")
    again.close()
    last = Journal(tmp_path / "j")
    assert last.instances == {}
    last.close()


def test_a_torn_last_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "j"
    _filled(path)
    path.write_bytes(path.read_bytes()[:-10])
    again = Journal(path)
    assert again.epoch == 3
    assert again.instances == {}
    assert "torn" in again.damage[0]
    again.close()


@given(st.integers(0, 2000), st.integers(0, 7))
def test_a_flipped_bit_costs_at_most_its_line_and_is_named(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "j"
    log = LineLog(path, "kind", 1)
    entries = [{"n": n} for n in range(20)]
    for entry in entries:
        log.append(entry)
    log.close()
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1 << bit
    path.write_bytes(data)
    again = LineLog(path, "kind", 1)
    again.close()
    assert all(e in entries for e in again.entries)
    assert len(again.entries) >= len(entries) - 2
    assert again.damage


def test_a_newer_version_and_another_kind_are_refused_naming_the_field(tmp_path: Path) -> None:
    LineLog(tmp_path / "newer", "kind", 2).close()
    LineLog(tmp_path / "other", "other", 1).close()
    for name, field in (("newer", "version"), ("other", "journal")):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(InvalidInput) as caught:
            LineLog(tmp_path / name, "kind", 1)
        assert [e.field for e in caught.value.errors] == [field]
        assert (tmp_path / name).read_bytes() == before


def test_an_entry_that_is_no_record_is_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    _filled(tmp_path / "j")
    log = LineLog(tmp_path / "j", "relight-agent", 1)
    log.append({"instance": {"state": "floating"}})
    log.close()
    again = Journal(tmp_path / "j")
    assert again.instances == {"i-a": RECORD}
    assert "state" in again.damage[0]
    again.close()
