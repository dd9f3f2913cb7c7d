"""What comes back from a runtime and its container is taken apart without trust."""

import asyncio
import itertools
import os
import shlex
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from burnish.core.errors import UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.images.running import ImageUser
from burnish.sandbox.keeper.children import child_pids, readable
from burnish.sandbox.oci.launch import OciLaunch, Plan, parse_pid
from burnish.sandbox.oci.launcher import READY, STARTED, launcher_script
from burnish.sandbox.oci.marks import MarkedCapture
from burnish.sandbox.oci.podman import unshare_command
from burnish.sandbox.oci.pool import OciPool
from burnish.sandbox.oci.probe import probe_runtimes
from burnish.sandbox.oci.runtime import Runtime, RuntimeName, find_runtime, parse_version
from burnish.sandbox.oci.users import box_users
from burnish.sandbox.start import open_pool

WHOLE = "0 0 4294967295"


def runtime(name: RuntimeName) -> Runtime:
    return Runtime(name=name, path=f"/usr/bin/{name}", version="1")


def captured(pieces: list[bytes], limit_bytes: int = 1000) -> tuple[bytes, bool, bool, bool]:
    """What is kept of pieces that arrive one by one; ready, started, cut."""

    async def main() -> tuple[bytes, bool, bool, bool]:
        capture = MarkedCapture()
        capture.watch(limit_bytes, lambda: None)
        for piece in pieces:
            os.write(capture.write_fd, piece)
            capture.pump()
        os.close(capture.write_fd)
        kept = capture.finish()
        try:
            started = os.read(capture.started_fd, 10) == b"s"
        except BlockingIOError:
            started = False
        result = (kept, capture.ready, started, capture.cut)
        capture.close()
        return result

    return asyncio.run(main())


@given(cuts=st.lists(st.integers(1, 60), max_size=4), warning=st.binary(max_size=20))
def test_marks_are_found_however_the_text_is_split(cuts: list[int], warning: bytes) -> None:
    assume(STARTED not in warning and READY not in warning)  # a runtime says neither
    text = warning + READY + STARTED + b"from the program\n"
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert captured(pieces) == (b"from the program\n", True, True, False)


def test_marks_of_the_program_are_its_own_output() -> None:
    text = READY + STARTED + STARTED + READY
    assert captured([text])[0] == STARTED + READY


def test_words_of_a_runtime_that_fails_are_kept_and_prove_no_start() -> None:
    assert captured([b"no such bundle\n"]) == (b"no such bundle\n", False, False, False)


def test_a_runtime_that_floods_is_kept_in_bounds() -> None:
    pieces = [b"x" * 60_000] * 10
    kept, ready, started, _ = captured(pieces)
    assert (ready, started, len(kept) <= 65536) == (False, False, True)


def test_only_the_programs_bytes_count_against_its_limit() -> None:
    noise = b"warning\n" * 100
    assert captured([noise + READY + STARTED + b"12345"], 5) == (b"12345", True, True, False)
    assert captured([READY + STARTED + b"123456"], 5) == (b"12345", True, True, True)


@pytest.mark.parametrize("text", ["", "0", "1", "-5", "12x", "9" * 30, "\u0661", "1 2", "\0"])
def test_a_pid_file_with_nonsense_names_no_process(tmp_path: Path, text: str) -> None:
    (tmp_path / "pid").write_text(text, encoding="utf-8")
    assert parse_pid(tmp_path / "pid") is None


def test_a_pid_file_names_a_process(tmp_path: Path) -> None:
    assert parse_pid(tmp_path / "absent") is None
    (tmp_path / "pid").write_text("1234\n", encoding="ascii")
    assert parse_pid(tmp_path / "pid") == 1234


@given(text=st.text(max_size=200))
def test_no_version_text_breaks_us(text: str) -> None:
    assert len(parse_version(text)) <= 40


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("crun version 1.8.1\ncommit: f8", "1.8.1"),
        ("runc version 1.1.5+ds1\n", "1.1.5+ds1"),
        ("runsc version 0.0~20221219.0\nspec: 1.0.2-dev", "0.0~20221219.0"),
        ("podman version 4.3.1\n", "4.3.1"),
        ("runsc version release-20240101.0\n", "20240101.0"),
        ("", ""),
    ],
)
def test_versions_are_read(text: str, version: str) -> None:
    assert parse_version(text) == version


def test_a_runtime_that_is_absent_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(UserError, match="apt-get install runsc"):
        find_runtime("runsc", "/nonexistent")
    with pytest.raises(UserError, match="crun, runc"):
        find_runtime("kata")
    with pytest.raises(UserError, match="apt-get install podman"):
        find_runtime("podman", "/nonexistent")


def fake(tmp_path: Path, name: str, script: str) -> str:
    path = tmp_path / name
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="ascii")
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return str(tmp_path)


