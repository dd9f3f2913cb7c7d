"""Stop strings: found wherever tokens cut them, reported once, at the token that completes them."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from burnish.core.errors import ClassifiedFailure
from burnish.rollout.engine.stops import StopText


def cut(data: bytes, seed: int) -> tuple[list[bytes], list[int]]:
    """`data` as tokens of one to three bytes: the pieces, and one id for each."""
    rng, pieces = random.Random(seed), []
    while data:
        length = rng.randrange(1, 4)
        pieces.append(data[:length])
        data = data[length:]
    return pieces, list(range(len(pieces)))


def decoder(pieces: list[bytes]):
    return lambda ids: b"".join(pieces[i] for i in ids).decode("utf-8", "replace")


@example("\U0001f600\U0001f600\u00e9\u4e16", ["\u4e16"], 64)
@given(
    st.text("ab\u00e9\u4e16\U0001f600 ", max_size=30),
    st.lists(st.text("ab\u00e9\u4e16", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 99),
)
def test_a_stop_is_found_at_the_first_token_whose_text_contains_it(
    text: str, stops: list[str], seed: int
) -> None:
    pieces, ids = cut(text.encode(), seed)
    matcher = StopText(stops, decoder(pieces))
    so_far = b""
    for token in ids:
        before = so_far.decode("utf-8", "ignore")
        so_far += pieces[token]
        after = so_far.decode("utf-8", "ignore")
        wanted = any(stop in after for stop in stops) and not any(stop in before for stop in stops)
        found = matcher.feed(token)
        if wanted:
            assert found
            return
        assert not found


def test_a_stop_that_was_passed_is_not_found_again() -> None:
    pieces = [b"ab", b"c", b"d", b"\xc3", b"\xa9"]
    matcher = StopText(["ab", "longer than that"], decoder(pieces))
    assert [matcher.feed(i) for i in range(5)] == [True, False, False, False, False]


def test_rubbish_bytes_do_not_hide_a_stop_nor_grow_the_window() -> None:
    pieces = [b"\xff"] * 50 + [b"sto", b"p"]
    matcher = StopText(["stop"], decoder(pieces))
    found = [matcher.feed(i) for i in range(52)]
    assert found == [False] * 51 + [True]
    assert len(matcher._context) + len(matcher._new) < 20


def test_a_decoder_that_raises_is_a_classified_failure() -> None:
    def broken(ids: object) -> str:
        raise KeyError(ids)

    with pytest.raises(ClassifiedFailure, match="stop strings"):
        StopText(["a"], broken).feed(1)
