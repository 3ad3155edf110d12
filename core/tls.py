"""Where a component's certificates lie. The files themselves are read by whoever opens the socket."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from relight.core.errors import FieldError, InvalidInput


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one end: its certificate chain, its private key, and the authority it trusts."""

    certificate: Path
    private_key: Path
    authority: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """(certificate chain, private key, authority) as PEM bytes. Raises InvalidInput naming a bad file."""
        parts = []
        for name in ("certificate", "private_key", "authority"):
            path: Path = getattr(self, name)
            try:
                data = path.read_bytes()
            except OSError as error:
                raise InvalidInput(
                    "TLS file cannot be read",
                    [FieldError(f"tls.{name}", "a readable PEM file", f"{path} ({error.strerror})")],
                ) from error
            if b"-----BEGIN" not in data:
                raise InvalidInput("TLS file is not PEM", [FieldError(f"tls.{name}", "PEM", str(path))])
            parts.append(data)
        return parts[0], parts[1], parts[2]
