import asyncio
import textwrap
from collections.abc import Awaitable, Callable, Iterator

import pytest

from burnish.core.boxes import Limits, Sandbox, StatefulSandbox
from burnish.core.errors import UserError
from burnish.core.vocabulary import FailureKind
from burnish.sandbox.bubblewrap.pool import BubblewrapPool
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.session.kernel import (
    Checkpoint,
    KernelDied,
    KernelResult,
    KernelStatus,
    PythonKernel,
)


@pytest.fixture(scope="module")
def pool() -> Iterator[NativePool]:
    try:
        made = NativePool(SandboxConfig(max_boxes=2))
    except UserError as error:
        pytest.skip(str(error))
    yield made
    asyncio.run(made.close())


Body = Callable[[PythonKernel, StatefulSandbox], Awaitable[None]]
Use = Callable[..., None]


@pytest.fixture
def use(pool: NativePool) -> Use:
    """Runs a body with a kernel in a fresh box; keywords go to the kernel."""

    def run(body: Body, **options: object) -> None:
        async def main() -> None:
            async with pool.acquire() as box:
                await body(PythonKernel(box, **options), box)  # type: ignore[arg-type]

        asyncio.run(main())

    return run


@pytest.fixture
def cells(use: Use) -> Callable[..., list[KernelResult]]:
    """Runs pieces of code one after another in one kernel."""

    def run(*codes: str, **options: float) -> list[KernelResult]:
        results: list[KernelResult] = []

        async def body(kernel: PythonKernel, box: Sandbox) -> None:
            for code in codes:
                code = textwrap.dedent(code)
                results.append(await kernel.execute(code, **options))  # type: ignore[arg-type]

        use(body)
        return results

    return run


Cells = Callable[..., list[KernelResult]]


def ok(result: KernelResult) -> KernelResult:
    assert result.status is KernelStatus.OK, result
    return result


def test_the_namespace_lasts(cells: Cells) -> None:
    *_, last = cells(
        "import math\nx = 1",
        "def f(a): return a + x",
        "class C: pass",
        "x = 41",
        "assert C.__module__ == '__main__'",
        "f(1), math.floor(2.5)",
    )
    assert ok(last).value == "(42, 2)"


def test_output_value_and_errors_are_told_apart(cells: Cells) -> None:
    printed, quiet, failed, syntax, after = cells(
        "import os, sys\nprint('a')\nos.write(1, b'\\xff')\nsys.stderr.write('e')\n'v'",
        "None",
        "def f():\n    raise KeyError('k')\nf()",
        "x = = 1",
        "1",
    )
    # Python's own buffer comes after what was written past it.
    assert sorted(printed.stdout) == sorted(b"a\n\xff")
    assert (printed.stderr, printed.value, printed.error) == (b"e", "'v'", None)
    assert (quiet.value, quiet.stdout) == (None, b"")
    assert failed.status is KernelStatus.ERROR
    assert failed.error is not None
    assert failed.error.splitlines()[-1] == "KeyError: 'k'"
    assert "raise KeyError" in failed.error
    assert "kernel_process" not in failed.error
    assert syntax.status is KernelStatus.ERROR
    assert syntax.error is not None
    assert "SyntaxError" in syntax.error
    assert ok(after).value == "1"


def test_output_of_child_processes_is_kept_too(cells: Cells) -> None:
    (result,) = cells("import subprocess\nsubprocess.run(['echo', 'from a child']).returncode")
    assert (ok(result).stdout, result.value) == (b"from a child\n", "0")


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(3)",
        "import sys\nsys.exit()",
        "raise KeyboardInterrupt",
        "raise BaseException('b')",
        "raise MemoryError",
        "x = bytearray(1 << 60)",
        "class R:\n    def __repr__(self): raise ValueError('no repr')\nR()",
        "class E(Exception):\n    def __str__(self): raise ValueError('no text')\nraise E",
        "def f(): f()\nf()",
        "input()",
        "import sys\nsys.stdout = None\nprint(1)\n1/0",
        "import sys\nsys.stdout.close()\n1/0",
        "'\\udc80'.encode()",
        "compile('(' * 10000, '', 'eval')",
    ],
)
def test_no_exception_of_the_code_ends_the_kernel(cells: Cells, code: str) -> None:
    _, bad, after = cells("x = 5", code, "x if type(x) is int else 5")
    assert bad.status is KernelStatus.ERROR, bad
    assert bad.error
    assert ok(after).value == "5"


