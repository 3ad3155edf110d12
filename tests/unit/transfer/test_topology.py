"""Which card is given to which device, on trees as kernels show them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from relight.core.errors import InvalidInput
from relight.transfer.topology import (
    Distance,
    direct_groups,
    distance,
    parse_xpu_topology,
    read_accelerators,
    read_nics,
)
from support.trees import P800_TOPOLOGY, Tree, switches

Record = Callable[[str, object], None]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_eight_gpus_with_eight_cards_each_get_the_one_on_their_switch(tree: Tree, record_property: Record) -> None:
    record_property("device_trees", "8 GPUs, 8 cards")
    for n in range(8):
        base, numa = switches(n)
        tree.accelerator(f"{base}:00.0/0000:{n + 1:x}3:00.0", numa)
        tree.nic(f"mlx5_{n}", f"{base}:01.0/0000:{n + 1:x}4:00.0", numa)
    found = tree.rails()
    assert [r.nic for r in found.values()] == [f"mlx5_{n}" for n in range(8)]
    assert {(r.distance, r.shared_by) for r in found.values()} == {(Distance.PIX, 1)}


def test_eight_gpus_with_four_cards_share_each_between_two_of_their_own_socket(
    tree: Tree, record_property: Record
) -> None:
    record_property("device_trees", "8 GPUs, 4 cards")
    for n in range(8):
        base, numa = switches(n)
        tree.accelerator(f"{base}:00.0/0000:{n + 1:x}3:00.0", numa)
        if n % 2 == 0:
            tree.nic(f"mlx5_{n}", f"{base}:01.0/0000:{n + 1:x}4:00.0", numa)
    found = list(tree.rails().values())
    assert [r.nic for r in found] == ["mlx5_0", "mlx5_0", "mlx5_2", "mlx5_2", "mlx5_4", "mlx5_4", "mlx5_6", "mlx5_6"]
    assert {r.shared_by for r in found} == {2}
    assert [r.distance for r in found] == [Distance.PIX, Distance.NODE] * 4


def test_p800_with_bonded_cards_gets_the_one_beside_it_and_two_groups_of_direct_links(
    tree: Tree, record_property: Record
) -> None:
    record_property("device_trees", "8 P800, bonded cards")
    for n in range(8):
        base, numa = switches(n)
        tree.accelerator(f"{base}:00.0/0000:{n + 1:x}3:00.0", numa, vendor="0x1d22", code="0x120000")
        tree.nic(f"mlx5_bond_{n}", f"{base}:00.0/0000:{n + 1:x}3:00.1", numa, rate=200)
    found = tree.rails()
    assert [r.nic for r in found.values()] == [f"mlx5_bond_{n}" for n in range(8)]
    assert {r.distance for r in found.values()} == {Distance.PIX}
    assert {n.gigabits for n in read_nics(tree.sysfs, tree.devfs)} == {200.0}
    groups = direct_groups(parse_xpu_topology(P800_TOPOLOGY))
    assert groups == [frozenset(range(4)), frozenset(range(4, 8))]


@pytest.mark.parametrize("text", ["", "no matrix", "XPU0 XPU1\nXPU0 X XL", "NIC0 XPU0"])
def test_what_is_no_matrix_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="expected"):
        parse_xpu_topology(text)


def test_a_host_without_cards_has_no_rails(tree: Tree, record_property: Record) -> None:
    record_property("device_trees", "no cards")
    tree.accelerator("pci0000:10/0000:10:01.0/0000:11:00.0", 0)
    assert tree.rails() == {}
    assert read_nics(tree.sysfs / "nowhere") == []


def test_cards_that_are_masked_or_down_are_named_with_the_reason_and_not_given(
    tree: Tree, record_property: Record
) -> None:
    record_property("device_trees", "cards masked or down")
    tree.accelerator("pci0000:10/0000:10:01.0/0000:11:00.0", 0)
    tree.nic("mlx5_0", "pci0000:10/0000:10:01.0/0000:11:00.1", 0, masked=True)
    tree.nic("mlx5_1", "pci0000:20/0000:20:01.0/0000:21:00.0", 0, state="1: DOWN")
    tree.nic("mlx5_2", "pci0000:30/0000:30:01.0/0000:31:00.0", 1)
    masked, down, good = read_nics(tree.sysfs, tree.devfs)
    assert "/dev/infiniband/uverbs0 cannot be opened here" in masked.why
    assert "its link is DOWN" in down.why
    assert good.usable
    assert [r.nic for r in tree.rails().values()] == ["mlx5_2"]


def test_a_container_that_sees_one_of_eight_devices_gives_it_the_same_card_as_the_whole_host(
    tree: Tree, record_property: Record
) -> None:
    record_property("device_trees", "container with one of eight")
    for n in range(8):
        base, numa = switches(n)
        tree.accelerator(f"{base}:00.0/0000:{n + 1:x}3:00.0", numa)
        tree.nic(f"mlx5_{n}", f"{base}:01.0/0000:{n + 1:x}4:00.0", numa)
    # sysfs shows all of the host's devices whichever the container was given: rails are dealt over all of them.
    assert tree.rails()["0000:63:00.0"].nic == "mlx5_5"


def test_distances_are_told_in_the_vendors_words(tree: Tree) -> None:
    tree.accelerator("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0", 0)
    for path in (
        "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.1",
        "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:14:00.0/0000:16:00.0",
        "pci0000:10/0000:10:02.0/0000:15:00.0",
        "pci0000:20/0000:20:01.0/0000:21:00.0",
    ):
        tree.accelerator(path, 0)
    tree.accelerator("pci0000:30/0000:30:01.0/0000:31:00.0", 1)
    first, *others = [a.function for a in read_accelerators(tree.sysfs)]
    assert [distance(first, o) for o in others] == [
        Distance.PIX, Distance.PHB, Distance.PXB, Distance.NODE, Distance.SYS,
    ]  # fmt: skip
