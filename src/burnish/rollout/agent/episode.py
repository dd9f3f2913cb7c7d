"""The turn loop of one episode: tokens in, tokens out.

    renderer.prompt --tokens--> engine --sampled--> renderer.parse --message--> episode.act
         ^                                                                        |
         '---------------- renderer.extend <----- replies ------------------------'
                                                     | none left
                                                     v
                                              episode.verdict -> Rollout

Sampled tokens are never re-tokenised: the next prompt is the previous tokens plus `extend`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from burnish.core.errors import ClassifiedFailure, boundary
from burnish.core.protocols import Engine, Environment, Episode, EpisodeContext, Renderer
from burnish.core.records import (
    CreditSpan,
    Failure,
    GenerateRequest,
    Message,
    Rollout,
    SamplingParams,
    Task,
    Turn,
    Verdict,
)
from burnish.core.seeds import derive_seed
from burnish.core.vocabulary import FailureKind, Outcome, StopReason
from burnish.envs.rewards import WEIGHTS
from burnish.rollout.agent.stream import TokenStream

T = TypeVar("T")


class EpisodePlan(NamedTuple):
    """All that fixes one episode beside the weights."""

    rollout_id: str
    """`{domain}/{index}/{sample}`, also the prefix of its request ids."""
    group_id: str
    """`{domain}/{index}`."""
    task: Task
    """What to do."""
    seed: int
    """Root of its randomness."""
    temperature: float
    """0 is greedy."""
    top_p: float
    """Nucleus mass."""
    step_timeout_s: float
    """Bound on each call into the environment."""


async def run_episode(
    plan: EpisodePlan,
    *,
    engine: Engine,
    renderer: Renderer,
    environment: Environment,
    context: EpisodeContext,
    priority: Callable[[int], int] = lambda turn: 0,
) -> Rollout:
    """Play one episode and judge it; `priority` of a turn is asked for just before its request.

    Raises:
        ClassifiedFailure: whatever went wrong that is not the policy's doing.
    """
    where = f"envs.{plan.task.domain}"
    with boundary(FailureKind.ENVIRONMENT, f"{where}.start"):
        episode = await _bounded(environment.start(plan.task, context), plan.step_timeout_s)
    try:
        stream = TokenStream(renderer.prompt(plan.task.prompt, environment.tools))
        messages = await _play(plan, stream, engine, renderer, episode, priority)
        with boundary(FailureKind.VERIFIER, f"{where}.verdict"):
            verdict = _checked(await _bounded(episode.verdict(), plan.step_timeout_s))
    finally:
        with boundary(FailureKind.ENVIRONMENT, f"{where}.close"):
            await _bounded(episode.close(), plan.step_timeout_s)
    if verdict.failure is not None:
        raise ClassifiedFailure(verdict.failure)
    return stream.rollout(
        plan.rollout_id,
        group_id=plan.group_id,
        environment=environment,
        messages=(*plan.task.prompt, *messages),
        verdict=verdict,
        spans=credit_spans(verdict, stream.turns),
        seed=plan.seed,
    )


async def _play(
    plan: EpisodePlan,
    stream: TokenStream,
    engine: Engine,
    renderer: Renderer,
    episode: Episode,
    priority: Callable[[int], int],
) -> list[Message]:
    messages: list[Message] = []
    for turn in range(plan.task.max_turns):
        budget = plan.task.max_tokens - stream.num_sampled_tokens
        if budget <= 0:
            break
        request = GenerateRequest(
            request_id=f"{plan.rollout_id}/{turn}",
            prompt_ids=tuple(stream.token_ids),
            params=SamplingParams(
                temperature=plan.temperature,
                top_p=plan.top_p,
                max_tokens=budget,
                stop_token_ids=renderer.stop_token_ids,
                seed=derive_seed(plan.seed, "turn", turn),
            ),
            session_id=plan.rollout_id,
            priority=priority(turn),
        )
        with boundary(FailureKind.INFRA, "engine.generate"):
            generation = await engine.generate(request)
            if generation.stop_reason is StopReason.ABORTED:
                raise RuntimeError("the generation was aborted")
        stream.sampled(generation)
        message = renderer.parse(generation.token_ids)
        messages.append(message)
        with boundary(FailureKind.ENVIRONMENT, f"envs.{plan.task.domain}.act"):
            replies = await _bounded(episode.act(message), plan.step_timeout_s)
        if replies is None or turn + 1 == plan.task.max_turns:
            break
        messages.extend(replies)
        stopped = generation.stop_reason is StopReason.STOP
        stream.environment(renderer.extend(replies, stopped))
    return messages


async def _bounded(call: Coroutine[Any, Any, T], seconds: float) -> T:
    """Await a call into an environment; a hang becomes a TimeoutError that names its bound."""
    try:
        return await asyncio.wait_for(call, seconds)
    except TimeoutError as error:
        raise TimeoutError(f"no answer within {seconds:g} s") from error


def _checked(verdict: Verdict) -> Verdict:
    """Refuse verdicts that contradict themselves, before anything learns from them."""
    scored = verdict.outcome is Outcome.SCORED
    if scored != (verdict.score is not None and verdict.passed is not None):
        raise ValueError(f"outcome {verdict.outcome} does not go with score {verdict.score}")
    if scored and not 0.0 <= (verdict.score or 0.0) <= 1.0:
        raise ValueError(f"score {verdict.score} is outside [0, 1]")
    if scored != (verdict.failure is None):
        raise ValueError(f"outcome {verdict.outcome} does not go with failure {verdict.failure}")
    return verdict


def credit_spans(verdict: Verdict, turns: Sequence[Turn]) -> tuple[CreditSpan, ...]:
    """Map the credits of a verdict to token spans: a turn's credit to its tokens, others to all."""
    if not turns:
        return ()
    whole = (turns[0].start, turns[-1].end)
    spans = []
    count = Counter(credit.source for credit in verdict.credits)
    for credit in verdict.credits:
        earned = credit.turn is not None and credit.turn < len(turns)
        turn = turns[credit.turn] if earned and credit.turn is not None else None
        start, end = (turn.start, turn.end) if turn is not None else whole
        spans.append(
            CreditSpan(
                source=credit.source,
                value=credit.value,
                weight=WEIGHTS[credit.source] / count[credit.source],
                start=start,
                end=end,
            )
        )
    return tuple(spans)


def failed_rollout(
    plan: EpisodePlan, environment: Environment, prompt_ids: tuple[int, ...], failure: Failure
) -> Rollout:
    """The record of an episode that could not be judged: no score, so nothing learns from it."""
    blamed = failure.kind in (FailureKind.ENVIRONMENT, FailureKind.DATA)
    outcome = Outcome.INVALID_ENVIRONMENT if blamed else Outcome.INVALID_INFRA
    return TokenStream(prompt_ids).rollout(
        plan.rollout_id,
        group_id=plan.group_id,
        environment=environment,
        messages=plan.task.prompt,
        verdict=Verdict(outcome=outcome, score=None, passed=None, failure=failure),
        spans=(),
        seed=plan.seed,
    )
