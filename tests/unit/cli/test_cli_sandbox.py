"""`burnish sandbox`, with a daemon of its own that is always stopped."""

import io
import json
import os
import select
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from burnish.cli.main import main
from burnish.cli.sandbox import duration
from burnish.cli.sandbox_exec import num_bytes
from burnish.core.errors import UserError
from burnish.sandbox.remote import daemon

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def state() -> Iterator[Path]:
    """Where the daemon of this module keeps its logs."""
    # A socket's path is short, and that of pytest's folders need not be.
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        patch.setenv("XDG_STATE_HOME", str(Path(folder, "state")))
        yield Path(folder, "state/burnish/sandbox-audit")
        daemon.stop()


@pytest.fixture
def call(
    state: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Call:
    """Runs a verb in this process: (exit status, stdout, stderr)."""

    def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(given))
            with pytest.raises(SystemExit) as caught:
                main(("sandbox", *arguments))
        out, err = capfdbinary.readouterr()
        return int(caught.value.code or 0), out.decode(errors="replace"), err.decode()

    return run


@pytest.fixture
def box(call: Call) -> str:
    status, out, err = call("create")
    if status:
        pytest.skip(f"no box runs here: {err}")
    return out.strip()


def test_a_box_lives_from_one_command_to_the_next(call: Call, box: str) -> None:
    assert call("exec", box, "--", "sh", "-c", "echo text > f") == (0, "", "")
    assert call("exec", box, "cat", "f") == (0, "text\n", "")
    status, out, _ = call("list", "--json")
    (row,) = [row for row in json.loads(out) if row["id"] == box]
    assert (status, row["num_commands"], row["busy"]) == (0, 2, False)
    assert box in call("list")[1]
    assert call("destroy", box) == (0, "", "")
    assert box not in call("list")[1]
    assert call("exec", box, "true")[0] == 2


def test_streams_pass_unchanged(call: Call, box: str) -> None:
    assert call("exec", box, "--", "cat", stdin=b"a\nb\0c") == (0, "a\nb\0c", "")
    status, out, err = call("exec", box, "--", "sh", "-c", "echo out; echo err >&2")
    assert (status, out, err) == (0, "out\n", "err\n")


@pytest.mark.parametrize(
    ("script", "flags", "status", "said"),
    [
        ("exit 3", (), 3, ""),
        ("kill -9 $$", (), 137, ""),
        ("kill -15 $$", (), 143, ""),
        ("sleep 1000", ("--timeout", "0.2"), 124, "timeout: wall-clock limit"),
        ("yes", ("--output", "1K"), 137, "output: output limit"),
        ("no-such-program", (), 127, ""),
        ("head -c 9000000 /dev/zero > f", ("--disk", "1M"), None, "disk"),
    ],
)
def test_exit_statuses_are_those_of_a_shell(
    call: Call, box: str, script: str, flags: tuple[str, ...], status: int | None, said: str
) -> None:
    found, _, err = call("exec", box, *flags, "--", "sh", "-c", script)
    assert found == status if status is not None else found > 0
    assert said in err


def test_the_result_is_data_for_programs(call: Call, box: str) -> None:
    script = "printf 'caf\\303\\251'; printf '\\377' >&2; exit 4"
    status, out, err = call("exec", box, "--json", "--", "sh", "-c", script)
    result = json.loads(out)
    assert (status, err) == (4, "")
    assert (result["status"], result["exit_code"], result["exit_status"]) == ("exit", 4, 4)
    assert (result["stdout"], result["stderr_base64"]) == ("caf\u00e9", "/w==")
    assert "stdout_base64" not in result


def test_flags_after_the_dashes_are_the_commands(call: Call, box: str) -> None:
    assert call("exec", box, "--", "echo", "--json", "--debug", "--", "-x")[1] == (
        "--json --debug -- -x\n"
    )


def test_variables_and_directory_are_set(call: Call, box: str) -> None:
    script = 'echo "$A:$B:$PWD"'
    flags = ("--env", "A=1", "--env", "B=x=y", "--cwd", "/tmp")
    assert call("exec", box, *flags, "--", "sh", "-c", script)[1] == "1:x=y:/tmp\n"


