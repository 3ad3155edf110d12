"""Error types, named by what the caller does next.

    RelightError
    |- InvalidInput        correct the input; nothing was changed
    |- NotFound            ask for something that exists
    |- Conflict            read the present state again, then decide anew
    |  |- Fenced           a newer epoch acts: stop acting at all
    |  `- TooOld           the revision asked for was compacted: list again, then watch
    |- Denied              present an identity of the right role
    |- Unavailable         try the same call again after `retry_after` seconds
    |- InvariantViolated   a rule of core/invariants.py was broken: stop, report, do not retry
    `- TransferError       a weight transfer failed; who is at fault says what comes next
       |- RemoteFault      the source is at fault: try another source
       |- LocalFault       this side is at fault: do not blame the source
       `- ModelDirty       bytes of the model were overwritten: re-initialise before the next rung

Standard library only: this module is imported inside engines' own processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldError:
    """One wrong field of an input: where it is, what was expected there, what stood there."""

    field: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected}, got {self.got}"


class RelightError(Exception):
    """Base of all errors that Relight raises on purpose.

    `code` is a stable word for machines (it is the last part of a problem's type URI);
    `retryable` says whether the same call may succeed later without any change by the caller.
    """

    code = "internal"
    retryable = False


class InvalidInput(RelightError):
    """The input is wrong; nothing was changed. `errors` names every wrong field."""

    code = "invalid-input"

    def __init__(self, message: str, errors: Sequence[FieldError] = ()) -> None:
        super().__init__(message if not errors else f"{message}: " + "; ".join(map(str, errors)))
        self.errors = tuple(errors)


class NotFound(RelightError):
    """What was asked for does not exist."""

    code = "not-found"


class Conflict(RelightError):
    """The state is not the one that the caller assumed: read it again, then decide anew."""

    code = "conflict"


class Fenced(Conflict):
    """A step came with an epoch lower than the highest one seen: its sender must stop acting."""

    code = "fenced"


class TooOld(Conflict):
    """A watch asked for a revision that was compacted: list again, then watch from there."""

    code = "too-old"


class Denied(RelightError):
    """The caller has no identity, or one of the wrong role. `authenticated` tells which."""

    code = "denied"

    def __init__(self, message: str, *, authenticated: bool = False) -> None:
        super().__init__(message)
        self.authenticated = authenticated


class Unavailable(RelightError):
    """Not now: the same call may succeed after `retry_after` seconds."""

    code = "unavailable"
    retryable = True

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class InvariantViolated(RelightError):
    """A rule that must always hold was broken (see core/invariants.py)."""

    code = "invariant-violated"


class TransferError(RelightError):
    """A weight transfer did not complete. Subclasses say who is at fault."""

    code = "transfer-failed"


class RemoteFault(TransferError):
    """The source is provably at fault (wrong bytes, refused, gone): try another source."""

    code = "transfer-remote-fault"


class LocalFault(TransferError):
    """The receiving side is at fault (no memory, bad layout of its own): no source is blamed."""

    code = "transfer-local-fault"


class ModelDirty(TransferError):
    """Weights were partly overwritten when the transfer failed: re-initialise before the next rung.

    `cause` is the fault that left the model dirty.
    """

    code = "transfer-model-dirty"

    def __init__(self, message: str, *, cause: TransferError) -> None:
        super().__init__(message)
        self.cause = cause
