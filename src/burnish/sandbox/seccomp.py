"""The system-call filter, assembled here as classic BPF: no library needed.

Known dangerous calls fail with EPERM, calls newer than our table with ENOSYS; a call through
another ABI (i386, x32) would bypass number checks, so it kills the process.

Not in reach of such a filter: `clone3` hides its flags behind a pointer. It answers ENOSYS, on
which C libraries fall back to `clone` (EPERM would break them).
"""

import errno
import platform
import struct
from typing import NamedTuple

from burnish.core.errors import UserError
from burnish.sandbox.syscalls import (
    ARCHITECTURES,
    DENIED,
    FIRST_UNKNOWN,
    ON_OTHERS,
    SPECIAL,
    Architecture,
)

_LD_ABS, _JEQ_K, _JGE_K, _JSET_K, _RET_K = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

# Offsets in struct seccomp_data on little-endian machines (both supported ones are). Only the low
# half of an argument is compared: the kernel itself truncates these ones to 32 bits.
_NR, _ARCH, _ARG0, _ARG1, _ARG2, _ARG2_HIGH = 0, 4, 16, 24, 32, 36

# CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}.
_CLONE_NEW = (
    0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
)
# TIOCSTI and TIOCLINUX push input into a terminal that the box may share with a person.
_IOCTL_DENIED = ((_ARG1, 0x5412), (_ARG1, 0x541C))
# F_NOTIFY watches directories of the host.
_FCNTL_DENIED = ((_ARG1, 1026),)
# A crash with any other limit than 1 starts the program that `kernel.core_pattern` may name, as
# root on the host. Helper and keeper set it; nobody may change it.
_CORE = 4
# "which" of these two is a user; "who" is a process or a group.
_BY_USER = {"setpriority": 2, "ioprio_set": 3}
# AF_UNIX, AF_INET, AF_INET6. Packet, netlink, vsock, alg and the rest are refused.
_FAMILIES = (1, 2, 10)
# The family's own, ICMP, TCP, UDP, ICMPv6. Rare ones (SCTP, DCCP, MPTCP, UDP-Lite) are code that
# few hosts run otherwise, and the kernel loads their modules for whoever asks.
_PROTOCOLS = (0, 1, 6, 17, 58)
_PERSONALITIES = (0, 0xFFFFFFFF)


class _Instruction(NamedTuple):
    code: int
    on_true: int
    on_false: int
    value: int


def _statement(code: int, value: int) -> _Instruction:
    return _Instruction(code, 0, 0, value)


def _error(number: int) -> _Instruction:
    return _statement(_RET_K, _ERRNO | number)


def _only(offset: int, allowed: tuple[int, ...], refusal: int) -> list[_Instruction]:
    """Allow if the argument is one of `allowed`, else fail with `refusal`."""
    tests = [
        _Instruction(_JEQ_K, len(allowed) - index, 0, value) for index, value in enumerate(allowed)
    ]
    return [_statement(_LD_ABS, offset), *tests, _error(refusal), _statement(_RET_K, _ALLOW)]


def _socket() -> list[_Instruction]:
    families = [
        _Instruction(_JEQ_K, len(_FAMILIES) - index, 0, value)
        for index, value in enumerate(_FAMILIES)
    ]
    return [
        _statement(_LD_ABS, _ARG0),
        *families,
        _error(errno.EAFNOSUPPORT),
        *_only(_ARG2, _PROTOCOLS, errno.EPROTONOSUPPORT),
    ]


def _none_of(denied: tuple[tuple[int, int], ...]) -> list[_Instruction]:
    """Fail with EPERM if an argument has a value of one of the pairs, else allow."""
    program = []
    for left, (offset, value) in zip(range(len(denied) - 1, -1, -1), denied, strict=True):
        program += [_statement(_LD_ABS, offset), _Instruction(_JEQ_K, 2 * left + 1, 0, value)]
    return [*program, _statement(_RET_K, _ALLOW), _error(errno.EPERM)]


def _prlimit() -> list[_Instruction]:
    """Never of process 1; the limit on core files may be read only (no new value: NULL)."""
    return [
        _statement(_LD_ABS, _ARG0),
        _Instruction(_JEQ_K, 6, 0, 1),
        _statement(_LD_ABS, _ARG1),
        _Instruction(_JEQ_K, 0, 5, _CORE),
        _statement(_LD_ABS, _ARG2),
        _Instruction(_JEQ_K, 0, 2, 0),
        _statement(_LD_ABS, _ARG2_HIGH),
        _Instruction(_JEQ_K, 1, 0, 0),
        _error(errno.EPERM),
        _statement(_RET_K, _ALLOW),
    ]


