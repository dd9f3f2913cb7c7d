"""Messages of the native sandbox: owner <-> helper and owner <-> init of a box.

Layouts are little endian and packed; `str` is bytes and a NUL; `n * x` is a u32 count and that many
x. Descriptors that travel with a message are in [brackets], in
this order. Every message starts with `HEADER`; `size` counts it too. Who does what and why is in
`design/0005-native-sandbox.md`.

owner -> helper
    HELLO     u32 version, u32 uid_first, u32 gid_first, u32 num_ids, u32 job_uid, str rootfs,
              n * bind (str source, str target), n * link (str path, str target),
              n * hidden (str path), n * file (str path, str text)
              [filter: array of sock_filter in a file]
              First message. `rootfs` empty: host image. Paths are absolute; targets, links, files
              and hidden as seen in the box. `/work` belongs to job_uid (and the same group).
              -> READY, or ERROR, after which the helper ends.
              Root: ids 0..num_ids-1 of the box are uid_first.. and gid_first.. outside. An ordinary
              user: id 0 is the user, and 1..num_ids-1 are uid_first.. and gid_first.. through
              newuidmap and newgidmap, which need num_ids-1 subordinate ids; num_ids = 1: 0 only.
    CREATE    u32 0, u64 disk_bytes, u32 num_inodes, u64 shm_bytes, u32 processor, n * layer (u32;
              lowest first)
              [cgroup.procs files; or one directory with CREATE_INTO_CGROUP; and last, with
              CREATE_UPPER, a disk]
              `shm_bytes` 0: /dev/shm is a directory `s` beside `u` in the box's file system, and so
              counts within disk_bytes. Else a tmpfs of its own of that size.
              -> CREATED u32 box, u32 pid [control socket of the init, pidfd, directory `u`], or
              ERROR. The init, which may be starting still, then says READY, or ERROR and ends; what
              is sent to it meanwhile waits. disk_bytes and num_inodes are not 0.
              Boxes and layers have numbers from one range, which the helper chooses. They are free
              again after the DONE of DESTROY.
              The disk: a mount (fsmount, attached nowhere) of a file system that holds no `u`, `w`
              or `s`, keeps extended attributes `user.*`, and whose top belongs to the helper's
              root. It takes the place of the tmpfs, so that its own size is the limit: the two
              sizes are ignored, RESIZE is ERROR EOPNOTSUPP. Helpers of ordinary users: ERROR EPERM.
              It is unmounted when helper, box and owner hold no descriptor of it: who keeps one
              till after the DONE of DESTROY pays for that, and not the helper.
    FREEZE    u32 box. End the box; what it wrote becomes the layer of that number.
              -> DONE as soon as nothing can change the layer. DIED follows when no process is left,
              unless it had come before.
    DESTROY   u32 box or layer. -> DONE when no process of it is left. Boxes keep what they use.
    NEWLAYER  u32 0, u64 size_bytes, u32 num_inodes
              [a disk as in CREATE, with NEWLAYER_UPPER]
              -> DONE u32 layer [directory `u`], which the owner may fill
    LAYERFD   u32 layer. -> DONE u32 layer [directory `u`]
    RESIZE    u32 box, u64 disk_bytes, u32 num_inodes. -> DONE, or ERROR EINVAL if more is in use

helper -> owner
    READY     u32 version, u32 abilities (`Ability`)
    ERROR     i32 errno, u32 length, stage in so many bytes
    DIED      u32 box, i32 wait_status. Unasked, id 0: init ended. The number stays until DESTROY.

owner -> init
    EXEC      u64 wall_us (0: none), u64 0, u32 uid, u32 gid, u32 num_limits, u32 num_files, u32
              num_arguments, u32 num_variables, and then so many rlimits (u32 resource, u64 soft,
              u64 hard), str cwd, files (str), arguments (str), variables (str "NAME=value")
              [stdin, stdout, stderr]
              The program is the first of the files that there is. Limits that the init may not set,
              as its own are lower, are left as they are.
              With EXEC_IN_FILE all after the header is in a 4th descriptor (a memfd) instead.
              -> EXITED when the program has ended and, without EXEC_KEEP, all else is dead. At
              wall_us all is killed, also what earlier commands kept. EXEC, PUT, GET and PYTHON
              while a command runs: ERROR EBUSY. The init has the last id of the box: any of them as
              that one is EXITED NOT_STARTED EINVAL (unless num_ids = 1). Without CREATE_PACKAGES,
              EXEC_PACKAGES is EXITED NOT_STARTED EINVAL.
    KILL      End the running command (SIGKILL to all, kept ones too); its EXITED follows. No reply
              of its own; ignored when nothing runs.
    PUT       As EXEC, but with the mode in place of 0, and in place of a program the first argument
              becomes a file with what is read from stdin (a file). Replaces atomically, makes
              missing parents, never follows a link; the path is relative to /work.
              -> EXITED; what kept it from being done is NOT_STARTED. At wall_us it is killed, and
              nothing that was kept. (The helper in Python has no limit: its init does this itself,
              and nothing in the box can stop that one.)
    GET       As PUT, but the other way round: the file goes to stdout (a file), at most so many
              bytes, in place of 0; if it has more, a hole of its length goes there instead.
              NOT_STARTED ENOENT for whatever is not a regular file.
    PYTHON    As EXEC, with u32 kind (`PythonKind`), u32 options (`PythonOption`) in place of 0,
              and one file, which is the source: code, a path or a module's name. Runs in an
              interpreter that is there already, with its modules imported; the arguments are
              sys.argv[1:]. Only boxes whose helper is a template (see `fallback`) take it; others:
              ERROR ENOSYS.
    LISTEN    u16 port. On 127.0.0.1 in the box's network. -> DONE [listening socket], or ERROR

init -> owner
    READY     First; id 0. Or ERROR, id 0, and the end: it could not set itself up.
    EXITED    u32 ending (`Ending`), i32 code (exit status, signal or errno), u64 wall_us,
              u64 user_us, u64 system_us, u64 max_rss_bytes
"""

