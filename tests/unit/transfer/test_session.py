"""A refill over every transport: the same bytes, and the same failures with the same party at fault."""

from __future__ import annotations

import random
import struct
import threading
from dataclasses import replace

import pytest

from relight.core import failpoints
from relight.core.errors import LocalFault, ModelDirty, RemoteFault
from relight.transfer.manifest import TensorEntry
from relight.transfer.request import Cancel, Kept, Progress
from relight.transfer.segment import Segment
from relight.transfer.source import Source
from relight.transfer.transports.memory import MemoryReader
from relight.transfer.verify import Digest
from tests.unit.transfer.conftest import LAYOUT, Connector, Rig, bring


def _untouched(rig: Rig) -> bool:
    return rig.target.resident_bytes() == 0


@pytest.mark.parametrize("digest", Digest)
@pytest.mark.parametrize("streams", [1, 2, 5])
def test_a_refill_brings_exactly_the_sources_bytes(rig: Rig, connector: Connector, streams: int) -> None:
    got = bring(rig, connector(rig, rig.grant()), streams=streams)
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
    bring(rig, connector(rig, rig.grant()), table=moved)
    for name, theirs in rig.table.items():
        ours = moved[name]
        got = rig.target.view[ours.offset : ours.offset + ours.bytes]
        assert got == rig.source.segment.view[theirs.offset : theirs.offset + theirs.bytes]


def test_the_pin_ends_with_thebring(rig: Rig, connector: Connector) -> None:
    bring(rig, connector(rig, rig.grant()))
    assert rig.source.close(5.0) == 0


def test_progress_is_told_up_to_the_last_byte(rig: Rig, connector: Connector) -> None:
    seen: list[Progress] = []
    bring(rig, connector(rig, rig.grant()), on_progress=seen.append)
    total = rig.source.manifest.weight_bytes
    assert (seen[-1].bytes, seen[-1].total, seen[-1].holders) == (total, total, {"i-source": total})
    assert [p.bytes for p in seen] == sorted(p.bytes for p in seen)
    assert seen[-1].bytes_per_second > 0


@pytest.mark.parametrize("digest", Digest)
def test_altered_bytes_are_refused_naming_the_tensor(
    rig: Rig, connector: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse("transfer.receive=1*corrupt"))
    with pytest.raises(ModelDirty, match=r"tensor t\d from i-source: digest") as caught:
        bring(rig, connector(rig, rig.grant()), streams=1)
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
        bring(rig, connector(rig, rig.grant(**changes)))
    assert _untouched(rig)


def test_a_grant_of_another_key_is_refused(rig: Rig, connector: Connector) -> None:
    foreign = replace(rig, key="00" * 32).grant()
    with pytest.raises(RemoteFault, match="not signed for this source"):
        bring(rig, connector(rig, foreign))
    assert _untouched(rig)


def test_a_closed_source_is_no_source(rig: Rig, connector: Connector) -> None:
    connect = connector(rig, rig.grant())
    rig.source.close(0.0)
    with pytest.raises(RemoteFault, match="no source now"):
        bring(rig, connect)


def test_a_source_that_cuts_its_readers_leaves_the_model_dirty_and_the_source_at_fault(
    rig: Rig, connector: Connector
) -> None:
    with pytest.raises(ModelDirty, match="cut this reader") as caught:
        bring(rig, connector(rig, rig.grant()), streams=1, on_progress=lambda progress: rig.source.close(0.0))
    assert isinstance(caught.value.cause, RemoteFault)


def test_a_source_that_cuts_its_reader_after_the_last_byte_is_not_believed(rig: Rig, connector: Connector) -> None:
    def last(progress: Progress) -> None:
        if progress.bytes == progress.total:
            rig.source.close(0.0)

    with pytest.raises(ModelDirty, match="cut this reader"):
        bring(rig, connector(rig, rig.grant()), streams=1, on_progress=last)


def test_a_grant_that_expires_while_reading_ends_the_read(rig: Rig, connector: Connector) -> None:
    with pytest.raises(ModelDirty, match="expired while reading"):
        bring(
            rig, connector(rig, rig.grant()), streams=1, on_progress=lambda progress: rig.clock.advance(3600)
        )  # fmt: skip


@pytest.mark.parametrize("name", ["engine", "dtype", "quantization"])
def test_another_layout_is_refused_naming_the_field(rig: Rig, connector: Connector, name: str) -> None:
    with pytest.raises(RemoteFault, match=f"layout.{name}: 'mine' here"):
        bring(rig, connector(rig, rig.grant()), layout={**LAYOUT, name: "mine"})
    assert _untouched(rig)