def test_strings_that_are_no_unicode_come_out_escaped(cells: Cells) -> None:
    (result,) = cells("print('\\udc80')\nraise ValueError('\\udc80')")
    assert result.stdout == b"\\udc80\n"
    assert result.error is not None
    assert "\\udc80" in result.error


def test_output_is_cut_and_says_so(cells: Cells) -> None:
    flood, value, error, child, after = cells(
        "print('x' * 10_000_000)",
        "'y' * 100_000",
        "raise ValueError('z' * 100_000)",
        "import subprocess\nsubprocess.run('head -c 30000000 /dev/zero', shell=True).returncode",
        "1",
        max_bytes=1000,
    )
    assert flood.stdout == b"x" * 1000
    assert flood.truncated
    assert value.value == "'" + "y" * 999
    assert value.truncated
    assert error.error is not None
    assert len(error.error) == 1000
    assert error.error.endswith("zz\n")
    assert child.stdout == bytes(1000)
    assert child.truncated
    assert not ok(after).truncated


def test_a_timeout_interrupts_and_keeps_the_namespace(cells: Cells) -> None:
    _, loop, sleep, after = cells(
        "x = 1",
        "print('started', flush=True)\nwhile True: x += 1",
        "import subprocess\nsubprocess.run(['sleep', '60'])",
        "x > 1",
        timeout_s=0.5,
    )
    assert loop.status is sleep.status is KernelStatus.TIMEOUT
    assert loop.stdout == b"started\n"
    assert loop.error is not None
    assert "KeyboardInterrupt" in loop.error
    assert ok(after).value == "True"


def test_a_kernel_that_ignores_the_interrupt_is_killed(use: Use) -> None:
    async def body(kernel: PythonKernel, box: Sandbox) -> None:
        await kernel.execute("x = 1")
        saved = await kernel.checkpoint()
        stubborn = "import signal\nsignal.pthread_sigmask(0, [2])\nwhile True: pass"
        result = await kernel.execute(stubborn, timeout_s=0.2)
        assert result.status is KernelStatus.DIED
        assert "ignored the interrupt" in result.message
        assert (await kernel.execute("x")).status is KernelStatus.DIED
        await kernel.restore(saved)
        assert ok(await kernel.execute("x")).value == "1"

    use(body)


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos._exit(3)",
        "import os\nos.kill(os.getpid(), 9)",
        "import ctypes\nctypes.string_at(0)",
        "import os\nfor fd in range(3, 64):\n    try: os.close(fd)\n    except OSError: pass",
        "import os\nif os.fork() == 0:\n    import time\n    time.sleep(60)\nos._exit(1)",
    ],
)
def test_a_kernel_that_dies_is_told_and_its_checkpoints_live(use: Use, code: str) -> None:
    async def body(kernel: PythonKernel, box: Sandbox) -> None:
        await kernel.execute("x = 1")
        saved = await kernel.checkpoint()
        result = await kernel.execute("print('last words', flush=True)\n" + code, timeout_s=5.0)
        assert result.status is KernelStatus.DIED, result
        assert result.stdout == b"last words\n"
        await kernel.restore(saved)
        assert ok(await kernel.execute("x")).value == "1"
        await kernel.restart()
        assert (await kernel.execute("x")).status is KernelStatus.ERROR

    use(body)


def test_checkpoints_are_whole_states_and_can_be_restored_often(use: Use) -> None:
    async def body(kernel: PythonKernel, box: Sandbox) -> None:
        await kernel.execute("import random\nlog = ['a']\nrandom.seed(1)")
        first = await kernel.checkpoint()
        await kernel.execute("log.append('b')\nfirst_number = random.random()")
        second = await kernel.checkpoint()
        await kernel.execute("log.append('c')")
        for _ in range(3):
            await kernel.restore(first)
            assert ok(await kernel.execute("log")).value == "['a']"
            await kernel.execute("log.append('x')\nnumber = random.random()")
            await kernel.restore(second)
            assert ok(await kernel.execute("log")).value == "['a', 'b']"
        await kernel.drop(first)
        with pytest.raises(KernelDied, match="checkpoint is gone"):
            await kernel.restore(first)
        assert ok(await kernel.execute("log")).value == "['a', 'b']"

    use(body)


