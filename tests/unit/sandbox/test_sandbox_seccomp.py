import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.core.errors import UserError
from burnish.sandbox.seccomp import build_filter
from burnish.sandbox.syscalls import ARCHITECTURES, DENIED, FIRST_UNKNOWN, ON_OTHERS, SPECIAL

ALLOW, KILL = 0x7FFF0000, 0x80000000
MACHINES = sorted(ARCHITECTURES)
PROGRAMS = {machine: build_filter(machine) for machine in MACHINES}
WORDS = st.integers(0, 2**64 - 1)


def error(number: int) -> int:
    return 0x00050000 | number


def evaluate(machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """What the program says of a call."""
    return run(machine, number, *arguments, arch=arch)[0]


def run(machine: str, number: int, *arguments: int, arch: int | None = None) -> tuple[int, int]:
    """Verdict and number of steps, as the kernel does it: an independent reading of classic BPF."""
    arch = ARCHITECTURES[machine].audit_arch if arch is None else arch
    padded = [*arguments, *[0] * 6][:6]
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, arch, 0, *padded)
    program = list(struct.iter_unpack("<HBBI", PROGRAMS[machine]))
    accumulator, counter, steps = 0, 0, 0
    while True:
        code, on_true, on_false, value = program[counter]
        counter += 1
        steps += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:
            return value, steps
        else:
            taken = {
                0x15: accumulator == value,
                0x35: accumulator >= value,
                0x45: bool(accumulator & value),
            }[code]
            counter += on_true if taken else on_false


@pytest.mark.parametrize("machine", MACHINES)
def test_every_denied_call_fails_whatever_its_arguments(machine: str) -> None:
    column = ARCHITECTURES[machine].column
    for numbers in DENIED.values():
        number = numbers[column]
        if number is not None:
            assert evaluate(machine, number, *[2**64 - 1] * 6) == error(errno.EPERM)


@pytest.mark.parametrize("machine", MACHINES)
@given(number=st.integers(0, 2**32 - 1), arguments=st.lists(WORDS, min_size=6, max_size=6))
def test_calls_outside_the_tables_pass_and_unknown_ones_do_not_exist(
    machine: str, number: int, arguments: list[int]
) -> None:
    arch = ARCHITECTURES[machine]
    named = {pair[arch.column] for table in (DENIED, SPECIAL, ON_OTHERS) for pair in table.values()}
    got = evaluate(machine, number, *arguments)
    if arch.x32_bit is not None and number >= arch.x32_bit:
        assert got == KILL
    elif number >= FIRST_UNKNOWN:
        assert got == error(errno.ENOSYS)
    elif number not in named:
        assert got == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_a_verdict_takes_few_steps_as_the_kernel_asks_for_all_when_a_box_starts(
    machine: str,
) -> None:
    assert max(run(machine, number)[1] for number in range(FIRST_UNKNOWN + 1)) <= 24


@pytest.mark.parametrize("machine", MACHINES)
@given(number=st.integers(0, 500), arch=st.integers(0, 2**32 - 1))
def test_another_abi_kills(machine: str, number: int, arch: int) -> None:
    if arch != ARCHITECTURES[machine].audit_arch:
        assert evaluate(machine, number, arch=arch) == KILL


@pytest.mark.parametrize("machine", MACHINES)
@given(flags=WORDS)
def test_clone_passes_exactly_without_new_namespaces(machine: str, flags: int) -> None:
    number = SPECIAL["clone"][ARCHITECTURES[machine].column]
    new = 0x20000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
    wanted = error(errno.EPERM) if flags & new else ALLOW
    assert evaluate(machine, number, flags) == wanted


@pytest.mark.parametrize("machine", MACHINES)
@given(high=st.integers(0, 2**32 - 1), family=st.integers(0, 50))
def test_sockets_of_three_families_only(machine: str, high: int, family: int) -> None:
    for name in ("socket", "socketpair"):
        number = SPECIAL[name][ARCHITECTURES[machine].column]
        wanted = ALLOW if family in (1, 2, 10) else error(errno.EAFNOSUPPORT)
        # The kernel takes an int: what is above must not change the answer.
        assert evaluate(machine, number, high << 32 | family) == wanted


@pytest.mark.parametrize("machine", MACHINES)
@given(high=st.integers(0, 2**32 - 1), protocol=st.integers(0, 300))
def test_sockets_of_plain_protocols_only(machine: str, high: int, protocol: int) -> None:
    number = SPECIAL["socket"][ARCHITECTURES[machine].column]
    wanted = ALLOW if protocol in (0, 1, 6, 17, 58) else error(errno.EPROTONOSUPPORT)
    for family in (1, 2, 10):
        assert evaluate(machine, number, family, 1, high << 32 | protocol) == wanted


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("request_number", "passes"), [(0x5412, 0), (0x541C, 0), (0x5401, 1)])
def test_terminal_input_is_refused(machine: str, request_number: int, passes: int) -> None:
    number = SPECIAL["ioctl"][ARCHITECTURES[machine].column]
    wanted = ALLOW if passes else error(errno.EPERM)
    assert evaluate(machine, number, 0, request_number) == wanted
    assert evaluate(machine, number, 0, 7 << 32 | request_number) == wanted


POINTERS = [1, 1 << 32, 2**64 - 1]


@pytest.mark.parametrize("machine", MACHINES)
@given(
    high=st.integers(0, 2**32 - 1), which=st.integers(0, 20), new=st.sampled_from([0, *POINTERS])
)
def test_the_limit_on_core_files_is_read_only(
    machine: str, high: int, which: int, new: int
) -> None:
    column = ARCHITECTURES[machine].column
    argument = high << 32 | which
    refused = error(errno.EPERM)
    got = evaluate(machine, SPECIAL["prlimit64"][column], 0, argument, new)
    assert got == (refused if which == 4 and new else ALLOW)
    got = evaluate(machine, SPECIAL["setrlimit"][column], argument, new)
    assert got == (refused if which == 4 else ALLOW)


@pytest.mark.parametrize("machine", MACHINES)
@given(high=st.integers(0, 2**32 - 1), other=st.integers(0, 2**32 - 1))
def test_nothing_is_changed_for_process_1(machine: str, high: int, other: int) -> None:
    column = ARCHITECTURES[machine].column
    first, refused = high << 32 | 1, error(errno.EPERM)
    assert evaluate(machine, SPECIAL["prlimit64"][column], first, other, other) == refused
    for name, numbers in ON_OTHERS.items():
        by_kind = name in ("setpriority", "ioprio_set")
        user = {"setpriority": 2, "ioprio_set": 3}.get(name)
        arguments = (0, first) if by_kind else (first, other)
        assert evaluate(machine, numbers[column], *arguments) == refused
        if by_kind:
            assert evaluate(machine, numbers[column], user, other) == refused
        elif other != 1:
            assert evaluate(machine, numbers[column], other, 1) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_disks_are_not_written_out_and_folders_not_watched(machine: str) -> None:
    column = ARCHITECTURES[machine].column
    for name in ("sync", "syncfs"):
        assert evaluate(machine, SPECIAL[name][column], 3) == error(0)
    assert evaluate(machine, SPECIAL["fcntl"][column], 3, 1026) == error(errno.EPERM)
    assert evaluate(machine, SPECIAL["fcntl"][column], 3, 1 << 32 | 1026) == error(errno.EPERM)
    assert evaluate(machine, SPECIAL["fcntl"][column], 3, 1) == ALLOW


def test_an_unknown_machine_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="riscv64"):
        build_filter("riscv64")
