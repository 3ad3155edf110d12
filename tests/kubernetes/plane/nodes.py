"""Hollow nodes: a real kubelet's loop over a runtime that only pretends (kubemark).

Its kubelet listens on every address, so each has a network namespace of its own, in which nothing but the API server
can be reached, through a socket that is answered from outside. Root is not needed where users may make namespaces.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from tests.kubernetes.plane.processes import PlaneError, Process, wait_for

INSIDE = Path(__file__).with_name("inside.py")
READY_SECONDS = 40.0


class Forward:
    """Answers a listening socket of another network namespace with connections to a port of this one."""

    def __init__(self, listening: socket.socket, port: int) -> None:
        self._listening, self._port = listening, port
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True, name="forward").start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True, name="forward").start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=5) as server:
            server.settimeout(None)
            with self._lock:
                self._open |= {client, server}
            back = threading.Thread(target=_copy, args=(server, client), daemon=True, name="forward")
            back.start()
            _copy(client, server)
            back.join()
            with self._lock:
                self._open -= {client, server}

    def close(self) -> None:
        """Ends all connections."""
        with self._lock:
            ends = [self._listening, *self._open]
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._listening.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def unshare() -> list[str]:
    """The command under which a program has a network of its own. Raises PlaneError where that is not allowed."""
    commands = [["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"]]
    for command in commands if os.geteuid() == 0 else commands[1:]:
        if subprocess.run([*command, "true"], capture_output=True, check=False, timeout=10).returncode == 0:
            return command
    raise PlaneError("expected root, or a system where users may make namespaces: hollow nodes need a network each")


class HollowNode:
    """One node. `start` waits until it is Ready; `kill` is a node that vanished, `stop` one that was shut down."""

    def __init__(
        self, name: str, process: Callable[[list[str], Mapping[str, str]], Process], kubemark: Path,
        kubeconfig: Path, api_port: int, folder: Path, address: str, labels: Mapping[str, str],
        ready: Callable[[], bool], registered: Callable[[], None],
    ) -> None:  # fmt: skip
        self.name, self.address = name, address
        self._ready, self._registered, self._api_port = ready, registered, api_port
        self._ours, theirs = socket.socketpair()
        self._theirs = theirs
        self._forward: Forward | None = None
        command = [
            *unshare(), sys.executable, "-I", str(INSIDE), str(theirs.fileno()), address, str(api_port), str(kubemark),
            "--morph=kubelet", f"--name={name}", f"--kubeconfig={kubeconfig}",
            "--node-labels=" + ",".join(f"{key}={value}" for key, value in labels.items()),
        ]  # fmt: skip
        # Its folders lie where the temporary files of a process do.
        self.process = process(command, {**os.environ, "TMPDIR": str(folder)})

    def start(self) -> None:
        """Starts its kubelet, for the first time or again."""
        self.process.start(pass_fds=[self._theirs.fileno()])
        self._ours.settimeout(10)
        try:
            _, fds, _, _ = socket.recv_fds(self._ours, 1, 1)
        except TimeoutError:
            raise PlaneError(f"expected {self.name} to get a network of its own:\n{self.process.tail()}") from None
        self._forward = Forward(socket.socket(fileno=fds[0]), self._api_port)
        kubelet = [self.process]
        what = f"the kubelet of {self.name} to register"
        wait_for(lambda: self.process.said("Successfully registered node"), what, READY_SECONDS, processes=kubelet)
        self._registered()
        wait_for(self._ready, f"node {self.name} to be Ready", READY_SECONDS, processes=kubelet)

    def kill(self) -> None:
        """The node is gone without a word."""
        self.process.kill()
        self._end_forward()

    def stop(self) -> None:
        """Ends its kubelet; the node's object stays."""
        self.process.stop()
        self._end_forward()

    def _end_forward(self) -> None:
        if self._forward is not None:
            self._forward.close()
            self._forward = None

    def close(self) -> None:
        """Ends it for good."""
        self.stop()
        self._ours.close()
        self._theirs.close()
