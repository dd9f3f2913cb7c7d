"""Remove a tree of any depth and any modes."""

import os
import stat

from burnish.sandbox.archive.beneath import FOLDER


def remove_tree(parent_fd: int, name: bytes) -> None:
    """Remove what `name` is; a missing one is fine. Links are removed, never followed.

    One descriptor at a time, since a tree may be deeper than the limit of open files and than
    Python's stack. The tree must not change meanwhile: the way back up is `..`.

    Raises:
        OSError: something cannot be removed.
    """
    try:
        if not stat.S_ISDIR(os.lstat(name, dir_fd=parent_fd).st_mode):
            os.unlink(name, dir_fd=parent_fd)
            return
    except FileNotFoundError:
        return
    current = _enter(parent_fd, name)
    trail = [(name, _empty(current))]
    try:
        while trail:
            done, below = trail[-1]
            if below:
                name = below.pop()
                current = _replace(current, _enter(current, name))
                trail.append((name, _empty(current)))
            else:
                trail.pop()
                if trail:
                    current = _replace(current, os.open("..", FOLDER, dir_fd=current))
                os.rmdir(done, dir_fd=current if trail else parent_fd)
    finally:
        os.close(current)


def _enter(parent_fd: int, name: bytes) -> int:
    if os.geteuid() != 0:
        # Own directories may be closed to their owner.
        os.chmod(name, 0o700, dir_fd=parent_fd)
    return os.open(name, FOLDER, dir_fd=parent_fd)


def _empty(folder: int) -> list[bytes]:
    """Remove all but directories; returns those."""
    with os.scandir(folder) as entries:
        names = [
            (os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries
        ]
    for name, is_folder in names:
        if not is_folder:
            os.unlink(name, dir_fd=folder)
    return [name for name, is_folder in names if is_folder]


def _replace(old: int, new: int) -> int:
    os.close(old)
    return new
