"""Where the cluster's resources hold what is wanted, REST writes go to them: one truth, whoever writes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from relight.controller.accept import Accept
from relight.controller.kubernetes.api import Api, Object
from relight.controller.kubernetes.resources import MODEL_DEPLOYMENT
from relight.core.errors import Conflict
from relight.core.records import ModelSpec, Operation, ScaleRequest


@dataclass(slots=True)
class ResourceFront(Accept):
    """As Accept: numbers are written to the ModelDeployment first, and all else is refused."""

    api: Api
    leads: Callable[[], None]
    """Raises Fenced when another controller may lead by now: its numbers are then not overwritten."""
    numbering: Callable[[str], AbstractContextManager[Callable[[Object], None]]]
    """Keeps the operator from copying the number meanwhile; what it gives is told the scale that was written."""
    manager: str
    """As whom: the field manager."""

    async def put_model(self, spec: ModelSpec, precondition: Callable[[int], bool]) -> tuple[int, bool]:
        """Raises Conflict: the resource is the truth."""
        raise Conflict(f"{spec.key} is a ModelDeployment: write it with `kubectl apply`")

    async def delete_model(self, key: str, precondition: Callable[[int], bool]) -> None:
        """Raises Conflict: the resource is the truth."""
        namespace, _, name = key.partition("/")
        raise Conflict(f"{key} is a ModelDeployment: `kubectl --namespace {namespace} delete modeldeployment {name}`")

    async def scale(self, request: ScaleRequest) -> Operation:
        """Writes the number to the resource under a field manager of its own, then as Accept does."""
        self.preview(request)
        namespace, _, name = request.model.partition("/")
        self.leads()
        body = {"spec": {"replicas": request.replicas}}
        with self.numbering(request.model) as tell:
            scale = await self.api.patch(
                MODEL_DEPLOYMENT, namespace, name, body, subresource="scale", manager=self.manager
            )  # fmt: skip
            tell(scale)
            # Not super(): a dataclass with slots is a class made anew, which a bare super() does not know.
            return await Accept.scale(self, request)
