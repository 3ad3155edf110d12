"""Configuration files never come back in errors with a secret in them, whatever is wrong with the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relight.agent import config as agent
from relight.core.errors import InvalidInput
from relight.gateway import config as gateway

SECRET = "rlt_" + "5" * 32
FILES: dict[str, tuple[Any, dict[str, Any]]] = {
    "agent": (agent.load, {"slot": "a", "controller_address": "127.0.0.1:7000", "token": SECRET, "state_dir": "/x"}),
    "gateway": (gateway.load, {"controller_address": "127.0.0.1:7000", "token": SECRET}),
}


@pytest.mark.parametrize("component", FILES)
@pytest.mark.parametrize("fault", ["a key too few", "a key too many", "a secret of another type", "broken JSON"])
def test_a_wrong_file_is_refused_without_repeating_its_secret(tmp_path: Path, component: str, fault: str) -> None:
    load, data = FILES[component]
    name = next(key for key in data if key.endswith("token"))
    text = json.dumps(
        {
            "a key too few": {name: SECRET},
            "a key too many": {**data, "colour": "blue"},
            "a secret of another type": {**data, name: [SECRET]},
            "broken JSON": data,
        }[fault]
    )
    path = tmp_path / "file.json"
    path.write_text(text[:-1] if fault == "broken JSON" else text)
    with pytest.raises(InvalidInput) as caught:
        load(path)
    assert SECRET not in str(caught.value)
    assert "5555" not in repr(caught.value.errors)
    assert caught.value.errors
