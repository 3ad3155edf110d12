"""The frozen records that travel between the hops of a scale-out. No I/O.

    ScaleRequest -> Snapshot -> Decision(reason) -> Plan(placements, modes, sources, predicted times)
      -> Assignment(slot, epoch, revision) -> InstanceReport -> Refill -> Proof -> Endpoint -> StartRecord

Units: bytes, seconds, wall times in seconds since the Unix epoch. Field names equal those of
protos/relight/v1, so that protos/convert.py carries a record over the wire without a second definition.
"""

from relight.core.records.assigned import (
    Assignment as Assignment,
)
from relight.core.records.assigned import (
    CacheRing as CacheRing,
)
from relight.core.records.assigned import (
    Deal as Deal,
)
from relight.core.records.assigned import (
    Door as Door,
)
from relight.core.records.assigned import (
    HostTier as HostTier,
)
from relight.core.records.assigned import (
    HostWanted as HostWanted,
)
from relight.core.records.assigned import (
    InstanceAssignment as InstanceAssignment,
)
from relight.core.records.assigned import (
    Neighbours as Neighbours,
)
from relight.core.records.assigned import (
    Prefetch as Prefetch,
)
from relight.core.records.assigned import (
    RingNode as RingNode,
)
from relight.core.records.assigned import (
    Rung as Rung,
)
from relight.core.records.assigned import (
    SourceRef as SourceRef,
)
from relight.core.records.cached import (
    CacheAnswer as CacheAnswer,
)
from relight.core.records.cached import (
    CacheBundle as CacheBundle,
)
from relight.core.records.cached import (
    CacheEntry as CacheEntry,
)
from relight.core.records.cached import (
    CacheQuery as CacheQuery,
)
from relight.core.records.planned import (
    Decision as Decision,
)
from relight.core.records.planned import (
    Demand as Demand,
)
from relight.core.records.planned import (
    HeldLevel as HeldLevel,
)
from relight.core.records.planned import (
    InstanceView as InstanceView,
)
from relight.core.records.planned import (
    MemberView as MemberView,
)
from relight.core.records.planned import (
    ModelView as ModelView,
)
from relight.core.records.planned import (
    Operation as Operation,
)
from relight.core.records.planned import (
    OperationState as OperationState,
)
from relight.core.records.planned import (
    Placement as Placement,
)
from relight.core.records.planned import (
    Plan as Plan,
)
from relight.core.records.planned import (
    Price as Price,
)
from relight.core.records.planned import (
    SlotView as SlotView,
)
from relight.core.records.planned import (
    Snapshot as Snapshot,
)
from relight.core.records.reported import (
    CacheReport as CacheReport,
)
from relight.core.records.reported import (
    Capability as Capability,
)
from relight.core.records.reported import (
    DeviceHolder as DeviceHolder,
)
from relight.core.records.reported import (
    DeviceReport as DeviceReport,
)
from relight.core.records.reported import (
    Endpoint as Endpoint,
)
from relight.core.records.reported import (
    Failure as Failure,
)
from relight.core.records.reported import (
    HostContent as HostContent,
)
from relight.core.records.reported import (
    HostCopyReport as HostCopyReport,
)
from relight.core.records.reported import (
    HostReport as HostReport,
)
from relight.core.records.reported import (
    HostState as HostState,
)
from relight.core.records.reported import (
    InstanceReport as InstanceReport,
)
from relight.core.records.reported import (
    MemoryReading as MemoryReading,
)
from relight.core.records.reported import (
    PcieLink as PcieLink,
)
from relight.core.records.reported import (
    Phase as Phase,
)
from relight.core.records.reported import (
    PrefetchReport as PrefetchReport,
)
from relight.core.records.reported import (
    Reach as Reach,
)
from relight.core.records.reported import (
    RungResult as RungResult,
)
from relight.core.records.reported import (
    Shapes as Shapes,
)
from relight.core.records.reported import (
    SlotReport as SlotReport,
)
from relight.core.records.reported import (
    SourceOffer as SourceOffer,
)
from relight.core.records.reported import (
    StartCache as StartCache,
)
from relight.core.records.reported import (
    StartRecord as StartRecord,
)
from relight.core.records.reported import (
    Verdict as Verdict,
)
from relight.core.records.routed import (
    GatewayInstance as GatewayInstance,
)
from relight.core.records.routed import (
    GatewayModel as GatewayModel,
)
from relight.core.records.routed import (
    GatewayReport as GatewayReport,
)
from relight.core.records.routed import (
    GatewaySpan as GatewaySpan,
)
from relight.core.records.routed import (
    RouteModel as RouteModel,
)
from relight.core.records.routed import (
    RouteReplica as RouteReplica,
)
from relight.core.records.routed import (
    RouteTable as RouteTable,
)
from relight.core.records.wanted import (
    Adapter as Adapter,
)
from relight.core.records.wanted import (
    Autoscaler as Autoscaler,
)
from relight.core.records.wanted import (
    Burst as Burst,
)
from relight.core.records.wanted import (
    Desired as Desired,
)
from relight.core.records.wanted import (
    Drain as Drain,
)
from relight.core.records.wanted import (
    Guardians as Guardians,
)
from relight.core.records.wanted import (
    Keep as Keep,
)
from relight.core.records.wanted import (
    Mode as Mode,
)
from relight.core.records.wanted import (
    ModelSpec as ModelSpec,
)
from relight.core.records.wanted import (
    OnTimeout as OnTimeout,
)
from relight.core.records.wanted import (
    Proving as Proving,
)
from relight.core.records.wanted import (
    RungKind as RungKind,
)
from relight.core.records.wanted import (
    ScaleRequest as ScaleRequest,
)
from relight.core.records.wanted import (
    ScaleToZero as ScaleToZero,
)
from relight.core.records.wanted import (
    Scaling as Scaling,
)
from relight.core.records.wanted import (
    Spread as Spread,
)
from relight.core.records.wanted import (
    Storage as Storage,
)
from relight.core.records.wanted import (
    Strategy as Strategy,
)
