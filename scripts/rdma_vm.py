"""What the virtual machines of `make test-rdma` are made of: an emulator, a kernel with soft-RoCE, and user space.

All of it is the distribution's own (Debian), downloaded and unpacked into one folder; nothing is installed. A guest's
root is that folder laid over this machine's own files, so only what is missing here is downloaded.
"""

from __future__ import annotations

import lzma
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from debian import Debian, found, libraries

PACKAGES = (
    "qemu-system-x86", "busybox-static", "iproute2", "rdma-core", "ibverbs-providers", "libibverbs1", "librdmacm1",
    "python3-pyverbs",
)  # fmt: skip
KERNEL = "linux-image-amd64"
"""Names the newest kernel; its `cloud` sibling has neither soft-RoCE nor 9p."""
MODULES = (
    "virtio_pci", "9p", "9pnet_virtio", "overlay", "virtio_net",
    # Before rdma_rxe, which asks for it by name alone and otherwise refuses every interface.
    "crc32_generic", "rdma_rxe", "ib_uverbs", "rdma_ucm",
)  # fmt: skip
MERGED = ("bin", "sbin", "lib", "lib64")
"""Links into usr/ on the machine below: a real folder of that name laid over it would hide all it has."""
GUEST_FILES = ("usr/lib/python3/dist-packages/pyverbs/device.cpython-311-*.so", "usr/*bin/rdma", "usr/*bin/ip",
               "usr/lib/*/libibverbs/librxe-rdmav*.so", "usr/lib/*/libibverbs.so.1")  # fmt: skip
"""What a guest has to find, in the folder or below it."""

INIT = """#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc; $b mount -t sysfs sys /sys; $b mount -t devtmpfs dev /dev
for m in /modules/*.ko; do $b insmod $m || echo "guest: $m was refused"; done
options=trans=virtio,version=9p2000.L,ro,msize=524288,cache=loose
$b mount -t 9p -o $options machine /machine || echo "guest: no files of the machine"
$b mount -t 9p -o $options unpacked /unpacked || echo "guest: no unpacked packages"
$b mount -t tmpfs tmpfs /written; $b mkdir -p /written/upper /written/work
$b mount -t overlay -o lowerdir=/unpacked:/machine,upperdir=/written/upper,workdir=/written/work overlay /new
for d in proc sys dev; do $b mount --move /$d /new/$d; done
$b mkdir -p /new/dev/shm /new/run
$b mount -t tmpfs shm /new/dev/shm; $b mount -t tmpfs run /new/run
for word in $($b cat /new/proc/cmdline); do
  case $word in
    relight.python=*) python=${word#*=} ;;
    relight.program=*) program=${word#*=} ;;
    relight.role=*) role=${word#*=} ;;
  esac
done
export PATH=/usr/sbin:/usr/bin HOME=/root PYTHONDONTWRITEBYTECODE=1
$b chroot /new $python $program $role
echo "guest: ended with $?"
$b sync; $b poweroff -f
"""


def build(path: Path, run: Callable[..., None], say: Callable[[str], None]) -> None:
    """Fills `path`: root/ (unpacked packages), vmlinuz, initrd."""
    say("packages and kernel of the RDMA test's virtual machines (about 110 MB)")
    root, work = path / "root", path / "work"
    debian = Debian(work, run, what_for="the RDMA test's machines are")
    debian.update()
    debian.unpack_missing(PACKAGES, root)
    debian.unpack([debian.dependency(KERNEL, r"linux-image-\S+")], work / "kernel")
    _merge(root)
    if lacking := [pattern for pattern in GUEST_FILES if not found(pattern, root)]:
        raise SystemExit(f"setup: neither here nor in the packages (of Debian 12, with Python 3.11): {lacking}")
    shutil.copy(next(work.glob("kernel/boot/vmlinuz-*")), path / "vmlinuz")
    _pack(work, busybox=found("usr/bin/busybox", root)[0], into=path / "initrd")
    shutil.rmtree(work)


def _merge(root: Path) -> None:
    for name in MERGED:
        old = root / name
        if old.is_dir() and not old.is_symlink():
            shutil.copytree(old, root / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(old)


def _needed(kernel: Path) -> list[Path]:
    """The modules in an order in which each finds what it depends on."""
    known = {p.name.partition(".ko")[0].replace("-", "_"): p for p in kernel.rglob("*.ko*")}
    order: list[Path] = []

    def add(name: str) -> None:
        path = known.get(name)
        if path is None:
            raise SystemExit(f"setup: the kernel's package has no module {name}")
        if path in order:
            return
        said = re.search(rb"\0depends=([^\0]*)\0", _plain(path))
        for other in (said[1].decode() if said else "").replace("-", "_").split(","):
            if other:
                add(other)
        order.append(path)

    for name in MODULES:
        add(name)
    return order


def _plain(module: Path) -> bytes:
    data = module.read_bytes()
    return lzma.decompress(data) if module.suffix == ".xz" else data


def _pack(work: Path, busybox: Path, into: Path) -> None:
    """The first root of a guest: loads the modules, puts the real root together, and goes there."""
    tree = work / "tree"
    for name in ("bin", "modules", "proc", "sys", "dev", "machine", "unpacked", "written", "new"):
        (tree / name).mkdir(parents=True)
    shutil.copy(busybox, tree / "bin" / "busybox")
    for number, module in enumerate(_needed(work / "kernel")):
        (tree / "modules" / f"{number:02d}-{module.name.partition('.ko')[0]}.ko").write_bytes(_plain(module))
    (tree / "init").write_text(INIT)
    (tree / "init").chmod(0o755)
    names = "\n".join(str(p.relative_to(tree)) for p in sorted(tree.rglob("*")))
    with into.open("wb") as out:
        subprocess.run(
            [busybox, "cpio", "-o", "-H", "newc"], input=f"{names}\n".encode(), stdout=out, cwd=tree, check=True,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip


def emulator(path: Path) -> tuple[list[str], dict[str, str]]:
    """The emulator's command as far as its own files go, and the environment it needs."""
    root = path / "root"
    binary = next(iter(found("usr/bin/qemu-system-x86_64", root)), root / "usr/bin/qemu-system-x86_64")
    folders = [f for name in ("qemu", "seabios") for f in found(f"usr/share/{name}", root)]
    command = [str(binary), *(word for folder in folders for word in ("-L", str(folder)))]
    return command, {**os.environ, "LD_LIBRARY_PATH": libraries(root)}


def sound(path: Path) -> bool:
    """Whether a guest can be started from it, and finds what it needs."""
    if not (path / "vmlinuz").is_file() or not (path / "initrd").is_file():
        return False
    if not all(found(pattern, path / "root") for pattern in GUEST_FILES):
        return False
    command, environment = emulator(path)
    try:
        done = subprocess.run([*command, "--version"], env=environment, capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
