"""Which layers are alive: pure bookkeeping for snapshot, fork, rollback and squash.

A box and a snapshot each have a hold: a name for a stack of layers, lowest first. A layer lives
while a stack of some hold has it, or while it is pending (a number was given out, and the layer
itself may not exist yet). Whatever ends a layer's life returns its number, for the helper to drop.

    create      box = table.acquire()
    snapshot    layer = table.new(); FREEZE; table.push(box, layer), or table.discard(layer) if the
                box was unchanged or the freeze failed; then snapshot = table.fork(box)
    fork        child = table.fork(snapshot)
    rollback    drop(table.rollback(box, snapshot))
    import      layer = table.new(); fill it; table.push(box, layer)
    destroy     drop(table.release(box)); the same for a snapshot
    squash      while job := table.begin_squash(box): merge job.run into job.layer, then
                drop(table.end_squash(job)), or drop(table.abandon_squash(job))

A running box keeps the layers that it was started on, whatever becomes of the stack of its hold:
the stack is what its next start uses.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

MAX_DEPTH = 16
"""No stack gets deeper: looking up an absent name costs 10 us per layer."""
SQUASH_DEPTH = 12
"""A squash is due. Below `MAX_DEPTH`, so that snapshots go on while it runs in the background."""
_MIN_RUN = 8
# At least so many layers are merged, so a squash is due at most once in seven snapshots.

LayerStack = tuple[int, ...]
"""Numbers of layers, lowest first."""


class Squash(NamedTuple):
    """A merge in progress; its layers stay alive until it ends."""

    run: LayerStack
    """Neighbours in a stack, lowest first: what to merge."""
    layer: int
    """Number for the result."""


class LayerTable:
    """Ref-counted immutable layers of one helper. Numbers are never used twice."""

    def __init__(self) -> None:
        """Start without layers."""
        self._next_layer = 1
        self._next_hold = 1
        self._pending: set[int] = set()
        self._stacks: dict[int, LayerStack] = {}
        self._squashes: list[Squash] = []
        self._uses: Counter[int] = Counter()

    @property
    def alive(self) -> frozenset[int]:
        """Layers that were given out and not yet named for dropping or discarded."""
        return frozenset(self._uses) | frozenset(self._pending)

    @property
    def num_holds(self) -> int:
        """Boxes and snapshots."""
        return len(self._stacks)

    def new(self) -> int:
        """A number for a layer that is about to be made: pending until pushed or discarded."""
        layer = self._next_layer
        self._next_layer += 1
        self._pending.add(layer)
        return layer

    def discard(self, layer: int) -> None:
        """A pending layer did not come about. If the helper has it all the same, drop it there."""
        self._take_pending(layer)

    def acquire(self, stack: LayerStack = ()) -> int:
        """A new hold on a stack of living layers.

        Raises:
            ValueError: a layer of it is not alive, named twice or pending, or it is too deep.
        """
        if len(stack) > MAX_DEPTH or len(set(stack)) != len(stack):
            raise ValueError(f"not a stack of at most {MAX_DEPTH} different layers: {stack}")
        if dead := [layer for layer in stack if layer not in self._uses]:
            raise ValueError(f"layers {dead} are not alive")
        hold = self._next_hold
        self._next_hold += 1
        self._stacks[hold] = stack
        self._uses.update(stack)
        return hold

    def stack(self, hold: int) -> LayerStack:
        """What a hold stands for now. A squash may shorten it, never change what it shows."""
        if hold not in self._stacks:
            raise ValueError(f"hold {hold} was released or never given")
        return self._stacks[hold]

    def push(self, hold: int, layer: int) -> None:
        """A pending layer now exists and lies on top of a hold's stack.

        Raises:
            ValueError: unknown hold, a layer that is not pending, or the stack is full.
        """
        stack = self.stack(hold)
        if len(stack) >= MAX_DEPTH:
            raise ValueError(f"the stack has {len(stack)} layers: squash it first")
        self._take_pending(layer)
        self._stacks[hold] = (*stack, layer)
        self._uses[layer] += 1

    def fork(self, hold: int) -> int:
        """Another hold on the same stack."""
        return self.acquire(self.stack(hold))

    def rollback(self, hold: int, target: int) -> list[int]:
        """Let a hold stand for what `target` stands for; returns the layers to drop."""
        old, new = self.stack(hold), self.stack(target)
        self._uses.update(new)
        self._stacks[hold] = new
        return self._let_go(old)

    def release(self, hold: int) -> list[int]:
        """End a hold; returns the layers to drop, highest first."""
        stack = self.stack(hold)
        del self._stacks[hold]
        return self._let_go(stack)

    def is_full(self, hold: int) -> bool:
        """Whether the next `push` needs a squash first."""
        return len(self.stack(hold)) >= MAX_DEPTH

    def begin_squash(self, hold: int, weights: Sequence[int] | None = None) -> Squash | None:
        """What to merge in a hold's stack, or None if nothing is due or one is under way there.

        Args:
            hold: whose stack.
            weights: bytes of each layer of the stack, if known: large old layers are then left
                alone while what lies on them is small.
        """
        stack = self.stack(hold)
        assert weights is None or len(weights) == len(stack), "one weight for each layer"
        if len(stack) < SQUASH_DEPTH or any(set(job.run) & set(stack) for job in self._squashes):
            return None
        run = stack[squash_start(weights if weights is not None else [1] * len(stack)) :]
        job = Squash(run, self.new())
        self._uses.update(run)
        self._squashes.append(job)
        return job

    def end_squash(self, job: Squash) -> list[int]:
        """The merged layer exists: every stack that has the run has it instead from now on.

        Returns:
            Layers to drop: those of the run that no other stack needs, or the result if none does.
        """
        self._squashes.remove(job)
        self._take_pending(job.layer)
        drops: list[int] = []
        # Counted once while stacks change hands, so that it cannot be dropped in between.
        self._uses[job.layer] += 1
        for hold, stack in self._stacks.items():
            shorter = _replace_run(stack, job)
            if shorter != stack:
                self._stacks[hold] = shorter
                self._uses[job.layer] += 1
                drops += self._let_go(job.run)
        return drops + self._let_go((*job.run, job.layer))

    def abandon_squash(self, job: Squash) -> list[int]:
        """The merge failed: all stays as it was. Returns the layers to drop, the result first."""
        self._squashes.remove(job)
        self._take_pending(job.layer)
        return [job.layer, *self._let_go(job.run)]

    def _take_pending(self, layer: int) -> None:
        if layer not in self._pending:
            raise ValueError(f"layer {layer} is not pending")
        self._pending.remove(layer)

    def _let_go(self, stack: LayerStack) -> list[int]:
        dropped = []
        for layer in reversed(stack):
            self._uses[layer] -= 1
            if not self._uses[layer]:
                del self._uses[layer]
                dropped.append(layer)
        return dropped


def squash_start(weights: Sequence[int]) -> int:
    """Index of the lowest layer to merge; the merge goes up to the top of the stack.

    At least `_MIN_RUN` layers, then on downwards while a layer weighs no more than all above it: so
    each byte is copied a number of times that is logarithmic in the number of snapshots.
    """
    start = max(len(weights) - _MIN_RUN, 0)
    above = sum(weights[start:])
    while start > 0 and weights[start - 1] <= above:
        start -= 1
        above += weights[start]
    return start


def _replace_run(stack: LayerStack, job: Squash) -> LayerStack:
    if job.run[0] not in stack:
        return stack
    start = stack.index(job.run[0])
    end = start + len(job.run)
    return (*stack[:start], job.layer, *stack[end:]) if stack[start:end] == job.run else stack
