"""What the operator leaves out when a write before it was refused: gates after labels, advice after models."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest

from relight.controller.kubernetes.intent import Intent
from relight.controller.kubernetes.marks import Mark
from relight.controller.kubernetes.operator import Operator
from relight.controller.kubernetes.resources import MODEL_LABEL, PROVEN_GATE, STATE_LABEL
from relight.controller.kubernetes.slots import SlotPods
from relight.core.clock import VirtualClock
from relight.core.records import Snapshot
from support.planning import SPEC


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


@pytest.mark.parametrize(("taken", "told"), [((3, True), 1), (None, 0)])
def test_advice_is_of_specifications_that_were_taken(taken, told):
    spec = dataclasses.replace(SPEC, engine="vllm", args=("--api-key=sk-1",))

    class Answers:
        async def do(self, *_):
            return taken

    operator = object.__new__(Operator)
    events = []
    operator.events = SimpleNamespace(tell=lambda *said, **_: events.append(said))
    operator._accept = SimpleNamespace(put_model=None)
    operator._catalog = SimpleNamespace(starts={})
    operator._caches = SimpleNamespace(models=SimpleNamespace(objects={spec.key: {}}))
    operator._writes = Answers()
    snapshot = Snapshot(1.0, 1, 1, (), (), ())
    step = SimpleNamespace(intent=Intent((spec,), (), (), (), (), {}), snapshot=snapshot)
    asyncio.run(operator._keep_intent(step))
    assert len(events) == told