def test_a_backend_without_snapshots_or_images_says_so(call: Call, box: str) -> None:
    features = json.loads(call("stats", "--json")[1])["backend"]
    if features != "bubblewrap":
        pytest.skip(f"the {features} sandbox has them")
    for verb in (("snapshot", box), ("rollback", box, "x"), ("fork", box)):
        status, out, err = call(*verb)
        assert (status, out) == (2, "")
        assert "has no snapshots" in err
        assert "Fix: " in err
    assert call("create", "--image", "debian")[0] == 2
    assert call("create", "--allow", "pypi.org")[0] == 2


@pytest.fixture
def stateful(call: Call, box: str) -> str:
    """A box that can be snapshotted."""
    status, _, err = call("snapshot", box)
    if status:
        pytest.skip(f"the native sandbox does not run here (`burnish doctor` says why): {err}")
    return box


def test_what_a_box_may_reach_is_changed(call: Call) -> None:
    status, box, err = call("create", "--allow", "pypi.org")
    if status:
        pytest.skip(f"boxes have no network here: {err}")
    box = box.strip()

    def allowed() -> list[str]:
        return next(b for b in json.loads(call("list", "--json")[1]) if b["id"] == box)["policy"][
            "allow"
        ]

    assert allowed() == ["pypi.org"]
    assert call("allow", box, "example.org", "*.example.org:8443") == (0, "", "")
    assert allowed() == ["example.org", "*.example.org:8443"]
    status, _, err = call("allow", box, "http://a b")
    assert (status, "Fix: " in err) == (2, True)
    assert json.loads(call("allow", box, "--json")[1]) == {"id": box, "allow": []}
    assert allowed() == []
    assert call("allow", "absent")[0] == 2


def put(call: Call, box: str, text: str) -> None:
    assert call("exec", box, "--", "sh", "-c", f"echo {text} > f")[0] == 0


def test_files_go_back_to_a_snapshot(call: Call, stateful: str) -> None:
    put(call, stateful, "old")
    snapshot = call("snapshot", stateful)[1]
    put(call, stateful, "new")
    assert call("rollback", stateful, snapshot.strip()) == (0, "", "")
    assert call("exec", stateful, "cat", "f")[1] == "old\n"
    assert call("rollback", stateful, "absent")[0] == 2


def test_forks_have_the_files_and_lives_of_their_own(call: Call, stateful: str) -> None:
    put(call, stateful, "old")
    snapshot = json.loads(call("snapshot", stateful, "--json")[1])["id"]
    put(call, stateful, "new")
    forks = call("fork", stateful, "-n", "2")[1].split()
    forks += call("fork", stateful, "--snapshot", snapshot)[1].split()
    assert call("destroy", stateful)[0] == 0
    found = [call("exec", fork, "cat", "f")[1] for fork in forks]
    assert found == ["new\n", "new\n", "old\n"]
    assert json.loads(call("destroy", *forks, "--json")[1]) == forks


def test_files_travel_as_a_tar(call: Call, stateful: str, tmp_path: Path) -> None:
    put(call, stateful, "text")
    file = tmp_path / "out.tar"
    status, digest, _ = call("export", stateful, str(file))
    assert (status, digest.partition(":")[0]) == (0, "sha256")
    other = call("create")[1].strip()
    assert call("import", other, str(file)) == (0, "", "")
    assert call("exec", other, "cat", "f")[1] == "text\n"
    file.write_bytes(b"no tar")
    status, out, err = call("import", other, str(file))
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert "Fix: " in err


