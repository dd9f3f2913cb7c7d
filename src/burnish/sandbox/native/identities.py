"""Which user ids boxes get: ids that own nothing on the host, wherever there are enough of them."""

import os
import pwd
from pathlib import Path
from typing import NamedTuple

NUM_IDS = 65536
"""What images expect: 0 to 65535."""
NOBODY = 65534
# Unused on any host we know of: above the subordinate ids that useradd hands out.
_FIRST_ID = 1_900_000_000


class Identities(NamedTuple):
    """As in HELLO."""

    uid_first: int
    gid_first: int
    num_ids: int

    @property
    def nobody(self) -> int:
        """The id in the box for jobs that own nothing; the last id is that of its process 1."""
        return max(0, min(NOBODY, self.num_ids - 2))


def for_root(uid_map: str, gid_map: str) -> Identities:
    """Ids of boxes of root, or of root of a container.

    Args:
        uid_map: `/proc/self/uid_map`: the ids that we can give away.
        gid_map: likewise.
    """
    uid_first, num_uids = _pick(uid_map)
    gid_first, num_gids = _pick(gid_map)
    return Identities(uid_first, gid_first, min(num_uids, num_gids))


def for_user(uid: int, gid: int, name: str, subuid: str, subgid: str) -> Identities:
    """Ids of boxes of an ordinary user: the user for root of the box, then subordinate ids.

    Args:
        uid: of the user.
        gid: of the user.
        name: of the user.
        subuid: `/etc/subuid`.
        subgid: `/etc/subgid`.
    """
    uids = _subordinate(subuid, uid, name)
    gids = _subordinate(subgid, uid, name)
    if uids is None or gids is None:
        return Identities(uid, gid, 1)
    return Identities(uids[0], gids[0], min(NUM_IDS, uids[1] + 1, gids[1] + 1))


def of_this_process() -> Identities:
    """Ids for boxes that we make."""
    if os.geteuid() == 0:
        return for_root(_read("/proc/self/uid_map"), _read("/proc/self/gid_map"))
    uid = os.geteuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    return for_user(uid, os.getegid(), name, _read("/etc/subuid"), _read("/etc/subgid"))


def _pick(id_map: str) -> tuple[int, int]:
    """First id and how many, out of the map of a user namespace."""
    ranges = [(int(line.split()[0]), int(line.split()[2])) for line in id_map.splitlines()]
    for first, count in ranges:
        if first <= _FIRST_ID and first + count >= _FIRST_ID + NUM_IDS:
            return _FIRST_ID, NUM_IDS
    first, count = max(ranges, key=lambda entry: entry[1], default=(0, 1))
    num_ids = min(NUM_IDS, count)
    # Low ids are more likely to own something.
    return first + count - num_ids, num_ids


def _subordinate(text: str, uid: int, name: str) -> tuple[int, int] | None:
    found = []
    for line in text.splitlines():
        fields = line.split(":")
        if len(fields) == 3 and fields[0] in (name, str(uid)) and fields[1].isdigit():
            found.append((int(fields[1]), int(fields[2]) if fields[2].isdigit() else 0))
    best = max(found, key=lambda entry: entry[1], default=(0, 0))
    return best if best[1] > 0 else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
