"""Which pod leads, as a label: the Service of controllers selects by it, while all candidates are ready.

Nothing rests on it. A label that lags sends a caller to a stand-by, which says that another one leads.
"""

from __future__ import annotations

from relight.controller.kubernetes.api import POD, Api, Object
from relight.controller.kubernetes.resources import GROUP
from relight.core.errors import NotFound, RelightError
from relight.core.logs import get_logger

LABEL = f"{GROUP}/leads"

log = get_logger("controller.kubernetes.leader")


async def show(api: Api, namespace: str, pod: str) -> None:
    """This pod leads, and no other: one that died could not say that it does no more."""
    try:
        labelled, _ = await api.list(POD, LABEL)
        for other in labelled:
            metadata = other["metadata"]
            if metadata["namespace"] == namespace and metadata["name"] != pod:
                await _label(api, namespace, metadata["name"], None)
        await _label(api, namespace, pod, "true")
    except RelightError as error:
        log.warning("leader.not-shown", pod=pod, error=str(error))


async def hide(api: Api, namespace: str, pod: str) -> None:
    """This pod leads no more."""
    try:
        await _label(api, namespace, pod, None)
    except RelightError as error:
        log.info("leader.not-hidden", pod=pod, error=str(error))


async def _label(api: Api, namespace: str, pod: str, value: str | None) -> None:
    body: Object = {"metadata": {"labels": {LABEL: value}}}
    try:
        await api.patch(POD, namespace, pod, body)
    except NotFound:
        # Run outside of a pod, or a pod that went.
        return
