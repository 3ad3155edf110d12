"""Takes init containers out of slot pods on their way in: a hollow kubelet waits for ever for one to end.

They are kept in an annotation, and run as processes by slots.py before the pod's other containers.
"""

from __future__ import annotations

import base64
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml
from tests.kubernetes.plane import ControlPlane

KEPT = "test.relight.dev/init-containers"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = review["request"]
        annotations = {
            **(asked["object"]["metadata"].get("annotations") or {}),
            KEPT: json.dumps(asked["object"]["spec"].get("initContainers") or []),
        }
        removed = (
            [{"op": "remove", "path": "/spec/initContainers"}] if asked["object"]["spec"].get("initContainers") else []
        )
        patch = [
            *removed,
            {"op": "add", "path": "/metadata/annotations", "value": annotations},
        ]
        answer = {
            "uid": asked["uid"], "allowed": True, "patchType": "JSONPatch",
            "patch": base64.b64encode(json.dumps(patch).encode()).decode(),
        }  # fmt: skip
        body = json.dumps({"apiVersion": review["apiVersion"], "kind": review["kind"], "response": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Admission:
    """The server and its registration; `close` ends it."""

    def __init__(self, plane: ControlPlane) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        certificate = plane.server_certificate("admission")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.certificate, certificate.private_key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, daemon=True, name="admission").start()
        authority = base64.b64encode(plane.authority.own.certificate.read_bytes()).decode()
        webhook = {
            "name": "init.test.relight.dev",
            "clientConfig": {"url": f"https://127.0.0.1:{self._server.server_port}/", "caBundle": authority},
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
            "objectSelector": {"matchExpressions": [{"key": "relight.dev/pool", "operator": "Exists"}]},
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
        }
        plane.apply(
            yaml.safe_dump(
                {
                    "apiVersion": "admissionregistration.k8s.io/v1",
                    "kind": "MutatingWebhookConfiguration",
                    "metadata": {"name": "init-containers"},
                    "webhooks": [webhook],
                }
            )
        )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
