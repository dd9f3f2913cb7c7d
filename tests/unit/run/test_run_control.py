import asyncio
import itertools
import os
import socket
import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.core.errors import UserError
from burnish.run.control import client
from burnish.run.control.client import ask
from burnish.run.control.messages import MAX_LINE_BYTES, Answer, Request, Verb, parse
from burnish.run.control.roster import Roster
from burnish.run.control.server import serve_control
from burnish.run.jobs.daemon import is_served
from burnish.run.jobs.messages import jobs_socket


async def echo(line: bytes) -> Answer:
    request = parse(line)
    if isinstance(request, str):
        return Answer(ok=False, error=request)
    if request.verb is Verb.STOP:
        raise UserError("no.", fix="never")
    return Answer(ok=True, result={"verb": request.verb.value})


def talk(path: Path, *lines: bytes) -> list[Answer]:
    """What a server answers to raw bytes, until it hangs up or has said enough."""

    def client() -> list[Answer]:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(20)
            link.connect(str(path))
            answers = []
            for line in lines:
                link.sendall(line)
                reply = link.makefile("rb").readline()
                if not reply:
                    break
                answers.append(msgspec.json.decode(reply, type=Answer))
            return answers

    async def serve() -> list[Answer]:
        async with serve_control(path, echo):
            return await asyncio.to_thread(client)

    return asyncio.run(serve())


def test_garbage_is_answered_and_the_next_request_is_served(tmp_path):
    garbage = [b"\n", b"\x00\xff\n", b"[" * 9000 + b"\n", b'{"verb": "fly"}\n', b'{"verb":1}\n']
    answers = talk(tmp_path / "s", *garbage, b'{"verb": "status"}\n')
    assert [a.ok for a in answers] == [False] * len(garbage) + [True]
    assert all(a.error for a in answers[:-1])


def test_a_line_without_an_end_is_refused_and_not_collected(tmp_path):
    answers = talk(tmp_path / "s", b"x" * (2 * MAX_LINE_BYTES))
    assert len(answers) == 1
    assert "longer than" in (answers[0].error or "")


def test_a_users_mistake_is_an_answer_with_its_fix(tmp_path):
    (answer,) = talk(tmp_path / "s", b'{"verb": "stop"}\n')
    assert answer.error == "no. Fix: never"


def test_only_the_owner_may_open_it_whatever_the_umask_and_it_is_gone_afterwards(tmp_path):
    path = tmp_path / "s"

    async def look() -> int:
        before = os.umask(0)
        try:
            async with serve_control(path, echo):
                return stat.S_IMODE(path.stat().st_mode)
        finally:
            os.umask(before)

    assert asyncio.run(look()) == 0o600
    assert not path.exists()


def test_directories_longer_than_a_socket_address_serve_all_the_same(tmp_path):
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    path = deep / "control.sock"

    async def serve() -> Answer:
        async with serve_control(path, echo):
            return await asyncio.to_thread(ask, path, Request(verb=Verb.STATUS))

    assert asyncio.run(serve()).ok


def test_a_socket_left_by_a_killed_run_is_replaced(tmp_path):
    path = tmp_path / "s"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    with pytest.raises(UserError, match="does not answer"):
        ask(path, Request(verb=Verb.STATUS))
    assert talk(path, b'{"verb": "status"}\n')[0].ok


def test_more_clients_than_allowed_cannot_lock_the_owner_out_for_good(tmp_path):
    path = tmp_path / "s"

    async def serve() -> bool:
        async with serve_control(path, echo):
            silent = [await asyncio.open_unix_connection(str(path)) for _ in range(16)]
            await asyncio.sleep(0)
            for _, writer in silent:
                writer.close()
                await writer.wait_closed()
            for _ in range(200):
                try:
                    return (await asyncio.to_thread(ask, path, Request(verb=Verb.STATUS))).ok
                except UserError:
                    continue
            return False

    assert asyncio.run(serve())


@given(st.binary(max_size=200) | st.text(max_size=80).map(str.encode))
def test_parsing_never_raises(line):
    assert isinstance(parse(line), Request | str)


@pytest.mark.parametrize(
    "line",
    [
        b'{"verb": "add"}',
        b'{"verb": "share", "domain": "d", "weight": 0}',
        b'{"verb": "share", "domain": "d", "min_share": 1.5}',
        b'{"verb": "status", "more": 1}',
    ],
)
def test_what_cannot_be_meant_is_refused_when_it_is_parsed(line):
    assert isinstance(parse(line), str)


def test_a_stopped_run_is_waited_for_shortly_and_only_its_gate_for_long(tmp_path, monkeypatch):
    path = jobs_socket(tmp_path)
    monkeypatch.setattr(client, "_ANSWER_S", 0.02)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        for verb in set(Verb) - {Verb.ADD}:
            with pytest.raises(UserError, match=r"does not answer \(stopped\?") as refused:
                ask(path, Request(verb=verb))
            assert "kill -CONT" in refused.value.fix
        # Whoever is stopped still owns the jobs: another daemon must not take its socket.
        assert is_served(tmp_path)
        monkeypatch.setattr(client, "_GATE_S", 0.03)
        with pytest.raises(UserError, match="does not answer"):
            ask(path, Request(verb=Verb.ADD, domain="x"))


def test_what_the_guide_adds_to_a_live_run_is_what_the_run_takes():
    text = (Path(__file__).parents[3] / "docs" / "scheduling.md").read_text()
    lines = [line.split() for line in text.splitlines() if "burnish control add" in line]
    assert lines
    for words in lines:
        options = dict(itertools.pairwise(words))
        Roster().build(words[4], options.get("--environment"))


@pytest.mark.parametrize("later", [True, False], ids=["after the answer", "with the answer"])
def test_the_end_of_a_server_hangs_up_and_says_nothing_of_it(tmp_path, later):
    complaints = []

    async def serve() -> bytes:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        async with serve_control(tmp_path / "s", echo):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
            writer.write(b'{"verb": "status"}\n')
            assert await reader.readline()
            for _ in range(10 * later):
                await asyncio.sleep(0)
        try:
            async with asyncio.timeout(5):
                return await reader.read()
        finally:
            writer.close()

    assert asyncio.run(serve()) == b""
    assert not complaints
