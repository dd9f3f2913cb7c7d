import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from burnish.core.errors import ClassifiedFailure
from burnish.core.vocabulary import FailureKind
from burnish.sandbox.pooling.fair_queue import FairQueue, QueueFull, Ticket

CAPACITY = 6


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.capacity = CAPACITY
        self.queue = FairQueue(CAPACITY, max_waiting=12)
        self.waiting: list[Ticket] = []
        self.held: dict[Ticket, int] = {}
        self.last: dict[str, int] = {}

    @rule(client=st.sampled_from("abc"), units=st.integers(1, CAPACITY), weight=st.floats(0.5, 4))
    def offer(self, client: str, units: int, weight: float) -> None:
        own = sum(ticket.client == client for ticket in self.waiting)
        if units > self.capacity:
            with pytest.raises(ValueError, match="boxes at once"):
                self.queue.offer(client, units, weight)
        elif len(self.waiting) >= 12 or own >= 6:
            with pytest.raises(QueueFull):
                self.queue.offer(client, units, weight)
        else:
            self.waiting.append(self.queue.offer(client, units, weight))

    @rule()
    def grant(self) -> None:
        for ticket in self.queue.grant():
            self.waiting.remove(ticket)
            assert self.last.get(ticket.client, -1) < ticket.number
            self.last[ticket.client] = ticket.number
            self.held[ticket] = ticket.units
        if self.waiting:
            # Work conservation: only a request that does not fit may hold up the rest.
            free = self.capacity - sum(self.held.values())
            assert max(ticket.units for ticket in self.waiting) > free
        assert self.queue.grant() == []

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.held)))
        units = data.draw(st.integers(1, self.held[ticket]))
        self.queue.release(ticket, units)
        self.held[ticket] -= units
        if not self.held[ticket]:
            del self.held[ticket]
            with pytest.raises(AssertionError):
                self.queue.release(ticket)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.waiting))
        assert self.queue.cancel(ticket)
        assert not self.queue.cancel(ticket)
        self.waiting.remove(ticket)

    @rule(capacity=st.integers(1, CAPACITY))
    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        for ticket in self.queue.resize(capacity):
            assert ticket.units > capacity
            self.waiting.remove(ticket)

    @invariant()
    def nothing_is_lost_or_made_up(self) -> None:
        assert self.queue.outstanding == sum(self.held.values())
        assert self.queue.outstanding <= CAPACITY
        assert self.queue.num_waiting == len(self.waiting)

    def teardown(self) -> None:
        for ticket in list(self.held):
            self.queue.release(ticket)
        self.held.clear()
        while self.waiting:
            granted = self.queue.grant()
            assert granted, "a waiting request that fits an empty pool was not granted"
            for ticket in granted:
                self.waiting.remove(ticket)
                self.queue.release(ticket)
        assert self.queue.outstanding == 0


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def grant_one_at_a_time(queue: FairQueue) -> list[Ticket]:
    """Order of grants when everything granted is released at once."""
    order = []
    while granted := queue.grant():
        for ticket in granted:
            queue.release(ticket)
        order += granted
    return order


def requests_of_clients() -> st.SearchStrategy[dict[str, tuple[float, list[int]]]]:
    """Weight and batches of each client; no batch fits beside another."""
    sizes = st.lists(st.integers(5, 8), min_size=1, max_size=30)
    clients = st.sampled_from("abcd")
    return st.dictionaries(clients, st.tuples(st.floats(0.1, 10), sizes), min_size=2)


@settings(deadline=None)
@given(requests=requests_of_clients())
def test_granted_units_differ_by_no_more_than_one_request_of_each(
    requests: dict[str, tuple[float, list[int]]],
) -> None:
    queue = FairQueue(8)
    for client, (weight, counts) in requests.items():
        for count in counts:
            queue.offer(client, count, weight)
    got = dict.fromkeys(requests, 0)
    left = {client: len(counts) for client, (_, counts) in requests.items()}
    for ticket in grant_one_at_a_time(queue):
        got[ticket.client] += ticket.units
        left[ticket.client] -= 1
        busy = [client for client in requests if left[client]]
        for i in busy:
            for j in busy:
                bound = sum(max(requests[k][1]) / requests[k][0] for k in (i, j))
                difference = got[i] / requests[i][0] - got[j] / requests[j][0]
                assert abs(difference) <= bound + 1e-6


@settings(deadline=None)
@given(
    flood=st.integers(1, 8),
    history=st.lists(st.integers(1, 8), max_size=3),
    batch=st.integers(1, 8),
    weight=st.floats(0.2, 5),
)
def test_a_batch_waits_no_longer_than_stated_however_many_small_requests_come(
    flood: int, history: list[int], batch: int, weight: float
) -> None:
    queue = FairQueue(8)
    for _ in range(50):
        queue.offer("flood", flood)
    for count in history:
        queue.offer("batch", count, weight)
    waited_for = queue.offer("batch", batch, weight)
    largest = max([batch, *history])
    ahead = None if history else 0
    for _ in range(1000):
        granted = queue.grant()
        # From when its client holds nothing any more.
        starts = any(ticket.number == waited_for.number - 1 for ticket in granted)
        for ticket in granted:
            queue.release(ticket)
            if ticket.client == "flood":
                queue.offer("flood", flood)
            if ticket == waited_for:
                assert ahead is None or ahead <= largest / weight + flood + 1e-6
                return
            if ticket.client == "flood" and ahead is not None:
                ahead += ticket.units
        if starts and history:
            ahead = 0
    pytest.fail("the batch starved")


