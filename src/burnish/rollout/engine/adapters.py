"""LoRA adapters that requests can name."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from burnish.core.errors import UserError
from burnish.model.lora import LayerDeltas
from burnish.rollout.engine.argument_types import check_one, check_version


class ServedAdapter(NamedTuple):
    """An adapter in use."""

    name: str
    """As requests name it."""
    version: int
    """Of its weights; tokens carry this or the model's version, whichever is newer."""
    revision: int
    """Never used twice: tells what its present weights computed from what others did."""
    layers: Sequence[LayerDeltas]
    """What it adds."""

    @property
    def key(self) -> str:
        """Under which its keys and values are known."""
        return f"{self.name}#{self.revision}"


class AdapterSet:
    """Adapters by name. Written by the engine's thread, read by any."""

    def __init__(self) -> None:
        """No adapters."""
        self._by_name: Mapping[str, ServedAdapter] = {}
        self._num_made = 0

    @property
    def names(self) -> tuple[str, ...]:
        """All, sorted."""
        return tuple(sorted(self._by_name))

    def get(self, name: str | None) -> ServedAdapter | None:
        """None for no name.

        Raises:
            UserError: if it is not known.
        """
        if name is None:
            return None
        found = self._by_name.get(name)
        if found is None:
            known = ", ".join(self.names) or "none"
            raise UserError(
                f"the engine knows no adapter {name!r} (it has {known}).",
                fix="leave `adapter` out or load the adapter first.",
            )
        return found

    def put(self, name: str, layers: Sequence[LayerDeltas], version: int) -> ServedAdapter:
        """Add an adapter, or replace one by newer weights.

        Raises:
            UserError: if the name is no text or empty, or the version not newer.
        """
        check_one("an adapter's name", name, (str,))
        check_version(version)
        old = self._by_name.get(name)
        if not name:
            raise UserError("the adapter's name is empty.", fix="name it.")
        if old is not None and version <= old.version:
            raise UserError(
                f"version {version} of adapter {name!r} is not newer than {old.version}.",
                fix="publish increasing versions.",
            )
        self._num_made += 1
        served = ServedAdapter(name, version, self._num_made, layers)
        self._by_name = {**self._by_name, name: served}
        return served

    def remove(self, name: str) -> None:
        """Forget it; unknown names are ignored."""
        self._by_name = {key: each for key, each in self._by_name.items() if key != name}
