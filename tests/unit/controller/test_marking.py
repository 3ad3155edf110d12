"""In which order a slot pod's gate and labels are written, and what is left out when one is refused."""

import asyncio
from types import SimpleNamespace

import pytest

from relight.controller.kubernetes.pods import MODEL_LABEL, PROVEN_GATE, STATE_LABEL, Mark
from relight.controller.kubernetes.slots import SlotPods
from relight.core.clock import VirtualClock


class Writes:
    """Takes patches, but for those of `refused` ("labels" or "gate"), and keeps what was written in order."""

    def __init__(self, refused: str = "") -> None:
        self.refused, self.written = refused, []

    async def patch(self, step, kind, cache, pod, body, subresource=""):
        what = "gate" if subresource else "labels"
        if what == self.refused:
            return pod
        self.written.append(what)
        if subresource:
            return {**pod, "status": body["status"]}
        return {
            **pod,
            "metadata": {**pod["metadata"], "labels": {**pod["metadata"]["labels"], **body["metadata"]["labels"]}},
        }


def _marked(writes: Writes, model: str, mark: Mark) -> list[str]:
    labels = {STATE_LABEL: "draining", MODEL_LABEL: model}
    pod = {"metadata": {"name": "a", "namespace": "n", "resourceVersion": "1", "labels": labels}, "status": {}}
    pod["status"]["conditions"] = [{"type": PROVEN_GATE, "status": "False", "reason": "Draining", "message": model}]
    caches = SimpleNamespace(pods=None)
    slots = SlotPods(caches, writes, None, None, None, VirtualClock())
    asyncio.run(slots._mark(SimpleNamespace(retry=False), pod, mark))
    return writes.written


@pytest.mark.parametrize(("model", "order"), [("m", ["gate", "labels"]), ("other", ["labels", "gate"])])
def test_the_gate_goes_first_but_where_labels_name_another_model(model, order):
    assert _marked(Writes(), model, Mark("m", "ready", True, "Proven")) == order


def test_a_gate_stays_closed_while_labels_that_name_another_model_could_not_be_changed():
    assert _marked(Writes("labels"), "other", Mark("m", "ready", True, "Proven")) == []
