"""SHA-256 of files, computed while they are loaded: hashing needs no interpreter."""

import hashlib
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Self

_PIECE = 1 << 20


class FileDigest:
    """A digest that is computed in a thread of its own; leaving the context ends it."""

    def __init__(self, files: list[Path]) -> None:
        """Start reading `files`."""
        self._stop = Event()
        self._pool = ThreadPoolExecutor(1, "digest")
        self._found = self._pool.submit(self._compute, files)

    def __enter__(self) -> Self:
        """Nothing more."""
        return self

    def __exit__(self, *error: object) -> None:
        """Stop reading: a failed load must not wait for it."""
        self._stop.set()
        self._pool.shutdown()

    def result(self) -> str:
        """`sha256:...` of one file as `sha256sum` has it; of shards, of their `name hash` lines.

        Raises:
            OSError: if a file cannot be read.
            CancelledError: if the context was left before all was read.
        """
        return self._found.result()

    def _compute(self, files: list[Path]) -> str:
        hashes = [self._of_file(file) for file in files]
        if len(hashes) == 1:
            return f"sha256:{hashes[0]}"
        lines = "".join(f"{file.name} {h}\n" for file, h in zip(files, hashes, strict=True))
        return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"

    def _of_file(self, path: Path) -> str:
        found = hashlib.sha256()
        with path.open("rb") as stream:
            while piece := stream.read(_PIECE):
                if self._stop.is_set():
                    raise CancelledError
                found.update(piece)
        return found.hexdigest()
