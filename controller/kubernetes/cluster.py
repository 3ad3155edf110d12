"""A controller's place in a cluster: its connection, its turn to lead, and the operator that keeps both in step."""

from __future__ import annotations

import asyncio
import socket

from relight.controller.accept import Accept
from relight.controller.autoscale.signals import Board
from relight.controller.config import KubernetesConfig
from relight.controller.kubernetes import leader
from relight.controller.kubernetes.api import Api
from relight.controller.kubernetes.election import Election
from relight.controller.kubernetes.front import ResourceFront
from relight.controller.kubernetes.identity import ClusterCallers
from relight.controller.kubernetes.metrics_server import MetricsServer
from relight.controller.kubernetes.operator import Operator
from relight.controller.kubernetes.pods import Added
from relight.controller.kubernetes.reviews import Reviews
from relight.controller.kubernetes.slot_identity import PodAgents
from relight.controller.kubernetes.writers import AUTOSCALER_MANAGER, REST_MANAGER
from relight.controller.loop import Hooks
from relight.controller.observe.places import Places
from relight.core.auth import Tokens
from relight.core.clock import Clock
from relight.core.ids import new_id
from relight.core.logs import get_logger

log = get_logger("controller.kubernetes")

EPOCHS_PER_TURN = 1 << 10
"""How many epochs one leader may take, so that those of the next one are above whatever store it has.

Route tables carry the epoch above 32 bits of their own: two million turns fit.
"""


class Cluster:
    """`open`, `lead`, `keep`; `end` gives the lead up, `close` the connection."""

    def __init__(self, api: Api, config: KubernetesConfig, clock: Clock) -> None:
        self._api, self._config, self._clock = api, config, clock
        # In a pod the host's name is the pod's.
        self._pod = config.identity or socket.gethostname()
        identity = f"{self._pod}_{new_id('c')}"
        self._election = Election(api, config.namespace, config.lease, identity, clock, config.lease_seconds)
        self._reviews = Reviews(api, clock)
        self._keeping: asyncio.Task[None] | None = None
        self._operator: Operator | None = None
        self._metrics: MetricsServer | None = None

    @classmethod
    async def open(cls, config: KubernetesConfig, clock: Clock) -> Cluster:
        """Raises InvalidInput when there is no way to the API server."""
        return cls(await Api.open(config.kubeconfig), config, clock)

    async def close(self) -> None:
        """Ends the connection, and a turn that was never begun."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._api.close()

    async def lead(self) -> None:
        """Waits for this controller's turn, and has the Service of controllers lead to it alone."""
        await self._election.win()
        # From here on: filling caches, and the first step of a large cluster, may take longer than the lease lasts.
        self._keeping = asyncio.create_task(self._election.keep(), name="election")
        await leader.show(self._api, self._config.namespace, self._pod)

    @property
    def epoch_floor(self) -> int:
        """Every epoch of this turn is above it, and every epoch of an earlier turn is not."""
        return self._election.transitions * EPOCHS_PER_TURN

    @property
    def epochs_below(self) -> int:
        """Every epoch from here on is of a later turn."""
        return self.epoch_floor + EPOCHS_PER_TURN

    def agents(self, places: Places) -> PodAgents:
        """Who admits agents."""
        return PodAgents(self._reviews, places)

    def callers(self, tokens: Tokens) -> ClusterCallers:
        """Who knows the callers of the REST API."""
        return ClusterCallers(tokens, self._reviews)

    async def keep(self, accept: Accept, hooks: Hooks, board: Board) -> tuple[Accept, Accept]:
        """Fills the caches and lets the operator hear of each pass. Returns what the writes of REST and those of the
        autoscaler go through."""
        config = self._config
        added = Added(
            config.agent_image, config.controller_address, config.agent_secret, config.serving_port,
            tls_secret=config.agent_tls_secret,
        )  # fmt: skip
        operator = Operator(
            self._api, self._election, accept, accept.catalog, accept.reconciler, added, self._clock
        )  # fmt: skip
        hooks.passed.append(operator.passed)
        hooks.placed, hooks.leads = operator.placed, self._election.require
        self._operator = operator
        # Before the first pass: a slot that stands nowhere would have its replicas taken away.
        await operator.open()
        # And on an emptied store models must be there before agents are, whose instances are adopted by them.
        await operator.step()
        if config.metrics is not None:
            self._metrics = MetricsServer(config.metrics, self._api, self._reviews, board, self._clock)
            log.info("metrics.ready", address=await self._metrics.open())
        parts = (accept.catalog, accept.reconciler, accept.clock, self._api, self._election.require, operator.numbering)
        return ResourceFront(*parts, REST_MANAGER), ResourceFront(*parts, AUTOSCALER_MANAGER)

    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """What runs while this controller leads; the end of one is the end of its turn."""
        if self._operator is None or self._keeping is None:
            return ()
        metrics = [asyncio.create_task(self._metrics.run(), name="metrics")] if self._metrics else []
        return (
            asyncio.create_task(self._operator.run(), name="operator"),
            self._keeping,
            *metrics,
        )

    async def end(self) -> None:
        """Lets another lead at once, and stops watching."""
        await self._election.release()
        if self._metrics is not None:
            await self._metrics.close()
        await leader.hide(self._api, self._config.namespace, self._pod)
        if self._operator is not None:
            await self._operator.close()
