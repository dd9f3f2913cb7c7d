"""LoRA adapters of all replicas: what requests may name, and what it is called on the servers.

Every set of weights has a name of its own there. So a request keeps the weights that it began
with, nothing that old ones computed is found again under the same name, and a server that was
started anew is told apart from one that has them.
"""

import asyncio
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import NamedTuple

import torch

from burnish.core.errors import UserError
from burnish.core.records import GenerateRequest, SamplingParams
from burnish.model.config import ModelConfig
from burnish.model.lora import Lora, LowRank, load_lora
from burnish.model.lora_directory import save_lora
from burnish.rollout.remote.delivery import PROBE_IDS
from burnish.rollout.remote.dialect import Ask, Dialect
from burnish.rollout.remote.failures import RemoteFailure, RemoteProblem
from burnish.rollout.remote.replica import Replica

_LOG = logging.getLogger(__name__)
OWN_PREFIX = "burnish-adapter-"
_PROBE_TOKENS = 4
# What requests that name none go through, where there is one.
_PLAIN = ""


class RemoteAdapter(NamedTuple):
    """One that requests can name."""

    name: str
    """As requests name it."""
    served: str
    """As the servers do."""
    version: int = 0
    """Of its weights; tokens carry this or the model's version, whichever is newer."""
    folder: Path | None = None
    """Where the servers find it; None: they were started with it."""
    is_zero: bool = False
    """Whether it adds nothing."""


def written(
    adapter: RemoteAdapter,
    directory: Path,
    folder: Path,
    model: ModelConfig,
    max_rank: int | None,
) -> RemoteAdapter:
    """Read an adapter from `directory`, and write it to `folder` for the servers.

    Raises:
        UserError: it is not plain LoRA of the model, or its rank is larger than they take.
    """
    lora = load_lora(directory, model)
    if max_rank is not None and lora.rank > max_rank:
        raise UserError(
            f"the adapter has rank {lora.rank}, the servers take {max_rank}.",
            fix="start them with a larger --max-lora-rank.",
        )
    save_lora(lora, folder, model)
    return adapter._replace(folder=folder, is_zero=lora.is_zero)


def plain_adapter(served: str, folder: Path, model: ModelConfig) -> RemoteAdapter:
    """One that adds nothing, for servers that need it beside others."""
    width, heads = model.hidden_size, model.num_heads * model.head_dim
    nothing = LowRank(torch.zeros(1, heads), torch.zeros(width, 1))
    save_lora(Lora(({"output": nothing},)), folder, model)
    return RemoteAdapter(_PLAIN, served, -1, folder, is_zero=True)


