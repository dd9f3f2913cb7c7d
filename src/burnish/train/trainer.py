"""One optimizer step on one machine.

    sequences -> pack -> lay out -> forward/backward per pack -> clip -> AdamW -> bf16 copy
                                     |  sums over the whole step
                                     '-> refused if anything is not finite: weights stay

The trainer draws no random numbers: same state, same sequences and same thread count give the same
weights bit for bit.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.core.clock import Clock, SystemClock
from burnish.core.errors import UserError
from burnish.core.records import TrainSequence
from burnish.core.vocabulary import FailureKind
from burnish.model.decoder import Decoder
from burnish.train.config import TrainConfig
from burnish.train.exact.forward import ExactForward
from burnish.train.forward import PackedForward
from burnish.train.head import HeadOutput
from burnish.train.layout import Layout, lay_out
from burnish.train.losses import kl_loss, policy_loss
from burnish.train.metrics import Piece, SftMetrics, StepMetrics, Tally
from burnish.train.optimizer import MasterWeights, learning_rate, refused
from burnish.train.packing import Pack, pack
from burnish.train.supervised import SftExample, supervised_sequences


class TrainerState(NamedTuple):
    """All that a trainer needs to go on."""

    tensors: dict[str, Tensor]
    """Masters and moments, fp32."""
    scalars: dict[str, int]
    """Counters."""


class Trainer:
    """Owns the master weights of a decoder and improves them."""

    def __init__(
        self,
        config: TrainConfig,
        decoder: Decoder,
        *,
        temperature: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        """Take over `decoder`: it becomes the copy in the compute dtype.

        Args:
            config: optimisation.
            decoder: weights to start from, best in fp32.
            temperature: of sampling; log-probs are compared under it.
            clock: for the reported durations.

        Raises:
            UserError: if it shall be exact and cannot.
        """
        self.config, self.decoder = config, decoder
        self._clock = clock or SystemClock()
        self._masters = MasterWeights(decoder, config)
        exact = ExactForward(decoder) if config.exact else None
        self._forward = PackedForward(decoder, temperature, config.checkpoint_activations, exact)

    @property
    def num_steps(self) -> int:
        """Steps taken."""
        return self._masters.num_steps

    def step(
        self, sequences: Sequence[TrainSequence], *, kl_reference: Decoder | None = None
    ) -> StepMetrics:
        """Take one policy-gradient step over all sequences.

        Args:
            sequences: any number; at least one target token in all.
            kl_reference: frozen model of the KL component, in any dtype; required exactly when
                `loss.kl_coefficient` is above 0.

        Raises:
            ClassifiedFailure: of kind `infra` if a loss or gradient is not finite; of kind `data`
                if an input is not. Nothing has changed.
        """
        self._check_reference(kl_reference)
        start_s = self._clock.now_s()
        check_inputs(sequences)
        packs = pack(sequences, self.config.micro_batch_tokens)
        total = sum(sum(s.loss_mask) for s in sequences)
        tally = Tally()
        for one in packs:
            layout = lay_out(sequences, one)
            reference_N = None
            if kl_reference is not None:
                reference_N = self._forward.of(kl_reference).logprobs(layout)
            self._accumulate(layout, self._policy_loss(layout, reference_N, total, tally))
            self._refuse_unless_finite(tally)
        optimizer_start_s = self._clock.now_s()
        lr = learning_rate(self.config, self.num_steps + 1, self.config.lr)
        norm = self._masters.step(lr)
        end_s = self._clock.now_s()
        kl = tally.kl / total if kl_reference is not None else None
        return StepMetrics(
            step=self.num_steps,
            loss=tally.policy / total + self.config.loss.kl_coefficient * (kl or 0.0),
            policy_loss=tally.policy / total,
            kl_reference=kl,
            grad_norm=norm,
            lr=lr,
            ratio_mean=tally.ratio / total,
            ratio_max=tally.ratio_max,
            kl_behaviour_k1=tally.k1 / total,
            kl_behaviour_k3=tally.k3 / total,
            entropy=tally.entropy / total,
            clip_ratio=tally.clipped / total,
            ess_ratio=tally.ratio**2 / (total * tally.ratio_square),
            num_sequences=len(sequences),
            num_target_tokens=total,
            num_tokens=sum(len(s.token_ids) for s in sequences),
            num_stored_tokens=_stored(packs),
            num_micro_batches=len(packs),
            seconds=end_s - start_s,
            optimizer_s=end_s - optimizer_start_s,
        )

    def sft_step(self, examples: Sequence[SftExample], *, lr: float | None = None) -> SftMetrics:
        """Take one supervised step: mean negative log-likelihood of the masked tokens.

        Args:
            examples: at least one masked token in all; token 0 of an example is never a target.
            lr: peak rate, instead of the configured one.

        Raises:
            ClassifiedFailure: as `step`.
        """
        start_s = self._clock.now_s()
        sequences = supervised_sequences(examples)
        check_inputs(sequences)
        packs = pack(sequences, self.config.micro_batch_tokens)
        total = sum(sum(s.loss_mask) for s in sequences)
        tally = Tally()
        for one in packs:
            layout = lay_out(sequences, one)
            self._accumulate(layout, _likelihood_loss(layout, total, tally))
            self._refuse_unless_finite(tally)
        lr = learning_rate(self.config, self.num_steps + 1, self.config.lr if lr is None else lr)
        norm = self._masters.step(lr)
        return SftMetrics(
            step=self.num_steps,
            loss=tally.policy / total,
            grad_norm=norm,
            lr=lr,
            entropy=tally.entropy / total,
            num_sequences=len(sequences),
            num_target_tokens=total,
            num_tokens=sum(len(s.token_ids) for s in sequences),
            seconds=self._clock.now_s() - start_s,
        )

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[list[float]]:
        """Log-prob of every target token of each sequence, in order, by the packed forward."""
        found: list[list[float]] = [[] for _ in sequences]
        for one in pack(sequences, self.config.micro_batch_tokens):
            layout = lay_out(sequences, one)
            values = self._forward.logprobs(layout).tolist()
            for owner, value in zip(layout.sequence_N.tolist(), values, strict=True):
                found[owner].append(value)
        return found

    def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-prob of each token given those before it; the first entry is 0.0."""
        mask = [i > 0 for i in range(len(token_ids))]
        return (0.0, *self.logprobs(supervised_sequences([SftExample(token_ids, mask)]))[0])

    def weights(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """A copy of the masters for publication, under the names of `Decoder.state_dict`."""
        return self._masters.weights(dtype)

    def state_dict(self) -> TrainerState:
        """Everything needed to go on, not copied: write it out before the next step."""
        return TrainerState(self._masters.tensors(), {"num_steps": self.num_steps})

    def load_state_dict(self, state: TrainerState) -> None:
        """Go on from `state`.

        Raises:
            UserError: if it belongs to a model of another shape. Nothing has changed.
        """
        for name, shape in self._masters.expected_tensors().items():
            found = tuple(state.tensors[name].shape) if name in state.tensors else "nothing"
            if found != tuple(shape):
                raise UserError(
                    f"The checkpoint holds {found} for {name}, the model needs {tuple(shape)}.",
                    fix="resume with the model that the run was started with.",
                )
        self._masters.load(state.tensors, state.scalars["num_steps"])

    def _accumulate(self, layout: Layout, loss: Callable[[slice, HeadOutput], Tensor]) -> None:
        if layout.target_ids_N.numel():
            self._forward.backward(layout, loss, self._masters.gradient("embedding.weight"))
            self._masters.collect()

    def _policy_loss(
        self, layout: Layout, reference_N: Tensor | None, total: int, tally: Tally
    ) -> Callable[[slice, HeadOutput], Tensor]:
        config = self.config.loss

        def loss(chunk: slice, output: HeadOutput) -> Tensor:
            logp_N, behaviour_N = output.logp_N, layout.behaviour_N[chunk]
            policy = policy_loss(config, logp_N, behaviour_N, layout.advantage_N[chunk])
            summed, kl_N = policy.loss_N.sum(), None
            if reference_N is not None:
                kl_N = kl_loss(
                    logp_N, reference_N[chunk], behaviour_N, estimator=config.kl_estimator
                )
                summed = summed + config.kl_coefficient * kl_N.sum()
            tally.add(
                Piece(
                    logp_N.detach(),
                    behaviour_N,
                    output.entropy_N,
                    policy.loss_N.detach(),
                    policy.clipped_N,
                    None if kl_N is None else kl_N.detach(),
                )
            )
            return summed / total

        return loss

    def _refuse_unless_finite(self, tally: Tally) -> None:
        if not tally.is_finite:
            self._masters.discard()
            raise refused(f"the loss is {tally.policy + tally.kl}")

    def _check_reference(self, kl_reference: Decoder | None) -> None:
        needed = self.config.loss.kl_coefficient > 0
        assert needed == (kl_reference is not None), "a reference model belongs to a KL coefficient"


def check_inputs(sequences: Sequence[TrainSequence]) -> None:
    """Refuse streams that cannot be trained on.

    Raises:
        ClassifiedFailure: of kind `data`.
    """
    for sequence in sequences:
        lengths = {
            len(sequence.token_ids),
            len(sequence.loss_mask),
            len(sequence.logprobs),
            len(sequence.advantages),
        }
        if len(lengths) != 1:
            raise refused(
                f"streams of lengths {sorted(lengths)} in one sequence", kind=FailureKind.DATA
            )
        if not all(map(math.isfinite, (*sequence.logprobs, *sequence.advantages))):
            raise refused("a log-prob or advantage is not finite", kind=FailureKind.DATA)
        if sequence.loss_mask and sequence.loss_mask[0]:
            raise refused("token 0 cannot be a target", kind=FailureKind.DATA)
    if not any(any(s.loss_mask) for s in sequences):
        raise refused("there is no target token", kind=FailureKind.DATA)


def _likelihood_loss(
    layout: Layout, total: int, tally: Tally
) -> Callable[[slice, HeadOutput], Tensor]:
    def loss(chunk: slice, output: HeadOutput) -> Tensor:
        logp_N = output.logp_N.detach()
        clipped_N = torch.zeros_like(logp_N, dtype=torch.bool)
        tally.add(Piece(logp_N, logp_N, output.entropy_N, -logp_N, clipped_N, None))
        return -output.logp_N.sum() / total

    return loss


def _stored(packs: Sequence[Pack]) -> int:
    return sum(p.num_tokens for p in packs)
