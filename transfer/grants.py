"""Grants: short-lived signed permissions to read one source's weights, checked at the source and offline.

A grant is `<payload>.<signature>`: base64url of canonical JSON, and of its HMAC-SHA256 under a key that
belongs to one source alone. The source's agent makes the key, the controller signs with it; a receiver
never sees a key, so it cannot mint grants, and an engine cannot mint them for another engine.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass

from relight.core.errors import Denied

MAX_GRANT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Claims:
    """What a grant permits: `receiver` may read `generation` of `source_instance` until `expires_at`.

    `expires_at` is in seconds since the Unix epoch, by the source's clock. An empty `manifest_digest`
    permits any manifest of that generation. One that only `tries` lets its bearer in and no further: nothing is read by
    it.
    """

    source_instance: str
    generation: int
    manifest_digest: str
    receiver: str
    expires_at: float
    tries: bool = False


def new_key() -> str:
    """A fresh signing key for one source: 64 hexadecimal digits (256 bits)."""
    return secrets.token_hex(32)


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _sign(key: str, payload: bytes) -> bytes:
    return hmac.new(bytes.fromhex(key), payload, hashlib.sha256).digest()


def mint(key: str, claims: Claims) -> str:
    """The grant for `claims` under the source's `key` (hexadecimal)."""
    plain = asdict(claims)
    if not claims.tries:
        # An engine that outlived the agent which started it may not know of it.
        del plain["tries"]
    payload = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    return f"{_b64(payload)}.{_b64(_sign(key, payload))}"


def check(
    key: str, grant: str, *, now: float, source_instance: str, generation: int, manifest_digest: Callable[[], str]
) -> Claims:
    """The claims of a grant that is valid here and now. Raises Denied saying what does not fit.

    The signature is checked before anything inside is looked at. `manifest_digest` is asked only when the grant names
    one.
    """
    if len(grant) > MAX_GRANT_BYTES:
        raise Denied(f"a grant has at most {MAX_GRANT_BYTES} bytes")
    try:
        head, _, tail = grant.partition(".")
        payload, signature = _unb64(head), _unb64(tail)
    except (ValueError, binascii.Error):
        raise Denied("the grant is not of the form payload.signature") from None
    if not hmac.compare_digest(_sign(key, payload), signature):
        raise Denied("the grant was not signed for this source")
    try:
        claims = Claims(**json.loads(payload))
    except (TypeError, ValueError):
        raise Denied("the grant's payload has other fields than a grant") from None
    if claims.source_instance != source_instance:
        raise Denied(f"the grant is for {claims.source_instance}, this is {source_instance}", authenticated=True)
    if claims.generation != generation:
        raise Denied(f"the grant is for generation {claims.generation}, this is {generation}", authenticated=True)
    if claims.manifest_digest and claims.manifest_digest != manifest_digest():
        raise Denied("the grant is for another manifest", authenticated=True)
    if not now < claims.expires_at:
        raise Denied(f"the grant expired {now - claims.expires_at:.1f} s ago", authenticated=True)
    return claims
