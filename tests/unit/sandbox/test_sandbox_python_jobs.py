"""Warm Python as owners see it: boxes of a template in a pool."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from burnish.core.boxes import ExecStatus, Feature, Limits
from burnish.core.errors import UserError
from burnish.sandbox.audit import AuditedPool, read, verify_all
from burnish.sandbox.audit.events import Failed, Started
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.measured import MeasuredPool
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.native.protocol import PythonKind
from burnish.sandbox.native.python_jobs import WarmBox
from burnish.sandbox.native.templates import Template, check_template, template_command

MODULES = ("json", "random")


@pytest.fixture(scope="module")
def pool() -> Iterator[NativePool]:
    try:
        made = NativePool(SandboxConfig(max_boxes=8, warm_boxes=0))
    except UserError as error:
        pytest.skip(str(error))
    if Feature.WARM_PYTHON not in made.capabilities.features:
        pytest.skip("install python3: this host has none below /usr")
    yield made
    asyncio.run(made.close())


def in_box(pool: NativePool, use: Callable[[WarmBox], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with pool.acquire_python(MODULES) as box:
            return await use(box)

    return asyncio.run(main())


def test_a_program_runs_with_its_modules_there(pool: NativePool) -> None:
    code = "import sys; print('json' in sys.modules, sys.argv, input())"
    result = in_box(pool, lambda box: box.python(code, argv=("a",), stdin=b"in\n"))
    assert (result.status, result.exit_code) == (ExecStatus.OK, 0)
    assert result.stdout == b"True ['-c', 'a'] in\n"


def test_scripts_and_modules_run_too(pool: NativePool) -> None:
    async def use(box: WarmBox) -> list[bytes]:
        await box.write_file("part.py", b"print(__name__, __file__)")
        script = await box.python("part.py", kind=PythonKind.SCRIPT)
        module = await box.python("part", kind=PythonKind.MODULE, isolated=False)
        return [script.stdout, module.stdout]

    assert in_box(pool, use) == [b"__main__ /work/part.py\n"] * 2


def test_a_pool_with_logs_has_them_too_and_logs_the_command(
    pool: NativePool, tmp_path: Path
) -> None:
    audited = AuditedPool(pool, tmp_path)
    assert Feature.WARM_PYTHON in audited.capabilities.features

    async def main() -> None:
        async with audited.acquire_python(MODULES) as box:
            result = await box.python("import sys; print(sys.argv[1:])", argv=("a",))
            assert result.stdout == b"['a']\n"
            assert (await box.exec(("true",))).status is ExecStatus.OK
            with pytest.raises(ValueError, match="NUL"):
                await box.python("\0")

    asyncio.run(main())
    (report,) = verify_all(tmp_path)
    assert (report.ok, report.ended) == (True, True)
    events = [line.event for line in read(Path(report.path))]
    started = [event.argv for event in events if isinstance(event, Started)]
    assert started[0] == ("python3", "-I", "-B", "-c", "import sys; print(sys.argv[1:])", "a")
    assert started[1] == ("true",)
    assert [event.operation for event in events if isinstance(event, Failed)] == ["exec"]


def test_pools_around_others_promise_no_warm_python_that_they_do_not_have(
    pool: NativePool, tmp_path: Path
) -> None:
    measured = MeasuredPool(pool)
    for outer in (measured, AuditedPool(measured, tmp_path)):
        assert Feature.WARM_PYTHON not in outer.capabilities.features
    with pytest.raises(UserError, match="no warm Python"):
        AuditedPool(measured, tmp_path).acquire_python()


def test_endings_are_told_as_those_of_commands(pool: NativePool) -> None:
    async def use(box: WarmBox) -> list[Any]:
        limits = Limits(memory_bytes=64 * 2**20, wall_s=0.3)
        runs = [
            await box.python("import sys; sys.exit(3)"),
            await box.python("import os; os.abort()"),
            await box.python("while True: pass", limits=limits),
            await box.python("x = bytearray(300 * 2**20)", limits=Limits(memory_bytes=64 * 2**20)),
            await box.python("print('x' * 10**6)"),
            await box.python("1 / 0"),
        ]
        return [(run.status, run.exit_code) for run in runs]

    assert in_box(pool, use) == [
        (ExecStatus.EXIT, 3),
        (ExecStatus.SIGNAL, None),
        (ExecStatus.TIMEOUT, None),
        (ExecStatus.OOM, None),
        (ExecStatus.OUTPUT, None),
        (ExecStatus.EXIT, 1),
    ]


def test_boxes_of_a_template_have_states(pool: NativePool) -> None:
    async def use(box: WarmBox) -> list[bytes]:
        await box.python("open('x', 'w').write('1')")
        snapshot = await box.snapshot()
        await box.python("open('x', 'w').write('2')")
        await box.rollback(snapshot)
        seen = [(await box.python("print(open('x').read())")).stdout]
        async with box.fork(2) as copies:
            for copy in copies:
                assert isinstance(copy, WarmBox)
                seen.append((await copy.python("print(open('x').read())")).stdout)
        return seen

    assert in_box(pool, use) == [b"1\n"] * 3


def template_pid(pool: NativePool) -> int:
    (launcher,) = {*pool.helper_pids} - {pool.helper_pids[0]}
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text(encoding="ascii")
    return int(children.split()[0])


def test_a_template_that_was_killed_is_started_again(pool: NativePool) -> None:
    async def main() -> bytes:
        async with pool.acquire_python(MODULES) as box:
            await box.python("1")
        os.kill(template_pid(pool), signal.SIGKILL)
        async with pool.acquire_python(MODULES) as box:
            return (await box.python("print('again')")).stdout

    assert asyncio.run(main()) == b"again\n"


def test_a_module_that_is_not_there_is_named_with_the_fix(pool: NativePool) -> None:
    async def main() -> None:
        async with pool.acquire_python(("no_such_module",)):
            pass

    with pytest.raises(UserError, match="no_such_module") as caught:
        asyncio.run(main())
    assert "modules" in caught.value.fix


@pytest.mark.parametrize(
    "template",
    [Template(("a b",)), Template(("-c",)), Template(("",)), Template((), paths=("relative",))],
)
def test_what_is_no_module_or_directory_is_refused(template: Template) -> None:
    with pytest.raises(UserError):
        check_template(template)


@pytest.mark.parametrize("source", ["a\0b", "x" * (9 * 2**20)])
def test_programs_that_no_machine_could_run_are_refused(pool: NativePool, source: str) -> None:
    with pytest.raises(ValueError, match="program"):
        in_box(pool, lambda box: box.python(source))


def test_images_bring_their_own_interpreter() -> None:
    assert "python3" in template_command(Template(()), has_image=True)
