"""Where the output of a command ends that leaves processes behind."""

import asyncio
import itertools
import os

from hypothesis import given
from hypothesis import strategies as st

from burnish.sandbox.keeper.pipes import Capture

MARK = b"aabaa!"


@given(
    text=st.lists(st.sampled_from([b"a", b"b", b"!", b"aab"]), max_size=12).map(b"".join),
    cuts=st.lists(st.integers(1, 30), max_size=6),
    ends=st.booleans(),
)
def test_a_mark_ends_the_output_however_it_is_split(
    text: bytes, cuts: list[int], *, ends: bool
) -> None:
    whole = text + (MARK + b"later" if ends else b"")
    expected, found, _ = whole.partition(MARK)

    async def main() -> None:
        capture = Capture()
        capture.expect(MARK)
        capture.watch(1000, lambda: None)
        edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
        for start, end in itertools.pairwise(edges):
            os.write(capture.write_fd, whole[start:end])
            capture._read_once()
        os.close(capture.write_fd)
        assert capture.finish() == expected
        assert capture.marked.is_set() == bool(found)
        capture.close()

    asyncio.run(main())
