"""How memory of this host is served to readers, and how a source's address is read: the same for all who do either."""

from __future__ import annotations

from pathlib import Path

from relight.core.errors import LocalFault
from relight.core.records import SourceRef
from relight.core.tls import TlsFiles
from relight.transfer.source import Source
from relight.transfer.transports.base import Connect, Listener
from relight.transfer.transports.shm import Pages, ShmListener, ShmReader
from relight.transfer.transports.tcp import TcpListener, TcpReader

READ_DEADLINE = 5.0
"""Seconds that one wait for a source may last before the source counts as gone."""


def serve(source: Source, socket: Path, host: str, tls: TlsFiles | None) -> tuple[list[Listener], dict[str, str]]:
    """Serves `source` by shm at `socket` and by tcp at `host`: who listens, and the addresses by transport.

    Raises LocalFault, and nothing is served then.
    """
    listeners: list[Listener] = []
    addresses = dict[str, str]()
    for listener in (ShmListener(socket), TcpListener(host, tls=tls)):
        listeners.append(listener)
        try:
            addresses[listener.kind] = listener.register(source)
        except LocalFault:
            for opened in listeners:
                opened.release()
            raise
    return listeners, addresses


def connector(transport: str, peer: SourceRef, tls: TlsFiles | None) -> Connect:
    """Connections to `peer` by shm or tcp; those by shm share its pages."""
    if transport == ShmListener.kind:
        pages = Pages()
        return lambda: ShmReader(peer.address, peer.grant, peer.instance, READ_DEADLINE, pages)
    return lambda: TcpReader(peer.address, peer.grant, peer.instance, READ_DEADLINE, tls)