def test_endless_input_is_one_line_and_not_read_to_its_end(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burnish.cli.sandbox_exec._MAX_STDIN_BYTES", 2**20)
    status, out, err = call("exec", "absent", "--", "head", "-1", stdin=b"y" * (2**20 + 1))
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert "more than the 1 MiB" in err
    assert "Fix: head -c 1048576" in err


WRONG = [
    ("exec", "BOX"),
    ("exec", "BOX", "--memory", "much", "--", "true"),
    ("exec", "BOX", "--memory", "1K", "--", "true"),
    ("exec", "BOX", "--timeout", "0", "--", "true"),
    ("exec", "BOX", "--timeout", "nan", "--", "true"),
    ("exec", "BOX", "--pids", "4194304", "--", "true"),
    ("exec", "BOX", "--disk", "64T", "--", "true"),
    ("exec", "BOX", "--env", "novalue", "--", "true"),
    ("exec", "BOX", "--cwd", "relative", "--", "true"),
    ("exec", "absent", "--", "true"),
    ("exec", "../../etc", "--", "true"),
    ("exec", "000000000000", "--", "true"),
    ("destroy", "absent"),
    ("destroy",),
    ("snapshot", "absent"),
    ("fork", "BOX", "-n", "0"),
    ("export", "BOX", "/absent/file.tar"),
    ("import", "BOX", "/absent/file.tar"),
    ("audit", "verify", "/absent"),
    ("audit", "show", "/absent"),
    ("serve",),
    ("serve", "--listen", "0.0.0.0:1"),
    ("serve", "--listen", "127.0.0.1:0", "--backend", "absent"),
    ("serve", "--listen", "127.0.0.1:0", "--max-boxes", "0"),
    ("serve", "--listen", "127.0.0.1:0", "--lease", "0"),
    ("serve", "--listen", "127.0.0.1:0", "--token-file", "/absent"),
]


def test_wrong_input_is_one_line_with_a_fix(call: Call, box: str) -> None:
    for arguments in WRONG:
        status, out, err = call(*(box if a == "BOX" else a for a in arguments))
        assert (status, out) == (2, ""), arguments
        assert len(err.splitlines()) == 1, err
        assert "Fix: " in err
    assert call("exec", box, "true")[0] == 0


@pytest.mark.parametrize(
    "records",
    [
        {"GNU.sparse.map": "0,x"},
        {"GNU.sparse.map": "1" * 5000},
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"},
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "x"},
        {"GNU.sparse.size": "x", "GNU.sparse.numblocks": "1"},
        {"size": "x"},
        {"size": "-" + "1" * 5000},
    ],
)
def test_an_archive_that_the_standard_library_cannot_read_is_not_our_bug(
    call: Call, tmp_path: Path, records: dict[str, str]
) -> None:
    body = b"".join(pax_record(name, value) for name, value in records.items())
    with tarfile.open(tmp_path / "odd.tar", "w") as tar:
        header = tarfile.TarInfo("pax")
        header.type, header.size = tarfile.XHDTYPE, len(body)
        tar.addfile(header, io.BytesIO(body))
        member = tarfile.TarInfo("f")
        member.size = 512
        tar.addfile(member, io.BytesIO(b"no map\n" * 512))
    status, _, said = call("image", "add", "x", str(tmp_path / "odd.tar"))
    assert status == 2, said
    assert "bug" not in said
    assert len(said.splitlines()) == 1


def pax_record(name: str, value: str) -> bytes:
    text = f" {name}={value}\n".encode()
    size = len(text)
    while size != len(text) + len(str(size)):
        size = len(text) + len(str(size))
    return str(size).encode() + text


@pytest.mark.parametrize("verb", ["exec", "destroy", "snapshot"])
def test_a_wrong_id_suggests_the_list(call: Call, verb: str) -> None:
    more = ("--", "true") if verb == "exec" else ()
    assert "Fix: burnish sandbox list" in call(verb, "000000000000", *more)[2]


def test_asking_starts_no_daemon(call: Call) -> None:
    call("stop")
    assert json.loads(call("list", "--json")[1]) == []
    assert json.loads(call("stats", "--json")[1]) is None
    assert json.loads(call("stop", "--json")[1]) == {"stopped": False}
    assert daemon.running_url() is None


def test_what_was_done_is_in_a_log_that_verifies(call: Call, box: str, state: Path) -> None:
    call("exec", box, "--", "echo", "hello")
    (row,) = [row for row in json.loads(call("list", "--json")[1]) if row["id"] == box]
    (log,) = state.glob(f"*/*-{row['local_id']}.jsonl")
    assert "echo hello" in call("audit", "show", str(log))[1]
    assert call("audit", "verify")[0] == 0
    honest = log.read_text()
    log.write_text(honest.replace("hello", "hullo"))
    assert call("audit", "verify")[0] == 1
    status, out, _ = call("audit", "verify", str(log), "--json")
    assert (status, json.loads(out)[0]["ok"]) == (1, False)
    log.write_text(honest)


