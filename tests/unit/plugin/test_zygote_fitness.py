"""What makes a process unfit to be forked from: each is found and named, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from relight.plugin.zygote.fitness import unfit

DEADLINE = 60


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """What the kernel shows of a process of one thread that has nothing open but a terminal and a socket."""
    (tmp_path / "task" / "1").mkdir(parents=True)
    (tmp_path / "task" / "1" / "comm").write_text("python3\n")
    (tmp_path / "fd").mkdir()
    for number, target in enumerate(("/dev/pts/0", "/dev/null", "socket:[4711]", "/dev/shm/x")):
        (tmp_path / "fd" / str(number)).symlink_to(target)
    return tmp_path


def test_a_process_of_one_thread_without_a_device_is_fit(proc: Path) -> None:
    assert unfit(proc) == ""


def test_a_thread_that_ends_while_it_is_looked_at_is_none(proc: Path) -> None:
    (proc / "task" / "2").mkdir()
    assert unfit(proc) == ""
    (proc / "task" / "2" / "comm").write_text("poller\n")
    assert unfit(proc) == "it has 2 threads (poller, python3)"


@pytest.mark.parametrize(
    "device", ["/dev/nvidia0", "/dev/nvidia-uvm", "/dev/nvidiactl", "/dev/xpu3", "/dev/xpuctrl", "/dev/dri/renderD128",
               "/dev/kfd", "/dev/infiniband/uverbs0"]
)  # fmt: skip
def test_an_open_device_is_named(proc: Path, device: str) -> None:
    (proc / "fd" / "9").symlink_to(device)
    assert unfit(proc) == f"it has {device} open, which a child cannot use"


@pytest.mark.parametrize("module", ["torch.cuda", "torch.xpu"])
@pytest.mark.parametrize("initialised", [True, False])
def test_a_device_context_by_torchs_own_word_is_named(
    proc: Path, monkeypatch: pytest.MonkeyPatch, module: str, initialised: bool
) -> None:
    said = types.SimpleNamespace(is_initialized=lambda: initialised)
    monkeypatch.setitem(sys.modules, module, said)  # type: ignore[misc]
    assert unfit(proc) == (f"{module} is initialised in it" if initialised else "")


HELD = {
    "channel": "held = grpc.insecure_channel('localhost:1')",
    "server": "held = grpc.server(ThreadPoolExecutor(1))",
    "closed channel": "held = grpc.insecure_channel('localhost:1'); held.close()",
    "asynchronous channel": (
        "\nasync def made(): return grpc.aio.insecure_channel('localhost:1')\nheld = asyncio.run(made())"
    ),
}


def _asked(code: str, proc: str) -> str:
    """What a process of its own says that ran `code`: this one has threads and channels of other tests."""
    script = (
        "import asyncio, grpc, grpc.aio\nfrom concurrent.futures import ThreadPoolExecutor\nfrom pathlib import Path\n"
        f"from relight.plugin.zygote.fitness import unfit\n{code}\nprint(unfit(Path({proc!r})), flush=True)\n"
        "import os\nos._exit(0)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE, check=True,
        env={**os.environ, "GRPC_VERBOSITY": "ERROR"},
    )  # fmt: skip
    return ran.stdout.strip()


@pytest.mark.parametrize("held", HELD)
def test_a_real_grpc_object_is_named_whether_it_left_threads_or_not(proc: Path, held: str) -> None:
    assert _asked(HELD[held], str(proc)).startswith("it holds a gRPC object (")
    assert _asked(HELD[held], "/proc/self").startswith(("it holds a gRPC object (", "it has "))


def test_grpc_that_is_imported_alone_does_no_harm() -> None:
    assert _asked("", "/proc/self") == ""


def test_a_thread_is_named() -> None:
    code = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    assert _asked(code, "/proc/self").startswith("it has 2 threads (")