def even_shares(capacity: int, wanted: dict[str, int]) -> dict[str, float]:
    """Max-min by definition: raise all together, stop each at what it wants."""
    shares, left = dict.fromkeys(wanted, 0.0), float(capacity)
    while left > 1e-9 and (rising := [c for c in wanted if shares[c] < wanted[c] - 1e-9]):
        step = min(left / len(rising), min(wanted[c] - shares[c] for c in rising))
        for client in rising:
            shares[client] += step
        left -= step * len(rising)
    return shares


@settings(deadline=None)
@given(
    capacity=st.integers(1, 20),
    wanted=st.dictionaries(st.sampled_from("abcde"), st.integers(1, 30), min_size=1),
    order=st.randoms(use_true_random=False),
)
def test_places_come_to_be_shared_evenly_whoever_had_them_before(
    capacity: int, wanted: dict[str, int], order: random.Random
) -> None:
    queue = FairQueue(capacity)
    held: dict[str, list[Ticket]] = {client: [] for client in wanted}
    for client in order.sample(sorted(wanted), len(wanted)):
        for _ in range(wanted[client]):
            queue.offer(client)
        for ticket in queue.grant():
            held[ticket.client].append(ticket)
    even = even_shares(capacity, wanted)
    while any(abs(len(held[c]) - even[c]) > 1 - 1e-6 for c in wanted):
        client = order.choice([c for c in wanted if len(held[c]) > even[c] + 1e-6])
        queue.release(held[client].pop())
        before = {c: len(held[c]) for c in wanted}
        queue.offer(client)
        (ticket,) = queue.grant()
        held[ticket.client].append(ticket)
        assert before[ticket.client] < even[ticket.client] + 1e-6, "not to who has its share"


def test_ten_thousand_requests_do_not_hold_up_another_client() -> None:
    queue = FairQueue(64, max_waiting=30_000)
    for _ in range(10_000):
        queue.offer("greedy")
    greedy = queue.grant()
    assert len(greedy) == 64
    modest = [queue.offer("modest") for _ in range(40)]
    got = []
    for ticket in greedy[:32]:
        queue.release(ticket)
        got += queue.grant()
    assert got == modest[:32]


def test_a_batch_that_waits_for_its_own_client_holds_up_nobody() -> None:
    queue = FairQueue(4)
    queue.offer("a", 2)
    queue.offer("a", 3)
    assert [ticket.units for ticket in queue.grant()] == [2]
    later = queue.offer("b")
    assert queue.grant() == [later]


def test_a_newcomer_goes_before_the_backlog_of_another() -> None:
    queue = FairQueue(1)
    first = [queue.offer("greedy") for _ in range(5)]
    assert queue.grant() == first[:1]
    newcomer = queue.offer("modest")
    queue.release(first[0])
    assert queue.grant() == [newcomer]


def test_a_batch_is_never_passed_once_it_is_next() -> None:
    queue = FairQueue(4)
    small = queue.offer("a", 1)
    assert queue.grant() == [small]
    batch = queue.offer("b", 4)
    later = queue.offer("c", 1)
    assert queue.grant() == []
    queue.release(small)
    assert queue.grant() == [batch]
    queue.release(batch, 1)
    assert queue.grant() == [later]


def test_one_client_cannot_have_the_others_refused() -> None:
    queue = FairQueue(1, max_waiting=10)
    for _ in range(5):
        queue.offer("greedy")
    with pytest.raises(QueueFull) as refusal:
        queue.offer("greedy")
    assert refusal.value.limit == 5
    queue.offer("modest")


def test_a_refusal_is_a_sandbox_failure_that_says_what_to_do() -> None:
    queue = FairQueue(1, max_waiting=1)
    queue.offer("a")
    with pytest.raises(ClassifiedFailure, match="try again later") as refusal:
        queue.offer("b")
    assert refusal.value.failure.kind is FailureKind.SANDBOX


def test_names_of_clients_do_not_pile_up() -> None:
    queue = FairQueue(1)
    queue.offer("stays")
    queue.grant()
    queue.offer("waits")
    for index in range(1000):
        assert queue.cancel(queue.offer(f"client {index}"))
    assert len(queue._clients) <= 2


def test_clients_that_had_a_box_and_left_are_forgotten() -> None:
    queue = FairQueue(2)
    queue.offer("stays")
    queue.grant()
    for index in range(1000):
        queue.offer(f"client {index}")
        (ticket,) = queue.grant()
        queue.release(ticket)
    assert len(queue._clients) <= 2
