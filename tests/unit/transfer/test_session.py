"""A refill over every transport: the same bytes, and the same failures with the same party at fault."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from relight.core import failpoints
from relight.core.clock import SystemClock
from relight.core.errors import LocalFault, ModelDirty, RemoteFault
from relight.transfer.manifest import TensorEntry
from relight.transfer.session import Received, refill
from tests.unit.transfer.conftest import LAYOUT, Connector, Rig


def _refill(rig: Rig, connect, *, layout=LAYOUT, table=None, revision="r1", streams=2) -> Received:
    return refill(
        rig.target, layout, rig.table if table is None else table, revision, connect, streams=streams,
        clock=SystemClock(),
    )  # fmt: skip


def _untouched(rig: Rig) -> bool:
    return rig.target.resident_bytes() == 0


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_a_refill_brings_exactly_the_sources_bytes(rig: Rig, connector: Connector, streams: int) -> None:
    got = _refill(rig, connector(rig, rig.grant()), streams=streams)
    assert got.bytes == rig.source.manifest.weight_bytes
    for tensor in rig.table.values():
        place = slice(tensor.offset, tensor.offset + tensor.bytes)
        assert rig.target.view[place] == rig.source.segment.view[place]
    assert {p.name for p in got.phases} == {"pages", "pull", "verify"}
    assert all(p.end >= p.start for p in got.phases)


def test_tensors_arrive_where_the_receiver_has_them_whatever_their_places_at_the_source(
    rig: Rig, connector: Connector
) -> None:
    order = sorted(rig.table.values(), key=lambda t: -t.offset)
    moved, offset = {}, 0
    for tensor in order:
        moved[tensor.name] = replace(tensor, offset=offset)
        offset += -(-tensor.bytes // 256) * 256
    _refill(rig, connector(rig, rig.grant()), table=moved)
    for name, theirs in rig.table.items():
        ours = moved[name]
        got = rig.target.view[ours.offset : ours.offset + ours.bytes]
        assert got == rig.source.segment.view[theirs.offset : theirs.offset + theirs.bytes]


def test_the_pin_ends_with_the_refill(rig: Rig, connector: Connector) -> None:
    _refill(rig, connector(rig, rig.grant()))
    assert rig.source.close(5.0) == 0


def test_progress_is_told_up_to_the_last_byte(rig: Rig, connector: Connector) -> None:
    seen: list[tuple[int, int]] = []
    refill(
        rig.target, LAYOUT, rig.table, "r1", connector(rig, rig.grant()), streams=2, clock=SystemClock(),
        on_progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    total = rig.source.manifest.weight_bytes
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_altered_bytes_are_refused_naming_the_tensor(
    rig: Rig, connector: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse("transfer.receive=1*corrupt"))
    with pytest.raises(ModelDirty, match=r"tensor t\d from i-source: digest") as caught:
        _refill(rig, connector(rig, rig.grant()), streams=1)
    assert isinstance(caught.value.cause, RemoteFault)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"generation": 2}, "generation 2, this is 1"),
        ({"source_instance": "i-other"}, "the grant is for i-other"),
        ({"manifest_digest": "0" * 32}, "another manifest"),
        ({"expires_at": 0.0}, "expired"),
    ],
)
def test_a_grant_that_does_not_fit_is_refused_and_nothing_is_touched(
    rig: Rig, connector: Connector, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(RemoteFault, match=reason):
        _refill(rig, connector(rig, rig.grant(**changes)))
    assert _untouched(rig)


def test_a_grant_of_another_key_is_refused(rig: Rig, connector: Connector) -> None:
    foreign = replace(rig, key="00" * 32).grant()
    with pytest.raises(RemoteFault, match="not signed for this source"):
        _refill(rig, connector(rig, foreign))
    assert _untouched(rig)


def test_a_closed_source_is_no_source(rig: Rig, connector: Connector) -> None:
    connect = connector(rig, rig.grant())
    rig.source.close(0.0)
    with pytest.raises(RemoteFault, match="no source now"):
        _refill(rig, connect)


def test_a_source_that_cuts_its_readers_leaves_the_model_dirty_and_the_source_at_fault(
    rig: Rig, connector: Connector
) -> None:
    def cut(done: int, total: int) -> None:
        rig.source.close(0.0)

    with pytest.raises(ModelDirty, match="cut this reader") as caught:
        refill(
            rig.target, LAYOUT, rig.table, "r1", connector(rig, rig.grant()), streams=1, clock=SystemClock(),
            on_progress=cut,
        )  # fmt: skip
    assert isinstance(caught.value.cause, RemoteFault)


def test_a_grant_that_expires_while_reading_ends_the_read(rig: Rig, connector: Connector) -> None:
    with pytest.raises(ModelDirty, match="expired while reading"):
        refill(
            rig.target, LAYOUT, rig.table, "r1", connector(rig, rig.grant()), streams=1, clock=SystemClock(),
            on_progress=lambda done, total: rig.clock.advance(3600),
        )  # fmt: skip


@pytest.mark.parametrize("name", ["engine", "dtype", "quantization"])
def test_another_layout_is_refused_naming_the_field(rig: Rig, connector: Connector, name: str) -> None:
    with pytest.raises(RemoteFault, match=f"layout.{name}: 'mine' here"):
        _refill(rig, connector(rig, rig.grant()), layout={**LAYOUT, name: "mine"})
    assert _untouched(rig)


def test_other_content_is_refused_naming_the_revision(rig: Rig, connector: Connector) -> None:
    with pytest.raises(RemoteFault, match=r"content\.revision: 'r2' asked for, 'r1' there"):
        _refill(rig, connector(rig, rig.grant()), revision="r2")
    assert _untouched(rig)


def _changed(table: dict[str, TensorEntry], **changes: object) -> dict[str, TensorEntry]:
    return {**table, "t1": replace(table["t1"], **changes)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: _changed(t, dtype="int8"), r"t1\.dtype: 'int8' here, 'uint8' there"),
        (lambda t: _changed(t, shape=(18,)), r"t1\.shape"),
        (lambda t: {k: v for k, v in t.items() if k != "t1"}, "tensor t1 exists on one side only"),
    ],
)
def test_another_tensor_table_is_refused_naming_tensor_and_field(
    rig: Rig, connector: Connector, change, reason: str
) -> None:
    with pytest.raises(RemoteFault, match=reason):
        _refill(rig, connector(rig, rig.grant()), table=change(rig.table))
    assert _untouched(rig)


def test_no_thread_is_left_after_a_failed_refill(
    rig: Rig, connector: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse("transfer.receive=2*error"))
    with pytest.raises(ModelDirty):
        _refill(rig, connector(rig, rig.grant()))
    assert not [t.name for t in threading.enumerate() if t.name.startswith("relight-pull")]


def test_a_defect_in_one_stream_ends_the_refill_instead_of_leaving_the_others_waiting(
    rig: Rig, connector: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, calls = rig.target.populate, iter(range(100))

    def defective(start: int, stop: int) -> None:
        if next(calls) == 0:
            raise ValueError("a defect")
        usual(start, stop)

    monkeypatch.setattr(rig.target, "populate", defective)
    with pytest.raises(LocalFault, match="ValueError: a defect"):
        _refill(rig, connector(rig, rig.grant()))


def test_many_receivers_at_once_all_get_the_bytes(rig: Rig, connector: Connector) -> None:
    connect = connector(rig, rig.grant())
    results: list[object] = []

    def one() -> None:
        from relight.transfer.segment import Segment

        target = Segment("many", rig.source.segment.bytes)
        try:
            results.append(refill(target, LAYOUT, rig.table, "r1", connect, streams=2, clock=SystemClock()).bytes)
        finally:
            target.close()

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [rig.source.manifest.weight_bytes] * 8
