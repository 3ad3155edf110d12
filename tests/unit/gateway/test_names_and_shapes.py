"""Names are resolved both ways, and answers are renamed without touching generated text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st

from relight.core.errors import InvalidInput
from relight.core.records import RouteReplica
from relight.gateway.openai import Renamer, parse
from relight.gateway.table import choose, key_of


@given(st.text(min_size=1), st.text(min_size=1), st.text(), st.booleans())
def test_only_the_models_name_changes_in_an_answer(served: str, asked: str, text: str, ascii_: bool) -> None:
    # The text may look like the very field that is replaced.
    answer = {"choices": [{"text": text + f'"model": "{served}"'}], "model": served, "n": 1}
    data = json.dumps(answer, ensure_ascii=ascii_).encode(errors="surrogatepass")
    renamed = Renamer(served, asked).whole(data)
    assert json.loads(renamed.decode(errors="surrogatepass")) == {**answer, "model": asked}


@given(st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"])), max_size=5), st.data())
async def test_a_stream_cut_anywhere_is_renamed_the_same(texts: list[str], data: st.DataObject) -> None:
    events = [json.dumps({"model": "served", "text": t}) for t in texts]
    whole = "".join(f"data: {e}\n\n" for e in [*events, "[DONE]"]).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))

    async def pieces() -> AsyncIterator[bytes]:
        for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            yield whole[start:end]

    got = b"".join([piece async for piece in Renamer("served", "asked").lines(pieces())])
    lines = [line for line in got.decode().split("\n\n") if line]
    assert [json.loads(line[6:]) for line in lines[:-1]] == [{"model": "asked", "text": t} for t in texts]
    assert lines[-1] == "data: [DONE]"


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_body_raises_anything_but_invalid_input(raw: bytes) -> None:
    try:
        asked = parse(raw)
    except InvalidInput:
        return
    assert asked.model


def test_a_body_whose_name_is_the_engines_own_is_not_touched() -> None:
    raw = b'{"model":  "m", "temperature": 1.0}'
    assert parse(raw).for_engine("m") is raw
    assert json.loads(parse(raw).for_engine("n")) == {"model": "n", "temperature": 1.0}


_replicas = st.lists(
    st.builds(RouteReplica, st.sampled_from("abcd"), st.integers(1, 2), st.just("u"), st.just("s")),
    unique_by=key_of,
)


@given(_replicas, st.dictionaries(st.tuples(st.sampled_from("abcd"), st.integers(1, 2)), st.integers(0, 5)), st.data())
def test_the_chosen_one_has_the_fewest_and_is_not_avoided(
    replicas: list[RouteReplica], in_flight: dict[tuple[str, int], int], data: st.DataObject
) -> None:
    avoid = {key_of(r) for r in replicas if data.draw(st.booleans())}
    chosen = choose(replicas, in_flight, avoid, data.draw(st.integers(0, 99)))
    able = [r for r in replicas if key_of(r) not in avoid]
    if chosen is None:
        assert not able
    else:
        assert chosen in able
        assert in_flight.get(key_of(chosen), 0) == min(in_flight.get(key_of(r), 0) for r in able)
