"""Device trees as kernels and vendors' tools show them: a sysfs and a devfs of files, and what tools print.

Sources of what is recorded: nvidia-smi -L of MIG-split A100s in https://github.com/NVIDIA/k8s-device-plugin issues and
NVIDIA's own tests; `xpu_smi -m`, tests/unit of https://github.com/xyDong0223/infer-forge-harness; `xpu-smi -L` and the
matrix of P800 nodes in two groups of four, a public survey of one (2026-09); the matrix with links between the groups,
tests of a public installer of Kunlun hosts; the table of `xpu_smi`, PaddlePaddle's ERNIE quick start for P800.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from relight.agent.devices.host import Host
from relight.core.errors import Unavailable
from relight.transfer.topology import rails, read_accelerators, read_nics


class Tree:
    """A sysfs in the making: PCI functions at real paths, with the links by which the kernel groups them."""

    def __init__(self, root: Path) -> None:
        self.sysfs, self.devfs, self.procfs = root / "sys", root / "dev", root / "proc"
        for place in (self.sysfs, self.devfs, self.procfs):
            place.mkdir()
        (self.procfs / "sys/kernel/random").mkdir(parents=True)
        (self.procfs / "sys/kernel/random/boot_id").write_text("boot-1\n")

    def _function(self, path: str, numa: int) -> Path:
        place = self.sysfs / "devices" / path
        place.mkdir(parents=True)
        (place / "numa_node").write_text(f"{numa}\n")
        self._link(self.sysfs / "bus/pci/devices" / place.name, place)
        return place

    @staticmethod
    def _link(link: Path, target: Path) -> None:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)

    def accelerator(
        self, path: str, numa: int, vendor: str = "0x10de", code: str = "0x030200", lanes: tuple[int, int] = (16, 16)
    ) -> None:
        place = self._function(path, numa)
        (place / "vendor").write_text(f"{vendor}\n")
        (place / "class").write_text(f"{code}\n")
        for when, width in zip(("current", "max"), lanes, strict=True):
            (place / f"{when}_link_speed").write_text("32.0 GT/s PCIe\n")
            (place / f"{when}_link_width").write_text(f"{width}\n")

    def nodes(self, *names: str) -> None:
        """Device nodes that the container was given."""
        for name in names:
            (self.devfs / name).touch()

    def host(self, answers: Mapping[str, str] | None = None, **environ: str) -> Host:
        """A host of this tree, whose tools print `answers` by their command line and are else not installed."""
        told = answers or {}

        def run(argv: Sequence[str]) -> str:
            line = " ".join(argv).replace(f"{self.devfs}/", "/dev/")
            if line not in told:
                raise Unavailable(f"{argv[0]} is not installed where the agent runs")
            return told[line]

        return Host(self.sysfs, self.devfs, self.procfs, environ, run)

    def nic(
        self, name: str, path: str, numa: int, *, state: str = "4: ACTIVE", rate: int = 400, masked: bool = False
    ) -> None:
        place = self._function(path, numa)
        home = place / "infiniband" / name
        (home / "ports/1").mkdir(parents=True)
        (home / "ports/1/state").write_text(f"{state}\n")
        (home / "ports/1/rate").write_text(f"{rate} Gb/sec (4X NDR)\n")
        (home / "ports/1/link_layer").write_text("Ethernet\n")
        self._link(home / "device", place)
        (place / "net" / f"eth-{name}").mkdir(parents=True)
        verbs = f"uverbs{name[-1]}"
        (place / "infiniband_verbs" / verbs).mkdir(parents=True)
        if not masked:
            (self.devfs / "infiniband").mkdir(exist_ok=True)
            (self.devfs / "infiniband" / verbs).touch()
        self._link(self.sysfs / "class/infiniband" / name, home)

    def rails(self):
        return rails(read_accelerators(self.sysfs), read_nics(self.sysfs, self.devfs))


def switches(n: int) -> tuple[str, int]:
    """The path down to the n-th switch of a board with four under each of two sockets, and its NUMA node."""
    return f"pci0000:{n + 1:x}0/0000:{n + 1:x}0:01.0/0000:{n + 1:x}1:00.0/0000:{n + 1:x}2", int(n >= 4)


def _matrix(direct: Sequence[tuple[int, int]], nics: Sequence[str]) -> str:
    """A matrix as `xpu-smi topo -m` prints it: XL where `direct` says, each card beside its device."""

    def cell(a: int, b: int) -> str:
        return "X" if a == b else "XL" if (min(a, b), max(a, b)) in direct else "SYS"

    def near(a: int, n: int) -> str:
        place = n * 8 // len(nics)
        return "PIX" if place == a else "NODE" if place // 4 == a // 4 else "SYS"

    names = [*(f"XPU{n}" for n in range(8)), *(f"NIC{n}" for n in range(len(nics)))]
    rows = [
        "\t".join(
            [f"XPU{a}", *(cell(a, b) for b in range(8)), *(near(a, n) for n in range(len(nics))), "0-95", str(a // 4)]
        )
        for a in range(8)
    ]
    legend = [f"  NIC{n}: {name}" for n, name in enumerate(nics)]
    return "\n".join(
        [
            "\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity",
            *rows,
            "",
            "Legend:",
            "  X = Self",
            "",
            "NIC Legend:",
            *legend,
        ]
    )


_GROUPS = [(a, b) for g in (range(4), range(4, 8)) for a in g for b in g if a < b]
P800_TOPOLOGY = _matrix(_GROUPS, [f"mlx5_bond_{n}" for n in range(8)])
"""Two groups of four, nothing direct between them."""
BRIDGED_TOPOLOGY = _matrix([*_GROUPS, *((n, n + 4) for n in range(4))], ["mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4"])
"""The same with a link from each of one group to one of the other, and four cards."""

P800_TABLE = """Wed Jun 25 19:45:10 2025
+-----------------------------------------------------------------------------+
| XPU-SMI               Driver Version: 5.0.21.21    XPU-RT Version: 5.0.21   |
|-------------------------------+----------------------+----------------------+
"""


def xpu_line(address: str, index: int, serial: str, used_mib: int = 0, model: str = "P800 OAM", power: int = 86) -> str:
    """One line of `xpu_smi -m`."""
    return (
        f"0000{address.upper()} {index} {index} {serial} 36 0 0 0 {power} 1450 1450 1450 1450 1450 1450 2 96 {used_mib}"
        f' 98304 0 1.0:2.6:1.39.1.7 "{model}" 0 0 0 0 0 0 0 0 0 0\n'
    )


def kunlun_host(
    tree: Tree,
    nodes: Sequence[int] = range(8),
    used_mib: Mapping[int, int] | None = None,
    model: str = "P800 OAM",
    **environ: str,
) -> Host:
    """Eight devices, of which the container was given `nodes`. Node n is device 7 - n: their numbers do not agree."""
    lines = []
    for n in range(8):
        base, numa = switches(n)
        address = f"0000:{n + 1:x}3:00.0"
        tree.accelerator(f"{base}:00.0/{address}", numa, vendor="0x1d22", code="0x120000")
        lines.append(xpu_line(address, n, f"02K15K624CV0030{n}", (used_mib or {}).get(n, 0), model))
    tree.nodes("xpuctrl", *(f"xpu{n}" for n in nodes))
    module = tree.sysfs / "module/kunlun_peermem"
    module.mkdir(parents=True)
    answers = {
        "xpu_smi": P800_TABLE,
        "xpu_smi -m": "".join(lines),
        "xpu_smi -L": "".join(f"XPU {n}: {model}  GPU-{n}d733bb8-c4a8-5bb5-9431-14512597fc12\n" for n in range(8)),
        "xpu_smi topo -m": P800_TOPOLOGY,
        **{f"xpu_smi -m -d /dev/xpu{n}": lines[7 - n] for n in nodes},
    }
    return tree.host(answers, **environ)
