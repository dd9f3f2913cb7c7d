"""Which domains a run trains now: those of its configuration, and what was changed since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish.core.errors import UserError
from burnish.core.protocols import Environment
from burnish.envs import registry


class Roster:
    """Changes made to the mix while the run was live; part of its checkpoints."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        """None yet, or those of a checkpoint."""
        self.added: dict[str, str] = dict(state["added"]) if state else {}
        self.digests: dict[str, str] = dict(state["digests"]) if state else {}
        self.removed: list[str] = list(state["removed"]) if state else []

    def build(self, domain: str, target: str | None) -> Environment:
        """The environment of a domain to be added.

        Raises:
            UserError: there is no such environment, or it calls itself something else.
        """
        environment = registry.get(target or domain)
        if environment.name != domain:
            raise UserError(
                f"{target} calls itself {environment.name!r}, not {domain!r}.",
                fix=f"add it as {environment.name}.",
            )
        return environment

    def restore(self) -> dict[str, Environment]:
        """The environments that were added before the checkpoint.

        Raises:
            UserError: one of them has changed since.
        """
        environments = {name: self.build(name, target) for name, target in self.added.items()}
        for name, environment in environments.items():
            if environment.digest != self.digests[name]:
                raise UserError(
                    f"the code or data of {name}, which was added to this run, has changed since.",
                    fix="go back to the version that it was added with, or start a new run.",
                )
        return environments

    def add(self, environment: Environment, target: str | None) -> None:
        """Note an addition."""
        self.added[environment.name] = target or environment.name
        self.digests[environment.name] = environment.digest
        if environment.name in self.removed:
            self.removed.remove(environment.name)

    def remove(self, domain: str) -> None:
        """Note a removal."""
        self.added.pop(domain, None)
        self.digests.pop(domain, None)
        if domain not in self.removed:
            self.removed.append(domain)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            "added": dict(self.added),
            "digests": dict(self.digests),
            "removed": list(self.removed),
        }
