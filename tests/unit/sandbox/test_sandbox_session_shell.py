import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burnish.core.boxes import (
    ExecResult,
    ExecStatus,
    Feature,
    Limits,
    SandboxPool,
    StatefulSandbox,
)
from burnish.core.errors import UserError
from burnish.sandbox.bubblewrap.pool import BubblewrapPool
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.session.shell import Shell, ShellSession

POOLS: dict[str, Callable[[SandboxConfig], SandboxPool]] = {
    "native": NativePool,
    "bubblewrap": BubblewrapPool,
}


@pytest.fixture(
    scope="module",
    params=["native", pytest.param("bubblewrap", marks=pytest.mark.slow)],
)
def pool(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    try:
        made = POOLS[request.param](SandboxConfig(max_boxes=4))
    except UserError as error:
        pytest.skip(str(error))
    yield made
    asyncio.run(made.close())


Run = Callable[..., list[ExecResult]]


@pytest.fixture
def run(pool: SandboxPool) -> Run:
    """Runs commands one after another in one session of a fresh box."""

    def commands(*texts: str, shell: Shell = Shell.BASH, **options: int) -> list[ExecResult]:
        async def main() -> list[ExecResult]:
            async with pool.acquire() as box:
                session = ShellSession(box, shell, **options)  # type: ignore[arg-type]
                return [await session.run(text) for text in texts]

        return asyncio.run(main())

    return commands


def last(results: list[ExecResult]) -> str:
    assert results[-1].status is ExecStatus.OK, results[-1]
    return results[-1].stdout.decode()


both_shells = pytest.mark.parametrize("shell", list(Shell))


@both_shells
@pytest.mark.parametrize(
    ("set_up", "ask", "answer"),
    [
        ("cd /usr/bin", "pwd", "/usr/bin\n"),
        ("cd /usr; cd /bin", "cd - > /dev/null; pwd", "/usr\n"),
        ("x='a  b\n$c`d`\"e'\\''f'", 'printf "%s" "$x"', "a  b\n$c`d`\"e'f"),
        ("export X=1 Y=2; Y=3", "env | grep -E '^[XY]=' | sort", "X=1\nY=3\n"),
        ("x=1; export x; unset x; x=2", "env | grep -c ^x= || :", "0\n"),
        ("unset HOME", 'echo "${HOME-none}"', "none\n"),
        ("PATH=/nowhere", 'echo "$PATH"', "/nowhere\n"),
        ("alias hi='echo \"it is\"'", "hi me", "it is me\n"),
        ("set -u -f", "case $- in *f*u*|*u*f*) echo yes;; esac", "yes\n"),
        ("set -C", "case $- in *C*) echo yes;; esac", "yes\n"),
        ("umask 027", "umask", "0027\n"),
        ("IFS=,", "v=a,b; for i in $v; do echo $i; done", "a\nb\n"),
        ("readonly r=1", "echo $r; (r=2) 2>/dev/null || echo refused", "1\nrefused\n"),
        ("x=1; exit 3", "echo $x", "1\n"),
        ("x=1; false", "echo $x", "1\n"),
        ("set -e; x=1; false; x=2", "set +e; echo $x", "1\n"),
        ("x=1\nif", "echo ok", "ok\n"),
        ("x=1; trap 'echo bye' EXIT", "echo $x", "1\n"),
        ("x=1; sleep 60 &", "echo $x", "1\n"),
        ("x=1; (x=2; exit 1)", "echo $x", "1\n"),
        ("x=1; . /dev/null; eval 'y=2'", "echo $x$y", "12\n"),
        ("x=\xe9\u2028", "printf %s $x", "\xe9\u2028"),
        ("x=$(printf '\\377\\1')", 'printf %s "$x" | od -An -tx1', " ff 01\n"),
        ("cd /work; mkdir 'a b'; cd 'a b'", "pwd", "/work/a b\n"),
        ("exec 5</dev/null; x=1", "echo $x", "1\n"),
    ],
)
def test_what_a_command_sets_is_there_for_the_next(
    run: Run, shell: Shell, set_up: str, ask: str, answer: str
) -> None:
    assert last(run(set_up, ask, shell=shell)) == answer
    # Once more, as reading and writing the state must not change it.
    assert last(run(set_up, ":", ":", ask, shell=shell)) == answer


@pytest.mark.parametrize(
    ("set_up", "ask", "answer"),
    [
        ('f() { echo "f $1"; }', "f 1", "f 1\n"),
        ("f() { :; }; export -f f", "bash -c 'f && echo yes'", "yes\n"),
        ("a=(1 '2 3' [9]=x)", 'echo "${a[1]} ${#a[@]} ${a[9]}"', "2 3 3 x\n"),
        ("declare -A m=(['k 1']=v)", 'echo "${m[k 1]}"', "v\n"),
        ("declare -i n=1", "n+=2; echo $n", "3\n"),
        ("declare -n ref=x; x=5", "echo $ref", "5\n"),
        ("set -- a 'b c'", 'echo "$2 $#"', "b c 2\n"),
        ("shopt -s nullglob", "echo [z]*q", "\n"),
        ("set -o pipefail", "false | true || echo fails", "fails\n"),
        ("shopt -s extglob\ng() { case $1 in @(a|b)) echo ext;; esac; }", "g a", "ext\n"),
        ("alias ls='ls -d'\ng() { ls /; }", "declare -f g | grep -c -- '-d -d' || :", "0\n"),
        ("trap 'echo bye' EXIT; x=1; exit 2", "echo $x", "1\n"),
        ("printf() { echo fake; }; declare() { :; }; shopt() { :; }; x=1", "echo $x", "1\n"),
        ("set -o posix; alias q='echo q'", "q", "q\n"),
    ],
)
def test_bash_keeps_what_only_bash_has(run: Run, set_up: str, ask: str, answer: str) -> None:
    assert last(run(set_up, ask)) == answer
    assert last(run(set_up, ":", ":", ask)) == answer


def test_parameters_of_a_function_that_exits_are_not_the_sessions(run: Run) -> None:
    assert last(run("set -- a", "f() { exit 1; }; f x y", "echo $@")) == "a\n"


@both_shells
def test_the_exit_status_is_that_of_the_shell_alone(pool: SandboxPool, shell: Shell) -> None:
    commands = (
        *("true", "false", "", "# nothing", "exit 42", "(exit 7)", "nosuchprogram", "if", "x=1; )"),
        *("set -e; false; true", "set -u; echo $undefined", "f() { return 3; }; f"),
        *("f() { exit 5; }; f", "trap 'exit 9' EXIT", "exec false", "exec nosuchprogram"),
        *("kill -15 $$", "kill -9 $$", "echo $((1/0))", "cd /nowhere", "readonly r=1; r=2"),
    )

    async def main() -> None:
        async with pool.acquire() as box:
            for command in commands:
                session = ShellSession(box, shell)
                await session.run("x=1")
                found = await session.run(command)
                alone = await box.exec((shell.value, "-c", command))
                seen, expected = (
                    (command, result.status, result.exit_code, result.signal)
                    for result in (found, alone)
                )
                assert seen == expected

    asyncio.run(main())


@both_shells
def test_the_end_of_a_command_leaves_no_trace_on_its_output(run: Run, shell: Shell) -> None:
    for result in run("set -x -v", "set +x +v", ":", shell=shell):
        assert result.stdout == b""
    assert run("echo a >&2", shell=shell)[-1].stderr == b"a\n"
    traced = run("set -x", "echo hi", shell=shell)[-1].stderr
    assert b"burnish" not in traced
    assert b"echo hi" in traced


def test_an_exit_trap_runs_once_with_the_status_of_its_command(run: Run) -> None:
    first, second = run("trap 'echo bye $?' EXIT; (trap 'echo inner' EXIT); exit 4", "echo next")
    assert first.stdout == b"inner\nbye 4\n"
    assert first.exit_code == 4
    assert second.stdout == b"next\n"


@both_shells
def test_a_directory_that_is_gone_is_told(run: Run, shell: Shell) -> None:
    gone = "mkdir -p /work/d; cd /work/d; rmdir ../d"
    result = run(gone, "pwd", shell=shell)[-1]
    assert result.stdout == b"/work\n"
    assert b"/work/d is gone" in result.stderr


@both_shells
def test_more_than_may_be_kept_is_not_and_says_so(run: Run, shell: Shell) -> None:
    first, second, third = run(
        "x=1",
        "x=2; y=$(printf '%20000s' '')",
        'echo "$x ${#y}"',
        shell=shell,
        max_state_chars=16 * 1024,
    )
    assert first.stderr == b""
    assert b"not kept" in second.stderr
    assert second.exit_code == 0
    assert third.stdout == b"1 0\n"


@both_shells
def test_a_command_that_is_killed_leaves_the_session_as_it_was(run: Run, shell: Shell) -> None:
    results = run("x=1", "x=2; kill -9 $$", "echo $x", shell=shell)
    assert results[1].status is ExecStatus.SIGNAL
    assert results[2].stdout == b"1\n"


@both_shells
def test_what_a_job_writes_over_the_state_hurts_this_session_only(run: Run, shell: Shell) -> None:
    spoil = 'for f in /tmp/.session-*; do printf "%s" "x=\\"" > "$f"; done'
    # The damage is done while the command runs, and repaired when it ends.
    assert last(run("x=1", spoil, "x=2", "echo $x", shell=shell)) == "2\n"
    # What is damaged behind the session's back is lost, and it begins anew.
    spoil_later = f"trap '{spoil}' EXIT" if shell is Shell.BASH else ":"
    assert last(run("x=1", spoil_later, "x=3", "echo $x", shell=shell)) == "3\n"


@both_shells
def test_a_full_disk_is_told_and_leaves_the_session_as_it_was(run: Run, shell: Shell) -> None:
    fill = "x=2; cat /dev/zero > /tmp/fill 2>/dev/null; y=$(printf '%9000s' '')"
    results = run("x=1", fill, "echo $x; rm /tmp/fill", "x=4", "echo $x", shell=shell)
    assert b"not kept" in results[1].stderr
    assert results[2].stdout == b"1\n"
    assert results[4].stdout == b"4\n"


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(value=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_any_value_survives(run: Run, value: str) -> None:
    quoted = "'" + value.replace("'", "'\\''") + "'"
    for shell in Shell:
        results = run(f"x={quoted}", ":", 'printf "%s" "$x"', shell=shell)
        assert results[-1].stdout.decode() == value


def test_stdin_is_the_commands(pool: SandboxPool) -> None:
    async def main() -> None:
        async with pool.acquire() as box:
            result = await ShellSession(box).run("cat", stdin=b"\0\xff\n")
            assert result.stdout == b"\0\xff\n"

    asyncio.run(main())


def test_a_timeout_is_a_timeout_and_the_session_goes_on(pool: SandboxPool) -> None:
    async def main() -> None:
        async with pool.acquire() as box:
            session = ShellSession(box)
            await session.run("x=1")
            result = await session.run("x=2; sleep 60", Limits(wall_s=0.2))
            assert result.status is ExecStatus.TIMEOUT
            assert (await session.run("echo $x")).stdout == b"1\n"

    asyncio.run(main())


def test_sessions_of_one_box_do_not_share(pool: SandboxPool) -> None:
    async def main() -> None:
        async with pool.acquire() as box:
            first, second = ShellSession(box), ShellSession(box, cwd="/usr")
            await first.run("x=1")
            assert (await second.run("echo ${x-none}; pwd")).stdout == b"none\n/usr\n"

    asyncio.run(main())


def test_a_command_that_is_too_long_is_refused_in_one_line(pool: SandboxPool) -> None:
    async def main() -> None:
        async with pool.acquire() as box:
            with pytest.raises(ValueError, match="write a script"):
                await ShellSession(box).run("#" * 200_000)
            assert (await ShellSession(box).run("#" * 90_000)).exit_code == 0

    asyncio.run(main())


def with_state(pool: SandboxPool, body: Callable[[StatefulSandbox], Awaitable[None]]) -> None:
    if Feature.SNAPSHOTS not in pool.capabilities.features:
        pytest.skip("this backend has no snapshots here: use the native one")

    async def main() -> None:
        async with pool.acquire() as box:
            await body(box)  # type: ignore[arg-type]

    asyncio.run(main())


@both_shells
def test_a_rollback_takes_the_session_back(pool: SandboxPool, shell: Shell) -> None:
    async def body(box: StatefulSandbox) -> None:
        session = ShellSession(box, shell)
        await session.run("x=1; cd /usr")
        snapshot = await box.snapshot()
        await session.run("x=2; cd /bin; y=3")
        await session.run("x=3")
        await box.rollback(snapshot)
        assert (await session.run('echo "$x ${y-none}"; pwd')).stdout == b"1 none\n/usr\n"

    with_state(pool, body)


def test_forks_continue_the_session_each_for_itself(pool: SandboxPool) -> None:
    async def body(box: StatefulSandbox) -> None:
        session = ShellSession(box)
        await session.run("x=1; f() { echo $x; }")
        async with box.fork(2) as forks:
            first, second = (session.of(fork) for fork in forks)
            await first.run("x=2")
            assert (await first.run("f")).stdout == b"2\n"
            assert (await second.run("f")).stdout == b"1\n"
        assert (await session.run("f")).stdout == b"1\n"

    with_state(pool, body)
