"""A real Kubernetes control plane for tests: see ControlPlane.start, and `python -m tests.kubernetes.plane up`."""

from tests.kubernetes.plane.nodes import HollowNode
from tests.kubernetes.plane.pki import Certificate
from tests.kubernetes.plane.plane import BINARIES, ControlPlane, Settings
from tests.kubernetes.plane.processes import PlaneError, Process, free_ports, wait_for
from tests.kubernetes.plane.users import User

__all__ = [
    "BINARIES",
    "Certificate",
    "ControlPlane",
    "HollowNode",
    "PlaneError",
    "Process",
    "Settings",
    "User",
    "free_ports",
    "wait_for",
]