def test_other_content_is_refused_naming_the_revision(rig: Rig, connector: Connector) -> None:
    with pytest.raises(RemoteFault, match=r"content\.revision: 'r2' asked for, 'r1' there"):
        bring(rig, connector(rig, rig.grant()), revision="r2")
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
        bring(rig, connector(rig, rig.grant()), table=change(rig.table))
    assert _untouched(rig)


def test_no_thread_is_left_after_a_failedbring(rig: Rig, connector: Connector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse("transfer.receive=2*error"))
    with pytest.raises(ModelDirty):
        bring(rig, connector(rig, rig.grant()))
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("relight-pull", "relight-pages"))]


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
        bring(rig, connector(rig, rig.grant()))


def test_many_receivers_at_once_all_get_the_bytes(rig: Rig, connector: Connector) -> None:
    connect = connector(rig, rig.grant())
    results: list[object] = []

    def one() -> None:
        target = Segment("many", rig.source.segment.bytes)
        try:
            results.append(bring(replace(rig, target=target), connect).bytes)
        finally:
            target.close()

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [rig.source.manifest.weight_bytes] * 8


def test_a_refill_that_broke_off_goes_on_with_what_is_missing(rig: Rig, connector: Connector) -> None:
    kept, seen = Kept(), list[Progress]()
    last = rig.source.manifest.tensors[-1]
    connect = connector(rig, rig.grant())
    rig.source.segment.view[last.offset] ^= 1
    with pytest.raises(ModelDirty, match=f"tensor {last.name} from i-source: digest"):
        bring(rig, connect, streams=1, kept=kept, on_progress=seen.append)
    rig.source.segment.view[last.offset] ^= 1
    placed = seen[-1].bytes
    assert 0 < placed < rig.source.manifest.weight_bytes
    got = bring(rig, connect, streams=1, kept=kept)
    assert got.bytes == rig.source.manifest.weight_bytes - placed
    for tensor in rig.table.values():
        place = slice(tensor.offset, tensor.offset + tensor.bytes)
        assert rig.target.view[place] == rig.source.segment.view[place]


def test_what_was_kept_of_another_content_is_not_kept(rig: Rig, connector: Connector) -> None:
    kept = Kept()
    connect = connector(rig, rig.grant())
    bring(rig, connect, kept=kept)
    assert bring(rig, connect, kept=kept).bytes == 0
    kept.content = kept.content[:-1]
    assert bring(rig, connect, kept=kept).bytes == rig.source.manifest.weight_bytes


def test_a_cancelled_refill_ends_and_says_so(rig: Rig, connector: Connector) -> None:
    cancel = Cancel()
    with pytest.raises(ModelDirty, match="cancelled") as caught:
        bring(rig, connector(rig, rig.grant()), streams=1, cancel=cancel, on_progress=lambda progress: cancel.set())
    assert isinstance(caught.value.cause, LocalFault)
    with pytest.raises(LocalFault, match="cancelled"):
        bring(rig, connector(rig, rig.grant()), cancel=cancel)
    assert _untouched(rig)


def test_any_wrong_bit_of_any_tensor_or_scalar_is_caught_five_hundred_times(rig: Rig) -> None:
    draw = random.Random(3)
    offered = rig.source.manifest_digest
    for _ in range(500):
        source = Source("i-source", rig.source.segment, rig.source.manifest, rig.clock)
        tensor = draw.choice([None, *rig.table.values()])
        at, bit = 0, 0
        if tensor is None:
            name, value = draw.choice(sorted(rig.source.manifest.scalars.items()))
            flipped = struct.unpack("<Q", struct.pack("<d", value))[0] ^ (1 << draw.randrange(52))
            wrong = struct.unpack("<d", struct.pack("<Q", flipped))[0]
            source.set_manifest(replace(rig.source.manifest, scalars={name: wrong}))
        else:
            at, bit = tensor.offset + draw.randrange(tensor.bytes), 1 << draw.randrange(8)
            source.segment.view[at] ^= bit
        source.open(rig.source.generation + 1, rig.key)
        grant = rig.grant(generation=source.generation, manifest_digest="")
        with pytest.raises((ModelDirty, RemoteFault), match="digest" if tensor else "other weights than it offered"):
            bring(rig, lambda: MemoryReader(source, grant), manifest_digest=offered)  # noqa: B023 - called at once
        source.segment.view[at] ^= bit
        rig.target.drop()


def test_a_thousand_right_transfers_are_all_believed(rig: Rig) -> None:
    grant = rig.grant()
    for _ in range(1000):
        got = bring(rig, lambda: MemoryReader(rig.source, grant), manifest_digest=rig.source.manifest_digest)
        assert got.bytes == rig.source.manifest.weight_bytes
