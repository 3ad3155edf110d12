"""KEDA's external scaler: what a ScaledObject's trigger asks of this controller, pulled or pushed.

Where demand is not known, pulls fail and streams keep silent: KEDA and the autoscaler that it makes then hold.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from relight.controller.autoscale.signals import Board, Metric, Reading
from relight.controller.rpc.guard import refuse
from relight.core.errors import FieldError, InvalidInput, NotFound, RelightError, Unavailable
from relight.core.ids import is_name
from relight.protos.externalscaler import externalscaler_pb2 as messages
from relight.protos.externalscaler import externalscaler_pb2_grpc as services

METRICS = (Metric.DEMAND, Metric.HELD, Metric.IN_FLIGHT, Metric.TARGET)
"""Those that grow with the load and not with the number: divided by a target they are the number."""
OURS = ("model", "namespace", "metric", "target")
KEDAS = ("scalerAddress", "enableTLS", "unsafeSsl", "caCert", "tlsClientCert", "tlsClientKey", "tlsCertFile")
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Trigger:
    """What a trigger's metadata say."""

    model: str
    metric: Metric
    target: float | None
    """None for as many requests as the model's specification says that a replica is for."""


def trigger(name: str, namespace: str, metadata: dict[str, str]) -> Trigger:
    """Raises InvalidInput naming every key of the metadata that is wrong."""
    wrong = [
        FieldError(key, f"one of {', '.join(OURS)}", metadata[key])
        for key in sorted(metadata)
        if key not in OURS and key not in KEDAS
    ]
    where = metadata.get("namespace") or namespace
    for key, value in (("model", metadata.get("model", "")), ("namespace", where)):
        if not is_name(value):
            wrong.append(FieldError(key, "a name: lower-case letters, digits, '-' and '.'", value or "nothing"))
    told = metadata.get("metric") or Metric.DEMAND
    if told not in METRICS:
        wrong.append(FieldError("metric", f"one of {', '.join(METRICS)}", told))
    goal = None
    if "target" in metadata:
        goal = _number(metadata["target"])
        if goal is None:
            wrong.append(FieldError("target", "a number above 0", metadata["target"]))
    if wrong:
        raise InvalidInput(f"the trigger of ScaledObject {namespace}/{name} is not valid", wrong)
    return Trigger(f"{where}/{metadata['model']}", Metric(told), goal)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


class ExternalScaler(services.ExternalScalerServicer):
    """Answers KEDA. Whoever reaches this listener may ask: what it tells is how much is asked of a model."""

    def __init__(self, board: Board) -> None:
        self._board = board

    async def IsActive(  # noqa: N802 - the names are the protocol's
        self, request: messages.ScaledObjectRef, context: Context
    ) -> messages.IsActiveResponse:
        try:
            return messages.IsActiveResponse(result=_active(self._reading(_asked(request))))
        except RelightError as error:
            return await _refused(context, error)

    async def StreamIsActive(  # noqa: N802
        self, request: messages.ScaledObjectRef, context: Context
    ) -> AsyncIterator[messages.IsActiveResponse]:
        try:
            asked = _asked(request)
        except RelightError as error:
            await refuse(context, error)
            return
        told: bool | None = None
        with self._board.looks() as looked:
            while True:
                looked.clear()
                found = self._board.reading(asked.model)
                if found is not None and found.value(Metric.DEMAND) is not None and _active(found) is not told:
                    told = _active(found)
                    yield messages.IsActiveResponse(result=told)
                await looked.wait()

    async def GetMetricSpec(  # noqa: N802
        self, request: messages.ScaledObjectRef, context: Context
    ) -> messages.GetMetricSpecResponse:
        try:
            asked = _asked(request)
            return _spec(asked, self._reading(asked))
        except RelightError as error:
            return await _refused(context, error)

    async def StreamMetricSpec(  # noqa: N802
        self, request: messages.ScaledObjectRef, context: Context
    ) -> AsyncIterator[messages.GetMetricSpecResponse]:
        try:
            asked = _asked(request)
        except RelightError as error:
            await refuse(context, error)
            return
        told: messages.GetMetricSpecResponse | None = None
        with self._board.looks() as looked:
            while True:
                looked.clear()
                found = self._board.reading(asked.model)
                if found is not None and (spec := _spec(asked, found)) != told:
                    told = spec
                    yield spec
                await looked.wait()

    async def GetMetrics(  # noqa: N802
        self, request: messages.GetMetricsRequest, context: Context
    ) -> messages.GetMetricsResponse:
        try:
            asked = _asked(request.scaledObjectRef)
            if request.metricName != asked.metric:
                expected = f"{asked.metric}, as GetMetricSpec says"
                raise InvalidInput("no such metric", [FieldError("metricName", expected, request.metricName)])
            value = self._reading(asked).value(asked.metric)
            if value is None:
                raise Unavailable(f"the demand for {asked.model} is not known: no gateway is attached")
            told = messages.MetricValue(
                metricName=asked.metric, metricValue=math.ceil(value), metricValueFloat=value
            )  # fmt: skip
            return messages.GetMetricsResponse(metricValues=[told])
        except RelightError as error:
            return await _refused(context, error)

    def _reading(self, asked: Trigger) -> Reading:
        found = self._board.reading(asked.model)
        if found is None:
            raise NotFound(f"there is no model {asked.model}")
        return found


def _asked(request: messages.ScaledObjectRef) -> Trigger:
    return trigger(request.name, request.namespace, dict(request.scalerMetadata))


def _active(found: Reading) -> bool:
    requests = found.value(Metric.DEMAND)
    if requests is None:
        raise Unavailable(f"the demand for {found.spec.key} is not known: no gateway is attached")
    return requests > 0


def _spec(asked: Trigger, found: Reading) -> messages.GetMetricSpecResponse:
    usual = 1 if asked.metric is Metric.TARGET else found.spec.scaling.requests_per_replica
    size = float(asked.target or usual)
    told = messages.MetricSpec(metricName=asked.metric, targetSize=max(1, round(size)), targetSizeFloat=size)
    return messages.GetMetricSpecResponse(metricSpecs=[told])


async def _refused(context: Context, error: RelightError) -> NoReturn:
    await refuse(context, error)
    raise error
