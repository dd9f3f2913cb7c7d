import asyncio
import json
import threading
from pathlib import Path

import msgspec
import pytest

from burnish.core.errors import ClassifiedFailure
from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind
from burnish.envs import registry
from burnish.quality.audit import audit
from burnish.quality.gate import Gate
from burnish.quality.isolation import run_isolated
from burnish.quality.probes import PROBES
from burnish.quality.report import ProbeVerdict, QualityReport
from burnish.quality.subject import AuditConfig

QUICK = AuditConfig(num_tasks=4, num_split_items=40, probe_timeout_s=60.0)


@pytest.fixture(autouse=True)
def planted(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)


def audited(name: str, pool=None, config: AuditConfig = QUICK, **extra) -> QualityReport:
    environment = registry.get(f"planted_environments:{name}")
    return asyncio.run(audit(environment, pool, config, **extra))


def test_a_sound_environment_passes_every_required_probe():
    report = audited("Sound")
    assert report.verdict is ProbeVerdict.PASS, report.reason
    assert report.reason == ""
    assert [f.probe for f in report.findings] == [probe.name for probe in PROBES]
    assert report.digest == registry.get("planted_environments:Sound").digest


DEFECTS = {
    "RemembersCalls": "verdict_deterministic",
    "PaysEmpty": "empty_scores_nothing",
    "OracleFails": "oracle_full_score",
    "TwoTurnOracle": "oracle_full_score",
    "JudgeRaises": "oracle_full_score",
    "RaisesOnOddText": "hostile_survived",
    "Exits": "tasks_well_formed",
    "SharesSplits": "splits_disjoint",
    "ShiftedSplits": "splits_disjoint",
    "ChangesItsMind": "task_deterministic",
    "HashSeeded": "process_deterministic",
    "PaysContaining": "degenerate_not_paid",
    "LeaksLastWord": "prompt_does_not_answer",
    "OneAnswer": "other_answers_not_paid",
    "PaysNonAnswers": "degenerate_not_paid",
    "ScoreOutOfRange": "oracle_full_score",
    "NotAVerdict": "oracle_full_score",
    "EmptyPrompt": "tasks_well_formed",
}


@pytest.mark.parametrize("name", sorted(DEFECTS))
def test_each_planted_defect_is_caught_by_its_probe_with_a_witness(name):
    report = audited(name)
    assert report.verdict is ProbeVerdict.FAIL
    last = report.findings[-1]
    assert (last.probe, last.verdict) == (DEFECTS[name], ProbeVerdict.FAIL)
    assert last.reason
    assert "\n" not in report.reason
    assert last.witness
    json.loads(msgspec.json.encode(report))


@pytest.mark.parametrize("name", ["HangsInPython", "HangsAsleep"])
def test_a_hanging_environment_is_failed_by_name_in_bounded_time(name):
    report = audited(name, config=AuditConfig(num_tasks=4, probe_timeout_s=1.5))
    assert report.verdict is ProbeVerdict.FAIL
    assert "1.5 s" in report.reason
    assert report.environment in ("hangs_in_python", "hangs_asleep")


def test_a_loop_that_was_given_up_on_stops_burning_cpu():
    gone = threading.Event()

    async def spin():
        try:
            while True:
                pass
        finally:
            gone.set()

    with pytest.raises(TimeoutError):
        asyncio.run(run_isolated(spin, 0.5))
    assert gone.wait(30)


def test_boxes_are_used_through_the_loop_that_owns_them(plain_pool):
    report = audited("NeedsBox", plain_pool)
    assert report.verdict is ProbeVerdict.PASS, report
    assert plain_pool.num_acquired > 10
    assert plain_pool.num_live == 0


def test_without_a_sandbox_it_is_unmeasured_and_says_so():
    report = audited("NeedsBox", None)
    assert report.verdict is ProbeVerdict.UNMEASURED
    assert "needs a sandbox" in report.reason
    assert Gate().admit([report]).quarantined["needs_box"].startswith("unmeasured")


def test_a_failing_sandbox_is_not_the_environments_fault(plain_pool):
    def refuse(image=None, policy=None):
        failure = Failure(kind=FailureKind.SANDBOX, where="sandbox.acquire", message="no memory")
        raise ClassifiedFailure(failure)

    plain_pool.acquire = refuse
    report = audited("NeedsBox", plain_pool)
    assert report.verdict is ProbeVerdict.UNMEASURED
    assert "no memory" in report.reason


def test_a_reference_over_its_token_budget_fails():
    report = audited("Sound", count_tokens=lambda messages: 1000)
    assert report.verdict is ProbeVerdict.FAIL
    assert "1000 tokens of 32" in report.reason
    assert audited("Sound", count_tokens=lambda messages: 32).verdict is ProbeVerdict.PASS


def test_what_cannot_be_rebuilt_elsewhere_is_unmeasured_not_passed():
    kind = type(registry.get("planted_environments:Sound"))

    class Local(kind):
        name = "local"

    Local.__module__ = kind.__module__
    environment = Local()
    report = asyncio.run(audit(environment, None, QUICK))
    assert report.verdict is ProbeVerdict.UNMEASURED
    assert "top of a module" in report.reason


def test_the_gate_admits_passes_only_and_binds_them_to_the_digest():
    gate = Gate()
    sound = registry.get("planted_environments:Sound")
    broken = registry.get("planted_environments:OracleFails")
    assert not gate.allows(sound)
    admission = gate.admit([audited("Sound"), audited("OracleFails")])
    assert admission.admitted == ("sound",)
    assert admission.quarantined["oracle_fails"].startswith("fail: oracle_full_score")
    assert gate.allows(sound)
    assert not gate.allows(broken)
    sound.digest = "sha256:" + "0" * 64
    assert not gate.allows(sound)


def test_a_later_failure_takes_an_admission_back():
    gate, report = Gate(), audited("Sound")
    gate.admit([report])
    fields = {f: getattr(report, f) for f in report.__struct_fields__}
    finding = msgspec.structs.replace(
        report.findings[0], verdict=ProbeVerdict.FAIL, reason="drifted"
    )
    gate.admit([QualityReport(**fields | {"verdict": ProbeVerdict.FAIL, "findings": (finding,)})])
    assert not gate.allows(registry.get("planted_environments:Sound"))
