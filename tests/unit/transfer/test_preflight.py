"""What is said to stand in RDMA's way, on trees as kernels show them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from relight.transfer.transports.preflight import UNLIMITED, Need, Roots, findings

NEED = Need(bytes=64 << 20, memlock=UNLIMITED)
MAPPED = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
LOCAL = "fe80:0000:0000:0000:5054:00ff:fe77:0001"


class Machine:
    """Cards in the making, and which kernel modules are loaded."""

    def __init__(self, root: Path) -> None:
        self.roots = Roots(root / "sys", root / "dev", root / "proc")
        (self.roots.devfs / "infiniband").mkdir(parents=True)
        self.roots.procfs.mkdir()

    def card(
        self, name: str = "mlx5_0", *, state: str = "4: ACTIVE", layer: str = "Ethernet",
        gids: tuple[tuple[str, str], ...] = ((LOCAL, "RoCE v2"), (MAPPED, "RoCE v2")), verbs: str = "uverbs0",
        device: bool = True, soft: bool = False,
    ) -> None:  # fmt: skip
        home = self.roots.sysfs / "class/infiniband" / name
        port = home / "ports/1"
        (port / "gids").mkdir(parents=True)
        (port / "gid_attrs/types").mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text(f"{layer}\n")
        for index, (address, kind) in enumerate(gids):
            (port / "gids" / str(index)).write_text(f"{address}\n")
            (port / "gid_attrs/types" / str(index)).write_text(f"{kind}\n")
        if verbs and soft:
            listed = self.roots.sysfs / "class/infiniband_verbs" / verbs
            listed.mkdir(parents=True)
            (listed / "ibdev").write_text(f"{name}\n")
        elif verbs:
            (home / "device/infiniband_verbs" / verbs).mkdir(parents=True)
        if verbs and device:
            (self.roots.devfs / "infiniband" / verbs).touch()

    def modules(self, *names: str) -> None:
        (self.roots.procfs / "modules").write_text("".join(f"{n} 16384 0 - Live 0x0\n" for n in names))

    def said(self, nic: str = "mlx5_0", need: Need = NEED) -> list[str]:
        return [str(f) for f in findings(nic, need, self.roots)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_nothing_is_said_of_a_card_that_can_be_used(machine: Machine) -> None:
    machine.card()
    assert machine.said() == []


def test_nothing_is_said_of_a_soft_card_that_has_no_device_below_it(machine: Machine) -> None:
    machine.card("rxe0", soft=True)
    assert machine.said("rxe0") == []


def test_a_card_that_is_not_there_is_the_only_thing_said(machine: Machine) -> None:
    (said,) = machine.said("mlx5_7")
    assert said.startswith("mlx5_7: there is no such card; ")


@pytest.mark.parametrize(("state", "named"), [("1: DOWN", "DOWN"), ("2: INIT", "INIT"), ("", "not there")])
def test_a_port_that_is_not_active_is_named_with_its_state(machine: Machine, state: str, named: str) -> None:
    machine.card(state=state)
    (said,) = machine.said()
    assert said.startswith(f"mlx5_0: port 1 is {named}, not ACTIVE; bring its interface up")


def test_a_card_without_an_address_needs_one(machine: Machine) -> None:
    machine.card(gids=(("0000:0000:0000:0000:0000:0000:0000:0000", "RoCE v2"),))
    assert machine.said() == ["mlx5_0: it has no address (GID); give its interface an IP address"]


def test_a_card_whose_addresses_are_all_of_the_old_kind_cannot_be_routed_to(machine: Machine) -> None:
    machine.card(gids=((LOCAL, "IB/RoCE v1"),))
    (said,) = machine.said()
    assert "it has no RoCE v2 address, only IB/RoCE v1; give its interface an IPv4 address" in said


def test_infiniband_needs_no_roce_address(machine: Machine) -> None:
    machine.card(layer="InfiniBand", gids=((LOCAL, "IB/RoCE v1"),))
    assert machine.said() == []


def test_a_verbs_device_that_is_masked_is_named(machine: Machine) -> None:
    machine.card(device=False, verbs="uverbs3")
    (said,) = machine.said()
    assert said.startswith("mlx5_0: /dev/infiniband/uverbs3 cannot be opened; ")


def test_a_card_without_a_verbs_device_needs_the_module(machine: Machine) -> None:
    machine.card(verbs="")
    assert machine.said() == ["mlx5_0: it has no verbs device; load the module ib_uverbs"]


def test_a_memlock_limit_below_what_is_registered_is_told_with_both_numbers(machine: Machine) -> None:
    machine.card()
    (said,) = machine.said(need=replace(NEED, memlock=65536))
    assert "67108864 bytes are to be registered, the memlock limit is 65536; raise it" in said
    assert machine.said(need=replace(NEED, memlock=NEED.bytes)) == []


@pytest.mark.parametrize(
    ("vendor", "module"),
    [("nvidia", "nvidia_peermem"), ("nvidia", "nv_peer_mem"), ("kunlun", "kunlun_peermem")],
)
def test_memory_of_an_accelerator_needs_its_module(machine: Machine, vendor: str, module: str) -> None:
    machine.card()
    need = replace(NEED, vendor=vendor)
    machine.modules("ib_core", "mlx5_ib")
    (said,) = machine.said(need=need)
    assert f"{vendor}_peermem is not loaded, and there is no dma-buf; modprobe {vendor}_peermem" in said
    machine.modules("ib_core", module)
    assert machine.said(need=need) == []


def test_a_module_of_another_vendor_does_not_help(machine: Machine) -> None:
    machine.card()
    machine.modules("nvidia_peermem")
    assert len(machine.said(need=replace(NEED, vendor="kunlun"))) == 1
    (said,) = machine.said(need=replace(NEED, vendor="other"))
    assert said == "mlx5_0: it cannot reach memory of other; transfer through memory of the host"


def test_dma_buffers_need_no_module(machine: Machine) -> None:
    machine.card()
    assert machine.said(need=replace(NEED, vendor="nvidia", dma_buf=True)) == []


def test_all_that_is_in_the_way_is_told_at_once(machine: Machine) -> None:
    machine.card(state="1: DOWN", gids=(), device=False)
    found = machine.said(need=Need(1 << 30, 65536, "nvidia"))
    assert len(found) == 5
    assert all(said.startswith("mlx5_0: ") for said in found)
