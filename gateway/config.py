"""The gateway's configuration file: JSON, strict, every wrong key named before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from relight.gateway.desk import Limits
from relight.protos import settings
from relight.protos.settings import Attached, Strict, Tls


class Hold(Strict):
    """What happens to requests while no replica is ready."""

    limit: Annotated[int, Field(ge=0, le=1_000_000)] = 1024
    """Requests held at once, over all models; the next one is answered 429."""
    seconds: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    """The longest that one request is held: a cold start fits into it, a forgotten client does not."""
    release_per_second: Annotated[float, Field(gt=0, le=100_000)] = 50.0
    """Held requests that go on each second once a replica is ready: it must not drown in its first second."""

    def limits(self) -> Limits:
        """As the desk takes them."""
        return Limits(self.limit, self.seconds, self.release_per_second)


class GatewayConfig(Attached):
    """All settings of one gateway. `host` and `port` are those of the front door; `tokens` of operators may pin."""

    name: Annotated[str, Field(min_length=1, max_length=63)] = "gateway"
    """Unique among the gateways of one controller."""
    https: Tls | None = None
    """For clients; `authority` is not asked of them."""
    hold: Hold = Hold()
    max_body_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 16 << 20
    max_tries: Annotated[int, Field(ge=1, le=16)] = 4
    """Replicas that one request is sent to before its failure is the answer."""
    grace_seconds: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """After SIGTERM, for requests that are in flight."""


def load(path: Path, told: Mapping[str, Any] | None = None) -> GatewayConfig:
    """The file, with what was `told` beside it in its stead.

    Raises InvalidInput with every wrong field, or when the file cannot be read.
    """
    return settings.load(path, GatewayConfig, "gateway", told)
