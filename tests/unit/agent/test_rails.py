"""Which RDMA cards a slot's engines may use, from recorded trees of what a kernel shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from relight.agent.rails import Rails, capacities, look
from relight.transfer.transports.preflight import Roots

MEMORY = 1 << 30
ALLOWED = "Name:\tagent\nCapEff:\t0000003fffffffff\n"


class Host:
    def __init__(self, root: Path) -> None:
        self.roots = Roots(root / "sys", root / "dev", root / "proc")
        self.pyverbs = root / "dist"
        (self.pyverbs / "pyverbs").mkdir(parents=True)
        (self.roots.procfs / "self").mkdir(parents=True)
        (self.roots.procfs / "self/status").write_text(ALLOWED)

    def card(self, name: str, number: int, state: str = "4: ACTIVE", gid: str = "") -> None:
        port = self.roots.sysfs / "class/infiniband" / name / "ports/1"
        (port / "gids").mkdir(parents=True)
        (port / "gid_attrs/types").mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "link_layer").write_text("Ethernet")
        (port / "gids/0").write_text(gid or f"0000:0000:0000:0000:0000:ffff:0a00:00{number:02x}")
        (port / "gid_attrs/types/0").write_text("RoCE v2")
        (port.parent.parent / f"device/infiniband_verbs/uverbs{number}").mkdir(parents=True)
        device = self.roots.devfs / "infiniband" / f"uverbs{number}"
        device.parent.mkdir(parents=True, exist_ok=True)
        device.touch()

    def look(self, names: tuple[str, ...] | None = None) -> Rails:
        return look(names, MEMORY, self.roots, self.pyverbs)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_host_without_a_card_is_not_equipped_and_nobody_expects_rdma_of_it(host: Host) -> None:
    assert host.look() == Rails(False)
    assert host.look().transports == {}


def test_all_cards_are_used_at_their_own_addresses(host: Host) -> None:
    host.card("mlx5_0", 1)
    host.card("mlx5_1", 2)
    found = host.look()
    assert found.cards == ("mlx5_0@10.0.0.1", "mlx5_1@10.0.0.2")
    assert found.transports == {"rdma": ""}


def test_only_the_cards_that_were_named_are_used(host: Host) -> None:
    host.card("mlx5_0", 1)
    host.card("mlx5_1", 2)
    assert host.look(("mlx5_1",)).cards == ("mlx5_1@10.0.0.2",)
    assert host.look(()).transports == {}


def test_one_card_that_works_is_enough(host: Host) -> None:
    host.card("mlx5_0", 1, state="1: DOWN")
    host.card("mlx5_1", 2)
    assert host.look().cards == ("mlx5_1@10.0.0.2",)
    assert host.look().transports == {"rdma": ""}


def test_a_slot_whose_cards_all_fail_is_equipped_and_says_of_each_what_is_wrong(host: Host) -> None:
    host.card("mlx5_0", 1, state="1: DOWN")
    said = host.look(("mlx5_0", "mlx5_9")).transports["rdma"]
    assert "mlx5_0: port 1 is DOWN" in said
    assert "mlx5_9: there is no such card" in said


def test_a_card_whose_address_is_no_ipv4_one_cannot_be_connected_to(host: Host) -> None:
    host.card("mlx5_0", 1, gid="fe80:0000:0000:0000:0000:0000:0000:0001")
    assert "mlx5_0: it has no IPv4 address; give its interface one" in host.look().transports["rdma"]


def test_without_pyverbs_the_package_to_install_is_named(host: Host) -> None:
    host.card("mlx5_0", 1)
    (host.pyverbs / "pyverbs").rmdir()
    assert "install the package python3-pyverbs" in host.look().transports["rdma"]


def test_a_memory_limit_binds_those_without_the_capability(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.card("mlx5_0", 1)
    (host.roots.procfs / "self/status").write_text("CapEff:\t0000000000000000\n")
    monkeypatch.setattr("resource.getrlimit", lambda _: (65536, 65536))
    assert f"{MEMORY} bytes are to be registered, the memlock limit is 65536" in host.look().transports["rdma"]


def test_the_capacity_of_usable_cards_is_what_their_links_say(host: Host) -> None:
    for number, rate in enumerate(("200 Gb/sec (4X HDR)", "400 Gb/sec (4X NDR)", "")):
        host.card(f"mlx5_{number}", number + 1)
        (host.roots.sysfs / f"class/infiniband/mlx5_{number}/ports/1/rate").write_text(rate)
    sysfs = host.roots.sysfs
    assert capacities(host.look(), sysfs) == {"mlx5_0": 25e9, "mlx5_1": 50e9}
    assert capacities(host.look(("mlx5_1",)), sysfs) == {"mlx5_1": 50e9}
    assert capacities(Rails(False), sysfs) == {}
