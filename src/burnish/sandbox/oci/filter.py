"""The system-call filter in the words of the OCI runtime specification.

The specification knows names, not numbers, and has no "newer than our table". So this is the list
of what is allowed; what it leaves out answers ENOSYS, as a call that does not exist does.
"""

import errno
import platform

import msgspec

from burnish.sandbox.oci.calls import ALLOWED
from burnish.sandbox.oci.spec import Argument, CallRule, Seccomp
from burnish.sandbox.syscalls import DENIED

_ALLOW, _ERRNO, _TRACE = "SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO", "SCMP_ACT_TRACE"
_ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}
# CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}.
_CLONE_NEW = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
_FAMILIES = (1, 2, 10)
_FIRST_EXOTIC_FAMILY = 11
_PROTOCOLS = (0, 1, 6, 17, 58)
_F_NOTIFY, _CORE = 1026, 4
# TIOCSTI and TIOCLINUX differ from each other in the low four bits only.
_TERMINAL_REQUESTS = (0x5412, 0x541C)
_LOW_BITS = 4


def plain_filter(machine: str | None = None) -> Seccomp:
    """The section for who takes no number for what is not listed: gVisor, and docker before 23.

    They answer EPERM, on which C libraries would not fall back. A call that is to be traced,
    without a tracer, answers ENOSYS; and no program here may trace.
    """
    return msgspec.structs.replace(
        oci_filter(machine), default_action=_TRACE, default_errno_ret=None
    )


def oci_filter(machine: str | None = None) -> Seccomp:
    """The `linux.seccomp` section.

    Only the machine's own ABI is named, so that a call through another one (i386, x32) kills.
    """
    machine = machine or platform.machine()
    rules = [
        CallRule(names=tuple(DENIED), action=_ERRNO, errno_ret=errno.EPERM),
        CallRule(names=ALLOWED, action=_ALLOW),
        *_clone(),
        *_sockets(),
        *_ioctl(),
        *_but_one("fcntl", 1, _F_NOTIFY),
        *_but_one("setrlimit", 0, _CORE),
        *_prlimit(),
        CallRule(names=("sync", "syncfs"), action=_ERRNO, errno_ret=0),
    ]
    rules += [
        _when("personality", _ALLOW, Argument(index=0, value=value, op="SCMP_CMP_EQ"))
        for value in (0, 0xFFFFFFFF)
    ]
    return Seccomp(
        default_action=_ERRNO,
        default_errno_ret=errno.ENOSYS,
        architectures=(_ARCHITECTURES[machine],),
        syscalls=tuple(rules),
    )


def _when(name: str, action: str, argument: Argument, number: int | None = None) -> CallRule:
    return CallRule(names=(name,), action=action, errno_ret=number, args=(argument,))


def _masked(index: int, mask: int, value: int) -> Argument:
    return Argument(index=index, value=mask, value_two=value, op="SCMP_CMP_MASKED_EQ")


def _clone() -> list[CallRule]:
    """Allowed without any namespace flag. `clone3`, whose flags are hidden, is on no list."""
    rules = [_when("clone", _ALLOW, _masked(0, sum(_CLONE_NEW), 0))]
    rules += [_when("clone", _ERRNO, _masked(0, bit, bit), errno.EPERM) for bit in _CLONE_NEW]
    return rules


def _sockets() -> list[CallRule]:
    rules = []
    exotic = [n for n in range(_FIRST_EXOTIC_FAMILY) if n not in _FAMILIES]
    for name in ("socket", "socketpair"):
        # No rule can name "all other" protocols: they do not exist, by the default action.
        rules += [
            CallRule(
                names=(name,),
                action=_ALLOW,
                args=(
                    Argument(index=0, value=family, op="SCMP_CMP_EQ"),
                    Argument(index=2, value=protocol, op="SCMP_CMP_EQ"),
                ),
            )
            for family in _FAMILIES
            for protocol in _PROTOCOLS
        ]
        refused = [Argument(index=0, value=family, op="SCMP_CMP_EQ") for family in exotic]
        refused.append(Argument(index=0, value=_FIRST_EXOTIC_FAMILY, op="SCMP_CMP_GE"))
        rules += [_when(name, _ERRNO, argument, errno.EAFNOSUPPORT) for argument in refused]
    return rules


def _differs(name: str, index: int, value: int) -> list[CallRule]:
    """Allowed is what differs from `value` in one of the 32 bits that the kernel reads."""
    return [_when(name, _ALLOW, _masked(index, 1 << bit, ~value & (1 << bit))) for bit in range(32)]


def _but_one(name: str, index: int, value: int) -> list[CallRule]:
    refused = _when(name, _ERRNO, _masked(index, 0xFFFFFFFF, value), errno.EPERM)
    return [*_differs(name, index, value), refused]


def _prlimit() -> list[CallRule]:
    """The limit on core files may be read only: the new value is NULL."""
    core = _masked(1, 0xFFFFFFFF, _CORE)
    arguments = (core, Argument(index=2, value=0, op="SCMP_CMP_NE"))
    return [
        *_differs("prlimit64", 1, _CORE),
        CallRule(
            names=("prlimit64",),
            action=_ALLOW,
            args=(core, Argument(index=2, value=0, op="SCMP_CMP_EQ")),
        ),
        CallRule(names=("prlimit64",), action=_ERRNO, errno_ret=errno.EPERM, args=arguments),
    ]


def _ioctl() -> list[CallRule]:
    """Everything but two requests. The kernel reads 32 bits, so only these may be compared.

    The specification has no masked "not equal": allowed is what differs in some bit.
    """
    low = (1 << _LOW_BITS) - 1
    first, second = _TERMINAL_REQUESTS
    assert first >> _LOW_BITS == second >> _LOW_BITS
    denied = {request & low for request in _TERMINAL_REQUESTS}
    rules = [
        _when("ioctl", _ALLOW, _masked(1, low, nibble))
        for nibble in range(low + 1)
        if nibble not in denied
    ]
    rules += [
        _when("ioctl", _ALLOW, _masked(1, 1 << bit, ~first & (1 << bit)))
        for bit in range(_LOW_BITS, 32)
    ]
    rules += [
        _when("ioctl", _ERRNO, _masked(1, 0xFFFFFFFF, request), errno.EPERM)
        for request in _TERMINAL_REQUESTS
    ]
    return rules
