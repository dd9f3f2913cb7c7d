"""fp32 masters and moments behind a decoder that computes in bf16.

The decoder holds a copy of the masters in the compute dtype. Pure bf16 weights lose an update whose
size is under 1/256 of the weight, which at lr = 1e-5 is nearly every update.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from burnish.core.errors import ClassifiedFailure
from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind
from burnish.train.config import TrainConfig


class MasterWeights:
    """Masters, summed gradients and AdamW moments of a decoder's parameters."""

    def __init__(self, module: nn.Module, config: TrainConfig) -> None:
        """Copy the parameters of `module` in fp32, then turn `module` to the compute dtype."""
        self._config = config
        self._masters = {
            name: nn.Parameter(p.detach().to(torch.float32, copy=True))
            for name, p in module.named_parameters()
        }
        module.to(getattr(torch, config.dtype))
        self._shadow = dict(module.named_parameters())
        self._adam = torch.optim.AdamW(
            self._parameter_groups(),
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )
        self.num_steps = 0

    def gradient(self, name: str) -> Tensor:
        """The summed fp32 gradient of a parameter, made on first use."""
        master = self._masters[name]
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return master.grad

    def collect(self) -> None:
        """Add the shadow's gradients to the sums and free them."""
        for name, shadow in self._shadow.items():
            if shadow.grad is None:
                continue
            master = self._masters[name]
            if master.grad is None:
                master.grad = shadow.grad.to(torch.float32, copy=True)
            else:
                master.grad += shadow.grad
            shadow.grad = None

    def discard(self) -> None:
        """Forget all gradients."""
        for name, shadow in self._shadow.items():
            shadow.grad = self._masters[name].grad = None

    def step(self, lr: float) -> float:
        """Clip and update; returns the norm before clipping.

        Raises:
            ClassifiedFailure: if the norm is not finite. Weights and moments are untouched and the
                gradients are gone.
        """
        grads = [m.grad for m in self._masters.values() if m.grad is not None]
        assert grads, "no gradient was collected"
        norm = math.sqrt(math.fsum(n.item() ** 2 for n in torch._foreach_norm(grads)))
        if not math.isfinite(norm):
            self.discard()
            raise refused(f"the gradient's norm is {norm}")
        if norm > self._config.max_grad_norm:
            torch._foreach_mul_(grads, self._config.max_grad_norm / norm)
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self.discard()
        self._cast()
        self.num_steps += 1
        return norm

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """A copy of the masters in `dtype`."""
        return {n: m.detach().to(dtype, copy=True) for n, m in self._masters.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Masters and moments by name, not copied: read them before the next step."""
        return dict(self._tensors())

    def load(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Put back what `tensors` gave."""
        for name, master in self._masters.items():
            with torch.no_grad():
                master.copy_(tensors[f"master.{name}"])
            moments = {
                slot: tensors[f"{slot}.{name}"].to(torch.float32, copy=True)
                for slot in _SLOTS
                if f"{slot}.{name}" in tensors
            }
            self._adam.state.pop(master, None)
            if moments:
                step = torch.tensor(float(num_steps))
                self._adam.state[master] = {"step": step, **moments}
        self.num_steps = num_steps
        self.discard()
        self._cast()

    def expected_tensors(self) -> dict[str, torch.Size]:
        """Names and shapes of the masters."""
        return {f"master.{name}": m.shape for name, m in self._masters.items()}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, master in self._masters.items():
            yield f"master.{name}", master.detach()
            for slot in _SLOTS:
                if slot in self._adam.state.get(master, {}):
                    yield f"{slot}.{name}", self._adam.state[master][slot]

    def _parameter_groups(self) -> list[dict[str, object]]:
        decayed = [n for n, m in self._masters.items() if m.ndim == 2 and "embedding" not in n]
        plain = [n for n in self._masters if n not in set(decayed)]
        return [
            {"params": [self._masters[n] for n in names], "weight_decay": decay}
            for names, decay in ((decayed, self._config.weight_decay), (plain, 0.0))
            if names
        ]

    def _cast(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list(self._shadow.values()), list(self._masters.values()))


_SLOTS = ("exp_avg", "exp_avg_sq")


def learning_rate(config: TrainConfig, step: int, peak: float) -> float:
    """Rate of step number `step` >= 1."""
    warm = min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "constant":
        return peak * warm
    left = max(config.schedule_steps - step + 1, 0) / max(
        config.schedule_steps - config.warmup_steps, 1
    )
    return peak * min(warm, left, 1.0)


def refused(why: str, *, kind: FailureKind = FailureKind.INFRA) -> ClassifiedFailure:
    """A step that was not taken."""
    message = f"Step refused, weights unchanged: {why}."
    return ClassifiedFailure(Failure(kind=kind, where="train.step", message=message))
