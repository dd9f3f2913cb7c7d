"""Images, and ordinary users."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from raw_helper import (
    COMMANDS,
    NOBODY,
    ROOT,
    RawHelper,
    open_helper,
    shell,
)

from burnish.sandbox.native.binary import helper_problem
from burnish.sandbox.native.protocol import Ability, Op


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A root file system out of the host's shell and its libraries."""
    tmp_path.chmod(0o755)
    for directory in ("bin", "etc", "usr"):
        (tmp_path / directory).mkdir()
    listed = subprocess.run(["ldd", "/bin/sh"], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"(/\S+)", listed)
    for path in ["/bin/sh", *needed]:
        target = tmp_path / path[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(Path(path).read_bytes())
        target.chmod(0o755)
    (tmp_path / "etc/os").write_text("tiny\n", encoding="ascii")
    return tmp_path


def test_an_image_is_read_only_below_and_writable_above(helper_name: str, image: Path) -> None:
    helper = open_helper(helper_name, rootfs=str(image))
    box = helper.create()
    assert shell(box, "read x < /etc/os; echo $x", env=["PATH=/bin"]) == "tiny\n"
    if helper.abilities & Ability.IDMAP:
        shell(box, "echo changed > /etc/os; echo new > /etc/new", env=["PATH=/bin"])
        assert shell(box, "read x < /etc/os; echo $x", env=["PATH=/bin"]) == "changed\n"
    assert (image / "etc/os").read_text(encoding="ascii") == "tiny\n"
    assert sorted(os.listdir(image / "etc")) == ["os"]
    helper.end()


def test_both_helpers_can_do_the_same_with_an_image(image: Path) -> None:
    found = {}
    for name in COMMANDS:
        helper = open_helper(name, rootfs=str(image))
        found[name] = helper.abilities
        helper.end()
    assert len(set(found.values())) == 1, found


@pytest.mark.skipif(not ROOT, reason="needs root, to become somebody else")
def test_an_ordinary_user_gets_boxes_with_one_id(helper_name: str) -> None:
    if helper_name == "python":
        pytest.skip("this interpreter may lie where an ordinary user cannot read it")
    helper = open_helper(helper_name, user=NOBODY, num_ids=1)
    assert not helper.abilities & Ability.RANGE
    box = helper.create()
    assert shell(box, "id -u; echo x > f; ls -n f | cut -d' ' -f3") == "0\n0\n"
    assert "CapEff:\t0000000000000000" in shell(box, "cat /proc/self/status")
    assert box.put("g", b"data") == 0
    assert box.get("g") == b"data"
    assert shell(helper.create(layers=[helper.freeze(box)]), "cat g") == "data"
    status, said = helper.end()
    assert (status, said) == (0, "")


@pytest.mark.skipif(not ROOT, reason="needs root, to become somebody else")
def test_an_ordinary_user_with_subordinate_ids_gets_a_range(
    helper_name: str, tmp_path: Path
) -> None:
    if helper_name == "python":
        pytest.skip("this interpreter may lie where an ordinary user cannot read it")
    tools = [f"/usr/bin/{tool}" for tool in ("newuidmap", "newgidmap", "unshare", "setpriv")]
    if not all(os.access(tool, os.X_OK) for tool in tools):
        pytest.skip("needs newuidmap: sudo apt-get install uidmap")
    granted = tmp_path / "ids"
    granted.write_text(f"nobody:300000:65536\n{NOBODY}:300000:65536\n", encoding="ascii")
    # The host's own files stay as they are: these lie over them in a mount namespace of the test.
    command = shlex.join(COMMANDS[helper_name])
    script = f"""
for f in /etc/subuid /etc/subgid; do test -e $f || exit 77; mount --bind {granted} $f; done
exec setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups {command} "$1"
"""
    started = ["/usr/bin/unshare", "--mount", "/bin/sh", "-c", script, "sh"]
    helper = RawHelper(started, first_id=300000, environment={"PATH": "/usr/sbin:/usr/bin:/bin"})
    assert helper.ready.op is Op.READY, helper.ready
    assert helper.abilities & Ability.RANGE
    box = helper.create()
    assert shell(box, "id -u; id -g; id -G; touch f; stat -c %u f").split() == [str(NOBODY)] * 4
    assert os.stat("work/f", dir_fd=box.upper).st_uid == 300000 + NOBODY - 1
    assert box.put("g", b"data") == 0
    helper.end()


def test_the_helper_needs_its_socket(helper_name: str) -> None:
    if helper_name == "c" and helper_problem():
        pytest.skip("the compiled helper is not there: install a C compiler, then Burnish again")
    for arguments in ([], ["x"], ["1", "2"]):
        done = subprocess.run(
            [*COMMANDS[helper_name], *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode != 0
        assert done.stderr
