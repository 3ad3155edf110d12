"""Whose slots and models are: in a cluster those of a namespace are one tenant's. No I/O.

On one machine nothing is of a pool, and all of it is one tenant's.
"""

from __future__ import annotations


def tenant(pool: str) -> str:
    """The tenant of a pool (`namespace/name`), of its slots and of the models that run on it."""
    return pool.partition("/")[0]


def strangers(ours: str, theirs: str) -> bool:
    """Whether nothing may pass between what is of these two pools."""
    return tenant(ours) != tenant(theirs)
