"""A real Kubernetes control plane on the loopback: etcd, API server, controllers, scheduler, hollow nodes."""

from __future__ import annotations

import os
import subprocess
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import yaml
from tests.kubernetes.plane.nodes import HollowNode
from tests.kubernetes.plane.pki import Authority, Certificate, new_key, write
from tests.kubernetes.plane.processes import PlaneError, Process, free_ports, wait_for
from tests.kubernetes.plane.users import User

BINARIES = Path(__file__).resolve().parents[3] / ".cache" / "kubernetes" / "bin"
START_SECONDS = 60.0
"""For one part; a few are usual, on a busy machine many."""
COMMAND_SECONDS = 60.0
WATCHES_SECONDS = 3.0
"""An API server that shall end waits a minute for those who watch; they are used to losing it."""
AUDIT_POLICY = """apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
"""


@dataclass(frozen=True, slots=True)
class Settings:
    """How soon the controllers act: much sooner than in a cluster, so that a test can wait for it."""

    hpa_sync_seconds: float = 2.0
    hpa_downscale_seconds: float = 10.0
    node_grace_seconds: float = 8.0
    eviction_seconds: int = 300
    """How long a pod that says nothing about it stays on a node that is not ready."""


class ControlPlane:
    """See `start`. Everything listens on the loopback alone, on ports that were free; files lie below `run_dir`."""

    def __init__(self, run_dir: Path, settings: Settings) -> None:
        if not BINARIES.is_dir():
            raise PlaneError(f"expected Kubernetes' programs in {BINARIES}: run `make setup-kubernetes`")
        self.run_dir, self._settings = run_dir, settings
        self._logs, self._pki = run_dir / "logs", run_dir / "pki"
        for folder in (self._logs, self._pki):
            folder.mkdir(parents=True, exist_ok=True)
        etcd, peer, self.port, controllers, scheduler = free_ports(5)
        self._etcd_url, self._peer_url = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peer}"
        self._health = {"kube-controller-manager": controllers, "kube-scheduler": scheduler}
        self.server = f"https://127.0.0.1:{self.port}"
        self.nodes: dict[str, HollowNode] = {}
        self._times: dict[str, float] = {}
        self._issue()
        self._processes = {p.name: p for p in (self._etcd(), self._apiserver(), self._controllers(), self._scheduler())}

    @classmethod
    def start(cls, run_dir: Path, settings: Settings = Settings(), *, early: Sequence[str] = ()) -> ControlPlane:
        """Starts all of it and waits until it works.

        Manifests in `early` are applied before the controllers run: the autoscaler learns new kinds only every 30 s.
        """
        plane = cls(run_dir, settings)
        try:
            plane._start(early)
        except BaseException:
            plane.stop()
            raise
        return plane

    def __enter__(self) -> ControlPlane:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- what it is made of

    def _issue(self) -> None:
        self.authority = Authority(self._pki, "ca")
        self._front = Authority(self._pki, "front-proxy-ca")
        self._front_proxy = self._front.issue("front-proxy", "front-proxy-client")
        hosts = ["127.0.0.1", "localhost", "kubernetes.default.svc", "10.0.0.1"]
        self._serving = self.authority.issue("serving", "kube-apiserver", hosts=hosts)
        self._accounts = write(self._pki, "service-accounts", None, new_key())
        self.admin = self.user("admin", groups=["system:masters"])

    def user(self, name: str, groups: Sequence[str] = ()) -> User:
        """A user by certificate; without groups it may do nothing until a role is bound to it."""
        file = "user-" + name.replace(":", "-").replace("/", "-")
        certificate = self.authority.issue(file, name, groups=groups)
        kubeconfig = self.run_dir / f"{file}.kubeconfig"
        return User(name, kubeconfig, self.authority.own.certificate, self.server, certificate).write()

    def _process(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Process:
        return Process(name, command, self._logs / f"{name}.log", environment=environment)

    def _etcd(self) -> Process:
        client, peer = self._etcd_url, self._peer_url
        command = [
            str(BINARIES / "etcd"), f"--data-dir={self.run_dir / 'etcd'}",
            f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}",
        ]  # fmt: skip
        # It refuses some architectures unless told by name.
        return self._process("etcd", command, {**os.environ, "ETCD_UNSUPPORTED_ARCH": os.uname().machine})

    def _apiserver(self) -> Process:
        policy = self.run_dir / "audit-policy.yaml"
        policy.write_text(AUDIT_POLICY)
        serving, front, grace = self._serving, self._front_proxy, self._settings.eviction_seconds
        command = [
            str(BINARIES / "kube-apiserver"), f"--etcd-servers={self._etcd_url}",
            "--bind-address=127.0.0.1", f"--secure-port={self.port}", "--insecure-port=0",
            "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none",
            f"--tls-cert-file={serving.certificate}", f"--tls-private-key-file={serving.private_key}",
            f"--client-ca-file={self.authority.own.certificate}", "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
            "--service-cluster-ip-range=10.0.0.0/24", "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self._accounts.certificate}",
            f"--service-account-signing-key-file={self._accounts.private_key}",
            f"--requestheader-client-ca-file={self._front.own.certificate}",
            "--requestheader-allowed-names=front-proxy-client", "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group", "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={front.certificate}", f"--proxy-client-key-file={front.private_key}",
            f"--audit-policy-file={policy}", f"--audit-log-path={self.audit_log}",
            f"--default-not-ready-toleration-seconds={grace}", f"--default-unreachable-toleration-seconds={grace}",
        ]  # fmt: skip
        return self._process("kube-apiserver", command)

    def _controller(self, name: str, *flags: str) -> Process:
        serving, kubeconfig = self._serving, self.user(f"system:{name}").kubeconfig
        command = [
            str(BINARIES / name), f"--kubeconfig={kubeconfig}", f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}", "--bind-address=127.0.0.1", "--port=0",
            f"--secure-port={self._health[name]}", "--leader-elect=false",
            f"--tls-cert-file={serving.certificate}", f"--tls-private-key-file={serving.private_key}", *flags,
        ]  # fmt: skip
        return self._process(name, command)

    def _controllers(self) -> Process:
        settings = self._settings
        return self._controller(
            "kube-controller-manager",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={self._accounts.private_key}",
            f"--root-ca-file={self.authority.own.certificate}",
            f"--horizontal-pod-autoscaler-sync-period={settings.hpa_sync_seconds}s",
            f"--horizontal-pod-autoscaler-downscale-stabilization={settings.hpa_downscale_seconds}s",
            f"--node-monitor-grace-period={settings.node_grace_seconds}s",
            "--node-monitor-period=1s",
        )

    def _scheduler(self) -> Process:
        return self._controller("kube-scheduler")

    # -- running it

    def _start(self, early: Sequence[str]) -> None:
        self._timed("etcd", self._await_etcd)
        self._timed("kube-apiserver", self._await_apiserver)
        for manifest in early:
            self.apply(manifest)
        for name in self._health:
            self._processes[name].start()
        begun = time.monotonic()
        for name in self._health:
            self._await_healthy(name)
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        wait_for(
            lambda: bool(self.get(account).get("secrets")), "the controllers to make service accounts", START_SECONDS,
            processes=[self._processes["kube-controller-manager"]],
        )  # fmt: skip
        self._times["controllers and scheduler"] = time.monotonic() - begun

    def _timed(self, name: str, ready: Callable[[], None]) -> None:
        begun = time.monotonic()
        self._processes[name].start()
        ready()
        self._times[name] = time.monotonic() - begun

    def _await_etcd(self) -> None:
        health = f"{self._etcd_url}/health"
        wait_for(lambda: _answers(health), "etcd to be healthy", START_SECONDS, processes=[self._processes["etcd"]])

    def _await_apiserver(self) -> None:
        with self.admin.client() as client:

            def ready() -> bool:
                try:
                    return client.get("/readyz").status_code == httpx.codes.OK
                except httpx.HTTPError:
                    return False

            process = self._processes["kube-apiserver"]
            wait_for(ready, "the API server to be ready", START_SECONDS, processes=[process])

    def _await_healthy(self, name: str) -> None:
        health, process = f"https://127.0.0.1:{self._health[name]}/healthz", self._processes[name]
        healthy = partial(_answers, health, verify=self.admin)
        wait_for(healthy, f"{name} to be healthy", START_SECONDS, processes=[process])

    def restart_apiserver(self) -> None:
        """Ends the API server, starts it again on its port and waits until it works."""
        self._processes["kube-apiserver"].stop(WATCHES_SECONDS)
        self.start_apiserver()

    def kill_apiserver(self) -> None:
        """The API server is gone, without a word to those who talk to it; `start_apiserver` brings it back."""
        self._processes["kube-apiserver"].kill()

    def start_apiserver(self) -> None:
        """Starts an API server that was ended."""
        self._timed("kube-apiserver", self._await_apiserver)

    def stop(self) -> None:
        """Ends everything, those who call before those who are called."""
        for node in self.nodes.values():
            node.close()
        self.nodes.clear()
        for name in ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"):
            self._processes[name].stop(WATCHES_SECONDS)

    def report(self) -> str:
        """How long each part took to start, and the memory that each holds now."""
        took = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._times.items())
        running = [*self._processes.values(), *(node.process for node in self.nodes.values())]
        memory = {process.name: process.resident_bytes() >> 20 for process in running}
        held = ", ".join(f"{name} {mib} MiB" for name, mib in memory.items())
        return f"control plane: started in: {took}; holds {sum(memory.values())} MiB: {held}"

    # -- using it

    @property
    def audit_log(self) -> Path:
        """What was asked of the API server, by whom: a JSON object a line."""
        return self.run_dir / "audit.log"

    def get(self, path: str) -> dict[str, Any]:
        """The object at a path of the API as the administrator sees it; empty when there is none."""
        with self.admin.client() as client:
            answer = client.get(path)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return {}
        if answer.is_error:
            raise PlaneError(f"expected an object at {path}, got {answer.status_code}: {answer.text}")
        found: dict[str, Any] = answer.json()
        return found

    def _holds(self, path: str, condition: str) -> bool:
        conditions = self.get(path).get("status", {}).get("conditions") or []
        return any(c["type"] == condition and c["status"] == "True" for c in conditions)

    def kubectl(self, *words: str, user: User | None = None, stdin: str = "") -> str:
        """What kubectl prints. Raises PlaneError with what it says when it fails."""
        kubeconfig = (user or self.admin).kubeconfig
        cache = self.run_dir / "kubectl-cache"
        command = [str(BINARIES / "kubectl"), f"--kubeconfig={kubeconfig}", f"--cache-dir={cache}", *words]
        done = subprocess.run(
            command, input=stdin, text=True, capture_output=True, check=False, timeout=COMMAND_SECONDS
        )  # fmt: skip
        if done.returncode:
            raise PlaneError(f"expected kubectl {' '.join(words)} to succeed, got {done.returncode}: {done.stderr}")
        return done.stdout

    def apply(self, manifest: str, *, user: User | None = None) -> None:
        """Applies YAML documents; kinds that they define are served when it returns."""
        # Not on the server's side: this version panics when an APIService is applied there.
        self.kubectl("apply", "-f", "-", user=user, stdin=manifest)
        for document in yaml.safe_load_all(manifest):
            if document and document["kind"] == "CustomResourceDefinition":
                name = document["metadata"]["name"]
                path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
                wait_for(partial(self._holds, path, "Established"), f"{name} to be served", START_SECONDS)

    def service_account(self, name: str, namespace: str = "default", *, seconds: int = 3600) -> User:
        """A service account (made when there is none), by a token that the API server issues for it."""
        manifest = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": namespace}}
        self.apply(yaml.safe_dump(manifest))
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        request = {
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": seconds},
        }  # fmt: skip
        with self.admin.client() as client:
            answer = client.post(path, json=request)
        if answer.is_error:
            raise PlaneError(f"expected a token of {namespace}/{name}, got {answer.status_code}: {answer.text}")
        kubeconfig = self.run_dir / f"account-{namespace}-{name}.kubeconfig"
        full = f"system:serviceaccount:{namespace}:{name}"
        authority = self.authority.own.certificate
        return User(full, kubeconfig, authority, self.server, token=answer.json()["status"]["token"]).write(namespace)

    def server_certificate(self, service: str, namespace: str = "default") -> Certificate:
        """For a server on the loopback that `register_api` makes known as this service."""
        hosts = ["localhost", "127.0.0.1", f"{service}.{namespace}.svc"]
        return self.authority.issue(f"server-{namespace}-{service}", service, hosts=hosts)

    @property
    def front_proxy_authority(self) -> Path:
        """Signs the certificate with which the API server calls the servers of registered APIs."""
        return self._front.own.certificate

    def register_api(self, group: str, version: str, service: str, port: int, namespace: str = "default") -> None:
        """Has the API server hand a group to the server on this port, and waits until it says that it is there."""
        # By name: with no kube-proxy a cluster address leads nowhere, and endpoints must not be on the loopback.
        backend = {
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": service, "namespace": namespace},
            "spec": {"type": "ExternalName", "externalName": "localhost"},
        }  # fmt: skip
        api = {
            "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": f"{version}.{group}"},
            "spec": {
                "group": group, "version": version, "groupPriorityMinimum": 100, "versionPriority": 100,
                "service": {"name": service, "namespace": namespace, "port": port},
                "caBundle": b64encode(self.authority.own.certificate.read_bytes()).decode(),
            },
        }  # fmt: skip
        self.apply(yaml.safe_dump_all([backend, api]))
        path = f"/apis/apiregistration.k8s.io/v1/apiservices/{version}.{group}"
        wait_for(partial(self._holds, path, "Available"), f"{version}.{group} to be available", START_SECONDS)
        # Its proxy learns of that a little later than its status says so.
        reached = partial(_answers, f"{self.server}/apis/{group}/{version}", verify=self.admin)
        wait_for(reached, f"{version}.{group} to be reached", START_SECONDS)

    def hollow_node(
        self, name: str, labels: Mapping[str, str] | None = None, capacity: Mapping[str, int] | None = None
    ) -> HollowNode:
        """A node whose kubelet is real and whose containers are not; `capacity` is beside processors and memory."""
        if name in self.nodes:
            raise PlaneError(f"expected a name that no node has, got {name}")
        folder = self.run_dir / f"node-{name}"
        folder.mkdir()
        path = f"/api/v1/nodes/{name}"

        def registered() -> None:
            amounts = {resource: str(amount) for resource, amount in (capacity or {}).items()}
            body = {"status": {"capacity": amounts, "allocatable": amounts}}
            with self.admin.client() as client:
                headers = {"Content-Type": "application/merge-patch+json"}
                answer = client.patch(f"{path}/status", json=body, headers=headers)
            if answer.is_error:
                raise PlaneError(f"expected to give {name} its capacity, got {answer.status_code}: {answer.text}")

        node = HollowNode(
            name, lambda command, environment: self._process(name, command, environment), BINARIES / "kubemark",
            self.user(f"system:node:{name}", groups=["system:nodes"]).kubeconfig, self.port, folder,
            f"10.77.0.{len(self.nodes) + 1}", labels or {}, partial(self._holds, path, "Ready"), registered,
        )  # fmt: skip
        self.nodes[name] = node
        node.start()
        return node


def _answers(url: str, *, verify: User | None = None) -> bool:
    try:
        if verify is None:
            return httpx.get(url, timeout=5, trust_env=False).status_code == httpx.codes.OK
        with verify.client() as client:
            return client.get(url).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
