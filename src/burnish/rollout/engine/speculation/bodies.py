"""What a drafting model is made of: where its layers, keys and values come from.

A second model keeps keys and values of its own under the page numbers of the target: sequences that
share a page share its copy here too. The first layers of the target need none: the target has
computed theirs, and will write the same slots again when it checks the guesses.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from burnish.core.errors import UserError
from burnish.core.vocabulary import NoDraft
from burnish.model.config import ModelConfig
from burnish.rollout.engine.cache.opening import open_cache
from burnish.rollout.engine.cache.storage import CacheShape, KvCache, StepAttend
from burnish.rollout.engine.pages import PagePool
from burnish.rollout.engine.placement import CPU
from burnish.rollout.engine.sequence import Sequence
from burnish.rollout.engine.speculation.drafter import Target
from burnish.rollout.engine.weights import ServedModel


class Body(Protocol):
    """Layers that a `ModelDrafter` runs."""

    @property
    def relative_cost(self) -> float:
        """Of one forward, as a share of the target's."""
        ...

    @property
    def context(self) -> int:
        """Most tokens that it can read."""
        ...

    def unable(self, version: int) -> NoDraft | None:
        """Why it cannot guess for weights of this version."""
        ...

    def cache(self, target: Target) -> KvCache:
        """Where its keys and values are."""
        ...

    def hidden(
        self, ids_T: Tensor, positions_T: Tensor, attend: StepAttend, target: Target
    ) -> Tensor:
        """Final hidden states [T, E]."""
        ...

    def logits(self, hidden_NE: Tensor, target: Target) -> Tensor:
        """Logits [N, V] in fp32."""
        ...

    def num_known(self, sequence: Sequence, pool: PagePool) -> int:
        """Tokens of a sequence whose keys and values it has."""
        ...

    def learned(self, sequence: Sequence, num_tokens: int, pool: PagePool) -> None:
        """It has those of so many tokens now."""
        ...

    def release(self) -> None:
        """Give memory back."""
        ...


class FirstLayers:
    """Early exit: the first layers of the target, then its norm and head."""

    def __init__(self, config: ModelConfig, num_layers: int) -> None:
        """Run so many layers.

        Raises:
            UserError: if that is none, or all.
        """
        refuse_layers(num_layers, config)
        self._num_layers, self.context = num_layers, config.max_position_embeddings
        layer = config.hidden_size * (2 * config.hidden_size + 3 * config.intermediate_size)
        head = config.vocab_size * config.hidden_size
        # The head is read in either case.
        self.relative_cost = (num_layers * layer + head) / (config.num_layers * layer + head)

    def unable(self, version: int) -> NoDraft | None:
        """Its weights are the target's."""
        return None

    def cache(self, target: Target) -> KvCache:
        """The target's."""
        return target.cache

    def hidden(
        self, ids_T: Tensor, positions_T: Tensor, attend: StepAttend, target: Target
    ) -> Tensor:
        """The target's first layers."""
        return target.model.hidden(ids_T, positions_T, attend, num_layers=self._num_layers)

    def logits(self, hidden_NE: Tensor, target: Target) -> Tensor:
        """The target's head."""
        return target.model.logits(hidden_NE)

    def num_known(self, sequence: Sequence, pool: PagePool) -> int:
        """What the target has."""
        return sequence.num_computed

    def learned(self, sequence: Sequence, num_tokens: int, pool: PagePool) -> None:
        """The target will write it again."""

    def release(self) -> None:
        """It holds nothing."""


class _Known(NamedTuple):
    num_tokens: int
    page: int
    birth: int


