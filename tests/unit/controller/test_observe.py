"""What a snapshot concludes of slots that the store does not know."""

from types import SimpleNamespace

from relight.controller.observe.fleet import Fleet
from relight.controller.observe.places import Places
from relight.controller.observe.snapshot import Observer
from relight.core.clock import VirtualClock
from relight.core.records import InstanceReport, SlotReport
from relight.core.states import State

GRACE = 10.0


def test_a_slot_that_nobody_could_adopt_is_lost_like_any_other_once_its_agent_is():
    clock = VirtualClock()
    fleet, places = Fleet(clock, GRACE, lambda: None), Places(lambda: None)
    names = ("assignments", "slots", "failures", "models", "operations", "activity")
    catalog = SimpleNamespace(revision=1, **{name: {} for name in names})
    gateways = SimpleNamespace(in_flight=lambda _: 0)
    # A store that was emptied: no table has anything.
    observer = Observer(catalog, fleet, gateways, places, clock)  # type: ignore[arg-type]
    serves = InstanceReport("i", "n/gone", 0, 1, ("d",), State.READY, 0.0, "", 1)
    session = fleet.new_session()
    fleet.report(SlotReport("a", 1, 1, 1, "agent", "boot", "host", "", instances=(serves,)), session)
    (there,) = observer.snapshot(1).slots
    assert (there.alive, there.clear) == (False, False)
    fleet.detach("a", session)
    clock.advance(GRACE / 2)
    assert not observer.snapshot(1).slots[0].clear
    clock.advance(GRACE)
    (lost,) = observer.snapshot(1).slots
    assert (lost.alive, lost.clear) == (False, True)
