"""Accelerators of recorded hosts: which are found and chosen, what they tell, who holds them, what is refused."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from relight.agent import devices as kinds_folder
from relight.agent.devices.base import Wanted, environment
from relight.agent.devices.host import Host
from relight.agent.devices.kinds import AUTO, known, named, open_devices
from relight.agent.devices.kunlun import KunlunDevices
from relight.agent.devices.nvidia import NvidiaDevices
from relight.agent.devices.visible import Seen, entries, select
from relight.agent.devices.xpu_smi import cards, ids, versions
from relight.agent.ledger import Claim, Ledger
from relight.agent.procfs import Procfs
from relight.core.errors import InvalidInput, Unavailable
from relight.core.records import PcieLink
from relight.transfer.topology import Distance, direct_groups, parse_xpu_topology
from support.nvml import RecordedNvml, h100, split_a100
from support.trees import BRIDGED_TOPOLOGY, Tree, kunlun_host, switches, xpu_line

ALL = Wanted()
Record = Callable[[str, object], None]
MIB = 1 << 20


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def _nvidia(tree: Tree, nvml: RecordedNvml, wanted: Wanted = ALL, **environ: str) -> NvidiaDevices:
    return NvidiaDevices(nvml, tree.host(**environ), wanted)


def _refused(call: Any, *arguments: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        call(*arguments)
    return str(caught.value)


# ------------------------------------------------------------------ NVIDIA


def test_eight_h100_tell_of_themselves_and_of_each_other(tree: Tree, record_property: Record) -> None:
    record_property("device_trees", "eight H100")
    nvml = RecordedNvml([h100(n, used_mib=72790, milliwatts=140_000, busy=4) for n in range(8)])
    found = _nvidia(tree, nvml)
    devices = found.enumerate()
    assert [d.visible_as for d in devices] == [gpu.uuid for gpu in nvml.gpus]
    assert {(d.model_name, d.total_bytes) for d in devices} == {("NVIDIA H100 80GB HBM3", 81559 * MIB)}
    first = found.readings()[0]
    assert (first.utilisation, first.temperature_celsius, first.power_watts) == (0.04, 39.0, 140.0)
    assert (first.used_bytes, first.ecc_errors, first.pcie) == (72790 * MIB, 0, PcieLink(5, 16, 5, 16))
    links = found.links()
    assert len(links) == 56
    assert set(links.values()) == {"NVL"}
    assert found.facts()["driver"] == "550.54.15"
    assert found.facts()["runtime"] == "12.4"


def test_cards_are_dealt_to_the_devices_that_the_driver_names_by_their_pci_address(tree: Tree) -> None:
    for n in range(8):
        base, numa = switches(n)
        tree.accelerator(f"{base}:00.0/0000:{n + 1:x}3:00.0", numa)
        if n % 2 == 0:
            tree.nic(f"mlx5_{n}", f"{base}:01.0/0000:{n + 1:x}4:00.0", numa)
    found = _nvidia(tree, RecordedNvml([h100(n) for n in range(8)]))
    reports = Ledger(found, "me", Procfs(tree.procfs), tree.rails()).measure(())
    assert [(r.nic, r.nic_distance) for r in reports[:3]] == [("mlx5_0", "PIX"), ("mlx5_0", "NODE"), ("mlx5_2", "PIX")]


def test_parts_of_a_split_a100_are_devices_with_the_whole_one_as_their_parent(
    tree: Tree, record_property: Record
) -> None:
    record_property("device_trees", "A100 in parts")
    gpu = split_a100()
    gpu.parts[1].processes, gpu.parts[1].used_mib = {77: 4000}, 4100
    found = _nvidia(tree, RecordedNvml([gpu]))
    devices = found.enumerate()
    assert [d.id for d in devices] == [part.uuid for part in gpu.parts]
    assert {d.parent for d in devices} == {gpu.uuid}
    assert {d.total_bytes for d in devices} == {4864 * MIB}
    reading = found.readings()[1]
    # A part tells no utilisation; heat, power and link are the whole device's.
    assert (reading.utilisation, reading.temperature_celsius, reading.used_bytes) == (None, 31.0, 4100 * MIB)
    assert found.processes()[gpu.parts[1].uuid] == {77: 4000 * MIB}


def test_what_a_driver_does_not_support_is_not_told_and_breaks_nothing(tree: Tree) -> None:
    old = h100(0, celsius=None, milliwatts=None, ecc=None, busy=None, link=None, processes={5: None})
    found = _nvidia(tree, RecordedNvml([old]))
    (reading,) = found.readings()
    told = (reading.utilisation, reading.temperature_celsius, reading.power_watts, reading.ecc_errors, reading.pcie)
    assert told == (None,) * 5
    assert found.processes() == {old.uuid: {5: 0}}


def test_a_device_that_fell_off_its_bus_is_said_and_not_offered(tree: Tree, record_property: Record) -> None:
    record_property("device_trees", "H100 of which one fell off its bus")
    nvml = RecordedNvml([h100(0)])
    found = _nvidia(tree, nvml)
    nvml.lost = True
    with pytest.raises(Unavailable, match="does not answer"):
        found.readings()
    (report,) = Ledger(found, "me", Procfs(tree.procfs)).measure(())
    assert not report.healthy
    assert "does not answer" in report.reason


def test_a_device_that_is_not_visible_any_more_to_a_reader_begun_anew_is_said_and_not_offered(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _nvidia(tree, RecordedNvml([h100(0)]))

    def refused() -> None:
        raise InvalidInput("visible devices are not those allocated", [])

    monkeypatch.setattr(found, "processes", refused)
    (report,) = Ledger(found, "me", Procfs(tree.procfs)).measure(())
    assert not report.healthy
    assert "not those allocated" in report.reason


@pytest.mark.parametrize(
    ("told", "chosen"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("GPU-1c5fe5e8-6b3d-4d6a-9a0e-2f4b8a0c1d2e", [1]),
        ("GPU-2,GPU-0c5f", [2, 0]),
        ("gpu-1", [1]),
    ],
)
def test_devices_are_chosen_by_index_uuid_or_its_beginning_in_the_order_told(
    tree: Tree, told: str | None, chosen: list[int]
) -> None:
    environ = {} if told is None else {"CUDA_VISIBLE_DEVICES": told}
    nvml = RecordedNvml([h100(n) for n in range(3)])
    found = _nvidia(tree, nvml, **environ)
    assert [d.id for d in found.enumerate()] == [nvml.gpus[n].uuid for n in chosen]
    assert environment(named("nvidia"), found.enumerate()) == {
        "CUDA_VISIBLE_DEVICES": ",".join(nvml.gpus[n].uuid for n in chosen)
    }


@pytest.mark.parametrize("told", ["MIG-2", "MIG-GPU-c9297a60-5079-9a56-b935-51e08dc0f65e/9/0"])
def test_a_part_is_chosen_by_either_form_of_its_id(tree: Tree, told: str) -> None:
    found = _nvidia(tree, RecordedNvml([split_a100()]), CUDA_VISIBLE_DEVICES=told)
    assert [d.id[:5] for d in found.enumerate()] == ["MIG-2"]


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ("7", "an index that is there"),
        ("²", "an index, a UUID"),
        ("GPU-", "one device; it begins the ids of"),
        ("GPU-9", "or its beginning"),
        ("MIG-1", "or its beginning"),
        ("MIG-GPU-0/1/0", "a MIG id that is there"),
        ("0,0", "each device once"),
        ("0,", "an index, a UUID"),
        ("-1", "hides them all"),
        ("", "hides them all"),
        ("NoDevFiles", "hides them all"),
    ],
)
def test_what_names_no_device_or_several_is_refused_by_name_with_what_is_visible(
    tree: Tree, told: str, why: str
) -> None:
    nvml = RecordedNvml([h100(0), h100(1)])
    said = _refused(lambda: _nvidia(tree, nvml, CUDA_VISIBLE_DEVICES=told))
    assert "CUDA_VISIBLE_DEVICES" in said
    assert why in said
    assert nvml.gpus[1].uuid in said


def test_every_wrong_entry_is_told_at_once() -> None:
    seen = [Seen(0, "GPU-a", "m"), Seen(1, "GPU-b", "m")]
    with pytest.raises(InvalidInput) as caught:
        select(seen, ("5", "GPU-a", "GPU-x"), "V")
    assert [e.got for e in caught.value.errors] == ["'5'", "'GPU-x'"]


def test_a_split_device_is_not_chosen_whole(tree: Tree) -> None:
    nvml = RecordedNvml([split_a100(2)])
    for told in ("0", "GPU-c9"):
        said = _refused(lambda value=told: _nvidia(tree, nvml, CUDA_VISIBLE_DEVICES=value))
        assert "split" in said
        assert "MIG-0c5876e6" in said


def test_an_index_among_unlike_devices_is_refused_until_the_order_is_told(tree: Tree) -> None:
    nvml = RecordedNvml([h100(0), split_a100(0)])
    nvml.gpus[1].mig = False
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in _refused(lambda: _nvidia(tree, nvml, CUDA_VISIBLE_DEVICES="1"))
    found = _nvidia(tree, nvml, CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert found.enumerate()[0].id == nvml.gpus[1].uuid


def test_a_container_without_devices_is_told_so(tree: Tree) -> None:
    said = _refused(lambda: _nvidia(tree, RecordedNvml([])))
    assert "no device is visible" in said
    assert "CUDA_VISIBLE_DEVICES" in said


@pytest.mark.parametrize(
    ("given", "count", "why"),
    [
        ("GPU-0c5fe5e8-6b3d-4d6a-9a0e-2f4b8a0c1d2e", None, "more than that: GPU-1c5"),
        ("GPU-0,GPU-1,GPU-7", None, "lacks GPU-7"),
        ("all", 1, "as many as were allocated"),
    ],
)
def test_what_is_visible_has_to_be_what_was_allocated(tree: Tree, given: str, count: int | None, why: str) -> None:
    nvml = RecordedNvml([h100(0), h100(1)])
    said = _refused(lambda: _nvidia(tree, nvml, Wanted(count=count), NVIDIA_VISIBLE_DEVICES=given))
    assert "not those allocated" in said
    assert why in said


def test_the_parts_of_an_allocated_device_are_allocated(tree: Tree) -> None:
    gpu = split_a100(2)
    found = _nvidia(tree, RecordedNvml([gpu]), NVIDIA_VISIBLE_DEVICES=gpu.uuid)
    assert len(found.enumerate()) == 2


# ------------------------------------------------------------------ who holds a device


def _process(tree: Tree, pid: int, name: str, parent: int = 1, opened: str = "", **environ: str) -> None:
    folder = tree.procfs / str(pid)
    (folder / "fd").mkdir(parents=True)
    fields = ["S", parent, pid, pid, *[0] * 15, 5, *[0] * 10]
    (folder / "stat").write_text(f"{pid} ({name}) " + " ".join(map(str, fields)))
    (folder / "environ").write_text("".join(f"{k}={v}\0" for k, v in environ.items()))
    if opened:
        (folder / "fd" / "3").symlink_to(opened)


def test_an_orphan_is_found_by_its_device_and_the_device_is_not_offered(tree: Tree) -> None:
    nvml = RecordedNvml([h100(n) for n in range(3)])
    nvml.gpus[0].processes, nvml.gpus[0].used_mib = {100: 500, 101: 60_000, 300: 3}, 60_900
    nvml.gpus[1].processes = {200: 2400}
    nvml.gpus[2].processes = {999: 70_000}
    _process(tree, 100, "python")
    _process(tree, 101, "VLLM::Worker", parent=100)
    _process(tree, 200, "VLLM::EngineCor", RELIGHT_INSTANCE="i-dead", RELIGHT_OWNER="me")
    _process(tree, 300, "dcgm")
    ledger = Ledger(_nvidia(tree, nvml), "me", Procfs(tree.procfs))
    held, orphaned, foreign = ledger.measure([Claim("i-a", 100, (nvml.gpus[0].uuid,))])
    assert [(h.pid, h.instance, h.bytes) for h in held.holders] == [(100, "i-a", 60_500 * MIB)]
    # The driver's own word counts what no process answers for; a monitor's few bytes block nobody.
    assert (held.used_bytes, held.healthy) == (60_900 * MIB, True)
    assert not orphaned.healthy
    assert "process 200 (VLLM::EngineCor) of i-dead, which does not run here" in orphaned.reason
    assert [(h.pid, h.instance) for h in orphaned.holders] == [(200, "")]
    assert not foreign.healthy
    assert "process 999 (not seen from here) of nobody's here" in foreign.reason
    assert ledger.tree_bytes("i-a", 100) == 60_500 * MIB


def test_an_instance_that_spills_onto_a_device_of_another_is_seen_there(tree: Tree) -> None:
    nvml = RecordedNvml([h100(0, processes={100: 10}), h100(1, processes={100: 20})])
    _process(tree, 100, "python")
    reports = Ledger(_nvidia(tree, nvml), "me", Procfs(tree.procfs)).measure([Claim("i-a", 100, (nvml.gpus[0].uuid,))])
    assert [[h.bytes for h in r.holders] for r in reports] == [[10 * MIB], [20 * MIB]]


# ------------------------------------------------------------------ Kunlun


def test_a_p800_node_tells_of_itself_in_two_groups_of_four(tree: Tree, record_property: Record) -> None:
    record_property("device_trees", "eight P800 in two groups")
    found = KunlunDevices(kunlun_host(tree, used_mib={1: 90440}), ALL)
    devices = found.enumerate()
    assert [d.visible_as for d in devices] == [str(n) for n in range(8)]
    assert devices[0].id == "GPU-0d733bb8-c4a8-5bb5-9431-14512597fc12"
    assert {(d.model_name, d.total_bytes) for d in devices} == {("P800 OAM", 98304 * MIB)}
    reading = found.readings()[1]
    assert (reading.used_bytes, reading.temperature_celsius, reading.power_watts) == (90440 * MIB, 36.0, 86.0)
    assert reading.pcie == PcieLink(5, 16, 5, 16)
    direct = {pair for pair, link in found.links().items() if link == "XL"}
    assert (devices[0].id, devices[3].id) in direct
    assert (devices[3].id, devices[4].id) not in direct
    facts = found.facts()
    assert (facts["driver"], facts["runtime"], facts["firmware"]) == ("5.0.21.21", "5.0.21", "1.0:2.6:1.39.1.7")
    assert facts["peer_memory"] == "kunlun_peermem"


def test_a_product_that_nobody_here_has_seen_is_taken_by_what_it_tells(tree: Tree, record_property: Record) -> None:
    record_property("device_trees", "a product of Kunlun's that nobody has seen")
    found = KunlunDevices(kunlun_host(tree, model="P900 OAM"), ALL)
    assert {d.model_name for d in found.enumerate()} == {"P900 OAM"}
    assert all(d.total_bytes == 98304 * MIB for d in found.enumerate())


def test_a_container_with_some_of_the_nodes_has_those_devices_alone_in_its_own_order(
    tree: Tree, record_property: Record
) -> None:
    record_property("device_trees", "a container with some P800")
    found = KunlunDevices(kunlun_host(tree, nodes=(2, 3)), Wanted(count=2))
    # Nodes 2 and 3 are devices 5 and 4 of the host; in here they are 0 and 1.
    assert [(d.id[:5], d.visible_as) for d in found.enumerate()] == [("GPU-4", "0"), ("GPU-5", "1")]
    assert environment(named("kunlun"), found.enumerate()[1:]) == {
        "XPU_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1",
    }  # fmt: skip


@pytest.mark.parametrize("serial", ["N/A", "0"])
def test_devices_without_a_number_of_their_own_are_named_by_their_host_and_place(tree: Tree, serial: str) -> None:
    host = kunlun_host(tree)
    plain = host.run

    def older(argv: Sequence[str]) -> str:
        if tuple(argv[1:]) == ("-L",):
            raise Unavailable("no such option")
        return re.sub("02K15K624CV0030.", serial, plain(argv))

    devices = KunlunDevices(dataclasses.replace(host, run=older), ALL).enumerate()
    assert len({d.id for d in devices}) == 8
    assert [d.id for d in devices] == [d.address for d in devices]


def test_variables_that_contradict_each_other_are_refused(tree: Tree) -> None:
    host = kunlun_host(tree, XPU_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="1")
    assert "as CUDA_VISIBLE_DEVICES" in _refused(KunlunDevices, host, ALL)


def test_holders_of_a_kunlun_device_are_those_that_have_its_node_open(tree: Tree) -> None:
    host = kunlun_host(tree, used_mib={0: 90440})
    # Device 0 is node 7 of this host.
    _process(tree, 100, "python", opened=str(tree.devfs / "xpu7"))
    _process(tree, 101, "python", parent=100, opened=str(tree.devfs / "xpu7"))
    found = KunlunDevices(host, ALL)
    first = found.enumerate()[0]
    assert found.processes()[first.id] == {100: 45220 * MIB, 101: 45220 * MIB}
    reports = Ledger(found, "me", Procfs(tree.procfs)).measure([Claim("i-x", 100, (first.id,))])
    assert [(h.instance, h.bytes) for h in reports[0].holders] == [("i-x", 90440 * MIB)]
    assert not reports[1].holders


def test_a_tool_that_looks_at_a_kunlun_device_just_now_holds_none_of_it(tree: Tree) -> None:
    host = kunlun_host(tree, used_mib={0: 90440})
    _process(tree, 100, "python", opened=str(tree.devfs / "xpu7"))
    _process(tree, 200, "xpu_smi", opened=str(tree.devfs / "xpu7"))
    found = KunlunDevices(host, ALL)
    first = found.enumerate()[0]
    assert found.processes()[first.id] == {100: 90440 * MIB}
    (report, *_) = Ledger(found, "me", Procfs(tree.procfs)).measure([Claim("i-x", 100, (first.id,))])
    assert report.healthy


def test_intels_tool_of_the_same_name_is_never_run(tree: Tree) -> None:
    tree.accelerator("pci0000:10/0000:10:01.0/0000:11:00.0", 0, vendor="0x8086", code="0x038000")
    ran: list[Any] = []

    def run(argv: Any) -> str:
        ran.append(argv)
        return "Intel XPU System Management Interface -- v1.2"

    host = Host(tree.sysfs, tree.devfs, tree.procfs, {}, run)
    assert known()["kunlun"].there(host) == ""
    assert "vendor 0x1d22" in _refused(KunlunDevices, host, ALL)
    assert ran == []


def test_a_masked_container_is_told_what_it_lacks(tree: Tree, record_property: Record) -> None:
    record_property("device_trees", "a container without what it needs")
    tree.accelerator("pci0000:10/0000:10:01.0/0000:11:00.0", 0, vendor="0x1d22", code="0x120000")
    assert "xpuctrl" in _refused(KunlunDevices, tree.host(), ALL)


def test_without_its_tool_kunlun_says_what_is_missing(tree: Tree) -> None:
    tree.accelerator("pci0000:10/0000:10:01.0/0000:11:00.0", 0, vendor="0x1d22", code="0x120000")
    tree.nodes("xpuctrl", "xpu0")
    with pytest.raises(Unavailable, match="xpu_smi is not installed"):
        KunlunDevices(tree.host(), ALL)


@pytest.mark.parametrize("line", ['00000000:03:00.0 0 0 S 36 0 "P800 OAM"', '00000000:03:00.0 0 0 "open'])
def test_a_line_of_another_shape_is_refused_and_not_misread(line: str) -> None:
    with pytest.raises(InvalidInput, match="memory at 17 and 18"):
        cards(line)


def test_milliwatts_of_an_older_product_are_not_taken_for_watts() -> None:
    (card,) = cards(xpu_line("0000:03:00.0", 0, "S", power=35_120, model="K200"))
    assert card.power_watts is None
    assert card.model == "K200"


def test_lines_that_are_no_devices_are_passed_over() -> None:
    assert cards("XPU-SMI\n\nnothing here\n") == ()
    assert ids("no ids") == {}
    assert versions("no table") == ("", "")


def test_a_matrix_with_links_between_the_groups_is_one_group(tree: Tree, record_property: Record) -> None:
    record_property("device_trees", "eight P800 with links between the groups")
    assert direct_groups(parse_xpu_topology(BRIDGED_TOPOLOGY)) == [frozenset(range(8))]


# ------------------------------------------------------------------ kinds


def test_the_only_kind_that_a_host_shows_is_found_out(tree: Tree) -> None:
    assert open_devices(AUTO, kunlun_host(tree), ALL).kind == "kunlun"


def test_no_kind_and_two_kinds_are_refused_with_what_was_seen(tree: Tree) -> None:
    assert "no accelerator of a known kind" in _refused(open_devices, AUTO, tree.host(), ALL)
    host = kunlun_host(tree)
    tree.nodes("nvidiactl")
    said = _refused(open_devices, AUTO, host, ALL)
    assert "kunlun: " in said
    assert "nvidia: " in said
    assert "cpu or kunlun or nvidia" in _refused(open_devices, "tpu", host, ALL)


def test_a_host_without_the_driver_says_so(tree: Tree) -> None:
    with pytest.raises(Unavailable, match="NVIDIA's driver does not answer"):
        open_devices("nvidia", tree.host(), ALL)


def test_cpu_devices_have_to_be_listed(tree: Tree) -> None:
    assert "a list of them" in _refused(open_devices, "cpu", tree.host(), ALL)


ASCEND = '''
"""Ascend, as somebody would write it: one file, and nothing else knows of it."""
from relight.agent.devices.base import Device, Kind, Reading
from relight.agent.devices.visible import Seen, entries, must_equal, select
from relight.agent.procfs import Procfs

class AscendDevices:
    kind = "ascend"
    def __init__(self, host, wanted):
        self._procfs = Procfs(host.procfs)
        seen = [Seen(n, f"910B-{p.name[7:]}", "910B3") for n, p in enumerate(sorted(host.devfs.glob("davinci[0-9]*")))]
        told = entries(host.environ.get("ASCEND_RT_VISIBLE_DEVICES")) if wanted.visible is None else wanted.visible
        chosen = select(seen, told, "ASCEND_RT_VISIBLE_DEVICES")
        must_equal(chosen, None, wanted.count, "ASCEND_RT_VISIBLE_DEVICES")
        self._devices = tuple(Device(s.id, "ascend", s.id, 64 << 30, s.model, visible_as=str(s.index)) for s in chosen)
    def boot_id(self): return self._procfs.boot_id()
    def enumerate(self): return self._devices
    def held_bytes(self, pids): return 0
    def processes(self): return {d.id: {} for d in self._devices}
    def readings(self): return tuple(Reading(d.id, power_watts=310.0) for d in self._devices)
    def links(self): return {}
    def facts(self): return {"driver": "24.1.rc2"}

def _there(host):
    return "davinci_manager is there" if (host.devfs / "davinci_manager").exists() else ""

KIND = Kind("ascend", ("ASCEND_RT_VISIBLE_DEVICES",), _there, AscendDevices, pci_vendor="0x19e5")
'''


def test_a_new_vendor_is_one_file(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "added"
    folder.mkdir()
    (folder / "ascend.py").write_text(ASCEND)
    monkeypatch.setattr(kinds_folder, "__path__", [*kinds_folder.__path__, str(folder)])
    tree.nodes("davinci_manager", "davinci0", "davinci1")
    try:
        found = open_devices(AUTO, tree.host(ASCEND_RT_VISIBLE_DEVICES="1"), ALL)
        assert [(d.id, d.visible_as) for d in found.enumerate()] == [("910B-1", "1")]
        assert environment(named("ascend"), found.enumerate()) == {"ASCEND_RT_VISIBLE_DEVICES": "1"}
        (report,) = Ledger(found, "me", Procfs(tree.procfs)).measure(())
        assert (report.kind, report.healthy) == ("ascend", True)
        assert "910B-0, 1=910B-1" in _refused(open_devices, "ascend", tree.host(), Wanted(("9",)))
    finally:
        sys.modules.pop("relight.agent.devices.ascend", None)


def test_a_variable_that_hides_everything_differs_from_one_that_is_not_set() -> None:
    assert entries(None) is None
    assert entries("-1") == entries("") == entries("none") == ()
    assert entries("0, GPU-1") == ("0", "GPU-1")


def test_a_link_of_fewer_lanes_than_it_could_have_is_told(tree: Tree) -> None:
    host = kunlun_host(tree)
    address = tree.sysfs / "bus/pci/devices/0000:13:00.0"
    (address / "current_link_width").write_text("8\n")
    assert KunlunDevices(host, ALL).readings()[0].pcie == PcieLink(5, 8, 5, 16)
    (address / "current_link_speed").write_text("Unknown speed\n")
    assert KunlunDevices(host, ALL).readings()[0].pcie is None


def test_distances_have_names_that_people_know() -> None:
    assert [d.name for d in Distance] == ["PIX", "PXB", "PHB", "NODE", "SYS"]
