"""Who talks to the API server, and how: kubeconfigs, and clients for plain HTTP."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from tests.kubernetes.plane.pki import Certificate

CALL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class User:
    """An identity: by a certificate, or by a service account's token."""

    name: str
    kubeconfig: Path
    authority: Path
    server: str
    certificate: Certificate | None = None
    token: str = ""

    def write(self, namespace: str = "default") -> User:
        """Writes the kubeconfig."""
        user: dict[str, Any] = {"token": self.token}
        if self.certificate is not None:
            files = self.certificate
            user = {"client-certificate": str(files.certificate), "client-key": str(files.private_key)}
        cluster = {"server": self.server, "certificate-authority": str(self.authority)}
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "plane", "cluster": cluster}],
                    "users": [{"name": self.name, "user": user}],
                    "contexts": [
                        {"name": "plane", "context": {"cluster": "plane", "user": self.name, "namespace": namespace}}
                    ],
                    "current-context": "plane",
                }
            )
        )
        return self

    def client(self) -> httpx.Client:
        """Calls as this user; whoever asked for it closes it."""
        context = ssl.create_default_context(cafile=str(self.authority))
        if self.certificate is not None:
            context.load_cert_chain(self.certificate.certificate, self.certificate.private_key)
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        # Without the environment: a proxy there is not for the loopback.
        return httpx.Client(
            base_url=self.server, verify=context, headers=headers, timeout=CALL_SECONDS, trust_env=False
        )