def test_stop_ends_the_daemon_and_its_boxes(call: Call, box: str) -> None:
    pid = json.loads(call("stats", "--json")[1])["pid"]
    assert call("stop") == (0, "", "")
    assert not Path(f"/proc/{pid}").exists() or _is_dead(pid)
    assert "there is no box" in call("exec", box, "true")[2]


def test_a_killed_daemon_is_replaced_and_its_boxes_are_gone(call: Call, box: str) -> None:
    pid = json.loads(call("stats", "--json")[1])["pid"]
    process = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select((process,), (), ())
    os.close(process)
    status, _, err = call("exec", box, "true")
    assert status == 2
    assert f"box '{box}' is gone: the daemon of sandboxes was killed" in err
    assert json.loads(call("list", "--json")[1]) == []
    removed = json.loads(call("sweep", "--json")[1])
    assert "socket" in [row["kind"] for row in removed]
    status, out, _ = call("create")
    assert status == 0
    assert out.strip() != box
    assert "there is no box" in call("exec", box, "true")[2]


@pytest.mark.slow
def test_many_commands_at_once_start_one_daemon(call: Call, box: str) -> None:
    call("stop")
    code = "from burnish.cli.main import main; main(['sandbox', 'create'])"
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(4)
    ]
    ids = {process.communicate()[0].strip() for process in started}
    assert len(ids) == 4
    assert json.loads(call("stats", "--json")[1])["num_boxes"] == 4


def test_an_interrupted_command_ends_in_the_box(call: Call, box: str) -> None:
    code = f"from burnish.cli.main import main; main(['sandbox', 'exec', '{box}', 'sleep', '1000'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    while not json.loads(call("stats", "--json")[1])["num_running"]:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    err = process.communicate()[1]
    assert (process.returncode, err) == (130, b"burnish: Interrupted.\n")
    while json.loads(call("stats", "--json")[1])["num_running"]:
        continue
    assert call("exec", box, "true")[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_command_of_a_killed_client_ends_before_the_next_begins(
    call: Call, box: str, number: signal.Signals
) -> None:
    code = f"from burnish.cli.main import main; main(['sandbox', 'exec', '{box}', 'sleep', '1000'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL)
    while not json.loads(call("stats", "--json")[1])["num_running"]:
        assert process.poll() is None
    process.send_signal(number)
    assert process.wait() == -number
    while json.loads(call("stats", "--json")[1])["num_running"]:
        continue
    assert call("exec", box, "true")[0] == 0


def test_a_folder_of_somebody_else_is_not_used(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "burnish").mkdir(mode=0o755)
    for verb in ("create", "list", "sweep"):
        status, _, err = call(verb)
        assert status == 2
        assert "not a directory of yours alone" in err
    (tmp_path / "burnish").rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "burnish").symlink_to("elsewhere")
    assert call("create")[0] == 2
    (tmp_path / "burnish").unlink()


def test_serving_says_where_and_ends_in_order(tmp_path: Path) -> None:
    code = "import sys; from burnish.cli.main import main; main(sys.argv[1:])"
    command = ["sandbox", "serve", "--listen", "127.0.0.1:0", "--max-boxes", "2"]
    process = subprocess.Popen([sys.executable, "-c", code, *command], stdout=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    process.send_signal(signal.SIGINT)
    assert process.wait() in (0, 2)
    process.stdout.close()
    if line:
        assert "boxes at http://127.0.0.1:" in line


def test_sizes() -> None:
    found = [num_bytes(text, "--x") for text in ("0", "4096", "64k", "256M", "2G", "1MiB", "1GB")]
    assert found == [0, 4096, 2**16, 2**28, 2**31, 2**20, 2**30]
    for text in ("", "M", "-1", "1.5G", "1X", "1 M", "\u0661"):
        with pytest.raises(UserError, match="--x"):
            num_bytes(text, "--x")


def test_durations() -> None:
    shown = [duration(s) for s in (0, 119, 120, 7199, 7200, 172799, 172800)]
    assert shown == ["0 s", "119 s", "2 min", "119 min", "2 h", "47 h", "2 d"]


def _is_dead(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--timeout", "0"), "Fix: raise --timeout"),
        (("--memory", "1M"), "Fix: raise --memory"),
        (("--disk", "1"), "Fix: raise --disk"),
        (("--pids", "0"), "Fix: raise --pids"),
        (("--cwd", "here"), "Fix: --cwd /work/here"),
        (("--timeout", "soon"), "Fix: burnish sandbox exec --help"),
    ],
)
def test_a_wrong_flag_is_named_with_what_puts_it_right(
    call: Call, flags: tuple[str, ...], said: str
) -> None:
    status, out, err = call("exec", "0123456789ab", *flags, "--", "true")
    assert (status, out) == (2, "")
    assert err.rstrip().endswith(said)


