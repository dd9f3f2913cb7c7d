"""A folder of weights for other programs, which appears complete or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from burnish.core.disk import ensure_free_space, full_disk_is_one_line

_SMALL_FILES_BYTES = 2**20


@contextmanager
def whole_folder(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Gives an empty directory, which becomes `folder`, in place of any before, on leaving.

    Args:
        folder: readable by others then: servers may run as somebody else.
        num_bytes: of its large files.

    Raises:
        UserError: the disk is full; nothing is left.
        OSError: the disk refuses otherwise.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    ensure_free_space(folder.parent, num_bytes + _SMALL_FILES_BYTES)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with full_disk_is_one_line(folder.parent):
            partial.mkdir()
            yield partial
            os.chmod(partial, 0o755)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
