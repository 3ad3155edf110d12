"""What Kunlun's `xpu_smi` prints, read. No I/O. Intel's tool of the same name is told apart before (kunlun.py)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from relight.core.errors import InvalidInput

MOST_WATTS = 2000
"""A larger number is of a product that tells milliwatts, and which ones do is not known: nothing is said then."""
_BUS = re.compile(r"[0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]")
_COLUMNS = 22
_ID = re.compile(r"XPU\s+(\d+):.*?(GPU-[0-9A-Fa-f-]+)")
_VERSIONS = re.compile(r"Driver Version:\s*([0-9.]+)\s+XPU-RT Version:\s*([0-9.]+)")


@dataclass(frozen=True, slots=True)
class Card:
    """One line of `xpu_smi -m`. Numbers are None where the tool prints something else."""

    address: str
    """As sysfs writes it."""
    index: int
    serial: str
    model: str
    firmware: str
    total_bytes: int
    used_bytes: int
    utilisation: float | None
    temperature_celsius: float | None
    power_watts: float | None


def cards(text: str) -> tuple[Card, ...]:
    """The devices of `xpu_smi -m`, in its order. Raises InvalidInput for a line that begins like one and is none."""
    found = []
    for line in text.splitlines():
        if not _BUS.match(line.strip()):
            continue
        try:
            # The model is quoted and has a space in it.
            fields = shlex.split(line)
            found.append(_card(fields))
        except (ValueError, IndexError) as error:
            expected = f"{_COLUMNS} columns of `xpu_smi -m`: address, ..., memory at 17 and 18, the model at 21"
            raise InvalidInput(f"expected {expected}; got {line.strip()[:120]!r} ({error})") from error
    return tuple(found)


def _card(fields: list[str]) -> Card:
    power = _number(fields[8])
    return Card(
        address=fields[0][4:].lower(),
        index=int(fields[1]),
        serial=fields[3],
        model=fields[21],
        firmware=fields[20],
        total_bytes=int(fields[18]) << 20,
        used_bytes=int(fields[17]) << 20,
        utilisation=None if (busy := _number(fields[19])) is None else busy / 100,
        temperature_celsius=_number(fields[4]),
        power_watts=power if power is not None and power <= MOST_WATTS else None,
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def ids(text: str) -> Mapping[int, str]:
    """UUIDs of `xpu-smi -L` by index; empty for a version that prints none."""
    return {int(found[1]): found[2] for found in map(_ID.search, text.splitlines()) if found}


def versions(text: str) -> tuple[str, str]:
    """Driver and runtime as the table of `xpu_smi` heads it; empty where it does not."""
    found = _VERSIONS.search(text)
    return (found[1], found[2]) if found else ("", "")
