"""A model's body at the boundary: what the defaults say may also be written."""

import pytest
from pydantic import ValidationError

from relight.controller.specs import ModelBody
from relight.core.records import RungKind

BODY = {"uri": "/m", "revision": "r1", "engine": "stub"}


def test_the_defaults_written_out_are_accepted_and_mean_the_same():
    written = ModelBody.model_validate(ModelBody.model_validate(BODY).model_dump(mode="json"))
    assert written == ModelBody.model_validate(BODY)
    assert written.rungs == list(RungKind)


@pytest.mark.parametrize("rungs", [[], ["peer_pigeon"], [*RungKind, RungKind.DISK]])
def test_rungs_that_are_none_unknown_or_too_many_are_refused(rungs):
    with pytest.raises(ValidationError, match="rungs"):
        ModelBody.model_validate(BODY | {"rungs": rungs})
