"""What the agent tells the in-process part, by environment: read once, checked, in one place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from relight.core.errors import FieldError, InvalidInput
from relight.core.records import Mode
from relight.core.tls import TlsFiles
from relight.transfer.verify import Digest

INSTANCE = "RELIGHT_INSTANCE"
DIRECTORY = "RELIGHT_ENGINE_DIR"
BIND_HOST = "RELIGHT_BIND_HOST"
REVISION = "RELIGHT_CONTENT_REVISION"
STREAMS = "RELIGHT_STREAMS"
RATE = "RELIGHT_SOURCE_RATE"
RDMA = "RELIGHT_RDMA"
DIGESTS = "RELIGHT_DIGESTS"
MODE = "RELIGHT_MODE"
START_SECONDS = "RELIGHT_START_SECONDS"
SIZES = "RELIGHT_SIZES"
MOST_WEIGHT = 1e15
TLS = ("RELIGHT_TLS_CERTIFICATE", "RELIGHT_TLS_PRIVATE_KEY", "RELIGHT_TLS_AUTHORITY")


@dataclass(frozen=True, slots=True)
class Card:
    """An RDMA card of this host, and the address of its own that sources listen at."""

    name: str
    host: str


@dataclass(frozen=True, slots=True)
class Settings:
    """`directory` is private to the instance and holds its sockets; `bind_host` is where tcp sources listen.

    `revision` names the content that the engine loads at start; `streams` is how many streams a refill uses. With `tls`
    weights travel between hosts over TLS alone. `source_rate` bounds the bytes per second that receivers together read.
    `cards` are the host's, for all ranks.
    """

    instance: str
    directory: Path
    bind_host: str
    revision: str
    streams: int
    tls: TlsFiles | None = None
    source_rate: int | None = None
    cards: tuple[Card, ...] = ()
    mode: Mode = Mode.COLD
    """How the engine starts: cold loads its own weights; lazy and normal wait for them to be brought by a rung."""
    start_seconds: float = 900.0
    """How long an engine that waits for its weights does so."""
    digests: Digest = Digest.XXH3
    """What proves weights, block by block."""
    sizes: tuple[tuple[int, float], ...] = ()
    """The fleet's steps as (tokens, weight), tokens ascending: what a lazy start captures first after it is ready."""

    @property
    def awaits(self) -> bool:
        """Whether weights are brought by the agent's rungs instead of being loaded."""
        return self.mode in (Mode.LAZY, Mode.NORMAL)

    def cards_of(self, rank: int, ranks: int) -> tuple[Card, ...]:
        """The cards that one of `ranks` members uses: all of them when it is the only one, else the one in its turn."""
        if ranks <= 1 or not self.cards:
            return self.cards
        return (self.cards[rank % len(self.cards)],)

    def control_socket(self, rank: int) -> Path:
        """Where the member of this rank takes the agent's calls."""
        return self.directory / f"worker-{rank}.sock"

    def nvlink_socket(self, rank: int) -> Path:
        """Where the member of this rank serves readers of its device's memory."""
        return self.directory / f"nvlink-{rank}.sock"

    def source_socket(self, rank: int) -> Path:
        """Where the member of this rank serves shm readers."""
        return self.directory / f"source-{rank}.sock"

    def relay_socket(self, rank: int) -> Path:
        """Where it serves them what it has, while it is filled itself."""
        return self.directory / f"relay-{rank}.sock"


def read(environ: Mapping[str, str]) -> Settings:
    """The settings in `environ`. Raises InvalidInput naming what is missing or wrong."""
    wrong = [
        FieldError(k, "to be set by the agent", "nothing")
        for k in (INSTANCE, DIRECTORY, BIND_HOST)
        if not environ.get(k)
    ]
    streams = environ.get(STREAMS, "2")
    if not streams.isdigit() or not 1 <= int(streams) <= 64:
        wrong.append(FieldError(STREAMS, "a number from 1 to 64", streams))
    rate = environ.get(RATE, "")
    if rate and (not rate.isdigit() or not int(rate)):
        wrong.append(FieldError(RATE, "bytes per second, at least 1", rate))
    cards = [Card(*part.split("@", 1)) for part in environ.get(RDMA, "").split(",") if "@" in part]
    if len(cards) != len([part for part in environ.get(RDMA, "").split(",") if part]):
        wrong.append(FieldError(RDMA, "cards as name@address, with ',' between them", environ[RDMA]))
    modes = (Mode.COLD, Mode.LAZY, Mode.NORMAL)
    mode = next((m for m in modes if m == environ.get(MODE, Mode.COLD)), None)
    if mode is None:
        wrong.append(FieldError(MODE, " or ".join(modes), environ[MODE]))
    digests = next((d for d in Digest if d == environ.get(DIGESTS, Digest.XXH3)), None)
    if digests is None:
        wrong.append(FieldError(DIGESTS, " or ".join(Digest), environ[DIGESTS]))
    seconds = environ.get(START_SECONDS, "900")
    if not seconds.replace(".", "", 1).isdigit() or not float(seconds):
        wrong.append(FieldError(START_SECONDS, "seconds, more than 0", seconds))
    sizes = _sizes(environ.get(SIZES, "{}"))
    if sizes is None:
        wrong.append(FieldError(SIZES, 'weights of at least 0 by tokens, such as {"1": 20, "8": 3.5}', environ[SIZES]))
    files = [environ.get(name, "") for name in TLS]
    if any(files) and not all(files):
        wrong += [FieldError(n, "set with the others", "nothing") for n, f in zip(TLS, files, strict=True) if not f]
    if wrong or mode is None or sizes is None or digests is None:
        raise InvalidInput("the engine was not started by an agent", wrong)
    return Settings(
        environ[INSTANCE], Path(environ[DIRECTORY]), environ[BIND_HOST], environ.get(REVISION, ""), int(streams),
        TlsFiles(*map(Path, files)) if all(files) else None, int(rate) if rate else None,
        tuple(cards), mode, float(seconds), digests, sizes,
    )  # fmt: skip


def _sizes(text: str) -> tuple[tuple[int, float], ...] | None:
    """None where `text` is not a histogram."""
    try:
        pairs = json.loads(text, object_pairs_hook=tuple, parse_constant=float)
    except (ValueError, RecursionError):
        return None
    if not isinstance(pairs, tuple):
        return None
    found: dict[int, float] = {}
    for key, weight in pairs:
        # One spelling for a number, so that no two keys mean the same one.
        if not (
            key.isascii() and key.isdigit() and len(key) < 10 and not key.startswith("0") and int(key) not in found
        ):
            return None
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MOST_WEIGHT:
            return None
        found[int(key)] = float(weight)
    return tuple(sorted(found.items()))
