"""What is known of a model's requests, out of its engines' reports and the store: pure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relight.controller.observe.shapes import STORED_SECONDS, present, worth_storing
from relight.core.records import ModelView, Shapes, Snapshot
from relight.core.states import State
from support.planning import SPEC, instance, slot


def _seen(*reports: Shapes | None) -> Snapshot:
    found = []
    for n, shapes in enumerate(reports):
        view = instance(f"i-{n}", "a", State.READY)
        (member,) = view.members
        found.append(replace(view, members=(replace(member, report=replace(member.report, shapes=shapes)),)))
    return Snapshot(100.0, 1, 1, (ModelView(SPEC, None),), (slot("a"),), tuple(found))


def test_reports_of_a_models_engines_add_up_and_other_models_do_not_count():
    seen = _seen(Shapes(50.0, {1: 4.0}, {8: 2.0}), None, Shapes(50.0, {1: 1.0}, {16: 1.0}))
    assert present(seen, SPEC.key, None) == Shapes(50.0, {1: 5.0}, {8: 2.0, 16: 1.0})
    assert present(seen, "default/other", None) is None


def test_what_is_stored_stands_while_no_engine_tells_more():
    stored = Shapes(40.0, {1: 90.0}, {8: 90.0})
    assert present(_seen(None), SPEC.key, stored) is stored
    assert present(_seen(Shapes(50.0, {1: 1.0}, {8: 1.0})), SPEC.key, stored) is stored


@pytest.mark.parametrize(
    ("later", "prompts", "written"),
    [(0.0, 100.0, False), (1.0, 110.0, False), (1.0, 130.0, True), (STORED_SECONDS, 101.0, True)],
)
def test_it_is_written_when_much_more_is_known_or_a_while_has_passed(later, prompts, written):
    stored, told = Shapes(50.0, {1: 1.0}, {8: 100.0}), Shapes(50.0 + later, {1: 1.0}, {8: prompts})
    assert worth_storing(_seen(told), {SPEC.key: stored}) == ({SPEC.key: told} if written else {})
    assert worth_storing(_seen(told), {}) == {SPEC.key: told}
