"""The supervisor's loop: one thread over a unix socket, SIGCHLD and pidfds. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import selectors
import signal
import socket
import struct
from pathlib import Path
from typing import Any

from relight.agent.supervisor import wire
from relight.agent.supervisor.processes import Main, Processes
from relight.core.clock import Clock
from relight.core.errors import Conflict, FieldError, InvalidInput, RelightError
from relight.core.logs import get_logger

_log = get_logger("supervisor")
_PR_SET_CHILD_SUBREAPER = 36
_MAX_PATH = 107
"""Bytes that the kernel's sockaddr_un leaves for a path."""


class _Peer:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.greeted = False
        self.incoming = bytearray()
        self.outgoing = bytearray()


class Server:
    """Serves until `shutdown` was asked for and everything has ended."""

    def __init__(self, socket_path: Path, journal: Path, clock: Clock) -> None:
        """Takes the journal's lock, adopts, and listens.

        Raises Conflict when another supervisor has the lock, InvalidInput for a socket path that is too
        long or a journal that is newer.
        """
        if len(os.fsencode(socket_path)) > _MAX_PATH:
            raise InvalidInput(
                "unusable socket path",
                [FieldError("socket", f"at most {_MAX_PATH} bytes", f"{len(os.fsencode(socket_path))}")],
            )
        for folder in (socket_path.parent, journal.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        socket_path.parent.chmod(0o700)
        self._lock = os.open(journal.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(f"another supervisor holds {journal}") from None
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}
        self._ending: dict[str, list[tuple[_Peer, Any]]] = {}
        self._shutdown: list[tuple[_Peer, Any]] = []
        self._stopping = False
        self._wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._stop(10.0))
        # A closed terminal or a pressed Ctrl-C is meant for the agent above, never for what serves. A
        # handler and not SIG_IGN: engines would inherit that.
        signal.signal(signal.SIGHUP, lambda *_: None)
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)
        self._processes = Processes(journal, clock, self._on_exit)
        for main in self._processes.all():
            self._watch(main)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            socket_path.unlink()
        self._listener.bind(str(socket_path))
        socket_path.chmod(0o600)
        self._listener.listen(16)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._on_connect)
        self._path = socket_path

    def serve(self) -> None:
        """Runs until shut down; removes its socket at the end."""
        while True:
            timeout = self._processes.tick()
            if self._stopping and not self._processes.all():
                break
            for key, _ in self._selector.select(timeout):
                key.data()
        for peer, number in self._shutdown:
            peer.connection.setblocking(True)
            self._send(peer, {"id": number, "ok": True})
        self._path.unlink(missing_ok=True)
        _log.info("supervisor.ended")

    # ------------------------------------------------------------------ events

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _watch(self, main: Main) -> None:
        self._selector.register(main.pidfd, selectors.EVENT_READ, lambda: self._unwatch(main))

    def _unwatch(self, main: Main) -> None:
        # Readable for ever once the process ended: taken off at the first sign, `tick` finds out the rest.
        with contextlib.suppress(KeyError):
            self._selector.unregister(main.pidfd)

    def _on_exit(self, main: Main) -> None:
        self._unwatch(main)
        event = {
            "event": "exit", "instance": main.instance, "pid": main.pid, "start_time": main.start_time,
            "code": main.code, "killed": sorted(main.killed), "out_of_memory": main.out_of_memory,
        }  # fmt: skip
        for peer in list(self._peers.values()):
            if peer.greeted:
                self._send(peer, event)
        # After the event: who asked for the end still knows then that it was the one who asked.
        for peer, number in self._ending.pop(main.instance, []):
            self._send(peer, {"id": number, "ok": True, "code": main.code})

    def _on_connect(self) -> None:
        connection, _ = self._listener.accept()
        data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, _ = struct.unpack("3i", data)
        if uid not in (0, os.geteuid()):
            _log.warning("peer.refused", uid=uid)
            connection.close()
            return
        connection.setblocking(False)
        peer = _Peer(connection)
        self._peers[connection.fileno()] = peer
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._on_peer(peer))
        self._send(peer, {**wire.hello(), "pid": os.getpid(), "owner": self._processes.owner})

    def _on_peer(self, peer: _Peer) -> None:
        if peer.connection.fileno() < 0:
            return
        self._flush(peer)
        try:
            data = peer.connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            return
        peer.incoming += data
        while (end := peer.incoming.find(b"\n")) >= 0:
            line = bytes(peer.incoming[:end])
            del peer.incoming[: end + 1]
            self._on_line(peer, line)
            if peer.connection.fileno() < 0:
                return
        if len(peer.incoming) > wire.MAX_LINE:
            self._drop(peer)

    def _on_line(self, peer: _Peer, line: bytes) -> None:
        number = None
        try:
            message = wire.decode(line)
            number = message.get("id")
            if not peer.greeted:
                wire.check_hello(message)
                peer.greeted = True
                return
            reply = self._do(peer, wire.check_request(message), message)
        except RelightError as error:
            self._send(peer, {"id": number, "ok": False, "code": error.code, "error": str(error)})
            if not peer.greeted:
                self._drop(peer)
            return
        if reply is not None:
            self._send(peer, {"id": number, "ok": True, **reply})

    def _do(self, peer: _Peer, operation: str, message: dict[str, Any]) -> dict[str, Any] | None:
        if operation == "spawn":
            if self._stopping:
                raise Conflict("the supervisor is shutting down")
            main = self._processes.spawn(
                message["instance"], message["argv"], message["env"], message["cwd"], message["log"]
            )
            self._watch(main)
            return {"pid": main.pid, "start_time": main.start_time}
        if operation == "adopt":
            if self._stopping:
                raise Conflict("the supervisor is shutting down")
            main = self._processes.adopt(message["instance"], message["pid"])
            self._watch(main)
            return {"pid": main.pid, "start_time": main.start_time}
        if operation == "list":
            return {
                "instances": [
                    {"instance": m.instance, "pid": m.pid, "start_time": m.start_time}
                    for m in self._processes.all()
                    if not m.exited
                ]
            }
        if operation == "environment":
            return {"environment": dict(os.environ)}
        if operation == "signal":
            self._processes.signal(message["instance"], message["signal"])
            return {}
        if operation == "end":
            self._processes.end(message["instance"], message["grace_seconds"])
            self._ending.setdefault(message["instance"], []).append((peer, message.get("id")))
            return None
        self._shutdown.append((peer, message.get("id")))
        self._stop(message["grace_seconds"])
        return None

    def _stop(self, grace_seconds: float) -> None:
        self._stopping = True
        for main in self._processes.all():
            self._processes.end(main.instance, grace_seconds)

    # ------------------------------------------------------------------ sending

    def _send(self, peer: _Peer, message: dict[str, Any]) -> None:
        peer.outgoing += wire.encode(message)
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        if peer.connection.fileno() < 0:
            return
        try:
            while peer.outgoing:
                sent = peer.connection.send(peer.outgoing)
                del peer.outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)
            return
        if len(peer.outgoing) > wire.MAX_LINE:
            # A peer that does not read is cut off: it lists again when it comes back.
            self._drop(peer)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outgoing else 0)
        if self._selector.get_key(peer.connection).events != events:
            self._selector.modify(peer.connection, events, lambda: self._on_peer(peer))

    def _drop(self, peer: _Peer) -> None:
        if peer.connection.fileno() >= 0:
            self._selector.unregister(peer.connection)
            self._peers.pop(peer.connection.fileno(), None)
            peer.connection.close()
