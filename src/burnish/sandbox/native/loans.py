"""A box for the time of a `with`."""

from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from burnish.core.boxes import Policy
from burnish.sandbox.native.stateful import NativeBox
from burnish.sandbox.native.templates import Template

B = TypeVar("B", bound=NativeBox)


class Lender(Protocol):
    """The pool."""

    async def take(
        self, image: str | None, policy: Policy, template: Template | None = None
    ) -> NativeBox:
        """A box that must be given back."""
        ...

    async def give_back(self, box: NativeBox) -> None:
        """Destroy it."""
        ...


class Loan(AbstractAsyncContextManager[B], Generic[B]):
    """A class, as a generator would cost 10 us more."""

    def __init__(
        self,
        lender: Lender,
        kind: type[B],
        image: str | None,
        policy: Policy,
        template: Template | None = None,
    ) -> None:
        """Nothing is taken yet; `kind` is the class of the boxes that these arguments give."""
        self._lender = lender
        self._kind = kind
        self._asked = (image, policy, template)
        self._box: B | None = None

    async def __aenter__(self) -> B:
        box = await self._lender.take(*self._asked)
        assert isinstance(box, self._kind)
        self._box = box
        return box

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._box is not None
        await self._lender.give_back(self._box)
