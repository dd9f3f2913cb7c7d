"""Where a run goes on: the newest checkpoint that is whole, or the beginning."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from burnish.core.errors import UserError
from burnish.core.protocols import Environment
from burnish.run.phases import first_state, warm_up
from burnish.run.session import Session
from burnish.store.run_directory import RunDirectory
from burnish.telemetry.events import EventKind, read_events
from burnish.train import checkpoint


def refuse_lost_checkpoints(directory: RunDirectory) -> None:
    """A run that has saved checkpoints must still have one: starting over silently is no resume.

    Raises:
        UserError: if all of them are gone.
    """
    if checkpoint.latest(directory.checkpoints) is not None:
        return
    events = read_events(directory.path / "events.jsonl")
    if any(event.kind is EventKind.CHECKPOINT_SAVED for event in events):
        raise UserError(
            f"{directory.checkpoints}: the checkpoints of this run are gone.",
            fix="put them back, or start a new run.",
        )


async def begin_or_restore(
    session: Session, environments: Mapping[str, Environment]
) -> Mapping[str, Any]:
    """Put trainer and engine where the run left off; returns the checkpoint's payload.

    Raises:
        CheckpointDamagedError: if there are checkpoints and none is whole.
    """
    directory = session.directory
    found = checkpoint.checkpoints(directory.checkpoints)
    if not found:
        if session.config.warmup.examples_per_domain > 0:
            await warm_up(session, environments)
        # Published before it is saved: what a checkpoint holds has passed the canary.
        await session.publisher.publish(1)
        await session.trainer.save(directory.checkpoints, 0, first_state())
        directory.events.emit(EventKind.CHECKPOINT_SAVED, 0)
        return first_state()
    saved = await _newest_whole(session)
    await session.trainer.restore(saved)
    await session.publisher.publish(1 + int(saved.payload["step"]))
    directory.events.emit(EventKind.ROLLED_BACK, int(saved.payload["step"]))
    return saved.payload


async def _newest_whole(session: Session) -> checkpoint.Checkpoint:
    found = checkpoint.checkpoints(session.directory.checkpoints)
    for older, path in zip((*found[:-1][::-1], None), found[::-1], strict=True):
        try:
            return await asyncio.to_thread(checkpoint.load, path)
        except checkpoint.CheckpointDamagedError as error:
            if older is None:
                raise
            session.observer.note(f"{error.what} The run goes on from {older.name} instead.")
    raise AssertionError("the last one was returned or raised")
