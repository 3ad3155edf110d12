"""A real Prometheus over targets of a test, and promtool."""

from __future__ import annotations

import math
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / ".cache" / "prometheus" / "bin"
START_SECONDS = 30.0
STEP = 1
"""Seconds between two scrapes, two evaluations of rules, and two points of what is asked."""


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAMS / "promtool", *words], capture_output=True, text=True, timeout=120, check=False)


class Prometheus:
    """One server in a folder of its own; it ends with whoever started it."""

    def __init__(self, folder: Path, port: int, jobs: Mapping[str, Sequence[str]], rules: Path) -> None:
        """`jobs` are `host:port` by job. The rules are evaluated each STEP, whatever they say themselves."""
        if not (PROGRAMS / "prometheus").exists():
            raise FileNotFoundError(f"no Prometheus in {PROGRAMS}: run `make setup-prometheus`")
        folder.mkdir(parents=True, exist_ok=True)
        told = yaml.safe_load(rules.read_text())
        for group in told["groups"]:
            group["interval"] = f"{STEP}s"
        (folder / "rules.yaml").write_text(yaml.safe_dump(told))
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump({
            "global": {"scrape_interval": f"{STEP}s", "evaluation_interval": f"{STEP}s"},
            "rule_files": [str(folder / "rules.yaml")],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": list(targets)}]} for job, targets in jobs.items()
            ],
        }))  # fmt: skip
        checked = promtool("check", "config", str(config))
        if checked.returncode:
            raise AssertionError(f"promtool check config: {checked.stdout}{checked.stderr}")
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "setpriv", "--pdeathsig", "KILL", PROGRAMS / "prometheus", f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
                    "--enable-feature=exemplar-storage", "--log.level=warn",
                ],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder,
            )  # fmt: skip
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False)
        self._await_ready()

    def _await_ready(self) -> None:
        until, pause = time.monotonic() + START_SECONDS, threading.Event()
        while True:
            try:
                if self._http.get("/-/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if self._process.poll() is not None or time.monotonic() > until:
                self.close()
                raise RuntimeError(f"Prometheus does not answer:\n{self._log.read_text()[-3000:]}")
            pause.wait(0.05)

    def _ask(self, path: str, **parameters: Any) -> Any:
        reply = self._http.get(f"/api/v1/{path}", params=parameters)
        said = reply.json()
        if said.get("status") != "success":
            raise AssertionError(f"{path} {parameters}: {reply.text[:600]}")
        return said["data"]

    def now(self, expression: str) -> list[dict[str, Any]]:
        """The vector that an expression gives now."""
        found: list[dict[str, Any]] = self._ask("query", query=expression)["result"]
        return found

    def over(self, expression: str, begin: float, end: float) -> list[dict[str, Any]]:
        """Its series between two wall times, each with at least one point that is a number."""
        found = self._ask("query_range", query=expression, start=begin, end=end, step=STEP)["result"]
        return [
            {"metric": series["metric"], "values": values}
            for series in found
            if (values := [float(v) for _, v in series["values"] if math.isfinite(float(v))])
        ]

    def label_values(self, label: str, selector: str) -> list[str]:
        """As Grafana's variables ask for them."""
        found: list[str] = self._ask(f"label/{label}/values", **{"match[]": selector})
        return found

    def exemplars(self, expression: str, begin: float, end: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("query_exemplars", query=expression, start=begin, end=end)
        return found

    def fired(self, begin: float, end: float) -> set[str]:
        """Names of alerts that fired within that time."""
        return {s["metric"]["alertname"] for s in self.over('ALERTS{alertstate="firing"}', begin, end)}

    def close(self) -> None:
        self._process.kill()
        self._process.wait(timeout=20)
        self._http.close()


class Recorded:
    """Serves one file as the metrics of a component that is not there."""

    def __init__(self, file: Path, folder: Path, port: int) -> None:
        folder.mkdir()
        shutil.copy(file, folder / "metrics")
        self._server = ThreadingHTTPServer(("127.0.0.1", port), partial(_Quiet, directory=str(folder)))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Quiet(SimpleHTTPRequestHandler):
    def guess_type(self, path: Any) -> str:
        return "text/plain; version=0.0.4; charset=utf-8"

    def log_message(self, *_: Any) -> None:
        pass
