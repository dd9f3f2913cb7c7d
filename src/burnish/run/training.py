"""The trainer behind an async face, on a thread of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from burnish.core.records import TrainSequence
from burnish.model.decoder import Decoder
from burnish.rollout.agent.reference import ReferenceExample
from burnish.rollout.engine.score import score
from burnish.rollout.engine.weights import ServedModel
from burnish.run.trainer_thread import TrainerThread
from burnish.train import checkpoint
from burnish.train.metrics import SftMetrics, StepMetrics
from burnish.train.supervised import SftExample
from burnish.train.trainer import Trainer, TrainerState


class ServedAs(NamedTuple):
    """How the engine serves the weights: the canary's reference must be computed the same way."""

    dtype: torch.dtype
    """Weights and cache."""
    page_size: int
    """Tokens per cache page."""
    num_threads: int
    """Reductions may be split by thread: equal bits need equal threads."""
    exact: bool = False
    """Exact mode never takes oneDNN's products, which other engines do where the CPU has tiles."""


class PolicyTrainer:
    """Steps, snapshots, the canary's reference and checkpoints. One call at a time."""

    def __init__(
        self,
        trainer: Trainer,
        thread: TrainerThread,
        *,
        served_as: ServedAs,
        keep_checkpoints: int,
        kl_reference: Decoder | None = None,
    ) -> None:
        """Wire it; `kl_reference` is the frozen model of the KL component."""
        self._trainer, self._thread = trainer, thread
        self._served_as, self._keep = served_as, keep_checkpoints
        self._kl_reference = kl_reference

    async def step(self, sequences: Sequence[TrainSequence]) -> StepMetrics:
        """One policy-gradient step."""
        return await self._thread.call(
            self._trainer.step, sequences, kl_reference=self._kl_reference
        )

    async def supervised_step(
        self, examples: Sequence[ReferenceExample], *, lr: float
    ) -> SftMetrics:
        """One supervised step."""
        batch = [SftExample(e.token_ids, e.loss_mask) for e in examples]
        return await self._thread.call(self._trainer.sft_step, batch, lr=lr)

    async def snapshot(self) -> Mapping[str, torch.Tensor]:
        """The weights to serve."""
        return await self._thread.call(self._trainer.weights, self._served_as.dtype)

    async def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        """Log-probs under the present masters, computed as the engine computes them."""
        return await self._thread.call(self._score, tuple(token_ids))

    def _score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        dtype, page_size, num_threads, exact = self._served_as
        own_threads = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            config = self._trainer.decoder.config
            served = ServedModel(config, self._trainer.weights(dtype), dtype, exact=exact)
            return score(served, token_ids, page_size)
        finally:
            torch.set_num_threads(own_threads)

    async def save(self, directory: Path, step: int, payload: Mapping[str, Any]) -> Path:
        """Write a checkpoint of `step`, with `payload` beside the weights."""
        return await self._thread.call(self._save, directory, step, payload)

    def _save(self, directory: Path, step: int, payload: Mapping[str, Any]) -> Path:
        state = self._trainer.state_dict()
        return checkpoint.save(
            directory,
            step=step,
            tensors=state.tensors,
            scalars=state.scalars,
            payload=payload,
            keep=self._keep,
        )

    async def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Go on from a checkpoint."""
        scalars = {name: int(value) for name, value in saved.scalars.items()}
        state = TrainerState(saved.tensors, scalars)
        await self._thread.call(self._trainer.load_state_dict, state)
