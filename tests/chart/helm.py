"""Helm 3 and Helm 4 as they come out of `make setup-kubernetes`, over this project's chart."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tests.kubernetes.plane import BINARIES

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "relight"
RELEASE, SYSTEM = "relight", "relight-system"
COMMAND_SECONDS = 180.0
VERSIONS = ("helm3", "helm4")
NEWEST, OLDEST = "1.37", "1.32"
"""Of the schemas that what is rendered is held to (make setup-chart)."""


class HelmError(Exception):
    """Helm refused; the message is what it said."""


@dataclass(frozen=True)
class Helm:
    """One version of it; `kubeconfig` for what needs a cluster."""

    version: str
    kubeconfig: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, *words: str, values: Mapping[str, Any] | None = None) -> str:
        """What it prints. Raises HelmError."""
        cluster = [f"--kubeconfig={self.kubeconfig}"] if self.kubeconfig else []
        given = ["--values", "-"] if values is not None else []
        done = subprocess.run(
            [str(BINARIES / self.version), *words, *given, *cluster], text=True, capture_output=True, check=False,
            input=None if values is None else json.dumps(values), timeout=COMMAND_SECONDS,
            env={**os.environ, "HELM_CACHE_HOME": "/nonexistent", **self.environment},
        )  # fmt: skip
        if done.returncode:
            raise HelmError(done.stderr or done.stdout)
        return done.stdout

    def template(
        self, values: Mapping[str, Any] | None = None, *words: str, kubernetes: str = NEWEST, hooks: bool = True
    ) -> list[dict[str, Any]]:
        """The objects that the chart renders for a cluster of that version."""
        told = [f"--kube-version={kubernetes}.0", *([] if hooks else ["--no-hooks"]), *words]
        text = self.run("template", RELEASE, str(CHART), "--namespace", SYSTEM, *told, values=values or {})
        # In C: the combinations come to a hundred thousand lines.
        return [found for found in yaml.load_all(text, Loader=yaml.CSafeLoader) if found]

    @property
    def unserved(self) -> Sequence[str]:
        """What keeps Helm 4 from applying on the server's side: the test's server panics at an APIService there."""
        return ("--server-side=false",) if self.version == "helm4" else ()


def named(objects: Sequence[dict[str, Any]], kind: str, name: str, namespace: str | None = None) -> dict[str, Any]:
    """The one object of this kind and name."""
    (found,) = (
        o
        for o in objects
        if o["kind"] == kind and o["metadata"]["name"] == name and namespace in (None, o["metadata"].get("namespace"))
    )
    return found
