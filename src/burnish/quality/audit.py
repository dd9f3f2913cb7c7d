"""Asks every probe about one environment and sums up."""

from __future__ import annotations

import asyncio

from burnish.core.boxes import SandboxPool
from burnish.core.errors import ClassifiedFailure, UserError, one_line
from burnish.core.protocols import Environment
from burnish.core.vocabulary import FailureKind
from burnish.envs import registry
from burnish.quality.isolation import BridgedPool, MissingPool, run_isolated
from burnish.quality.probes import PROBES, Defect, Probe, Unmeasured
from burnish.quality.report import Finding, ProbeVerdict, QualityReport
from burnish.quality.subject import AuditConfig, Subject, TokenCounter

_NOT_ITS_FAULT = frozenset({FailureKind.INFRA, FailureKind.SANDBOX})


async def audit(
    environment: Environment,
    pool: SandboxPool | None,
    config: AuditConfig | None = None,
    *,
    count_tokens: TokenCounter | None = None,
) -> QualityReport:
    """Probe an environment. Never raises for what the environment does, and ends in bounded time.

    Args:
        environment: to be audited.
        pool: boxes; without one, environments that need a box stay unmeasured.
        config: how thoroughly to look.
        count_tokens: the policy's tokenizer, to check that references fit their budget.
    """
    config = config or AuditConfig()
    boxes = MissingPool() if pool is None else BridgedPool(pool, asyncio.get_running_loop())
    subject = Subject(environment, boxes, config, rebuild_target(environment), count_tokens)
    findings: list[Finding] = []
    for probe in PROBES:
        findings.append(await _ask(probe, subject))
        if findings[-1].verdict is ProbeVerdict.FAIL:
            # One defect is enough to keep it out, and the next probe may hang on the same one.
            break
    return QualityReport(
        environment=environment.name,
        digest=environment.digest,
        verdict=_sum_up(findings),
        findings=tuple(findings),
    )


async def _ask(probe: Probe, subject: Subject) -> Finding:
    timeout_s = subject.config.probe_timeout_s
    try:
        await run_isolated(lambda: _coroutine(probe, subject), timeout_s)
    except Defect as defect:
        return Finding(
            probe=probe.name,
            verdict=ProbeVerdict.FAIL,
            reason=defect.reason,
            witness=defect.witness,
        )
    except Unmeasured as gap:
        return Finding(probe=probe.name, verdict=ProbeVerdict.UNMEASURED, reason=str(gap))
    except ClassifiedFailure as error:
        failure = error.failure
        blameless = failure.kind in _NOT_ITS_FAULT
        return Finding(
            probe=probe.name,
            verdict=ProbeVerdict.UNMEASURED if blameless else ProbeVerdict.FAIL,
            reason=failure.message if blameless else f"{failure.where} raised {failure.message}",
            witness={"kind": str(failure.kind), "where": failure.where},
        )
    except TimeoutError:
        return Finding(
            probe=probe.name,
            verdict=ProbeVerdict.FAIL,
            reason=f"no answer within {timeout_s:g} s",
            witness={"timeout_s": timeout_s},
        )
    except Exception as error:  # noqa: BLE001 (an audit outlives whatever an environment throws)
        return Finding(
            probe=probe.name,
            verdict=ProbeVerdict.FAIL,
            reason=one_line(error),
            witness={"raised": one_line(error)},
        )
    return Finding(probe=probe.name, verdict=ProbeVerdict.PASS)


async def _coroutine(probe: Probe, subject: Subject) -> None:
    await probe.ask(subject)


def _sum_up(findings: list[Finding]) -> ProbeVerdict:
    if any(finding.verdict is ProbeVerdict.FAIL for finding in findings):
        return ProbeVerdict.FAIL
    required = {probe.name for probe in PROBES if probe.required}
    measured = {f.probe for f in findings if f.verdict is ProbeVerdict.PASS}
    return ProbeVerdict.PASS if required <= measured else ProbeVerdict.UNMEASURED


def rebuild_target(environment: Environment) -> str | None:
    """What `registry.get` makes an equal environment from: its name, or `module:Class`."""
    kind = type(environment)
    for target in (environment.name, f"{kind.__module__}:{kind.__qualname__}"):
        try:
            twin = registry.get(target)
        except UserError:
            continue
        if type(twin) is kind and twin.digest == environment.digest:
            return target
    return None
