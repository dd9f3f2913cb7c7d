"""An answer in pieces, from replicas that take over from each other."""

from hypothesis import given
from hypothesis import strategies as st

from burnish.core.records import GenerateRequest, SamplingParams
from burnish.core.vocabulary import StopReason
from burnish.rollout.remote.dialect import Chunk
from burnish.rollout.remote.tally import Tally

CHUNKS = st.lists(
    st.lists(st.tuples(st.integers(0, 99), st.floats(-20, 0)), max_size=4), min_size=1, max_size=8
)


def tally(max_tokens: int, **params: object) -> Tally:
    values = {"max_tokens": max_tokens, "min_tokens": 3, "seed": 5} | params
    request = GenerateRequest(
        request_id="a",
        prompt_ids=(1, 2),
        params=SamplingParams(**values),  # type: ignore[arg-type]
    )
    return Tally(request, 0.0)


@given(CHUNKS)
def test_pieces_add_up_to_the_whole_and_the_rest_is_what_is_missing(
    pieces: list[list[tuple[int, float]]],
) -> None:
    total = sum(map(len, pieces))
    got = tally(total + 5)
    told: list[int] = []
    for number, piece in enumerate(pieces):
        chunk = Chunk(tuple(t for t, _ in piece), tuple(v for _, v in piece))
        told += got.add(chunk, number, float(number)).token_ids
        rest = got.remainder()
        assert rest.prompt_ids == (1, 2, *told)
        assert rest.params.max_tokens == total + 5 - len(told)
        assert rest.params.min_tokens == max(0, 3 - len(told))
    whole = got.result(StopReason.LENGTH)
    assert whole.token_ids == tuple(told) == tuple(t for piece in pieces for t, _ in piece)
    assert whole.weight_versions == tuple(n for n, piece in enumerate(pieces) for _ in piece)


def test_the_rest_draws_other_random_numbers_than_the_beginning() -> None:
    got = tally(9)
    assert got.remainder() == got.request
    seeds = {got.remainder().params.seed}
    for token in range(3):
        got.add(Chunk((token,), (-1.0,)), 0, 0.0)
        seeds.add(got.remainder().params.seed)
    assert len(seeds) == 4


def test_the_server_s_own_account_replaces_what_was_believed() -> None:
    got = tally(9)
    got.add(Chunk((1, 2), (-1.0, -1.0)), 4, 0.0)
    got.add(Chunk((3, 4), (-1.0, -1.0)), 4, 0.0)
    got.relabel(2, (4, 9))
    assert got.result(StopReason.STOP).weight_versions == (4, 4, 4, 9)
    assert got.final(StopReason.STOP, 1).weight_versions == (9,)
