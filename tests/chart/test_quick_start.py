"""The first block of commands of the chart's README, run line by line as a newcomer would, on a real control plane."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from pathlib import Path

import pytest
import yaml
from tests.chart.figures import FIGURES
from tests.chart.helm import CHART, RELEASE, SYSTEM, Helm
from tests.chart.release import VALUES, made
from tests.chart.values import Values, merged
from tests.kubernetes.plane import BINARIES, ControlPlane

pytestmark = [pytest.mark.chart, pytest.mark.timeout(300)]

# What differs here: pods are processes of this machine, and their engines stubs.
HERE = {
    **{name: VALUES[name] for name in ("controller", "gateway", "hooks")},
    "agent": {"config": VALUES["agent"]["config"]},
    "runtimes": {"vllm": {"engine": "stub"}},
}
CLAIM = """
apiVersion: v1
kind: PersistentVolume
metadata: {name: models}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadOnlyMany]
  storageClassName: given
  claimRef: {namespace: team-a, name: models}
  hostPath: {path: /nonexistent}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: models, namespace: team-a}
spec:
  accessModes: [ReadOnlyMany]
  storageClassName: given
  volumeName: models
  resources: {requests: {storage: 1Gi}}
"""


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (CHART / "README.md").read_text(), re.DOTALL | re.MULTILINE)


def _values() -> Values:
    """Those of the README; without the driver's devices and the vLLM arguments that this machine has no use for."""
    found = merged(yaml.safe_load(_blocks("yaml")[0]), HERE)
    assert found["agent"]["config"].pop("accelerators") == {}
    assert found["models"]["chat"]["spec"].pop("args")
    return found


def _commands() -> list[str]:
    """Those of the first block, each with its continuation."""
    return [line for line in _blocks("sh")[0].replace("\\\n", " ").splitlines() if line.strip()]


def _programs(folder: Path, plane: ControlPlane) -> None:
    """`helm` and `kubectl` as they are on a newcomer's PATH, with a cluster to talk to.

    Its namespaces are there already, and no kubelet forwards ports: a proxy stands before the gateways instead.
    """
    kubectl = f"{BINARIES / 'kubectl'} --kubeconfig={plane.admin.kubeconfig} --cache-dir={folder}"
    scripts = {
        "helm": f'exec {BINARIES / "helm3"} "$@" --kubeconfig={plane.admin.kubeconfig}',
        "kubectl": f"""case "$*" in
            "create namespace"*) {kubectl} "$@" 2>/dev/null || {kubectl} get "$2" "$3" ;;
            *port-forward*) ;;
            *) exec {kubectl} "$@" ;;
        esac""",
    }
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)


async def _shell(line: str, folder: Path) -> str:
    env = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HELM_CACHE_HOME": str(folder / "cache")}
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", line, cwd=folder, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, f"{line}\n{said.decode()}"
    return said.decode()


async def test_the_readmes_first_commands_lead_from_nothing_to_a_model_that_was_scaled(
    ready: ControlPlane, tmp_path: Path
) -> None:
    folder = tmp_path / "clone"
    (folder / "bin").mkdir(parents=True)
    (folder / "deploy").symlink_to(CHART.parents[1])
    _programs(folder / "bin", ready)
    (folder / "values.yaml").write_text(json.dumps(_values()))
    async with made(ready, Helm("helm3"), tmp_path) as release:
        before = await release.everything()
        await asyncio.to_thread(ready.apply, CLAIM)
        begun, said = time.monotonic(), {}
        for line in _commands():
            if "curl" in line:
                await release.stands(readyReplicas=4)
                door = release.pods.proxies.names[f"{RELEASE}-gateway.{SYSTEM}.svc:80"]
                line = line.replace("127.0.0.1:8080", door)
            said[line] = await _shell(line, folder)
        FIGURES["quick_start_seconds"] = round(time.monotonic() - begun, 1)
        assert json.loads(next(text for line, text in said.items() if "curl" in line))["choices"][0]["text"]
        starts = (await release.status())["lastStarts"]
        assert sum(start["mode"] == "Guardian" for start in starts) == 3, "guardians were woken, as the README says"
        await release.run("uninstall", RELEASE, "--wait")
        await release.relight("purge", "--yes", "--patience", "0")
        await asyncio.to_thread(ready.kubectl, "delete", "-f", "-", stdin=CLAIM)
        await release.until(lambda: release.left(before), "nothing to be left", lambda f: not f)
