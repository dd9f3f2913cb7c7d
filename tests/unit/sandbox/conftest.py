from collections.abc import Iterator

import pytest
from raw_helper import COMMANDS, RawBox, RawHelper, open_helper


@pytest.fixture(params=list(COMMANDS))
def helper_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def helper(helper_name: str) -> Iterator[RawHelper]:
    made = open_helper(helper_name)
    yield made
    made.end()


@pytest.fixture
def box(helper: RawHelper) -> RawBox:
    return helper.create()