class RemoteAdapters:
    """Changed by the client's loop only; names may be read from any thread."""

    def __init__(self, dialect: Dialect, timeout_s: float) -> None:
        """No adapters; `timeout_s` for one server to load one."""
        self._dialect, self._timeout_s = dialect, timeout_s
        self._by_name: Mapping[str, RemoteAdapter] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All, sorted."""
        return tuple(sorted(name for name in self._by_name if name != _PLAIN))

    @property
    def loaded(self) -> Sequence[RemoteAdapter]:
        """Those that were loaded from here."""
        return [each for each in self._by_name.values() if each.folder is not None]

    def find(self, served: Iterable[str]) -> None:
        """The servers were started with these."""
        own = (name for name in served if not name.startswith(OWN_PREFIX))
        self._by_name = {name: RemoteAdapter(name, name) for name in own}

    def get(self, name: str | None) -> RemoteAdapter | None:
        """None for no name, or the one that adds nothing.

        Raises:
            UserError: if it is not known.
        """
        if name is None:
            return self._by_name.get(_PLAIN)
        found = self._by_name.get(name)
        if found is None or name == _PLAIN:
            raise UserError(
                f"the servers know no adapter {name!r} (they have "
                f"{', '.join(self.names) or 'none'}).",
                fix="leave `adapter` out or load the adapter first.",
            )
        return found

    def check_new(self, name: str, version: int) -> None:
        """Refuse a name or version that cannot be loaded.

        Raises:
            UserError: saying which, and why.
        """
        old = self._by_name.get(name)
        if not name:
            raise UserError("the adapter's name is empty.", fix="name it.")
        if old is not None and old.folder is None:
            raise UserError(
                f"the servers were started with an adapter {name!r}.", fix="use another name."
            )
        if old is not None and version <= old.version:
            raise UserError(
                f"version {version} of adapter {name!r} is not newer than {old.version}.",
                fix="publish increasing versions.",
            )

    async def load(self, replicas: Sequence[Replica], adapter: RemoteAdapter) -> Sequence[Replica]:
        """Give servers an adapter, which later requests use; returns those that have not got it.

        Raises:
            UserError: its name or version is refused, or it is, by all servers.
            RemoteFailure: no server has it.
        """
        if adapter.name != _PLAIN:
            self.check_new(adapter.name, adapter.version)
        answers = await asyncio.gather(
            *(self.deliver(replica, adapter) for replica in replicas), return_exceptions=True
        )
        errors = {r: e for r, e in zip(replicas, answers, strict=True) if e is not None}
        if len(errors) == len(replicas):
            raise next(iter(errors.values()))
        for replica, error in errors.items():
            _LOG.warning("%s has not got adapter %s: %s", replica.url, adapter.name, error)
        old = self._by_name.get(adapter.name)
        self._by_name = {**self._by_name, adapter.name: adapter}
        if old is not None:
            await self.withdraw([r for r in replicas if r not in errors], old)
        return list(errors)

    def take(self, name: str) -> RemoteAdapter:
        """No later request uses it.

        Raises:
            UserError: it is not known, or the servers were started with it.
        """
        found = self.get(name)
        assert found is not None
        if found.folder is None:
            raise UserError(
                f"the servers were started with the adapter {name!r}.",
                fix="remove it where they are started.",
            )
        self._by_name = {key: each for key, each in self._by_name.items() if key != name}
        return found

    async def deliver(self, replica: Replica, adapter: RemoteAdapter) -> None:
        """Have one server load an adapter, and see that it changes what it answers.

        Raises:
            UserError: the server refuses it.
            RemoteFailure: it failed, or answers as without it.
        """
        assert adapter.folder is not None
        wire, dialect = replica.wire, self._dialect
        await dialect.load_adapter(wire, adapter.served, adapter.folder, self._timeout_s)
        if adapter.is_zero:
            return
        plain = self.get(None)
        base = await self._answer(replica, plain and plain.served)
        if await self._answer(replica, adapter.served) == base:
            what = f"adapter {adapter.name!r}: it answers the probe exactly as without it"
            raise RemoteFailure(RemoteProblem.NOT_DELIVERED, replica.url, what)

    async def _answer(self, replica: Replica, adapter: str | None) -> list[float]:
        """To a fixed probe, as log-probs of the likeliest tokens, with nothing reused."""
        params = SamplingParams(max_tokens=_PROBE_TOKENS, temperature=0.0)
        request = GenerateRequest(request_id="probe", prompt_ids=PROBE_IDS, params=params)
        ask = Ask(request, replica.facts.model, secrets.token_hex(8), adapter)
        logprobs: list[float] = []
        async with aclosing(self._dialect.generate(replica.wire, ask)) as chunks:
            async for chunk in chunks:
                logprobs += chunk.logprobs
        return logprobs

    async def restore(self, replica: Replica, *, everything: bool = False) -> None:
        """Give a server the adapters that it lacks, or all.

        Raises:
            UserError: it refuses one.
            RemoteFailure: it failed.
        """
        wanted = self.loaded
        if not wanted:
            return
        known: frozenset[str] = frozenset()
        if not everything:
            known = await self._dialect.adapters(replica.wire, self._timeout_s)
        for adapter in wanted:
            if adapter.served not in known:
                await self.deliver(replica, adapter)

    async def withdraw(self, replicas: Iterable[Replica], adapter: RemoteAdapter) -> None:
        """Let servers forget an adapter. One that does not only keeps a name nobody uses."""
        answers = await asyncio.gather(
            *(self._dialect.unload_adapter(r.wire, adapter.served) for r in replicas),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, Exception):
                _LOG.info("an old adapter stays: %s", answer)

    async def leave(self, replicas: Sequence[Replica], timeout_s: float) -> None:
        """The client closes: nobody will use what it has loaded."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for adapter in self.loaded:
                    await self.withdraw(replicas, adapter)
