"""The mount namespace of a helper: what boxes are built from, and nothing else of the host.

<base>/image    read-only root file system, if the image has one
<base>/skel     skeleton: directories, links and files that every box has
<base>/b<n>     binds
<base>/dev      template of /dev
<base>/empty    covers what is hidden
<base>/l/<n>    layers, attached only while a box starts
<base>/m        where a box mounts its root
<base>/proc     a visible proc, without which the kernel lets no user namespace mount another
"""

from __future__ import annotations

import errno
import os
import stat
from typing import NamedTuple

from ..protocol import MAX_LAYERS, Ability
from . import kernel
from .hello import Hello
from .users import Users, enter

_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9)}
_DEVICES["tty"] = (5, 0)
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
_SHARED = kernel.READ_ONLY | kernel.NO_SETUID | kernel.NO_DEVICES


class Stage(NamedTuple):
    """What a box is built from."""

    base: str
    """Prefix of the paths above."""
    users: Users
    has_image: bool
    bind_targets: list[str]
    """Where `b<n>` goes in a box."""
    filter: bytes
    """seccomp program."""
    abilities: Ability


def make_stage(hello: Hello, program: bytes) -> Stage:
    """Build it in the working directory, a mount over the host's `/dev`.

    Call `kernel.enter_root(".")` then: here the host's files are still in sight.

    Raises:
        OSError: the kernel refuses a step.
    """
    # Daemons run with 077, and what is made here is for jobs of other users.
    os.umask(0o022)
    users = enter(hello)
    kernel.call("mount", None, b"/", None, kernel.MS_PRIVATE_ALL, None)
    abilities = Ability.RANGE if users.num_ids > 1 else Ability(0)
    image = -1
    if hello.rootfs:
        image, idmapped = _open_image(hello.rootfs, users)
        abilities |= Ability.IDMAP if idmapped else Ability(0)
    binds = [_open_shared(pair.first) for pair in hello.binds]
    proc = kernel.copy_tree("/proc")
    devices = _open_devices()
    root = kernel.new_tree("tmpfs", kernel.NO_SETUID, size="16m", mode="0755")
    # Over something that every host has and nobody needs from here on: what runs next may want to
    # read its own /proc.
    kernel.attach(root, "/dev")
    os.fchdir(root)
    _fill(".", hello, users, binds, image)
    trees = {"proc": proc, "image": image, **{f"b{n}": tree for n, tree in enumerate(binds)}}
    for name, tree in trees.items():
        if tree >= 0:
            kernel.attach(tree, name)
            os.close(tree)
    _make_devices("dev", devices)
    _make_empty("empty")
    for path in hello.hidden:
        _hide(path, [pair.second for pair in hello.binds])
    os.close(root)
    targets = [pair.second for pair in hello.binds]
    return Stage("", users, image >= 0, targets, program, abilities)


def make_directories(base: str) -> None:
    """The empty directories of a stage."""
    for name in ("image", "dev", "empty", "m", "proc", "l"):
        os.mkdir(f"{base}/{name}", 0o755)
    for number in range(MAX_LAYERS + 1):
        os.mkdir(f"{base}/l/{number}", 0o755)


def _open_shared(path: str) -> int:
    try:
        tree = kernel.copy_tree(path)
    except OSError as error:
        raise OSError(error.errno, f"bind of {path}: {os.strerror(error.errno or 0)}") from error
    kernel.set_tree(tree, _SHARED)
    return tree


def _open_image(path: str, users: Users) -> tuple[int, bool]:
    """The read-only root file system, with its owners shifted to those of boxes where possible."""
    if not os.path.isdir(path):
        raise NotADirectoryError(errno.ENOTDIR, f"rootfs {path} is not a directory")
    try:
        tree = kernel.copy_tree(path, recursive=False)
    except OSError as error:
        # In a user namespace, what lies under mounts of the host may not be uncovered.
        if error.errno != errno.EINVAL:
            raise
        tree = kernel.copy_tree(path)
    if users.first_uid and _overlays_take_mapped_layers():
        namespace = _user_namespace(users)
        try:
            kernel.set_tree(tree, _SHARED | kernel.IDMAPPED, user_namespace=namespace)
        except OSError:
            kernel.set_tree(tree, _SHARED)
        else:
            return tree, True
        finally:
            os.close(namespace)
        return tree, False
    kernel.set_tree(tree, _SHARED)
    return tree, False


def _overlays_take_mapped_layers() -> bool:
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("0" + "".join(filter(str.isdecimal, minor[:2])))) >= (5, 19)


