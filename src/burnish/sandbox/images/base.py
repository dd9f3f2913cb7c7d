"""What pools know of images and of where they come from: the seam to `store.py`."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol


class ImageRoot(Protocol):
    """A root file system for boxes, such as `Image`."""

    @property
    def name(self) -> str:
        """As users call it."""
        ...

    @property
    def digest(self) -> str:
        """Of its content."""
        ...

    @property
    def root(self) -> Path:
        """Directory that holds it; nothing writes there."""
        ...

    @property
    def env(self) -> dict[str, str]:
        """Variables that its programs expect."""
        ...

    @property
    def workdir(self) -> str:
        """Directory in which its programs expect to start; empty: it does not say."""
        ...

    @property
    def user(self) -> str:
        """As whom its programs expect to run: NAME or UID, `:GROUP`; empty: it does not say."""
        ...


class Images(Protocol):
    """Where images come from, such as `ImageStore`."""

    def resolve(self, name: str) -> ImageRoot:
        """What a name stands for now. Takes no time to speak of.

        Raises:
            UserError: no such image.
        """
        ...

    def lease(self, name: str) -> AbstractContextManager[ImageRoot]:
        """The same, and its files stay while the context lasts.

        Raises:
            UserError: no such image.
        """
        ...