def test_a_command_that_hits_a_limit_is_told_the_flag(call: Call, box: str) -> None:
    status, _, err = call("exec", box, "--timeout", "0.1", "--", "sleep", "9")
    assert (status, "(--timeout raises it)" in err) == (124, True)


def test_more_forks_than_boxes_are_refused_at_once(call: Call, stateful: str) -> None:
    status, _, err = call("fork", stateful, "-n", "10000")
    assert status == 2
    assert "asked for 10000 boxes at once" in err


def test_what_is_no_tar_is_named_once_and_a_full_box_is_given_more_room(
    call: Call, stateful: str, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("no tar")
    status, _, err = call("import", stateful, str(text))
    assert (status, err.count(str(text))) == (2, 1)
    big = tmp_path / "big.tar"
    with tarfile.open(big, "w") as tar:
        info = tarfile.TarInfo("work/big")
        info.size = 70 * 2**20
        tar.addfile(info, io.BytesIO(bytes(info.size)))
    status, _, err = call("import", stateful, str(big))
    assert status == 2
    fix = err.partition("Fix: burnish sandbox ")[2].partition(" gives")[0].split()
    assert call(*fix)[0] == 0
    assert call("import", stateful, str(big))[0] == 0


def test_a_directory_that_is_not_there_is_named(call: Call, box: str) -> None:
    status, _, err = call("exec", box, "--cwd", "/nowhere", "--", "true")
    if status != 127:
        pytest.skip("this backend has words of its own")
    assert "true in /nowhere: No such file or directory" in err


def test_pipes_and_empty_files_are_refused_and_never_waited_for(
    call: Call, box: str, tmp_path: Path
) -> None:
    pipe, empty, folder = tmp_path / "pipe", tmp_path / "empty", tmp_path / "folder"
    os.mkfifo(pipe)
    empty.touch()
    folder.mkdir()
    serve = ("serve", "--listen", "127.0.0.1:0")
    for path, words in (
        (pipe, ("image", "add", "x", str(pipe))),
        (empty, ("image", "add", "x", str(empty))),
        (folder, ("image", "add", "x", str(folder))),
        (pipe, ("audit", "verify", str(pipe))),
        (pipe, ("audit", "show", str(pipe))),
        (pipe, ("audit", "verify", str(folder), "--heads", str(pipe))),
        (pipe, (*serve, "--token-file", str(pipe))),
        (pipe, (*serve, "--tls-cert", str(pipe), "--tls-key", str(pipe))),
    ):
        status, out, err = call(*words)
        assert (status, out, err.count("\n")) == (2, "", 1), words
        assert f"{path} is " in err


def test_an_empty_file_is_no_tar(call: Call, box: str, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    status, _, err = call("import", box, str(tmp_path / "empty"))
    assert (status, err.count("\n")) == (2, 1)
    assert "empty, which no tar is" in err


@pytest.mark.parametrize("lease", ["nan", "inf", "0.5"])
def test_a_lease_that_is_no_time_is_refused(call: Call, lease: str) -> None:
    status, _, err = call("serve", "--listen", "127.0.0.1:0", "--lease", lease)
    assert (status, err.count("\n")) == (2, 1)
    assert f"--lease {lease} is not 1 s or more" in err