def _user_namespace(users: Users) -> int:
    """A namespace with the map of boxes: only its descriptor is needed."""
    wait, go = os.pipe()
    child = kernel.clone(kernel.NEW_USER)
    if child.pid == 0:
        os.close(go)
        os.read(wait, 1)
        os._exit(0)
    try:
        proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
        users.write_maps(proc, child.pid)
        os.close(proc)
        return os.open(f"/proc/{child.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for descriptor in (wait, go, child.pidfd):
            os.close(descriptor)
        os.waitpid(child.pid, 0)


def _open_devices() -> dict[str, int]:
    """Clones of the host's devices, for those who may not make their own."""
    if os.geteuid() == 0 and _may_make_devices():
        return {}
    return {name: kernel.copy_tree(f"/dev/{name}") for name in _DEVICES}


def _may_make_devices() -> bool:
    with open("/proc/self/uid_map", encoding="ascii") as file:
        return file.read().split() == ["0", "0", "4294967295"]


def _make_devices(path: str, devices: dict[str, int]) -> None:
    tree = kernel.new_tree("tmpfs", kernel.NO_SETUID | kernel.NO_EXEC, size="64k", mode="0755")
    kernel.attach(tree, path)
    mask = os.umask(0)
    for name, (major, minor) in _DEVICES.items():
        target = f"{path}/{name}"
        if not devices:
            os.mknod(target, stat.S_IFCHR | 0o666, os.makedev(major, minor))
            continue
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o666))
        kernel.attach(devices[name], target)
        os.close(devices[name])
    os.umask(mask)
    for name, link in _DEVICE_LINKS.items():
        os.symlink(link, f"{path}/{name}")
    for name in ("shm", "pts"):
        os.mkdir(f"{path}/{name}", 0o755)
    os.close(tree)
    tree = kernel.copy_tree(path)
    kernel.set_tree(tree, kernel.READ_ONLY | kernel.NO_SETUID | kernel.NO_EXEC)
    kernel.detach(path)
    kernel.attach(tree, path)
    os.close(tree)


def _make_empty(path: str) -> None:
    """A mount of its own, read-only, so that nothing can ever be put in."""
    tree = kernel.new_tree("tmpfs", _SHARED | kernel.NO_EXEC, size="4k", nr_inodes=2, mode="0755")
    kernel.attach(tree, path)
    os.close(tree)


def _hide(hidden: str, targets: list[str]) -> None:
    """Cover a directory of a bind. A link on the way is refused: it would cover something else."""
    for number, target in reversed(list(enumerate(targets))):
        if not hidden.startswith(target + "/"):
            continue
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        place = os.open(f"b{number}", flags)
        try:
            for part in hidden[len(target) :].strip("/").split("/"):
                deeper = os.open(part, flags, dir_fd=place)
                os.close(place)
                place = deeper
            tree = kernel.copy_tree("empty")
            kernel.attach_at(tree, place)
            os.close(tree)
        except FileNotFoundError:
            return
        finally:
            os.close(place)
        return
    raise OSError(errno.EINVAL, f"no bind shows {hidden}, which is to be hidden")


def _fill(base: str, hello: Hello, users: Users, binds: list[int], image: int) -> None:
    make_directories(base)
    skeleton = f"{base}/skel"
    for name in ("", "/proc", "/dev", "/work", "/tmp"):
        os.mkdir(skeleton + name, 0o755)
    for number, (pair, tree) in enumerate(zip(hello.binds, binds)):
        folder = stat.S_ISDIR(os.fstat(tree).st_mode)
        make_point(f"{base}/b{number}", folder)
        make_point(skeleton + pair.second, folder)
    for path, text in hello.files:
        make_point(skeleton + path, folder=False)
        with open(skeleton + path, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
    for path, target in hello.links:
        os.makedirs(os.path.dirname(skeleton + path), 0o755, exist_ok=True)
        os.symlink(target, skeleton + path)
    _own(skeleton, users)
    uid, gid = users.first_uid + hello.job_uid, users.first_gid + hello.job_uid
    os.chown(f"{skeleton}/work", uid, gid)
    os.chmod(f"{skeleton}/tmp", 0o1777)


def make_point(path: str, folder: bool) -> None:
    """Something to mount on."""
    if folder:
        os.makedirs(path, 0o755, exist_ok=True)
        return
    os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
    if not os.path.exists(path):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def _own(top: str, users: Users) -> None:
    for folder, folders, files in os.walk(top):
        for name in (folder, *(os.path.join(folder, item) for item in folders + files)):
            os.chown(name, users.first_uid, users.first_gid, follow_symlinks=False)


def network_works() -> bool:
    """Whether a box may have a network; found out by a process that makes one."""
    pid = os.fork()
    if pid == 0:
        try:
            kernel.unshare(kernel.NEW_USER | kernel.NEW_NETWORK)
            kernel.start_loopback()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0
