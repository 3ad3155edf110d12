"""Records and protobuf messages carry the same fields, and bad messages are refused by field."""

from __future__ import annotations

import dataclasses

import pytest
from google.protobuf.descriptor import Descriptor
from hypothesis import given
from hypothesis import strategies as st

from relight.core import records
from relight.core.errors import InvalidInput
from relight.core.fingerprint import Fingerprint
from relight.protos.convert import from_proto, to_proto
from relight.protos.relight.v1 import fleet_pb2, routing_pb2


def _messages() -> dict[str, Descriptor]:
    found: dict[str, Descriptor] = {}
    for module in (fleet_pb2, routing_pb2):
        found |= dict(module.DESCRIPTOR.message_types_by_name)
    return found


NOT_RECORDS = {"LogRequest", "LogChunk"}
PAIRS = [(name, d) for name, d in _messages().items() if name not in NOT_RECORDS]


@pytest.mark.parametrize(("name", "descriptor"), PAIRS, ids=[n for n, _ in PAIRS])
def test_a_message_has_exactly_the_fields_of_its_record(name: str, descriptor: Descriptor) -> None:
    record = Fingerprint if name == "Fingerprint" else getattr(records, name)
    ours = [f.name for f in dataclasses.fields(record)]
    assert sorted(ours) == sorted(f.name for f in descriptor.fields)


_phases = st.builds(records.Phase, name=st.text(), start=st.floats(0, 2e9), end=st.floats(0, 2e9), detail=st.text())
_reports = st.builds(
    records.SlotReport,
    slot=st.text(min_size=1),
    epoch=st.integers(0, 2**60),
    revision=st.integers(0, 2**60),
    sequence=st.integers(0, 2**60),
    agent=st.text(),
    boot_id=st.text(),
    host=st.text(),
    agent_address=st.text(),
    engines=st.dictionaries(st.text(), st.text(), max_size=2),
    devices=st.lists(st.from_type(records.DeviceReport), max_size=2).map(
        lambda found: tuple(
            dataclasses.replace(
                d, total_bytes=abs(d.total_bytes) % 2**60, used_bytes=abs(d.used_bytes) % 2**60, holders=(), pcie=None
            )
            for d in found
        )
    ),
)


@given(_reports)
def test_a_record_survives_the_wire(report: records.SlotReport) -> None:
    data = to_proto(report, fleet_pb2.SlotReport).SerializeToString()
    assert from_proto(fleet_pb2.SlotReport.FromString(data), records.SlotReport) == report


def test_an_absent_optional_stays_absent_over_the_wire() -> None:
    failure = records.Failure("out of memory", None)
    assert from_proto(to_proto(failure, fleet_pb2.Failure), records.Failure) == failure


def test_a_message_with_an_unknown_state_is_refused_naming_the_field() -> None:
    bad = fleet_pb2.InstanceReport(instance="i", state="floating")
    with pytest.raises(InvalidInput) as caught:
        from_proto(bad, records.InstanceReport)
    assert "state" in [e.field for e in caught.value.errors]
