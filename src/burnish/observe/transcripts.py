"""Rollouts as people read them: the same task before and after, and tokens with their credit."""

from collections.abc import Iterable, Mapping, Sequence

from burnish.core.group_id import parse_group_id
from burnish.core.records import Message, Rollout
from burnish.observe.data import Attempt, Piece, Sample, Speech, TokenView
from burnish.observe.token_text import TokenText
from burnish.store.rollouts import StoredRollout

# A page with hundreds of domains must stay a page: longer texts are cut and say so.
_MAX_CHARACTERS = 4000
_MAX_TOKENS = 700


def samples(before: Sequence[Rollout], after: Sequence[Rollout]) -> tuple[Sample, ...]:
    """Per domain the first task, and the first that was gained or lost if that is another."""
    old, new = _by_task(before), _by_task(after)
    shown: list[Sample] = []
    for domain in sorted({domain for domain, _ in new}):
        keys = sorted(key for key in new if key[0] == domain)
        chosen: dict[tuple[str, int], str] = {keys[0]: "first"}
        for why, was, now in (("gained", False, True), ("lost", True, False)):
            for key in keys:
                if key in old and (_passed(old[key]), _passed(new[key])) == (was, now):
                    chosen.setdefault(key, why)
                    break
        shown += [_sample(key, why, old.get(key), new[key]) for key, why in chosen.items()]
    return tuple(shown)


def token_views(
    found: Mapping[str, Sequence[StoredRollout]], texts: TokenText | None
) -> tuple[TokenView, ...]:
    """The best and the worst of each domain's group, token by token.

    Args:
        found: by domain, the trained rollouts of one group.
        texts: the tokenizer's texts; without it there is nothing to show.
    """
    if texts is None:
        return ()
    views = []
    for domain, stored in found.items():
        ranked = sorted(stored, key=lambda s: s.rollout.verdict.score or 0.0)
        if ranked:
            views.append(_token_view(domain, "best", ranked[-1], texts))
        if len(ranked) > 1:
            views.append(_token_view(domain, "worst", ranked[0], texts))
    return tuple(views)


def _token_view(domain: str, why: str, stored: StoredRollout, texts: TokenText) -> TokenView:
    rollout, advantages = stored
    assert advantages is not None
    span = slice(rollout.num_prompt_tokens, rollout.num_prompt_tokens + _MAX_TOKENS)
    pieces = [
        Piece(text=text, advantage=advantage if sampled else None)
        for text, advantage, sampled in zip(
            texts.pieces(rollout.token_ids[span]),
            advantages[span],
            rollout.sampled_mask[span],
            strict=True,
        )
    ]
    if len(rollout.token_ids) > span.stop:
        pieces.append(Piece(text=f" [{len(rollout.token_ids) - span.stop} more tokens]"))
    return TokenView(
        domain=domain,
        why=why,
        rollout_id=rollout.rollout_id,
        score=rollout.verdict.score,
        pieces=tuple(pieces),
    )


def _by_task(rollouts: Iterable[Rollout]) -> dict[tuple[str, int], Rollout]:
    """(domain, index) to its first rollout."""
    found: dict[tuple[str, int], Rollout] = {}
    for rollout in rollouts:
        key = (rollout.domain, parse_group_id(rollout.group_id).item)
        found.setdefault(key, rollout)
    return found


def _passed(rollout: Rollout) -> bool:
    return bool(rollout.verdict.passed)


def _sample(key: tuple[str, int], why: str, old: Rollout | None, new: Rollout) -> Sample:
    opening, _ = _split(new.messages)
    return Sample(
        domain=key[0],
        index=key[1],
        why=why,
        prompt=_cut("\n\n".join(message.content for message in opening)),
        before=None if old is None else _attempt(old),
        after=_attempt(new),
    )


def _split(messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """What came before the policy's first turn, and the rest."""
    first = next((i for i, m in enumerate(messages) if m.role == "assistant"), len(messages))
    return messages[:first], messages[first:]


def _attempt(rollout: Rollout) -> Attempt:
    verdict = rollout.verdict
    _, played = _split(rollout.messages)
    return Attempt(
        speeches=tuple(
            Speech(role=message.role, pieces=(Piece(text=_spoken(message)),)) for message in played
        ),
        outcome=str(verdict.outcome),
        score=verdict.score,
        passed=verdict.passed,
        credits=tuple((str(c.source), c.value, c.note) for c in verdict.credits),
    )


def _spoken(message: Message) -> str:
    calls = [f"{call.name}({_arguments(call.arguments)})" for call in message.tool_calls]
    text = "\n".join([message.content, *calls] if message.content else calls)
    return _cut(text) if text else "(nothing)"


def _arguments(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _cut(text: str) -> str:
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[:_MAX_CHARACTERS]}\n[{len(text) - _MAX_CHARACTERS} more characters]"
