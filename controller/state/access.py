"""Where the state lies, as the configuration says it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from relight.core.ids import is_name
from relight.protos.settings import Closed

URL = re.compile(r"rediss?://[^@\s]+|unix:///[^@\s]+")
Address = Annotated[str, Field(pattern=r"^\S+:\d{1,5}$")]


class Password(Closed):
    """Where a password is: it never stands in the configuration itself. Read anew for every connection."""

    file: Path | None = None
    environment: Annotated[str, Field(max_length=256)] = ""
    """Name of a variable."""

    @model_validator(mode="after")
    def _one(self) -> Password:
        if bool(self.file) == bool(self.environment):
            raise ValueError("give either `file` or `environment`")
        return self


class RedisTls(Closed):
    """Without an authority those of the system count; a certificate is shown where the server asks for one."""

    authority: Path | None = None
    certificate: Path | None = None
    private_key: Path | None = None

    @model_validator(mode="after")
    def _both(self) -> RedisTls:
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("`certificate` and `private_key` go together")
        return self


class Sentinels(Closed):
    """Who knows which server is the master."""

    addresses: Annotated[tuple[Address, ...], Field(min_length=1)]
    service: Annotated[str, Field(min_length=1)]
    """The name under which they watch it."""
    password: Password | None = None
    """Of the sentinels themselves."""


class RedisConfig(Closed):
    """A Redis or Valkey server, from 6.2 on, that holds the state of one Relight below one prefix."""

    url: str = ""
    """redis://host:port/db, rediss:// for TLS, or unix:///path; without a password."""
    sentinels: Sentinels | None = None
    tls: RedisTls | None = None
    username: str = ""
    password: Password | None = None
    prefix: Annotated[str, Field(max_length=63)] = "relight"
    """Several Relights share a server under different ones. All keys are of one hash slot."""
    timeout_seconds: Annotated[float, Field(gt=0, le=60, allow_inf_nan=False)] = 3.0
    """For one call; whether a write that takes longer was done is then unknown."""
    history: Annotated[int, Field(ge=100, le=10_000_000)] = 100_000
    """Changes that are kept for watchers that resume."""

    @model_validator(mode="after")
    def _consistent(self) -> RedisConfig:
        if bool(self.url) == bool(self.sentinels):
            raise ValueError("give either `url` or `sentinels`")
        # Said of the whole and not of the field: a password that was put there is not repeated in the error.
        if self.url and not URL.fullmatch(self.url):
            raise ValueError("`url` must be redis://host:port/db, rediss://... or unix:///path, without a password")
        if self.url and self.tls and not self.url.startswith("rediss://"):
            raise ValueError("`tls` needs a url that begins with rediss://")
        if self.username and not self.password:
            raise ValueError("`username` needs a `password`")
        if not is_name(self.prefix):
            raise ValueError("`prefix` must be lower-case letters, digits, '-' and '.'")
        return self
