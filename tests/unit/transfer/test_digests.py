"""What proves bytes, and what somebody on the way would have to forge."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relight.core.errors import InvalidInput, RemoteFault
from relight.transfer.manifest import WeightManifest, dump, parse
from relight.transfer.segment import Segment
from relight.transfer.verify import BLOCK_BYTES, DIGEST_BYTES, Digest, blocks_of
from tests.unit.transfer.conftest import Connector, Rig, bring


def _rehashed(manifest: WeightManifest, segment: Segment, digest: Digest) -> WeightManifest:
    """The same content, proven by another digest."""
    tensors = tuple(
        replace(t, blocks=blocks_of(segment.view[t.offset : t.offset + t.bytes], digest)) for t in manifest.tensors
    )
    return replace(manifest, tensors=tensors, digests=digest)


def test_digests_are_those_that_others_compute() -> None:
    # FIPS 180-2, appendix B.1, and the test vector of an empty input of xxHash's specification.
    assert Digest.SHA256.of(memoryview(b"abc")).hex() == "ba7816bf8f01cfea414140de5dae2223"
    assert Digest.XXH3.of(memoryview(b"")).hex() == "99aa06d3014798d86001c324468d497f"


@pytest.mark.parametrize("digest", Digest)
def test_each_block_has_a_digest_of_its_own(digest: Digest) -> None:
    body = memoryview(bytes(2 * BLOCK_BYTES + 1))
    found = blocks_of(body, digest)
    parts = [found[at : at + DIGEST_BYTES] for at in range(0, len(found), DIGEST_BYTES)]
    assert parts == [digest.of(body[:BLOCK_BYTES])] * 2 + [digest.of(body[:1])]


@pytest.mark.parametrize("digest", Digest)
def test_a_manifest_says_what_made_its_digests(rig: Rig, digest: Digest) -> None:
    assert parse(dump(rig.source.manifest)).digests is digest


@pytest.mark.parametrize("said", ["md5", "", 1, None, ["xxh3"]])
def test_a_manifest_of_an_unknown_digest_is_refused_by_that_field(rig: Rig, said: object) -> None:
    with pytest.raises(InvalidInput, match="digests: expected xxh3 or sha256"):
        parse(dump(replace(rig.source.manifest, digests=said)))  # type: ignore[arg-type]


@pytest.mark.parametrize("digest", Digest)
def test_a_source_that_proves_otherwise_is_refused_and_nothing_is_touched(
    rig: Rig, connector: Connector, digest: Digest
) -> None:
    other = next(d for d in Digest if d is not digest)
    rig.source.close(0)
    rig.source.set_manifest(_rehashed(rig.source.manifest, rig.source.segment, other))
    rig.source.open(2, rig.key)
    with pytest.raises(RemoteFault, match=f"i-source proves bytes by {other}, this member by {digest}"):
        bring(rig, connector(rig, rig.grant()))
    assert rig.target.resident_bytes() == 0


@pytest.mark.parametrize("digest", Digest)
def test_what_names_a_manifest_names_what_made_its_digests(rig: Rig, digest: Digest) -> None:
    other = next(d for d in Digest if d is not digest)
    manifest = rig.source.manifest
    assert replace(manifest, digests=other).digest() != manifest.digest()


@pytest.mark.parametrize("digest", [Digest.SHA256])
def test_bytes_that_were_forged_together_with_the_manifest_are_refused_by_what_the_controller_said(
    rig: Rig, connector: Connector
) -> None:
    said = rig.source.manifest_digest
    rig.source.close(0)
    rig.source.segment.view[100] ^= 1
    rig.source.set_manifest(_rehashed(rig.source.manifest, rig.source.segment, Digest.SHA256))
    rig.source.open(2, rig.key)
    with pytest.raises(RemoteFault, match="describes other weights than it offered"):
        bring(rig, connector(rig, rig.grant()), manifest_digest=said)
    assert rig.target.resident_bytes() == 0
