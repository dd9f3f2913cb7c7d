"""Native boxes of images: what an image says, what becomes of it, what can be wrong with it."""

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import pytest

from burnish.core.boxes import ExecResult, ExecStatus, Feature, Policy, Privileges, Sandbox
from burnish.core.errors import UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.images.manifest import Image
from burnish.sandbox.images.store import ImageStore
from burnish.sandbox.native.identities import Identities
from burnish.sandbox.native.image_settings import job_user
from burnish.sandbox.native.pool import NativePool

PROGRAMS = ("/bin/sh", "/usr/bin/id", "/usr/bin/env", "/bin/cat")
MODES = ("/bin/chmod", "/bin/chown", "/usr/bin/stat")


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    """A shell and little else."""
    tmp_path.chmod(0o755)
    root = tmp_path / "rootfs"
    for program in PROGRAMS + MODES:
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for path in (program, *re.findall(r"(/\S+) \(0x", listed)):
            copy = root / path[1:]
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\napp:x:1000:1001::/:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nstaff:x:50:app\n")
    (root / "srv/app").mkdir(parents=True)
    (root / "version").write_text("one\n")
    return root


class Described:
    """A store whose images say more about themselves than a directory can."""

    def __init__(self, store: ImageStore) -> None:
        self.store = store
        self.settings: dict[str, object] = {}

    def resolve(self, name: str) -> Image:
        return msgspec.structs.replace(self.store.resolve(name), **self.settings)

    def lease(self, name: str) -> AbstractContextManager[Image]:
        store, resolve = self.store, self.resolve

        class Lease(AbstractContextManager[Image]):
            def __enter__(self) -> Image:
                self.inner = store.lease(name)
                self.inner.__enter__()
                return resolve(name)

            def __exit__(self, *error: object) -> None:
                self.inner.__exit__(None, None, None)

        return Lease()


@pytest.fixture
def images(tmp_path: Path, rootfs: Path) -> Described:
    store = ImageStore(tmp_path / "store")
    store.add_directory("small", rootfs)
    return Described(store)


@pytest.fixture(params=["c", "python"])
def pool(request: pytest.FixtureRequest, images: Described) -> Iterator[NativePool]:
    config = SandboxConfig(max_boxes=3, warm_boxes=1, helper=request.param)
    try:
        made = NativePool(config, images=images)
    except UserError as error:
        pytest.skip(str(error))
    yield made
    asyncio.run(made.close())


def run(pool: NativePool, script: str, policy: Policy | None = None, **options: str) -> str:
    async def main() -> ExecResult:
        async with pool.acquire("small", policy) as box:
            await box.write_file("mine", b"")
            return await box.exec(("/bin/sh", "-c", script), env=dict(options) or None)

    result = asyncio.run(main())
    assert result.status is ExecStatus.OK, result
    return result.stdout.decode()


def needs_ids(pool: NativePool) -> None:
    if Feature.PRIVILEGES not in pool.capabilities.features:
        pytest.skip("boxes have one user id here: see `burnish doctor`")


def test_commands_start_as_the_image_says(pool: NativePool, images: Described) -> None:
    needs_ids(pool)
    images.settings = {
        "env": {"COLOUR": "red", "SHAPE": "round", "PATH": "/usr/bin:/bin"},
        "workdir": "/srv/app",
        "user": "app:staff",
    }
    script = "pwd; id -u; id -g; echo $COLOUR $SHAPE; : > /work/mine && echo writes"
    assert run(pool, script, SHAPE="square").splitlines() == [
        "/srv/app",
        "1000",
        "50",
        "red square",
        "writes",
    ]

    async def elsewhere() -> bytes:
        async with pool.acquire("small") as box:
            return (await box.exec(("/bin/sh", "-c", "pwd"), cwd="/work")).stdout

    assert asyncio.run(elsewhere()) == b"/work\n"


def test_without_a_word_of_the_image_commands_are_root_in_work(pool: NativePool) -> None:
    assert run(pool, "pwd; id -u; id -g") == "/work\n0\n0\n"