class DraftModel:
    """A second decoder with the target's vocabulary.

    One whose weights are all found in the target, as in a model of its first layers, follows the
    target: every update of the target's weights brings its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        state: Mapping[str, Tensor],
        target: ModelConfig,
        shape: "DraftShape",
        target_state: Mapping[str, Tensor],
    ) -> None:
        """Copy its weights; they count as made for the target's present ones.

        Raises:
            UserError: if the vocabularies differ, or the weights do not fit.
        """
        refuse_other_vocabulary(config, target)
        self._shape, self._config = shape, config
        self._served = ServedModel(config, state, shape.dtype, device=shape.device)
        self._shared = frozenset(state) if _is_part(state, target_state) else None
        self.context = config.max_position_embeddings
        self.version = shape.version
        self.relative_cost = min(1.0, _num_weights(config) / _num_weights(target))
        self._cache: KvCache | None = None
        self._births: dict[int, int] = {}
        self._known: WeakKeyDictionary[Sequence, _Known] = WeakKeyDictionary()

    def update(self, state: Mapping[str, Tensor], version: int) -> None:
        """Take new weights, made for the target's `version`.

        Raises:
            UserError: if they do not fit; the old ones stay.
        """
        self._served.load(state)
        self.version = version
        self._forget()

    def part_of(self, state: Mapping[str, Tensor]) -> ServedModel | None:
        """Its share of new weights of the target, to `follow`; None if it shares none.

        Touches nothing that is served: safe from any thread.
        """
        if self._shared is None:
            return None
        part = {name: state[name] for name in self._shared}
        return ServedModel(self._config, part, self._shape.dtype, device=self._shape.device)

    def follow(self, part: ServedModel, version: int) -> None:
        """Guess by these from now on; its keys and values stay, as the target's may."""
        self._served, self.version = part, version

    def unable(self, version: int) -> NoDraft | None:
        """Its weights may lag behind the target's only so far."""
        most = self._shape.max_lag
        return NoDraft.STALE if most is not None and version - self.version > most else None

    def cache(self, target: Target) -> KvCache:
        """Its own, under the target's page numbers."""
        if self._cache is None:
            shape = target.cache.shape
            own = self._shape
            self._cache = open_cache(
                CacheShape(
                    self._config,
                    shape.num_pages,
                    shape.page_size,
                    own.dtype,
                    device=own.device,
                    tiles=shape.tiles,
                )
            )
        return self._cache

    def hidden(
        self, ids_T: Tensor, positions_T: Tensor, attend: StepAttend, target: Target
    ) -> Tensor:
        """All its layers."""
        return self._served.hidden(ids_T, positions_T, attend)

    def logits(self, hidden_NE: Tensor, target: Target) -> Tensor:
        """Its own head."""
        return self._served.logits(hidden_NE)

    def num_known(self, sequence: Sequence, pool: PagePool) -> int:
        """From its own notes if the pages are still the same, else from those on whole pages."""
        size, known = pool.page_size, self._known.get(sequence)
        if known is not None and 0 < known.num_tokens <= len(sequence.pages) * size:
            page = sequence.pages[(known.num_tokens - 1) // size]
            if (page, pool.birth(page)) == (known.page, known.birth):
                return min(known.num_tokens, len(sequence.tokens) - 1)
        count = 0
        for page in sequence.pages[: (len(sequence.tokens) - 1) // size]:
            if self._births.get(page) != pool.birth(page):
                break
            count += size
        return count

    def learned(self, sequence: Sequence, num_tokens: int, pool: PagePool) -> None:
        """Note it for the sequence, and for whoever shares its whole pages."""
        size, before = pool.page_size, self.num_known(sequence, pool)
        # A draft that was rejected may have been noted as known; its page is no longer whole.
        for page in sequence.pages[min(before, num_tokens) // size : num_tokens // size]:
            self._births[page] = pool.birth(page)
        last = sequence.pages[(num_tokens - 1) // size]
        self._known[sequence] = _Known(num_tokens, last, pool.birth(last))

    def release(self) -> None:
        """Give the cache back."""
        self._cache = None
        self._forget()

    def _forget(self) -> None:
        self._births.clear()
        self._known.clear()


class DraftShape(NamedTuple):
    """How a draft model is served."""

    dtype: torch.dtype
    """Of weights and cache."""
    version: int
    """The target's version that its weights were made for."""
    max_lag: int | None = 0
    """How many versions its weights may be behind before it stands aside; None: any."""
    device: torch.device = CPU
    """Where it computes."""


def refuse_layers(num_layers: int, target: ModelConfig) -> None:
    """An early exit has some of the layers.

    Raises:
        UserError: if that is none, or all.
    """
    if not 0 < num_layers < target.num_layers:
        raise UserError(
            f"engine.draft_layers is {num_layers}, the model has {target.num_layers} layers.",
            fix=f"use 1..{target.num_layers - 1}, or 0 for a quarter of them.",
        )


def refuse_other_vocabulary(draft: ModelConfig, target: ModelConfig) -> None:
    """A guess is a number of the target's vocabulary.

    Raises:
        UserError: if the draft model has another.
    """
    if draft.vocab_size != target.vocab_size:
        raise UserError(
            f"engine.draft_model has a vocabulary of {draft.vocab_size} tokens, the model has one "
            f"of {target.vocab_size}.",
            fix='name a draft model with the same tokenizer, or set engine.speculation = "lookup".',
        )


def _is_part(state: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> bool:
    return all(name in target and torch.equal(state[name], target[name]) for name in state)


def _num_weights(config: ModelConfig) -> int:
    layer = config.hidden_size * (2 * config.hidden_size + 3 * config.intermediate_size)
    return config.num_layers * layer + config.vocab_size * config.hidden_size