def test_checkpoints_are_bounded_and_leave_no_zombies(use: Use) -> None:
    async def body(kernel: PythonKernel, box: Sandbox) -> None:
        saved = await kernel.checkpoint()
        for _ in range(2):
            await kernel.checkpoint()
        with pytest.raises(KernelDied, match="drop some"):
            await kernel.checkpoint()
        for _ in range(40):
            await kernel.restore(saved)
        count = "import os\nlen([p for p in os.listdir('/proc') if p.isdigit()])"
        # Init, supervisor, three frozen ones, the live one, the messenger, and one just killed.
        value = ok(await kernel.execute(count)).value
        assert value is not None
        assert int(value) <= 9

    use(body, max_checkpoints=3)


def test_a_foreign_checkpoint_is_refused(use: Use) -> None:
    async def body(kernel: PythonKernel, box: Sandbox) -> None:
        saved = await kernel.checkpoint()
        with pytest.raises(KernelDied, match="another kernel"):
            await PythonKernel(box).restore(saved)
        await kernel.restart()
        with pytest.raises(KernelDied, match="another kernel"):
            await kernel.restore(saved)
        with pytest.raises(KernelDied, match="is gone"):
            await kernel.restore(Checkpoint(kernel=str(kernel._name), number=7))

    use(body)


def test_what_ends_the_boxs_processes_ends_the_kernel(use: Use) -> None:
    async def body(kernel: PythonKernel, box: StatefulSandbox) -> None:
        await kernel.execute("x = 1")
        await box.exec(("true",), keep=True)
        assert ok(await kernel.execute("x")).value == "1"
        await box.exec(("true",))
        result = await kernel.execute("x")
        assert result.status is KernelStatus.DIED
        assert "restart it" in result.message
        await kernel.restart()
        await kernel.execute("x = 2")
        await box.write_file("changed", b"")
        snapshot = await box.snapshot()
        assert (await kernel.execute("x")).status is KernelStatus.DIED
        await box.rollback(snapshot)
        await kernel.restart()
        assert ok(await kernel.execute("3")).value == "3"

    use(body)


def test_running_out_of_memory_is_a_result(use: Use) -> None:
    async def body(kernel: PythonKernel, box: Sandbox) -> None:
        result = await kernel.execute(
            "x = bytearray(1 << 30)\nfor i in range(0, 1 << 30, 4096): x[i] = 1"
        )
        assert result.status in (KernelStatus.DIED, KernelStatus.ERROR), result
        await kernel.restart()
        assert ok(await kernel.execute("1")).value == "1"

    use(body, limits=Limits(memory_bytes=128 * 2**20))


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"nonsense",
        b'{"status": 3}',
        b'{"status": "ok", "stdout": "\\u0394"}',
        b'{"status": "fine"}',
        b'{"status": "ok", "value": {}}',
        b"\xff",
        b'{"status": "ok", "checkpoint": -1}' * 2,
    ],
)
def test_a_forged_supervisor_gives_a_result_and_no_exception(use: Use, answer: bytes) -> None:
    forge = f"""
    import os, socket, sys
    name = sys.argv[1]
    server = socket.socket(socket.AF_UNIX)
    server.bind(chr(0) + name)
    server.listen()
    if os.fork():
        os._exit(0)
    for fd in (0, 1, 2):
        os.close(fd)
    while True:
        connection, _ = server.accept()
        while connection.recv(65536):
            pass
        connection.sendall({answer!r})
        connection.close()
    """

    async def body(kernel: PythonKernel, box: Sandbox) -> None:
        argv = ("/usr/bin/python3", "-c", textwrap.dedent(forge), "forged")
        assert (await box.exec(argv, keep=True)).exit_code == 0
        kernel._name = "forged"
        result = await kernel.execute("1")
        assert result.status is KernelStatus.DIED
        with pytest.raises(KernelDied):
            await kernel.checkpoint()

    use(body)


def test_an_interpreter_that_is_not_there_is_the_jobs_fault_in_one_line(use: Use) -> None:
    async def body(kernel: PythonKernel, box: Sandbox) -> None:
        with pytest.raises(KernelDied, match="does not start") as failure:
            await kernel.checkpoint()
        assert failure.value.failure.kind is FailureKind.POLICY

    use(body, python=("/nowhere/python3",))


def test_backends_that_keep_no_processes_say_so() -> None:
    async def main() -> None:
        try:
            pool = BubblewrapPool(SandboxConfig(max_boxes=1))
        except UserError as error:
            pytest.skip(str(error))
        try:
            async with pool.acquire() as box:
                with pytest.raises(UserError, match="ends every process"):
                    await PythonKernel(box).execute("1")
        finally:
            await pool.close()

    asyncio.run(main())
