"""What an engine made of an installed bundle, from its log and from its directories. Pure: no I/O.

Three things that are easily taken for one:
    installed   the bundle's files are where the engine looks
    selected    the engine's own key led it to them
    hit         it loaded what it found there, and compiled nothing of its own

Log lines are vLLM 0.32.0's (vllm/compilation/decorators.py, backends.py). An engine whose lines are not known is
judged by its directories alone: nothing new in them is a hit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath

from relight.agent.cache.trees import Tree

_LOADED = re.compile(r"Directly load AOT compilation from path (\S+)|Directly load the compiled graph\(s\)")
_FAILED = re.compile(r"Compiling model again due to a load failure from (\S+?), reason: (.*)")
_COMPILED = re.compile(r"saved AOT compiled function to|Cache the graph of compile range|Compiling a graph for compile")
_ENGINE = re.compile(r"init engine \(profile, create kv cache, warmup model\) took ([\d.]+) s")
_HASH = re.compile(r"vllm/torch_compile_cache/(?:torch_aot_compile/)?([0-9a-f]{10,64})/")
SHOWN = 3


class Verdict(StrEnum):
    """One word per start."""

    HIT = "hit"
    """Installed, selected, loaded; nothing was compiled."""
    PARTLY = "partly"
    """Loaded, and something more was compiled."""
    NOT_SELECTED = "not-selected"
    """Installed, and the engine's own key led elsewhere."""
    NOT_LOADED = "not-loaded"
    """Selected, and the engine failed to load it: the bundle is bad."""
    COMPILED = "compiled"
    """Nothing was installed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a start went. `compiled` counts artefacts that are new since the start; `reason` is for people."""

    verdict: Verdict
    installed: bool
    selected: bool
    hit: bool
    compiled: int
    reason: str


def judge(log: str, before: Tree, after: Tree, *, installed: bool) -> Outcome:
    """`before` is the tree as the engine found it, `after` as it is now; `log` is what the engine wrote meanwhile."""
    new = after.new_since(before)
    shown = ", ".join(_short(f.path) for f in new[:SHOWN]) + (" and more" if len(new) > SHOWN else "")
    if not installed:
        return Outcome(Verdict.COMPILED, False, False, False, len(new), f"{len(new)} artefacts are the engine's own")
    if failed := load_failure(log):
        return Outcome(Verdict.NOT_LOADED, True, True, False, len(new), failed)
    had, has = _hashes(before), _hashes(after)
    if has - had and not _LOADED.search(log):
        reason = f"the engine looked for {_names(has - had)}, the bundle has {_names(had) or 'none of its kind'}"
        return Outcome(Verdict.NOT_SELECTED, True, False, False, len(new), reason)
    if new or _COMPILED.search(log):
        reason = f"{len(new)} artefacts were compiled beside the bundle's: {shown}" if new else "the engine compiled"
        return Outcome(Verdict.PARTLY, True, True, False, len(new), reason)
    return Outcome(Verdict.HIT, True, True, True, 0, "loaded, and nothing was compiled")


def load_failure(log: str) -> str | None:
    """What the engine said when it could not load an artefact; None when it said no such thing."""
    failed = _FAILED.search(log)
    return f"the engine failed to load {_short(failed[1])}: {failed[2].strip()}" if failed else None


def engine_seconds(log: str) -> float | None:
    """What the engine says its initialisation took, compiling or loading included; the slowest of several ranks."""
    said = [float(s) for s in _ENGINE.findall(log)]
    return max(said) if said else None


def _hashes(tree: Tree) -> set[str]:
    """vLLM's own keys, by the directories that are named by them."""
    return {found[1] for f in tree.files if (found := _HASH.match(f.path))}


def _names(hashes: set[str]) -> str:
    return ", ".join(sorted(h[:12] for h in hashes))


def _short(path: str) -> str:
    parts = PurePosixPath(path).parts
    return "/".join(parts[-2:])
