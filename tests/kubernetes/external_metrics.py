"""The API external.metrics.k8s.io with numbers that a test sets, as the autoscaler asks for them."""

from __future__ import annotations

import json
import ssl
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.kubernetes.plane import Certificate

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
ROOT = f"/apis/{GROUP}/{VERSION}"
READERS = """
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: external-metrics-reader}
rules: [{apiGroups: [external.metrics.k8s.io], resources: ["*"], verbs: [get, list]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: external-metrics-reader}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: external-metrics-reader}
subjects: [{kind: ServiceAccount, name: horizontal-pod-autoscaler, namespace: kube-system}]
"""


class ExternalMetrics:
    """Serves `values` by name of the metric, in every namespace, to those with a certificate of the front proxy."""

    def __init__(self, certificate: Certificate, callers: Path) -> None:
        self.values: dict[str, str] = {}
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.certificate, certificate.private_key)
        context.load_verify_locations(callers)
        context.verify_mode = ssl.CERT_REQUIRED
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        # The handshake belongs to the connection's own thread: one that stalls must not hold up the others.
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="external-metrics")
        self._thread.start()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self._answer

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                code, body = answer(self.path.partition("?")[0].rstrip("/"))
                data = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def _answer(self, path: str) -> tuple[int, dict[str, Any]]:
        if path == ROOT:
            resource = {
                "name": "externalmetrics", "singularName": "", "namespaced": True, "kind": "ExternalMetricValueList",
                "verbs": ["get"],
            }  # fmt: skip
            group = f"{GROUP}/{VERSION}"
            return 200, {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": [resource]}
        metric = path.rpartition("/")[2]
        if not path.startswith(f"{ROOT}/namespaces/") or metric not in self.values:
            return 404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404, "reason": "NotFound"}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        item = {"metricName": metric, "metricLabels": {}, "timestamp": now, "value": self.values[metric]}
        return 200, {
            "kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {}, "items": [item],
        }  # fmt: skip

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)
