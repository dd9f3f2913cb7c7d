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
from burnish.sandbox.syscalls import ARCHITECTURES, DENIED, FIRST_UNKNOWN, SPECIAL, Architecture

_LD_ABS, _JEQ_K, _JGE_K, _JSET_K, _RET_K = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

# Offsets in struct seccomp_data on little-endian machines (both supported ones are). Only the low
# half of an argument is compared: the kernel itself truncates these ones to 32 bits.
_NR, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24

# CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}.
_CLONE_NEW = (
    0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
)
# TIOCSTI and TIOCLINUX push input into a terminal that the box may share with a person.
_IOCTL_DENIED = (0x5412, 0x541C)
# AF_UNIX, AF_INET, AF_INET6. Packet, netlink, vsock, alg and the rest are refused.
_FAMILIES = (1, 2, 10)
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


def _for_call(number: int, body: list[_Instruction]) -> list[_Instruction]:
    """`body` for this call number; it must return on every path."""
    return [_Instruction(_JEQ_K, 0, len(body), number), *body]


def _only(offset: int, allowed: tuple[int, ...], refusal: int) -> list[_Instruction]:
    """Allow if the argument is one of `allowed`, else fail with `refusal`."""
    tests = [
        _Instruction(_JEQ_K, len(allowed) - index, 0, value) for index, value in enumerate(allowed)
    ]
    return [_statement(_LD_ABS, offset), *tests, _error(refusal), _statement(_RET_K, _ALLOW)]


def _none_of(offset: int, denied: tuple[int, ...]) -> list[_Instruction]:
    """Fail with EPERM if the argument is one of `denied`, else allow."""
    tests = [
        _Instruction(_JEQ_K, len(denied) - index, 0, value) for index, value in enumerate(denied)
    ]
    return [
        _statement(_LD_ABS, offset),
        *tests,
        _statement(_RET_K, _ALLOW),
        _error(errno.EPERM),
    ]


def _no_bits(offset: int, mask: int) -> list[_Instruction]:
    """Fail with EPERM if any bit of `mask` is set in the argument, else allow."""
    return [
        _statement(_LD_ABS, offset),
        _Instruction(_JSET_K, 0, 1, mask),
        _error(errno.EPERM),
        _statement(_RET_K, _ALLOW),
    ]


def _head(arch: Architecture) -> list[_Instruction]:
    program = [
        _statement(_LD_ABS, _ARCH),
        _Instruction(_JEQ_K, 1, 0, arch.audit_arch),
        _statement(_RET_K, _KILL_PROCESS),
        _statement(_LD_ABS, _NR),
    ]
    if arch.x32_bit is not None:
        program += [
            _Instruction(_JGE_K, 0, 1, arch.x32_bit),
            _statement(_RET_K, _KILL_PROCESS),
        ]
    return [*program, _Instruction(_JGE_K, 0, 1, FIRST_UNKNOWN), _error(errno.ENOSYS)]


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
    program = _head(arch)
    for numbers in DENIED.values():
        number = numbers[arch.column]
        if number is not None:
            program += _for_call(number, [_error(errno.EPERM)])
    special = {name: numbers[arch.column] for name, numbers in SPECIAL.items()}
    program += _for_call(special["clone"], _no_bits(_ARG0, _CLONE_NEW))
    program += _for_call(special["clone3"], [_error(errno.ENOSYS)])
    program += _for_call(special["ioctl"], _none_of(_ARG1, _IOCTL_DENIED))
    for name in ("socket", "socketpair"):
        program += _for_call(special[name], _only(_ARG0, _FAMILIES, errno.EAFNOSUPPORT))
    program += _for_call(special["personality"], _only(_ARG0, _PERSONALITIES, errno.EPERM))
    program.append(_statement(_RET_K, _ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
