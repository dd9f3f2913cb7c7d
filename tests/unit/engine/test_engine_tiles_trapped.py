"""What the compiler made of attention by tiles, with each instruction trapped and emulated."""

import pytest
import torch
from attention_cases import Case, make_cache, run, tokens_of
from emulated_tiles import emulated, trapped, trapping_problem

pytestmark = pytest.mark.skipif(trapping_problem() is not None, reason=str(trapping_problem()))


@pytest.mark.parametrize(
    "case",
    [
        Case((9, 3, 64), [(0, 70), (50, 40)], 16, None, 0, 1),
        Case((4, 2, 96), [(1010, 50)], 32, 70, 5, 2),
        Case((2, 1, 128), [(90, 1), (33, 90)], 48, None, 0, 3),
    ],
)
def test_the_machine_code_gives_the_bits_of_its_source(case: Case) -> None:
    t = tokens_of(case, torch.bfloat16)
    outs = []
    for kind in (emulated, trapped):
        with kind() as count:
            cache, pages = make_cache(case, torch.bfloat16, tiles=True)
            for tensor in cache.stores[0]:
                tensor.fill_(0xFF)  # NaN: a store that came too late would be seen
            outs.append(run(cache, case, pages, t))
            assert count is None or count() > 100
    assert torch.equal(*outs)


def test_every_thread_has_tiles_of_its_own() -> None:
    case = Case((9, 3, 64), [(0, 150), (10, 60)], 16, None, 0, 4)
    t = tokens_of(case, torch.bfloat16)
    before, outs = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            with trapped():
                cache, pages = make_cache(case, torch.bfloat16, tiles=True)
                outs.append(run(cache, case, pages, t))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*outs)
