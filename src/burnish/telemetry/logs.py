"""Logging of the standard library into `logs/*.jsonl`. Nothing happens at import."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from burnish.core.errors import UserError
from burnish.telemetry.jsonl import JsonLinesFile, encode_line

ROOT_LOGGER = "burnish"


class JsonLinesHandler(logging.Handler):
    """Writes each record as one JSON line."""

    def __init__(self, path: Path, level: int = logging.INFO) -> None:
        """Open or create `path`."""
        super().__init__(level)
        self._file = JsonLinesFile(path)
        self.num_lost = 0
        """Records that a full disk swallowed. A log must not stop what it describes."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        line: dict[str, object] = {
            "t": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "thread": record.threadName,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = logging.Formatter().formatException(record.exc_info)
        try:
            self._file.append(encode_line(line))
        except (OSError, UserError):
            self.num_lost += 1

    def close(self) -> None:
        """Close the file."""
        super().close()
        self._file.close()


@contextmanager
def logging_to(path: Path, level: int = logging.INFO) -> Iterator[JsonLinesHandler]:
    """Send the `burnish` loggers to `path` inside the context, and put things back after it."""
    handler = JsonLinesHandler(path, level)
    logger = logging.getLogger(ROOT_LOGGER)
    level_before, propagate_before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(min(level, level_before or level))
    # The terminal belongs to the progress display.
    logger.propagate = False
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level_before)
        logger.propagate = propagate_before
        handler.close()
