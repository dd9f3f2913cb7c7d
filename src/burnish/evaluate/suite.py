"""What is evaluated and how it is sampled: held-out tasks per domain, fixed by a digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import msgspec
from pydantic import Field

from burnish.core.config import Config
from burnish.core.errors import UserError
from burnish.core.protocols import Environment
from burnish.core.records import Record, Task
from burnish.core.seeds import derive_seed
from burnish.core.vocabulary import Split


class SuiteConfig(Config):
    """Size and sampling of the held-out evaluation."""

    num_tasks: int = Field(default=64, ge=1)
    """Held-out tasks per domain."""
    first_task: int = Field(default=0, ge=0)
    """Index of the first of them: tasks that chose a recipe must not judge it."""
    num_samples: int = Field(default=1, ge=1)
    """Samples per task. More than one needs a temperature above 0."""
    temperature: float = Field(default=0.0, ge=0.0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus mass."""
    seed: int = 0
    """Root of every sample's seed; the same for all models that are compared."""


class SamplingPlan(Record, frozen=True, kw_only=True):
    """How answers are drawn."""

    num_samples: int = 1
    """Samples per task."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Nucleus mass."""
    seed: int = 0
    """Root of every sample's seed."""


class SampleRef(Record, frozen=True, kw_only=True):
    """One sample to be drawn."""

    domain: str
    """Environment name."""
    index: int
    """Held-out task."""
    sample: int
    """Which of the task's samples, from 0."""
    seed: int
    """Root seed of the episode, the same for every model: common random numbers."""


class Suite(Record, frozen=True, kw_only=True):
    """A fixed set of held-out tasks."""

    indices: dict[str, tuple[int, ...]]
    """Held-out task indices by domain, in order."""
    environment_digests: dict[str, str]
    """Digest of each domain's environment."""
    plan: SamplingPlan
    """How answers are drawn."""

    @property
    def digest(self) -> str:
        """`sha256:...` over all fields: only results with equal digests are comparable."""
        canonical = msgspec.json.encode(self, order="deterministic")
        return "sha256:" + hashlib.sha256(canonical).hexdigest()

    @property
    def num_samples(self) -> int:
        """Samples in all."""
        return self.plan.num_samples * sum(map(len, self.indices.values()))

    def samples(self) -> Iterator[SampleRef]:
        """All samples in canonical order: domain, task, sample."""
        for domain, indices in self.indices.items():
            for index in indices:
                for sample in range(self.plan.num_samples):
                    seed = derive_seed(self.plan.seed, "evaluate", domain, index, sample)
                    yield SampleRef(domain=domain, index=index, sample=sample, seed=seed)

    def task(self, environments: Mapping[str, Environment], ref: SampleRef) -> Task:
        """The held-out task behind a sample."""
        return environments[ref.domain].task(Split.HELD_OUT, ref.index)

    def check(self, environments: Mapping[str, Environment]) -> None:
        """Make sure that these environments are the ones the suite was built from.

        Raises:
            UserError: if one is missing or has changed.
        """
        for domain, digest in self.environment_digests.items():
            if domain not in environments:
                raise UserError(
                    f"The suite needs domain {domain!r}, which is not loaded.",
                    fix=f"add {domain} to the environments, or build a new suite.",
                )
            now = environments[domain].digest
            if now != digest:
                raise UserError(
                    f"Environment {domain!r} has changed since the suite was built "
                    f"({digest[:19]}... is now {now[:19]}...).",
                    fix="evaluate both models again with a new suite.",
                )


def build_suite(environments: Mapping[str, Environment], config: SuiteConfig) -> Suite:
    """The suite of `num_tasks` held-out tasks of each domain, from `first_task` on.

    Raises:
        UserError: if nothing would be evaluated, or samples would only repeat each other.
    """
    if not environments:
        raise UserError("There is no domain to evaluate.", fix="name at least one under `envs`.")
    if config.num_samples > 1 and config.temperature == 0.0:
        raise UserError(
            f"num_samples = {config.num_samples} at temperature 0 would draw the same answer "
            "every time.",
            fix="set temperature above 0, or num_samples = 1 and a larger num_tasks.",
        )
    indices = tuple(range(config.first_task, config.first_task + config.num_tasks))
    return Suite(
        indices=dict.fromkeys(environments, indices),
        environment_digests={name: env.digest for name, env in environments.items()},
        plan=SamplingPlan(
            num_samples=config.num_samples,
            temperature=config.temperature,
            top_p=config.top_p,
            seed=config.seed,
        ),
    )
