"""What others offer for the same: NIXL (UCX), Mooncake, gRPC streaming, gloo. None of them verifies what arrives."""

from __future__ import annotations

import base64
import datetime
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import body
from contender import STREAMS
from raw import address_of, in_parts, resident

MESSAGE_BYTES = 2 << 20
DESCRIPTORS = 16
"""Pieces that a body is described in: more keep an engine's pipeline full."""


def pieces(length: int) -> list[tuple[int, int]]:
    """(offset, bytes) of DESCRIPTORS equal pieces."""
    cuts = [length * n // DESCRIPTORS // 4096 * 4096 for n in range(DESCRIPTORS)] + [length]
    return [(a, b - a) for a, b in pairwise(cuts)]


class _Peer:
    def __init__(self, sizes: list[int], length: int) -> None:
        self._length = length

    def _memory(self, *, filled: bool) -> int:
        """The address of resident memory, with the body when `filled`."""
        self._view = resident(self._length)
        if filled:
            body.fill(self._view)
        return address_of(self._view)


class _Nixl(_Peer):
    """NIXL with its UCX backend; segments and buffers as large as make it fastest."""

    transports = ""

    def _agent(self, name: str, address: int) -> Any:
        os.environ |= {
            "UCX_TLS": self.transports, "UCX_MODULES": "^efa", "UCX_NET_DEVICES": "lo", "UCX_TCP_TX_SEG_SIZE": "256k",
            "UCX_TCP_RX_SEG_SIZE": "256k", "UCX_TCP_SNDBUF": "4m", "UCX_TCP_RCVBUF": "4m",
        }  # fmt: skip
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        agent.register_memory(agent.get_reg_descs([(address, self._length, 0, "w")], "DRAM"))
        return agent

    def serve(self) -> dict[str, Any]:
        address = self._memory(filled=True)
        self._held = self._agent("source", address)
        return {"metadata": base64.b64encode(self._held.get_agent_metadata()).decode(), "address": address}

    def attach(self, address: dict[str, Any]) -> memoryview:
        here = self._memory(filled=False)
        self._held = self._agent("target", here)
        peer = self._held.add_remote_agent(base64.b64decode(address["metadata"]))
        local = self._held.get_xfer_descs([(here + at, size, 0) for at, size in pieces(self._length)], "DRAM")
        remote = self._held.get_xfer_descs(
            [(address["address"] + at, size, 0) for at, size in pieces(self._length)], "DRAM"
        )
        self._handle = self._held.initialize_xfer("READ", local, remote, peer)
        return self._view

    def pull(self) -> dict[str, float]:
        state = self._held.transfer(self._handle)
        while state == "PROC":
            # Gives the interpreter away: NIXL's own threads do the work, and tell nobody when it is done.
            time.sleep(0)
            state = self._held.check_xfer_state(self._handle)
        if state != "DONE":
            raise SystemExit(f"NIXL ended a transfer with {state}")
        return {}


class NixlTcp(_Nixl):
    transports = "tcp,self"


class NixlShm(_Nixl):
    """Shared memory and cross-memory attach."""

    transports = "posix,sysv,cma,self,tcp"


class MooncakeTcp(_Peer):
    """Mooncake's transfer engine over tcp, peers found by handshake."""

    def _engine(self, address: int) -> Any:
        from mooncake.engine import TransferEngine

        engine = TransferEngine()
        if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise SystemExit("Mooncake's engine did not start")
        engine.register_memory(address, self._length)
        return engine

    def serve(self) -> dict[str, Any]:
        address = self._memory(filled=True)
        self._held = self._engine(address)
        return {"name": f"127.0.0.1:{self._held.get_rpc_port()}", "address": address}

    def attach(self, address: dict[str, Any]) -> memoryview:
        self._here = self._memory(filled=False)
        self._held = self._engine(self._here)
        self._there = address
        return self._view

    def pull(self) -> dict[str, float]:
        there = self._there
        if self._held.transfer_sync_read(there["name"], self._here, there["address"], self._length):
            raise SystemExit("Mooncake's read failed")
        return {}


class GrpcTcp(_Peer):
    """A server-streaming call per part, raw bytes as messages."""

    def serve(self) -> dict[str, Any]:
        import grpc

        self._memory(filled=True)

        def stream(request: bytes, context: Any) -> Iterator[bytes]:
            start, stop = map(int, request.split())
            for at in range(start, stop, MESSAGE_BYTES):
                yield bytes(self._view[at : min(at + MESSAGE_BYTES, stop)])

        handler = grpc.method_handlers_generic_handler("body", {"read": grpc.unary_stream_rpc_method_handler(stream)})
        self._held = grpc.server(ThreadPoolExecutor(STREAMS), handlers=(handler,), options=self._options())
        port = self._held.add_insecure_port("127.0.0.1:0")
        self._held.start()
        return {"port": port}

    @staticmethod
    def _options() -> list[tuple[str, int]]:
        return [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

    def attach(self, address: dict[str, Any]) -> memoryview:
        import grpc

        self._memory(filled=False)
        # Without a pool of its own each channel would share one connection with the others.
        options = [*self._options(), ("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.insecure_channel(f"127.0.0.1:{address['port']}", options) for _ in range(STREAMS)]
        return self._view

    def pull(self) -> dict[str, float]:
        def part(n: int, start: int, stop: int) -> None:
            for message in self._channels[n].unary_stream("/body/read")(f"{start} {stop}".encode()):
                self._view[start : start + len(message)] = message
                start += len(message)

        in_parts(self._length, part)
        return {}


class GlooTcp(_Peer):
    """torch.distributed's gloo: one send for one receive."""

    def _group(self, rank: int, port: int) -> Any:
        import torch
        import torch.distributed as dist

        self._memory(filled=rank == 0)
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=datetime.timedelta(seconds=60),
                              wait_for_workers=False)  # fmt: skip
        self._tensor = torch.frombuffer(self._view, dtype=torch.uint8)
        return dist, store

    def serve(self) -> dict[str, Any]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        dist, store = self._group(0, port)

        def send() -> None:
            dist.init_process_group("gloo", store=store, rank=0, world_size=2)
            go = self._tensor[:1].clone()
            while True:
                dist.recv(go, 1)
                dist.send(self._tensor, 1)

        threading.Thread(target=send, daemon=True).start()
        return {"port": port}

    def attach(self, address: dict[str, Any]) -> memoryview:
        self._dist, store = self._group(1, address["port"])
        self._dist.init_process_group("gloo", store=store, rank=1, world_size=2)
        return self._view

    def pull(self) -> dict[str, float]:
        self._dist.send(self._tensor[:1].clone(), 0)
        self._dist.recv(self._tensor, 0)
        return {}