def test_packages_are_installed_by_root_whatever_the_image_says(
    pool: NativePool, images: Described
) -> None:
    needs_ids(pool)
    images.settings = {"user": "app"}
    assert run(pool, "id -u", Policy(privileges=Privileges.PACKAGES)) == "0\n"
    assert run(pool, "id -u; id -g") == "1000\n1001\n"


def test_a_name_means_the_newest_image_and_boxes_keep_theirs(
    pool: NativePool, images: Described, rootfs: Path
) -> None:
    async def main() -> None:
        async with pool.acquire("small") as old:
            (rootfs / "version").write_text("two\n")
            images.store.add_directory("small", rootfs)
            async with pool.acquire("small") as new:
                assert (await new.exec(("cat", "/version"))).stdout == b"two\n"
            assert (await old.exec(("cat", "/version"))).stdout == b"one\n"
            async with old.fork(1) as (child,):
                assert (await child.exec(("cat", "/version"))).stdout == b"one\n"

    asyncio.run(main())
    assert run(pool, "cat /version") == "two\n"


def test_helpers_of_what_a_name_meant_end_when_nobody_uses_them(
    pool: NativePool, images: Described, rootfs: Path
) -> None:
    async def main() -> None:
        async with pool.acquire("small") as old:
            await old.write_file("f", b"x")
            snapshot = await old.snapshot()
            digests = [images.resolve("small").digest]
            for text in ("two", "three", "four"):
                (rootfs / "version").write_text(text)
                images.store.add_directory("small", rootfs)
                digests.append(images.resolve("small").digest)
                async with pool.acquire("small") as new:
                    assert (await new.exec(("cat", "/version"))).stdout == text.encode()
            # Of the host, of the first image, which is in use, and of the last.
            assert len(pool.helper_pids) == 3
            assert (await old.exec(("cat", "/version"))).stdout == b"one\n"
        pool.forget(snapshot)
        (rootfs / "version").write_text("five")
        images.store.add_directory("small", rootfs)
        async with pool.acquire("small"):
            assert len(pool.helper_pids) == 2

    asyncio.run(main())
    # The next change of the store takes the trees that nobody holds.
    images.store.add_directory("other", rootfs)
    trees = images.resolve("small").root.parents[1]
    assert len(list(trees.iterdir())) == 1


def test_settings_that_change_change_the_next_box(pool: NativePool, images: Described) -> None:
    for colour in ("red", "blue"):
        images.settings = {"env": {"COLOUR": colour}}
        assert run(pool, "echo $COLOUR") == f"{colour}\n"


def test_an_image_stays_while_a_pool_uses_it(pool: NativePool, images: Described) -> None:
    run(pool, "cat /version")
    with pytest.raises(UserError, match="in use by a running pool"):
        images.store.remove("small")
    assert run(pool, "cat /version") == "one\n"
    asyncio.run(pool.close())
    images.store.remove("small")
    with pytest.raises(UserError, match="no image"):
        images.store.resolve("small")


def lose_root(images: Described) -> None:
    shutil.rmtree(images.store.resolve("small").root)


def file_for_root(images: Described) -> None:
    root = images.store.resolve("small").root
    shutil.rmtree(root)
    root.write_text("no directory")


def damage_record(images: Described) -> None:
    root = images.store.resolve("small").root
    (root.parent / "tree.json").write_text("{")


def remove(images: Described) -> None:
    images.store.remove("small")


def set_user(user: str) -> Callable[[Described], None]:
    return lambda images: images.settings.update(user=user)


def set_workdir(path: str) -> Callable[[Described], None]:
    return lambda images: images.settings.update(workdir=path)


