import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.sandbox.pooling.starts import Breaker, Start, StartLimiter


def take(limiter: StartLimiter, now_s: float) -> Start:
    start = limiter.try_start(now_s)
    assert start is not None
    return start


def opened(now_s: float = 0.0) -> StartLimiter:
    limiter = StartLimiter(4, failures_to_open=3, first_pause_s=1.0, max_pause_s=4.0)
    for _ in range(3):
        limiter.failed(take(limiter, now_s), now_s)
    assert limiter.state is Breaker.OPEN
    return limiter


@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["start", "ok", "fail", "drop"]), st.floats(0, 2)), max_size=200
    ),
    cap=st.integers(1, 6),
)
def test_never_more_in_flight_than_allowed_and_never_stuck(
    steps: list[tuple[str, float]], cap: int
) -> None:
    limiter = StartLimiter(cap)
    flying: list[Start] = []
    now_s = 0.0
    for action, step_s in steps:
        now_s += step_s
        if action == "start":
            before = len(flying)
            if start := limiter.try_start(now_s):
                flying.append(start)
                assert limiter.state is Breaker.PROBING or before < limiter.limit
        elif flying:
            start = flying.pop(0)
            if action == "ok":
                limiter.succeeded(start)
            elif action == "fail":
                limiter.failed(start, now_s)
            else:
                limiter.abandoned(start, now_s)
        assert limiter.in_flight == len(flying) <= cap
        assert 1 <= limiter.limit <= cap
    for start in flying:
        limiter.abandoned(start, now_s)
    retry_s = limiter.retry_s()
    assert limiter.try_start(now_s if retry_s is None else max(now_s, retry_s)) is not None


def test_a_failure_halves_the_limit_and_successes_bring_it_back() -> None:
    limiter = StartLimiter(8)
    limiter.failed(take(limiter, 0.0), 0.0)
    assert limiter.limit == 4
    starts = 0
    while limiter.limit < 8:
        limiter.succeeded(take(limiter, 0.0))
        starts += 1
    # One round of successes for each step: 4 + 5 + 6 + 7 and what 1/limit loses meanwhile.
    assert 4 + 5 + 6 + 7 <= starts <= 5 + 6 + 7 + 8


def test_failures_in_a_row_open_the_breaker_but_scattered_ones_do_not() -> None:
    limiter = StartLimiter(4, failures_to_open=3)
    for _ in range(10):
        limiter.failed(take(limiter, 0.0), 0.0)
        limiter.failed(take(limiter, 0.0), 0.0)
        limiter.succeeded(take(limiter, 0.0))
    assert limiter.state is Breaker.CLOSED
    assert opened().try_start(0.5) is None


def test_after_the_pause_exactly_one_probe_goes() -> None:
    limiter = opened()
    assert limiter.retry_s() == 1.0
    assert limiter.try_start(0.99) is None
    probe = take(limiter, 1.0)
    assert limiter.state is Breaker.PROBING
    assert limiter.try_start(1.0) is None
    limiter.succeeded(probe)
    assert limiter.state is Breaker.CLOSED
    assert limiter.retry_s() is None
    assert limiter.try_start(1.0) is not None


def test_a_failed_probe_doubles_the_pause_up_to_the_longest() -> None:
    limiter = opened()
    pauses, now_s = [], 1.0
    for _ in range(4):
        limiter.failed(take(limiter, now_s), now_s)
        retry_s = limiter.retry_s()
        assert retry_s is not None
        pauses.append(retry_s - now_s)
        now_s = retry_s
    assert pauses == [2.0, 4.0, 4.0, 4.0]


def test_an_abandoned_probe_lets_the_next_one_try_at_once() -> None:
    limiter = opened()
    limiter.abandoned(take(limiter, 1.0), 1.5)
    assert limiter.try_start(1.5) is not None


def test_starts_from_before_the_breaker_opened_have_no_say() -> None:
    limiter = StartLimiter(4, failures_to_open=2, first_pause_s=1.0)
    early, *failing = [take(limiter, 0.0) for _ in range(4)]
    for start in failing[:2]:
        limiter.failed(start, 0.0)
    assert limiter.state is Breaker.OPEN
    limiter.succeeded(early)
    limiter.failed(failing[2], 0.5)
    assert limiter.state is Breaker.OPEN
    assert limiter.retry_s() == 1.0
    assert limiter.in_flight == 0


def test_a_start_ends_once() -> None:
    limiter = StartLimiter(1)
    start = take(limiter, 0.0)
    limiter.succeeded(start)
    with pytest.raises(AssertionError, match="ended twice"):
        limiter.failed(start, 0.0)