import struct
from enum import IntEnum, IntFlag

VERSION = 3
MAX_MESSAGE_BYTES = 128 * 2**10
"""Longer commands go through EXEC_IN_FILE."""
MAX_LAYERS = 16
MAX_CREATE_FDS = 8

HEADER = struct.Struct("<IHHI")
"""size, op, flags, id."""
JOB = struct.Struct("<QQIIIIII")
"""How EXEC, PUT, GET and PYTHON begin."""
LIMIT = struct.Struct("<IQQ")
"""An rlimit in them."""


class Op(IntEnum):
    """What a message is."""

    HELLO = 1
    CREATE = 2
    FREEZE = 3
    DESTROY = 4
    NEWLAYER = 5
    LAYERFD = 6
    RESIZE = 7
    EXEC = 32
    KILL = 33
    PUT = 34
    GET = 35
    LISTEN = 36
    PYTHON = 37
    READY = 64
    CREATED = 65
    DONE = 66
    ERROR = 67
    DIED = 68
    EXITED = 69


class Flag(IntFlag):
    """Modifiers; each belongs to the op in its name."""

    CREATE_INTO_CGROUP = 1
    """The one descriptor is a cgroup v2 directory for `clone3(CLONE_INTO_CGROUP)`."""
    CREATE_DETERMINISTIC = 2
    """No address randomisation, and only `processor`."""
    CREATE_PACKAGES = 4
    """Keep the capabilities of `Privileges.PACKAGES` in the bounding set."""
    CREATE_UPPER = 8
    """The last descriptor is the box's writable file system."""
    NEWLAYER_UPPER = 8
    """The descriptor is the layer's file system."""
    EXEC_KEEP = 1
    """Leave what the program started alive."""
    EXEC_IN_FILE = 2
    """The body is in the last descriptor."""
    EXEC_PACKAGES = 4
    """Run with the capabilities that CREATE_PACKAGES kept."""


class Ability(IntFlag):
    """What the helper found that it can do."""

    IDMAP = 1
    """The rootfs is idmapped: files of the image can be changed by the box."""
    RANGE = 2
    """The box has more than one user id."""
    NETWORK = 4
    """The box has a network namespace with a working loopback."""


class Ending(IntEnum):
    """How a command ended, as init saw it."""

    EXITED = 0
    """`code` is the exit status."""
    SIGNALED = 1
    """`code` is the signal."""
    TIMEOUT = 2
    """`wall_us` passed; `code` is 0."""
    NOT_STARTED = 3
    """The program could not be executed; `code` is the errno of the failing step."""
    KILLED = 4
    """KILL was received; `code` is 0."""


class PythonKind(IntEnum):
    """What the source of PYTHON is."""

    CODE = 0
    """Program text, as after `python -c`."""
    SCRIPT = 1
    """Path of a file, directory or zip file."""
    MODULE = 2
    """Name, as after `python -m`."""


class PythonOption(IntFlag):
    """How PYTHON differs from plain `python`."""

    ISOLATED = 1
    """As `python -I`: neither the script's directory nor PYTHONPATH is searched for modules."""