BROKEN = {
    "absent": (remove, "no image"),
    "files gone": (lose_root, "cannot be used"),
    "a file": (file_for_root, "cannot be used"),
    "damaged record": (damage_record, "is damaged"),
    "unknown user": (set_user("nosuch"), "has no 'nosuch'"),
    "unknown group": (set_user("app:nosuch"), "has no 'nosuch'"),
    "a number of 5,000 digits": (set_user("1" * 5000), "a number that is none"),
    "a group of 5,000 digits": (set_user("7:" + "1" * 5000), "a number that is none"),
    "digits of another script": (set_user("\u0667"), "has no '\u0667'"),
    "id beyond the range": (set_user("4000000000"), "boxes have the ids"),
    "id of process 1": (set_user("65535"), "boxes have the ids"),
    "no working directory": (set_workdir("/srv/nowhere"), "does not have"),
    "a file to start in": (set_workdir("/version"), "does not have"),
    "relative": (set_workdir("srv/app"), "does not have"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_image_is_the_users_problem(
    pool: NativePool, images: Described, name: str
) -> None:
    break_it, message = BROKEN[name]
    break_it(images)

    async def main() -> None:
        async with pool.acquire("small"):
            raise AssertionError("there was a box")

    with pytest.raises(UserError, match=message) as caught:
        asyncio.run(main())
    assert caught.value.fix
    assert len(pool.helper_pids) == 1


def test_an_image_does_not_lead_the_look_up_out(images: Described, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret:x:7:7::/:/bin/sh\n")
    image = images.resolve("small")
    table = image.root / "etc/passwd"
    table.unlink()
    for target in (str(tmp_path / "secret"), "../../../../secret", "/proc/self/environ"):
        table.symlink_to(target)
        with pytest.raises(UserError, match="has no 'secret'"):
            job_user(msgspec.structs.replace(image, user="secret"), Identities(1, 1, 65536))
        table.unlink()
    os.mkfifo(table)
    with pytest.raises(UserError, match="has no 'secret'"):
        job_user(msgspec.structs.replace(image, user="secret"), Identities(1, 1, 65536))


@pytest.mark.parametrize("uid", ["1" * 5000, "4294967295", "-1", "\u0667", ""])
def test_a_table_with_an_id_that_is_none_does_not_have_the_name(
    images: Described, uid: str
) -> None:
    image = images.resolve("small")
    (image.root / "etc/passwd").write_text(f"odd:x:{uid}:0::/:/bin/sh\n")
    with pytest.raises(UserError, match="has no 'odd'"):
        job_user(msgspec.structs.replace(image, user="odd"), Identities(1, 1, 65536))


@pytest.mark.parametrize("privileges", Privileges)
@pytest.mark.parametrize("change", ["chmod 0 /", "chmod 4777 /", "chown :50 /; chmod 70 /"])
def test_what_a_program_did_to_the_root_directory_itself_ends_with_it(
    pool: NativePool, images: Described, privileges: Privileges, change: str
) -> None:
    needs_ids(pool)
    images.settings = {"user": "0:50"}
    if privileges is Privileges.PACKAGES:
        change = change.replace("chown :50", "chown 7:50")

    async def look(box: Sandbox) -> bytes:
        await box.write_file("f", b"x")
        assert await box.read_file("f") == b"x"
        result = await box.exec(("/bin/sh", "-c", "stat -c '%a %u %g' / && cat /version"))
        assert result.status is ExecStatus.OK, result
        return result.stdout

    async def main() -> None:
        async with pool.acquire("small", Policy(privileges=privileges)) as box:
            assert (await box.exec(("/bin/sh", "-c", change))).status is ExecStatus.OK
            assert await look(box) == b"755 0 0\none\n"
            assert (await box.exec(("/bin/sh", "-c", change))).status is ExecStatus.OK
            snapshot = await box.snapshot()
            async with box.fork(1, snapshot) as (fork,):
                assert await look(fork) == await look(box)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("", (0, 0)),
        ("0", (0, 0)),
        ("7", (7, 0)),
        ("7:8", (7, 8)),
        ("app", (1000, 1001)),
        ("app:9", (1000, 9)),
        ("7:staff", (7, 50)),
    ],
)
def test_users_are_read_as_container_engines_do(
    images: Described, user: str, expected: tuple[int, int]
) -> None:
    image = msgspec.structs.replace(images.resolve("small"), user=user)
    assert job_user(image, Identities(1, 1, 65536)) == expected
    if expected[0]:
        with pytest.raises(UserError, match="0 to 0"):
            job_user(image, Identities(1000, 1000, 1))
