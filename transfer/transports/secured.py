"""TLS for data sockets, when it is configured: both ends show a certificate of the fleet's own authority.

Names in certificates are not compared: a node is reached by whatever address it listens on, and who may read what is
said by the grant. What TLS adds is that nobody on the way can read or alter a byte.
"""

from __future__ import annotations

import socket
import ssl

from relight.core.errors import LocalFault
from relight.core.tls import TlsFiles

HANDSHAKE_SECONDS = 5.0


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(files.certificate, files.private_key)
        context.load_verify_locations(files.authority)
    except (OSError, ssl.SSLError) as error:
        raise LocalFault(f"the certificate of this member cannot be used: {error}") from error
    return context


def serving(files: TlsFiles) -> ssl.SSLContext:
    """For a source. Raises LocalFault when a file cannot be used."""
    return _context(ssl.PROTOCOL_TLS_SERVER, files)


def reading(files: TlsFiles) -> ssl.SSLContext:
    """For a receiver. Raises LocalFault when a file cannot be used."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, files)


def accepted(sock: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
    """The server's end of an accepted connection, after the handshake. Raises OSError."""
    sock.settimeout(HANDSHAKE_SECONDS)
    secured = context.wrap_socket(sock, server_side=True)
    secured.settimeout(None)
    return secured
