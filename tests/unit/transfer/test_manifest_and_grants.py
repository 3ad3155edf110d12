"""Manifests and grants from a peer: what is honest survives the wire, what is hostile is refused by field."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.core.errors import Denied, InvalidInput
from relight.core.fingerprint import Fingerprint
from relight.transfer import grants
from relight.transfer.manifest import Canary, TensorEntry, WeightManifest, dump, parse

ENTRY = TensorEntry("w", "bfloat16", (2, 3), (3, 1), 0, 12, (), b"\xab" * 16)
MANIFEST = WeightManifest(
    Fingerprint({"a": "1"}, {"revision": "r"}, {}), 3, 4096, (ENTRY, replace(ENTRY, name="v", offset=256)),
    {"s": 1.5}, Canary((1,), (2,), (-0.5,)),
)  # fmt: skip


def test_a_manifest_survives_the_wire() -> None:
    assert parse(dump(MANIFEST)) == MANIFEST


def _put(raw: dict[str, Any], tensor: int, field: str, value: object) -> None:
    raw["tensors"][field][tensor] = value


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda m: _put(m, 0, "offset", 4090), "tensor w"),
        (lambda m: _put(m, 1, "offset", 4), "tensor v"),
        (lambda m: _put(m, 1, "name", "w"), "tensor w"),
        (lambda m: _put(m, 0, "bytes", 13), r"tensors\[0\].bytes"),
        (lambda m: _put(m, 0, "shape", [2, 1 << 60]), r"tensors\[0\].shape"),
        (lambda m: _put(m, 0, "shape", [2]), r"tensors\[0\].stride"),
        (lambda m: _put(m, 0, "dtype", "object"), r"tensors\[0\].dtype"),
        (lambda m: _put(m, 0, "blocks", "zz" * 16), r"tensors\[0\].blocks"),
        (lambda m: _put(m, 0, "blocks", "ab" * 32), r"tensors\[0\].blocks"),
        (lambda m: _put(m, 0, "shape", [1] * 65), r"tensors\[0\].shape"),
        (lambda m: m["tensors"]["name"].append("x"), r"tensors\.dtype"),
        (lambda m: _put(m, 0, "offset", -1), r"tensors\[0\].offset"),
        (lambda m: _put(m, 0, "offset", True), r"tensors\[0\].offset"),
        (lambda m: m["tensors"].pop("aliases"), "tensors"),
        (lambda m: m.update(block_bytes=1), "block_bytes"),
        (lambda m: m["scalars"].update(s=float("nan")), "scalars.s"),
        (lambda m: m["canary"].update(logprobs=[]), "canary.logprobs"),
        (lambda m: m["canary"].update(token_ids=[1, 2]), "canary.logprobs"),
        (lambda m: m.update(generation="3"), "generation"),
        (lambda m: m.update(extra=1), "manifest"),
        (lambda m: m["fingerprint"].pop("layout"), "fingerprint"),
    ],
)
def test_a_hostile_manifest_is_refused_naming_the_field(change, field: str) -> None:
    raw = json.loads(dump(MANIFEST))
    change(raw)
    with pytest.raises(InvalidInput, match=field):
        parse(json.dumps(raw).encode())


_scalars = st.none() | st.booleans() | st.integers() | st.text()
_json = st.recursive(_scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(st.binary(max_size=200) | _json.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_manifest_or_invalid_input(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        parse(data)


def test_the_content_digest_ignores_where_tensors_lie_and_sees_every_byte_and_scalar() -> None:
    moved = replace(MANIFEST, tensors=(MANIFEST.tensors[0], replace(MANIFEST.tensors[1], offset=512)))
    assert moved.content_digest() == MANIFEST.content_digest()
    assert moved.digest() != MANIFEST.digest()
    other = replace(MANIFEST, tensors=(replace(ENTRY, blocks=b"\xcd" * 16), MANIFEST.tensors[1]))
    assert other.content_digest() != MANIFEST.content_digest()
    assert replace(MANIFEST, scalars={"s": 1.0}).content_digest() != MANIFEST.content_digest()


KEY = grants.new_key()
CLAIMS = grants.Claims("i-a", 4, "m" * 32, "i-b", 1000.0)


def _check(grant: str, now: float = 999.0) -> grants.Claims:
    return grants.check(KEY, grant, now=now, source_instance="i-a", generation=4, manifest_digest=lambda: "m" * 32)


def test_a_grant_gives_its_claims_back() -> None:
    assert _check(grants.mint(KEY, CLAIMS)) == CLAIMS


def test_a_grant_is_over_at_its_expiry() -> None:
    with pytest.raises(Denied, match="expired"):
        _check(grants.mint(KEY, CLAIMS), now=1000.0)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_grant_with_any_byte_altered_is_denied(at: int, by: int) -> None:
    raw = bytearray(grants.mint(KEY, CLAIMS).encode())
    raw[at % len(raw)] ^= by
    text = raw.decode("latin-1")
    if text != grants.mint(KEY, CLAIMS):
        try:
            claims = _check(text)
        except Denied:
            return
        # base64 has spare bits in its last character: another spelling of the same grant is the same grant.
        assert claims == CLAIMS


@given(st.text(max_size=5000))
def test_any_text_is_a_grant_or_denied(text: str) -> None:
    with pytest.raises(Denied):
        _check(text)
