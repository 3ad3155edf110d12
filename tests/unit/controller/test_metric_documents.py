"""The metric APIs' documents: quantities, selectors, and what must not be left out."""

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.controller.autoscale.signals import Counts, Reading
from relight.controller.kubernetes.metric_documents import NAMES, custom, external, quantity, resources, selector
from relight.core.errors import InvalidInput, Unavailable
from relight.core.records import Demand, ModelSpec

NOW = "2026-11-30T00:00:00Z"


def reading(name, held=0, known=True):
    spec = ModelSpec("team", name, "/m", "r", "stub")
    return Reading(spec, Demand(held, 0, 0, 0) if known else None, Counts(1, 1))


def value(text):
    return Decimal(text[:-1]) / 1000 if text.endswith("m") else Decimal(text)


@given(st.integers(0, 10**9) | st.floats(0, 1e9))
def test_a_quantity_is_never_less_than_the_number_and_less_than_a_thousandth_more(number):
    told = value(quantity(number))
    assert Decimal(number) - Decimal("1e-6") <= told <= Decimal(number) + Decimal("0.001")


def test_quantities_are_whole_where_they_can_be():
    assert [quantity(n) for n in (0, 3, 4.0, 1.5, 4 / 3)] == ["0", "3", "4", "1500m", "1334m"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ["a", "b"]),
        ("model=a", ["a"]),
        ("model == b", ["b"]),
        ("model!=a", ["b"]),
        ("model in (a, b)", ["a", "b"]),
        ("model notin (a),model", ["b"]),
        ("!model", []),
        ("model=a,team=x", []),
        ("team", []),
        ("!team , model=b", ["b"]),
    ],
)
def test_a_selector_chooses_as_kubernetes_does(text, found):
    items = external("relight_demand", [reading("a"), reading("b")], selector(text), NOW)["items"]
    assert [i["metricLabels"]["model"] for i in items] == found


@pytest.mark.parametrize("text", ["=a", "model=a b", "model in a", "!model=a", "model=(a)", "model in (a"])
def test_what_is_no_selector_is_refused(text):
    with pytest.raises(InvalidInput, match="labelSelector"):
        selector(text)


def test_a_list_with_one_unknown_value_is_an_error_rather_than_too_short_a_list():
    some = [reading("a", 5), reading("b", known=False)]
    assert external("relight_demand", some, selector("model=a"), NOW)["items"][0]["value"] == "5"
    with pytest.raises(Unavailable, match="no gateway"):
        external("relight_demand", some, selector(""), NOW)
    with pytest.raises(Unavailable, match="no gateway"):
        custom("relight_demand", "v1beta2", some, NOW)


def test_both_versions_of_custom_metrics_name_the_object_and_the_metric():
    (old,) = custom("relight_demand", "v1beta1", [reading("a", 2)], NOW)["items"]
    (new,) = custom("relight_demand", "v1beta2", [reading("a", 2)], NOW)["items"]
    assert (old["metricName"], new["metric"], old["value"]) == ("relight_demand", {"name": "relight_demand"}, "2")
    assert old["describedObject"] == {
        "kind": "ModelDeployment", "apiVersion": "relight.dev/v1alpha1", "namespace": "team", "name": "a",
    }  # fmt: skip


def test_every_metric_is_discovered_in_both_groups():
    for group, prefix in (
        ("external.metrics.k8s.io", ""),
        ("custom.metrics.k8s.io", "modeldeployments.relight.dev/"),
    ):
        found = {r["name"] for r in resources(group, "v1beta1")["resources"]}
        assert found == {prefix + name for name in NAMES}
        json.dumps(resources(group, "v1beta1"))
