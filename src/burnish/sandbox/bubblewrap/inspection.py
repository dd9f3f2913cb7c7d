"""What this host offers: found by trying it, once, when a keeper starts."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from burnish.core.boxes import (
    Capabilities,
    ExecResult,
    ExecStatus,
    Feature,
    Isolation,
    Limits,
)
from burnish.core.errors import UserError
from burnish.sandbox.bubblewrap.argv import (
    REQUIRED_OPTIONS,
    BwrapFeatures,
    parse_features,
)
from burnish.sandbox.bubblewrap.box import EMPTY, Box, Host
from burnish.sandbox.cgroup import Controllers, find_controllers, owner_name
from burnish.sandbox.commands import WORK
from burnish.sandbox.host_view import (
    GROUP,
    OWN_PACKAGE,
    PASSWD,
    hidden_paths,
    namespace_fix,
    system_paths,
)
from burnish.sandbox.keeper.attacher import Attacher
from burnish.sandbox.keeper.capabilities import enforced, group_notes
from burnish.sandbox.keeper.namespace import box_identity, enter, make_base
from burnish.sandbox.keeper.protocol import Exec
from burnish.sandbox.network.base import PROXY_PORT
from burnish.sandbox.seccomp import build_filter

INSTALL_FIX = "sudo apt-get install bubblewrap"
_SELF_TEST_LINES = {
    "Seccomp:": "2",
    "NoNewPrivs:": "1",
    "CapEff:": "0" * 16,
    "CapBnd:": "0" * 16,
}


def find_bwrap(search_path: str | None = None) -> tuple[str, BwrapFeatures]:
    """Where bubblewrap is and what it can do.

    Args:
        search_path: directories to look in; by default PATH and the system's own.

    Raises:
        UserError: absent or too old.
    """
    if search_path is None:
        search_path = os.environ.get("PATH", "") + ":/usr/bin:/bin"
    path = shutil.which("bwrap", path=search_path)
    if path is None:
        raise UserError("bubblewrap is not installed.", fix=INSTALL_FIX)
    texts = [
        subprocess.run([path, option], capture_output=True, text=True, check=False).stdout
        for option in ("--help", "--version")
    ]
    features = parse_features(*texts)
    if missing := REQUIRED_OPTIONS - features.options:
        raise UserError(
            f"bubblewrap {features.version} lacks {', '.join(sorted(missing))}.",
            fix="install bubblewrap 0.4 or newer",
        )
    return path, features


async def inspect_host(*, use_control_groups: bool) -> tuple[Host, Capabilities, bool]:
    """Enter the keeper's namespace and run one box to see that everything holds.

    Returns the host, its capabilities and whether boxes get user ids of their own.

    Raises:
        UserError: names what is missing and the fix.
    """
    bwrap, features = find_bwrap()
    seccomp = build_filter()
    privileged = enter()
    base = make_base()
    controllers = _controllers() if use_control_groups else None
    attacher = Attacher() if controllers else None
    (base / EMPTY).mkdir(mode=0o755)
    system = system_paths()
    host = Host(
        bwrap=bwrap,
        features=features,
        base=base,
        system=system,
        hidden=hidden_paths([*sys.path, OWN_PACKAGE], system),
        etc=_make_etc(base),
        seccomp=seccomp,
        controllers=controllers,
        attacher=attacher,
        helpers={attacher.pid} if attacher else set(),
    )
    try:
        has_network = await _self_test(host, privileged)
    except BaseException:
        close_host(host)
        raise
    return host, _capabilities(host, privileged, has_network), privileged


def close_host(host: Host) -> None:
    """Free what `inspect_host` made outside the namespace."""
    if host.attacher is not None:
        host.attacher.close()
    if host.controllers is not None:
        host.controllers.close()


def _make_etc(base: Path) -> tuple[tuple[str, str], ...]:
    """Names for two users and what the dynamic linker needs: nothing else of the host's /etc."""
    (base / "passwd").write_text(PASSWD, encoding="ascii")
    (base / "group").write_text(GROUP, encoding="ascii")
    etc = [(str(base / "passwd"), "passwd"), (str(base / "group"), "group")]
    for name in ("ld.so.cache", "alternatives"):
        if os.path.exists(f"/etc/{name}"):
            etc.append((f"/etc/{name}", name))
    return tuple(etc)


def _controllers() -> Controllers | None:
    with contextlib.suppress(OSError):
        return find_controllers(
            Path("/proc/self/cgroup").read_text(encoding="ascii"),
            Path("/proc/self/mountinfo").read_text(encoding="utf-8"),
            owner_name(),
            rates=True,
        )
    return None


async def _self_test(host: Host, privileged: bool) -> bool:
    """Returns whether boxes can have a network."""
    box = Box(host, "self-test", box_identity(privileged, 0), PROXY_PORT)
    status = ("cat", "/proc/self/status")
    request = Exec(id=0, box=0, argv=(), stdin=b"", env={}, cwd=os.fsencode(WORK), limits=Limits())
    try:
        has_network = await box.has_network()
        result = await box.run(status, request)
    finally:
        await box.destroy()
    if result.status is not ExecStatus.OK:
        raise UserError(_first_failure(result), fix=namespace_fix())
    seen = dict(line.split("\t", 1) for line in result.stdout.decode().splitlines() if "\t" in line)
    for name, wanted in _SELF_TEST_LINES.items():
        if seen.get(name) != wanted:
            raise UserError(
                f"a box runs with {name} {seen.get(name)} instead of {wanted}: it would not hold.",
                fix="use a kernel with seccomp filters and user namespaces",
            )
    return has_network


def _first_failure(result: ExecResult) -> str:
    detail = result.message or result.stderr.decode("utf-8", "replace").strip()[:300]
    return f"bubblewrap cannot run a box here: {detail or result.status}."


def _capabilities(host: Host, privileged: bool, has_network: bool) -> Capabilities:
    notes = ["namespaces share the host's kernel: a kernel bug is a way out of the box"]
    notes += group_notes(host.controllers)
    if not privileged:
        notes.append("not root: boxes run as your own user id, in their own namespaces")
    if not host.features.has("--disable-userns"):
        notes.append("bubblewrap < 0.8: nested user namespaces are refused by the filter alone")
    return Capabilities(
        backend="bubblewrap",
        enforces=enforced(host.controllers),
        isolation=Isolation.NAMESPACES,
        features=frozenset({Feature.ALLOW_LIST} if has_network else ()),
        seccomp=True,
        notes=tuple(notes),
    )
