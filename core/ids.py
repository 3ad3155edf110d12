"""Identifiers: short, sortable by age within a process's second, safe in paths and labels."""

from __future__ import annotations

import re
import secrets

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?")
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id(prefix: str) -> str:
    """A fresh identifier `<prefix>-<10 characters>`; 50 random bits, lower case, no look-alikes."""
    return prefix + "-" + "".join(secrets.choice(_ALPHABET) for _ in range(10))


def is_name(text: str) -> bool:
    """Whether `text` can name a namespace, model, slot or instance (an RFC 1123 label, dots allowed)."""
    return _NAME.fullmatch(text) is not None
