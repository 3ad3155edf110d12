"""The second fork, of one model: it has read the model's configuration and tokenizer too, and forks engines of it.

The zygote above passes a caller's socket on to it; the engine answers there by itself.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

from relight.core.logs import get_logger
from relight.plugin.zygote import child, fitness, place

log = get_logger("zygote.model")
_PR_SET_PDEATHSIG = 1
_READY = b"ready"


@dataclass(slots=True, eq=False)
class Model:
    """The zygote's end of one prepared model."""

    pid: int
    channel: socket.socket
    ready: bool = False
    ended: bool = False

    def fork(self, raw: object, caller: socket.socket) -> bool:
        """Has an engine forked from it, which answers to `caller`; False when it is not ready, or ended."""
        if not self.ready:
            return False
        try:
            # The words follow on the stream: a message of any length, and the file with its first byte.
            words = json.dumps(raw).encode() + b"\n"
            socket.send_fds(self.channel, [words[:1]], [caller.fileno()])
            self.channel.sendall(words[1:])
        except OSError:
            self.end()
            return False
        return True

    def look(self) -> None:
        """Takes in whether it became ready, or ended."""
        try:
            said = self.channel.recv(len(_READY), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if said == _READY:
            self.ready = True
        elif not said:
            self.end()

    def end(self) -> None:
        """Ends it and reaps it."""
        if not self.ended:
            self.ended, self.ready = True, False
            self.channel.close()
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def begin(key: str, ask: child.Ask, preload: child.Preload, listener: socket.socket) -> Model | None:
    """Forks the process that prepares a model; returns in the zygote alone."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        return Model(pid, ours)
    try:
        ours.close()
        listener.close()
        # It must not outlive the zygote: nobody would find it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _prepare(key, ask, preload, theirs)
        _serve(key, preload, theirs)
    except BaseException:  # noqa: BLE001 - nothing of the zygote may run on here
        traceback.print_exc()
    os._exit(0)


def _prepare(key: str, ask: child.Ask, preload: child.Preload, channel: socket.socket) -> None:
    os.environ.clear()
    os.environ.update(ask.env)
    place.show([sys.orig_argv[0], "relight-zygote", *key.split("\0")], None)
    preload.in_child(ask.env)
    preload.prepare(ask.argv)
    gc.collect()
    if why := fitness.unfit():
        log.warning("model.unfit", model=key, reason=why)
        os._exit(1)
    gc.freeze()
    log.info("model.ready", model=key)
    channel.sendall(_READY)


def _serve(key: str, preload: child.Preload, channel: socket.socket) -> None:
    while True:
        first, files, _, _ = socket.recv_fds(channel, 1, 1)
        if not first:
            return
        raw = json.loads(first + child.line(channel))
        with socket.socket(fileno=files[0]) as caller:
            if why := fitness.unfit():
                log.warning("model.unfit", model=key, reason=why)
                _refuse(caller, why)
                return
            child.fork(child.asked(raw), caller, preload, key)


def _refuse(caller: socket.socket, why: str) -> None:
    said: Mapping[str, object] = {"refused": f"of its model's fork: {why}", "stale": True}
    child.send(caller, said)