def _no_bits(offset: int, mask: int) -> list[_Instruction]:
    """Fail with EPERM if any bit of `mask` is set in the argument, else allow."""
    return [
        _statement(_LD_ABS, offset),
        _Instruction(_JSET_K, 0, 1, mask),
        _error(errno.EPERM),
        _statement(_RET_K, _ALLOW),
    ]


_ALLOWED = [_statement(_RET_K, _ALLOW)]


def _calls(arch: Architecture) -> dict[int, list[_Instruction]]:
    """What is done about the calls that do not simply pass, by number."""
    denied = [numbers[arch.column] for numbers in DENIED.values()]
    bodies = {number: [_error(errno.EPERM)] for number in denied if number is not None}
    special = {name: numbers[arch.column] for name, numbers in SPECIAL.items()}
    bodies[special["clone"]] = _no_bits(_ARG0, _CLONE_NEW)
    bodies[special["clone3"]] = [_error(errno.ENOSYS)]
    bodies[special["ioctl"]] = _none_of(_IOCTL_DENIED)
    bodies[special["fcntl"]] = _none_of(_FCNTL_DENIED)
    bodies[special["setrlimit"]] = _none_of(((_ARG0, _CORE),))
    bodies[special["prlimit64"]] = _prlimit()
    bodies[special["personality"]] = _only(_ARG0, _PERSONALITIES, errno.EPERM)
    for name in ("sync", "syncfs"):
        bodies[special[name]] = [_error(0)]
    for name in ("socket", "socketpair"):
        bodies[special[name]] = _socket()
    for name, numbers in ON_OTHERS.items():
        of_one = name not in _BY_USER
        pairs = ((_ARG0, 1),) if of_one else ((_ARG0, _BY_USER[name]), (_ARG1, 1))
        bodies[numbers[arch.column]] = _none_of(pairs)
    return bodies


def _intervals(arch: Architecture) -> list[tuple[int, list[_Instruction]]]:
    """First number and body of each run of numbers that are treated alike, in order."""
    bodies = _calls(arch)
    wanted = [(number, bodies.get(number, _ALLOWED)) for number in range(FIRST_UNKNOWN)]
    wanted.append((FIRST_UNKNOWN, [_error(errno.ENOSYS)]))
    if arch.x32_bit is not None:
        wanted.append((arch.x32_bit, [_statement(_RET_K, _KILL_PROCESS)]))
    return [pair for i, pair in enumerate(wanted) if i == 0 or pair[1] != wanted[i - 1][1]]


def _search(intervals: list[tuple[int, list[_Instruction]]]) -> list[_Instruction]:
    """A binary search for the interval of the number, then the bodies, each once.

    The kernel walks a filter for each of a thousand calls when it is installed, to know which it
    need not run it for. A chain of comparisons cost every box 0.15 ms there.
    """
    places: dict[tuple[_Instruction, ...], int] = {}
    end = len(intervals) - 1  # of the search, whose size is known: where the bodies begin
    bodies: list[_Instruction] = []
    for _, body in intervals:
        if tuple(body) not in places:
            places[tuple(body)] = end + len(bodies)
            bodies += body

    def branch(at: int, part: list[tuple[int, list[_Instruction]]]) -> list[_Instruction]:
        """The search in a part, if it stands at `at`."""
        if len(part) == 1:
            return []
        middle = len(part) // 2
        left, right = part[:middle], part[middle:]
        below = branch(at + 1, left)
        above = branch(at + 1 + len(below), right)
        to_left = at + 1 if below else places[tuple(left[0][1])]
        to_right = at + 1 + len(below) if above else places[tuple(right[0][1])]
        first = _Instruction(_JGE_K, to_right - at - 1, to_left - at - 1, right[0][0])
        return [first, *below, *above]

    return branch(0, intervals) + bodies


def build_filter(machine: str | None = None) -> bytes:
    """The filter as an array of `struct sock_filter`, as `bwrap --seccomp` reads it.

    Args:
        machine: `x86_64` or `aarch64`; by default the one we run on.

    Raises:
        UserError: on any other machine.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise UserError(
            f"the sandbox has no system-call filter for {machine!r}.",
            fix=f"run on one of {', '.join(sorted(ARCHITECTURES))}",
        )
    arch = ARCHITECTURES[machine]
    program = [
        _statement(_LD_ABS, _ARCH),
        _Instruction(_JEQ_K, 1, 0, arch.audit_arch),
        _statement(_RET_K, _KILL_PROCESS),
        _statement(_LD_ABS, _NR),
        *_search(_intervals(arch)),
    ]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
