"""Messages, problems and addresses."""

import contextlib
import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.core.boxes import ExecResult, Limits
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind
from burnish.sandbox.remote import messages as m
from burnish.sandbox.remote.problems import (
    Refused,
    RemoteFailure,
    exception_of,
    http_status,
    problem_of,
)
from burnish.sandbox.remote.serving import split_address
from burnish.sandbox.remote.token_file import read_token, read_tokens
from burnish.sandbox.remote.wire import split_url

HOST = "http://host:1"
FAILURE = Failure(kind=FailureKind.INFRA, where="a.b", message="broke")
KINDS = [m.Exec, m.CreateBox, m.Problem, m.Boxes, m.Stats, ExecResult, m.WriteFile, m.Fork]


def there_and_back(error: BaseException) -> Exception:
    return exception_of(m.decode(m.encode(problem_of(error)), m.Problem), HOST)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("path must be relative"),
        OSError(errno.ENOSPC, "No space left on device"),
        FileNotFoundError(errno.ENOENT, "no regular file", "f"),
        FileNotFoundError("no number"),
        NotADirectoryError(errno.ENOTDIR, "Not a directory"),
        PermissionError(errno.EACCES, "Permission denied"),
    ],
)
def test_exceptions_arrive_as_what_they_were(error: Exception) -> None:
    back = there_and_back(error)
    assert type(back) is type(error)
    if isinstance(error, OSError) and error.errno:
        assert (back.errno, back.strerror) == (error.errno, error.strerror)
    elif not isinstance(error, OSError):
        assert str(back) == str(error)


def test_a_users_mistake_keeps_its_fix() -> None:
    back = there_and_back(UserError("wrong.", fix="do it right"))
    assert isinstance(back, UserError)
    assert (back.what, back.fix) == ("wrong.", "do it right")


def test_a_failure_keeps_its_kind_and_names_the_host() -> None:
    back = there_and_back(ClassifiedFailure(FAILURE))
    assert isinstance(back, ClassifiedFailure)
    assert (back.failure.kind, back.failure.where) == (FailureKind.INFRA, "a.b")
    assert HOST in back.failure.message


@pytest.mark.parametrize("kind", list(m.ProblemKind))
def test_every_problem_has_an_exception_and_a_status(kind: m.ProblemKind) -> None:
    problem = m.Problem(kind=kind, message="what", errno=5)
    error = exception_of(problem, HOST)
    assert isinstance(error, ValueError | OSError | ClassifiedFailure)
    assert 400 <= http_status(problem) < 600
    assert problem_of(Refused(kind, "what")).kind is kind


def test_a_failure_of_the_way_is_of_kind_sandbox_and_names_the_host() -> None:
    error = RemoteFailure(m.ProblemKind.UNREACHABLE, HOST, "two\nlines")
    assert error.failure.kind is FailureKind.SANDBOX
    assert error.failure.message == f"{HOST}: two lines"


@given(st.binary(max_size=200), st.sampled_from(KINDS))
def test_garbage_is_malformed_and_nothing_worse(body: bytes, kind: type) -> None:
    # Anything but these two is a failure of the test.
    with contextlib.suppress(m.Malformed):
        assert isinstance(m.decode(body, kind), kind)


@given(st.sampled_from([b"\x91", b"\x81\xa1a"]), st.integers(1, 5000))
def test_deep_garbage_is_malformed(opening: bytes, depth: int) -> None:
    with pytest.raises(m.Malformed):
        m.decode(opening * depth, m.Exec)


@given(st.lists(st.binary(max_size=50)), st.binary(max_size=1000), st.binary(max_size=20))
def test_bytes_survive(argv: list[bytes], stdin: bytes, cwd: bytes) -> None:
    message = m.Exec(argv=tuple(argv), stdin=stdin, cwd=cwd, limits=Limits(wall_s=1.5))
    assert m.decode(m.encode(message), m.Exec) == message


def test_a_number_beyond_64_bits_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="int"):
        m.encode(m.ReadFile(path=b"f", limit_bytes=2**70))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:8321", ("http://host:8321", None)),
        ("https://[::1]:1/", ("https://[::1]:1", None)),
        ("http+unix:///run/a%20b.sock", ("http://localhost", "/run/a b.sock")),
    ],
)
def test_urls(url: str, expected: tuple[str, str | None]) -> None:
    assert split_url(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:8321",
        "ftp://host",
        "http://",
        "http://host/path",
        "http://u:p@host",
        "http://host?q",
        "http://host:port",
        "http://host:99999",
        "http+unix://host/path",
        "http+unix:relative",
        "http://[::1",
    ],
)
def test_what_is_no_url_of_a_server_is_a_users_mistake(url: str) -> None:
    with pytest.raises(UserError, match="URL"):
        split_url(url)


def test_addresses() -> None:
    assert split_address("127.0.0.1:0") == ("127.0.0.1", 0)
    assert split_address("[::1]:80") == ("::1", 80)
    for text in ("", "host", ":80", "host:", "host:x", "host:-1", "host:65536", "host:\u0661"):
        with pytest.raises(UserError):
            split_address(text)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "short",
        "ann short",
        "three words of-some-length-that-do",
        "a-token-of-more-than-16-characters\nann a-token-of-anns-own",
        "\xe9" * 20,
    ],
)
def test_a_file_that_holds_no_token_is_a_users_mistake(content: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(content)
    with pytest.raises(UserError, match="token"):
        read_tokens(file)


def test_a_token_file_is_a_regular_one_and_its_bad_line_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UserError, match="pipe is no regular file"):
        read_tokens(tmp_path / "pipe")
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("\nann a-token-of-anns-own\nbob short\n")
    with pytest.raises(UserError, match=r"line 3 of .*token holds no token"):
        read_tokens(file)


def test_a_token_that_others_can_read_is_a_users_mistake(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-of-more-than-16-characters\n")
    file.chmod(0o640)
    with pytest.raises(UserError, match="chmod 600"):
        read_tokens(file)
    file.chmod(0o600)
    assert read_tokens(file) == {"a-token-of-more-than-16-characters": ""}


def test_tokens_may_have_names(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("ann  a-token-of-anns-own\n\nbob a-token-of-bobs-own\n")
    assert read_tokens(file) == {"a-token-of-anns-own": "ann", "a-token-of-bobs-own": "bob"}
    for twice in ("ann a-token-of-bobs-own\n", "ann another-token-of-anns\n"):
        file.write_text("ann a-token-of-anns-own\nbob a-token-of-bobs-own\n" + twice)
        with pytest.raises(UserError, match="twice"):
            read_tokens(file)


def test_a_clients_token_file_is_never_waited_for_and_holds_one_word(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    contents = {"empty": b"", "lines": b"ann x\nbob y\n", "odd": b"\xff", "nul": b"a\0b\xe9"}
    contents["huge"] = b"x" * (2**20 + 1)
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    for name in (*contents, "pipe", "device", "folder", "absent"):
        with pytest.raises(UserError, match=name) as refused:
            read_token(tmp_path / name)
        assert "token_file" in refused.value.fix
        with pytest.raises(UserError, match=name):
            read_tokens(tmp_path / name)
    (tmp_path / "token").write_text(" a-token-of-some-length \n")
    assert read_token(tmp_path / "token") == "a-token-of-some-length"
