import json
import random

import pytest

from burnish.core.vocabulary import DropReason
from burnish.schedule.admission import Admission, AdmissionConfig
from burnish.schedule.batcher import BatchStatus, plan_batch
from burnish.schedule.length_audit import LengthAudit, LengthAuditConfig


def length(rng):
    return int(rng.lognormvariate(4.0, 1.0)) + 1


def simulate(take, num_steps=60, size=4, seed=0):
    """Rollouts take as many ticks as they have tokens; `take` chooses each batch."""
    rng = random.Random(seed)
    audit = LengthAudit(LengthAuditConfig())
    ledger = Admission(AdmissionConfig(max_lag=2, groups_per_batch=size), num_steps=num_steps)
    now, running, lengths, order = 0, {}, {}, 0
    while ledger.step < num_steps:
        while ledger.may_dispatch():
            name = f"g/{order}"
            order += 1
            ledger.dispatched(name)
            lengths[name] = length(rng)
            running[name] = now + lengths[name]
        batch = take(ledger, audit, running, lengths)
        if batch is None:
            name = min(running, key=running.get)
            now = running.pop(name)
            ledger.completed(name)
            audit.completed("d", lengths[name])
            continue
        ledger.trained(batch)
        for name in batch:
            audit.trained("d", lengths[name])
        ledger.published(ledger.version + 1)
    return audit.report()[0]


def dispatch_order(ledger, audit, running, lengths):
    plan = plan_batch(ledger)
    return plan.group_ids if plan.status is BatchStatus.READY else None


def first_come_first_served(ledger, audit, running, lengths):
    """The planted fault: trains whatever came back first and drops the rest as stale."""
    size = ledger.config.groups_per_batch
    waiting = [e.group_id for e in ledger.entries() if e.group_id not in running]
    if len(waiting) < size:
        return None
    for entry in ledger.entries():
        late = ledger.version - entry.dispatched_version >= ledger.config.max_lag
        if late and entry.group_id in running:
            del running[entry.group_id]
            ledger.dropped(entry.group_id, DropReason.STALE)
            audit.completed("d", lengths[entry.group_id])
    return waiting[:size]


def test_training_in_dispatch_order_is_length_unbiased():
    for seed in range(3):
        assert not simulate(dispatch_order, seed=seed).biased


def test_training_what_finishes_first_is_caught():
    report = simulate(first_come_first_served)
    assert report.biased
    assert report.mean_ratio < 0.9
    assert report.z < 0


def test_u_statistic_and_variance_agree_with_all_orderings():
    # trained {1, 3} against left out {2, 7, 7}: pairs won 0+0+0 and 1+0+0, so U = 1, mean 3.
    audit = LengthAudit(LengthAuditConfig())
    for tokens in (1, 3, 2, 7, 7):
        audit.completed("d", tokens)
    for tokens in (1, 3):
        audit.trained("d", tokens)
    row = audit.report()[1]
    variance = 2 * 3 / 12 * (6 - (2**3 - 2) / (5 * 4))
    assert row.z == pytest.approx((1 - 3) / variance**0.5, rel=1e-12)
    assert row.mean_ratio == pytest.approx(2.0 / 4.0)


def test_the_mix_of_domains_is_not_mistaken_for_a_bias():
    rng = random.Random(0)
    audit = LengthAudit(LengthAuditConfig())
    # Long domain mostly left out, short domain mostly trained; inside each, at random.
    for domain, scale, keep in (("long", 10, 0.1), ("short", 1, 0.9)):
        for _ in range(2000):
            tokens = scale * length(rng)
            audit.completed(domain, tokens)
            if rng.random() < keep:
                audit.trained(domain, tokens)
    assert not any(row.biased for row in audit.report())


def test_exclusions_for_content_do_not_count():
    audit = LengthAudit(LengthAuditConfig())
    for tokens in range(1, 1001):
        audit.completed("d", tokens)
        if tokens <= 500:
            audit.trained("d", tokens)
        else:
            audit.excluded("d", tokens)
    row = audit.report()[1]
    assert (row.num_trained, row.num_trainable, row.mean_ratio) == (500, 500, 1.0)
    assert not row.biased


def test_nothing_seen_is_no_bias():
    row = LengthAudit(LengthAuditConfig()).report()[0]
    assert (row.num_trainable, row.mean_ratio, row.p_value, row.biased) == (0, 1.0, 1.0, False)


def test_state_survives_json():
    audit = LengthAudit(LengthAuditConfig())
    rng = random.Random(1)
    for _ in range(50):
        tokens = length(rng)
        audit.completed("d", tokens)
        if rng.random() < 0.5:
            audit.trained("d", tokens)
    again = LengthAudit.from_state(json.loads(json.dumps(audit.state())), LengthAuditConfig())
    assert again.report() == audit.report()
    assert again.state() == audit.state()
