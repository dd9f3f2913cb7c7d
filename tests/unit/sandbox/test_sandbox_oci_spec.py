"""The container's configuration: what must be in it whatever the box, and how runtimes read it."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.sandbox.oci.calls import ALLOWED
from burnish.sandbox.oci.filter import oci_filter, plain_filter
from burnish.sandbox.oci.spec import Argument, Bind, BoxSpec, IdMapping, build_spec
from burnish.sandbox.syscalls import DENIED, SPECIAL

paths = st.text(st.characters(categories=["L", "N"]), min_size=1).map(lambda name: f"/{name}")
binds = st.lists(
    st.builds(Bind, source=paths, destination=paths, writable=st.booleans()), max_size=5
)


def built(**changes: object) -> dict[str, object]:
    box = BoxSpec(root="/r", args=("/bin/sh",), uid=65534, gid=65534, binds=())
    spec = build_spec(msgspec.structs.replace(box, **changes))
    loaded = json.loads(msgspec.json.encode(spec))
    assert isinstance(loaded, dict)
    return loaded


@given(binds=binds, uid=st.sampled_from([0, 65534]))
def test_no_box_has_a_privilege_or_a_writable_root(binds: list[Bind], uid: int) -> None:
    spec = built(binds=tuple(binds), uid=uid, gid=7)
    assert spec["root"] == {"path": "/r", "readonly": True}
    process = spec["process"]
    assert process["noNewPrivileges"] is True
    sets = {"bounding", "effective", "inheritable", "permitted", "ambient"}
    assert process["capabilities"] == {name: [] for name in sets}
    assert process["user"] == {"uid": uid, "gid": 7}


@given(binds=binds)
def test_only_what_is_writable_is_mounted_so(binds: list[Bind]) -> None:
    mounts = built(binds=tuple(binds))["mounts"][2:]
    assert [mount["destination"] for mount in mounts] == [bind.destination for bind in binds]
    for bind, mount in zip(binds, mounts, strict=True):
        assert ("rw" in mount["options"], "ro" in mount["options"]) == (
            bind.writable,
            not bind.writable,
        )
        assert {"nosuid", "nodev", "private"} <= set(mount["options"])


def test_every_namespace_is_new_and_none_is_joined() -> None:
    alone = built()["linux"]["namespaces"]
    assert {n["type"] for n in alone} == {"pid", "ipc", "uts", "mount", "network"}
    mapping = IdMapping(container_id=0, host_id=5, size=1)
    linux = built(uid_map=(mapping,), gid_map=(mapping,))["linux"]
    assert {"type": "user"} in linux["namespaces"]
    assert linux["uidMappings"] == [{"containerID": 0, "hostID": 5, "size": 1}]
    assert linux["gidMappings"] == linux["uidMappings"]
    assert all(set(n) == {"type"} for n in linux["namespaces"])


def test_the_kernels_files_are_masked_or_read_only() -> None:
    linux = built()["linux"]
    assert {"/proc/kcore", "/proc/keys", "/proc/kmsg"} <= set(linux["maskedPaths"])
    assert {"/proc/sys", "/proc/sysrq-trigger"} <= set(linux["readonlyPaths"])


def test_what_is_not_set_is_left_out() -> None:
    linux = built()["linux"]
    assert "seccomp" not in linux
    assert "cgroupsPath" not in linux


def test_every_call_is_denied_or_allowed_or_special_but_never_two() -> None:
    assert not set(ALLOWED) & set(DENIED)
    assert not set(ALLOWED) & set(SPECIAL)
    assert len(set(ALLOWED)) == len(ALLOWED)


def test_clone3_is_on_no_list_so_that_libraries_fall_back() -> None:
    section = oci_filter("x86_64")
    assert not any("clone3" in rule.names for rule in section.syscalls)
    assert section.default_errno_ret == 38


def test_only_one_abi_is_named() -> None:
    assert oci_filter("x86_64").architectures == ("SCMP_ARCH_X86_64",)
    assert oci_filter("aarch64").architectures == ("SCMP_ARCH_AARCH64",)


def holds(argument: Argument, value: int) -> bool:
    if argument.op == "SCMP_CMP_EQ":
        return value == argument.value
    if argument.op == "SCMP_CMP_NE":
        return value != argument.value
    if argument.op == "SCMP_CMP_GE":
        return value >= argument.value
    assert argument.op == "SCMP_CMP_MASKED_EQ"
    return value & argument.value == argument.value_two


def verdicts(name: str, value: int, *others: int) -> set[str]:
    """Of all rules that fit, as libseccomp may take any of them. `others` follow on argument 0."""
    found = set()
    for rule in oci_filter("x86_64").syscalls:
        values = [(value, *others)[a.index] if others else value for a in rule.args]
        if name in rule.names and all(map(holds, rule.args, values)):
            found.add("allow" if rule.action == "SCMP_ACT_ALLOW" else "deny")
    return found


@given(request=st.integers(0, 2**64 - 1))
def test_every_ioctl_but_two_is_allowed(request: int) -> None:
    low = request & 0xFFFFFFFF
    assert verdicts("ioctl", request) == ({"deny"} if low in (0x5412, 0x541C) else {"allow"})


@pytest.mark.parametrize("request_number", [0x5412, 0x541C])
@pytest.mark.parametrize("high", [0, 1, 0xFFFFFFFF])
def test_high_bits_that_the_kernel_ignores_open_nothing(request_number: int, high: int) -> None:
    assert verdicts("ioctl", request_number | high << 32) == {"deny"}


@given(which=st.integers(0, 10), high=st.integers(0, 1), new=st.sampled_from([0, 1, 1 << 32]))
def test_the_limit_on_core_files_is_read_only(which: int, high: int, new: int) -> None:
    argument = high << 32 | which
    wanted = {"deny"} if which == 4 and new else {"allow"}
    assert verdicts("prlimit64", 0, argument, new) == wanted
    assert verdicts("setrlimit", argument) == ({"deny"} if which == 4 else {"allow"})


@given(command=st.integers(0, 2**64 - 1))
def test_every_fcntl_but_the_watch_of_a_folder_is_allowed(command: int) -> None:
    assert verdicts("fcntl", command) == ({"deny"} if command & 0xFFFFFFFF == 1026 else {"allow"})
    assert verdicts("fcntl", 1026 | command >> 32 << 32) == {"deny"}


@given(flags=st.integers(0, 2**64 - 1))
def test_clone_is_allowed_exactly_without_new_namespaces(flags: int) -> None:
    new = flags & 0x7E020000
    assert verdicts("clone", flags) == ({"deny"} if new else {"allow"})


@given(family=st.integers(0, 2**64 - 1))
def test_only_three_families_of_sockets_are_allowed(family: int) -> None:
    for name in ("socket", "socketpair"):
        assert verdicts(name, family, 1, 0) == ({"allow"} if family in (1, 2, 10) else {"deny"})


@given(protocol=st.integers(0, 300))
def test_only_plain_protocols_are_allowed(protocol: int) -> None:
    """What no rule names does not exist."""
    for family in (1, 2, 10):
        wanted = {"allow"} if protocol in (0, 1, 6, 17, 58) else set()
        assert verdicts("socket", family, 1, protocol) == wanted


def test_gvisors_filter_differs_in_what_an_unlisted_call_answers_only() -> None:
    ours, theirs = oci_filter("x86_64"), plain_filter("x86_64")
    assert theirs.syscalls == ours.syscalls
    assert theirs.default_action == "SCMP_ACT_TRACE"
