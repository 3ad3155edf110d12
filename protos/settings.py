"""What configuration files of several processes say in the same words: TLS, tokens, where the controller is.

Files are JSON and strict: every wrong key is named before anything starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from relight.core.auth import Identity, Role, TokenEntry, Tokens
from relight.core.errors import FieldError, InvalidInput
from relight.core.tls import TlsFiles
from relight.protos.client import ControllerAccess

Port = Annotated[int, Field(ge=0, le=65535)]


class Closed(BaseModel):
    """Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Strict(Closed):
    """Unknown keys are refused, and values of another type too, however well they would convert."""

    model_config = ConfigDict(strict=True)


class Tls(Closed):
    """PEM files of this end, and the authority whose certificates it trusts."""

    certificate: Path
    private_key: Path
    authority: Path

    def files(self) -> TlsFiles:
        """As the shared record."""
        return TlsFiles(self.certificate, self.private_key, self.authority)


class Token(Closed):
    """One accepted token, by its SHA-256: the token itself is never stored."""

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    name: str
    roles: tuple[Role, ...]


def known(tokens: Iterable[Token]) -> Tokens:
    """As the shared record."""
    return Tokens(TokenEntry(t.sha256, Identity(t.name, frozenset(t.roles))) for t in tokens)


class Attached(Strict):
    """Settings of a process that stays attached to the controller and serves on an address of its own."""

    controller_address: Annotated[str, Field(pattern=r"^\S+:\d{1,5}$")]
    """host:port of the controller's gRPC."""
    token: Annotated[str | None, Field(min_length=1, repr=False)] = None
    """Sent to the controller as bearer token."""
    token_file: Path | None = None
    """Holds the token in place of `token`, and is read anew at each attach: others renew it."""
    tls: Tls | None = None
    """For gRPC: both ends of every connection show a certificate of `authority`."""
    host: str = "127.0.0.1"
    port: Port = 0
    """0 takes any free port."""
    tokens: tuple[Token, ...] = ()
    """Who may call this process."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="after")
    def _one_token(self) -> Self:
        if (self.token is None) == (self.token_file is None):
            raise ValueError("give either `token` or `token_file`")
        return self

    def controller(self) -> ControllerAccess:
        """As the stream to the controller takes it."""
        tls = self.tls.files() if self.tls else None
        return ControllerAccess(self.controller_address, self.token or "", tls, self.token_file)

    def known_tokens(self) -> Tokens:
        """Who may call this process."""
        return known(self.tokens)


S = TypeVar("S", bound=Attached)


def load(path: Path, settings: type[S], component: str, told: Mapping[str, Any] | None = None) -> S:
    """The settings of `component` in `path`, with what was `told` on the command line in their stead.

    Raises InvalidInput with every wrong field, or when it cannot be read.
    """
    try:
        text = path.read_bytes()
        if told:
            with suppress(ValueError, TypeError):
                text = json.dumps({**json.loads(text), **told}).encode()
        return settings.model_validate_json(text)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise InvalidInput(f"{path} is not a valid {component} configuration", wrong_fields(error)) from None


def wrong_fields(error: ValidationError) -> list[FieldError]:
    """Every wrong field with what was expected and what came; never a secret, nor an object that may hold one."""
    return [
        FieldError(".".join(map(str, e["loc"])) or "(file)", e["msg"], _shown(e["loc"], e["type"], e["input"]))
        for e in error.errors(include_url=False)
    ]


def _shown(loc: tuple[int | str, ...], kind: str, value: object) -> str:
    if kind == "missing":
        return "nothing"
    if kind == "json_invalid":
        return "a text that is no JSON"
    if loc and str(loc[-1]).endswith("token"):
        return "***"
    return type(value).__name__ if isinstance(value, dict | list) else repr(value)[:80]