def test_a_podman_that_serves_no_ordinary_user_says_why_in_one_line(tmp_path: Path) -> None:
    fake(tmp_path, "podman", "echo no range >&2; echo for you >&2; exit 125")
    broken = Runtime(name=RuntimeName.PODMAN, path=str(tmp_path / "podman"), version="4")
    with pytest.raises(UserError, match="no range for you") as caught:
        unshare_command(broken)
    assert "\n" not in str(caught.value)
    fake(tmp_path, "podman", 'shift; exec "$@"')
    assert unshare_command(broken) == (broken.path, "unshare")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo broken >&2; exit 1", "broken"),
        ("exit 0", "did not start"),
        ("head -c 1000000 /dev/zero >&2; exit 3", "did not start"),
        ("echo 'burnish: ready' >&2; exit 0", "which process"),
        ("kill -9 $$", "did not start"),
    ],
)
def test_a_broken_runtime_is_a_users_mistake_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    folder = fake(tmp_path, "crun", f'[ "$1" = --version ] && exit 0\n{script}')
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PATH", folder, prepend=os.pathsep)
    with pytest.raises(UserError, match=message) as caught:
        OciPool(SandboxConfig(max_boxes=1), "crun")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("end", "is_complete"), [("exit 128", False), ("echo 128 >&0; exit 128", True)]
)
def test_a_kernel_that_dies_under_its_program_is_told_from_one_that_reports(
    tmp_path: Path, end: str, is_complete: bool
) -> None:
    script = f"echo {READY.decode().strip()!r} >&2; echo $$ > pid; read -r go; {end}"

    async def main() -> tuple[bool, int]:
        def write_bundle(bundle: Path) -> list[str]:
            (bundle / "inbox").mkdir()
            return ["/bin/sh", "-c", f"cd {shlex.quote(str(bundle))}; {script}"]

        plan = Plan(
            write_bundle=write_bundle,
            attach=None,
            attach_runtime=(),
            remove_group=lambda bundle: None,
            helpers=set(child_pids()),
            reports=True,
            relayed=False,
        )
        launch = OciLaunch(plan, tmp_path / "run-0")
        await launch.prepare()
        launch.go(b"", b"")
        await readable(os.pidfd_open(launch.monitor_pid))
        code, _ = await launch.end()
        launch.close()
        return launch.is_complete, code

    assert asyncio.run(main()) == (is_complete, 128)


def test_root_gives_each_box_users_of_its_own() -> None:
    boxes = [
        box_users(runtime(RuntimeName.RUNC), n, privileged=True, uid_map=WHOLE) for n in (0, 1)
    ]
    ids = [mapping.host_id for users in boxes for mapping in users.uid_map]
    assert len(set(ids)) == 4
    assert min(ids) >= 1_900_000_000
    assert all(users.identity is not None for users in boxes)


def test_root_of_a_container_uses_what_it_has() -> None:
    small = box_users(runtime(RuntimeName.CRUN), 3, privileged=True, uid_map="0 100000 65536")
    assert {mapping.host_id for mapping in small.uid_map} == {65534, 65533}
    tiny = box_users(runtime(RuntimeName.CRUN), 3, privileged=True, uid_map="0 1000 1")
    assert tiny.identity is None


@pytest.mark.parametrize("name", list(RuntimeName))
def test_an_ordinary_user_maps_the_one_id_that_it_has(name: RuntimeName) -> None:
    users = box_users(runtime(name), 0, privileged=False)
    (mapping,) = users.uid_map
    assert users.gid_map == users.uid_map
    assert (users.identity, mapping.host_id, mapping.size) == (None, 0, 1)


ids = st.integers(0, 2**32 - 2)


@given(uid=ids, gid=ids, name=st.sampled_from(RuntimeName))
def test_an_images_user_is_one_that_owns_the_files_outside(
    uid: int, gid: int, name: RuntimeName
) -> None:
    users = box_users(runtime(name), 1, privileged=True, user=ImageUser(uid, gid), uid_map=WHOLE)
    assert users.inside == (uid, gid)
    assert users.identity is not None
    for number, mapped in ((uid, users.uid_map), (gid, users.gid_map)):
        by_inside = {mapping.container_id: mapping.host_id for mapping in mapped}
        assert by_inside[number] == users.identity.uid
        assert len(by_inside) == len(mapped) == len(set(by_inside.values()))
        assert 0 in by_inside


def test_a_user_for_whom_there_is_no_id_is_a_users_mistake() -> None:
    with pytest.raises(UserError, match="1000:1000"):
        box_users(runtime(RuntimeName.RUNC), 0, privileged=False, user=ImageUser(1000, 1000))
    users = box_users(runtime(RuntimeName.CRUN), 0, privileged=False, user=ImageUser(7, 8))
    assert (users.uid_map[0].container_id, users.gid_map[0].container_id) == (7, 8)


words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@given(arguments=st.lists(words, max_size=4), value=words)
def test_no_argument_or_variable_is_taken_for_shell_code(arguments: list[str], value: str) -> None:
    argv = ("printf", r"%s\n", *arguments, value)
    script = launcher_script(argv, {"V": value}, "/work", []).decode("utf-8", "surrogateescape")
    script = script.replace("</run/box/stdin", "</dev/null")
    ran = subprocess.run(["/bin/sh", "-c", script], capture_output=True, check=False)
    assert ran.returncode == 0
    assert ran.stdout == b"".join(word.encode() + b"\n" for word in (*arguments, value))
    assert ran.stderr == STARTED


@pytest.mark.slow
def test_the_doctor_says_of_a_runtime_what_holds_for_the_boxes_of_runs() -> None:
    try:
        pool = open_pool(SandboxConfig(backend="gvisor", max_boxes=1))
    except UserError as error:
        pytest.skip(str(error))
    notes = "; ".join(pool.capabilities.notes)
    asyncio.run(pool.close())
    rows = {check.name: check for check in probe_runtimes()}
    assert rows["sandbox gvisor"].detail.endswith(notes)
