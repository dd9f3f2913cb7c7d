"""A server against everything that may come in: garbage, strangers, replays, bodies without end."""

import asyncio
import contextlib
import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burnish.core.boxes import Snapshot
from burnish.core.errors import UserError
from burnish.core.records import Record
from burnish.sandbox.remote import messages as m
from burnish.sandbox.remote.config import ServeConfig
from burnish.sandbox.remote.hosting import ServerThread
from burnish.sandbox.remote.messages import ProblemKind

TOKEN = "a-token-of-more-than-16-characters"
Served = Any  # conftest.Served

HEADERS = {
    "Accept": m.CONTENT_TYPE,
    "Content-Type": m.CONTENT_TYPE,
    m.SESSION_HEADER: "session-1",
    m.REQUEST_HEADER: "request-1",
}
Answer = tuple[int, bytes]


def ask(served: Served, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """One request over the server's Unix socket or address, as no client of ours would send it."""
    sent = {**HEADERS, **{name.replace("_", "-"): value for name, value in headers.items()}}

    async def main() -> Answer:
        connector = None
        base = served.url
        if served.url.startswith("http+unix://"):
            connector = aiohttp.UnixConnector(served.url.removeprefix("http+unix://"))
            base = "http://localhost"
        async with (
            aiohttp.ClientSession(connector=connector) as http,
            http.request(method, base + path, data=body, headers=sent) as response,
        ):
            return response.status, await response.read()

    return asyncio.run(main())


def problem(answer: Answer) -> m.Problem:
    assert answer[0] >= 400, answer
    return m.decode(answer[1], m.Problem)


def create(served: Served, request_id: str = "request-1", **fields: Any) -> str:
    body = m.encode(m.CreateBox(**fields))
    status, answer = ask(served, "POST", "/v4/boxes", body, Burnish_Request=request_id)
    assert status == 200, answer
    return m.decode(answer, m.BoxInfo).id


def use(served: Served, box: str, verb: str, message: Record, request_id: str) -> Answer:
    body = m.encode(message)
    return ask(served, "POST", f"/v4/boxes/{box}/{verb}", body, Burnish_Request=request_id)


def raw(served: Served, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(served.url.removeprefix("http+unix://"))
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            return client.recv(65536)
    return b""


def begin_to_wait(served: Served, box: str) -> socket.socket:
    """A client that has sent a command that does not end by itself."""
    body = m.encode(m.Exec(argv=(b"wait",)))
    lines = [f"POST /v4/boxes/{box}/exec HTTP/1.1", "Host: localhost"]
    lines += [f"{k}: {v}" for k, v in {**HEADERS, m.REQUEST_HEADER: "request-2"}.items()]
    lines += [f"Content-Length: {len(body)}", "", ""]
    client = socket.socket(socket.AF_UNIX)
    client.connect(served.url.removeprefix("http+unix://"))
    client.sendall("\r\n".join(lines).encode() + body)
    return client


async def until(condition: Callable[[], object]) -> None:
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come to be")


# Strangers


@pytest.mark.parametrize(
    "sent", ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", TOKEN, "\xff"]
)
def test_without_the_token_nothing_is_told_or_done(serve: Callable[..., Served], sent: str) -> None:
    served = serve(listen="127.0.0.1:0")
    for method, path in (
        ("POST", "/v4/boxes"),
        ("GET", "/v4/boxes"),
        ("GET", "/v4/pool"),
        ("GET", "/v4/stats"),
        ("DELETE", "/v4/sessions"),
        ("PUT", "/v4/files"),
        ("GET", "/nowhere"),
        ("GET", "/v1/pool"),
    ):
        body = m.encode(m.CreateBox()) if method == "POST" else None
        answer = ask(served, method, path, body, Authorization=sent)
        assert answer[0] == 401
        assert problem(answer).kind is ProblemKind.UNAUTHORIZED
        assert TOKEN.encode() not in answer[1]
    assert served.pool.num_made == 0


def test_health_needs_no_token_and_tells_the_version_only(serve: Callable[..., Served]) -> None:
    served = serve(listen="127.0.0.1:0")
    assert ask(served, "GET", "/health", Accept="*/*") == (200, b'{"api":4}\n')


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "BeArEr", "Bearer  "])
def test_the_name_of_the_scheme_has_no_case(serve: Callable[..., Served], scheme: str) -> None:
    served = serve(listen="127.0.0.1:0")
    sent = f"{scheme} {TOKEN}"
    assert ask(served, "GET", "/v4/boxes", Authorization=sent)[0] == 200


def test_the_token_opens(serve: Callable[..., Served]) -> None:
    served = serve(listen="127.0.0.1:0")
    status, answer = ask(served, "GET", "/v4/stats", Authorization=f"Bearer {TOKEN}", Accept="*/*")
    assert status == 200
    assert json.loads(answer)["backend"] == "memory"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "10.0.0.1", "", "localhost.x"])
def test_without_a_token_a_page_cannot_come_under_another_name(
    serve: Callable[..., Served], host: str, tmp_path: Path
) -> None:
    served = serve(listen="127.0.0.1:0", token_file=None)
    assert problem(ask(served, "GET", "/v4/stats", Host=host)).kind is ProblemKind.UNAUTHORIZED
    assert ask(served, "GET", "/v4/stats", Host="localhost:1")[0] == 200
    assert ask(served, "GET", "/v4/stats", Host="[::1]:1")[0] == 200


@pytest.mark.parametrize("limit", [-1, 2**63, 2**64 - 1, -(2**63)])
def test_a_limit_that_is_no_number_of_bytes_is_the_clients_mistake(
    served: Served, limit: int
) -> None:
    box = create(served)
    answer = use(served, box, "read", m.ReadFile(path=b"f", limit_bytes=limit), "request-2")
    assert answer[0] == 400
    assert "limit_bytes must be" in problem(answer).message


def test_a_form_of_a_page_is_no_message(served: Served) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = ask(served, "POST", "/v4/boxes", b"\x80", Content_Type=kind)
        assert problem(answer).kind is ProblemKind.MALFORMED
    assert served.pool.num_made == 0


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:80", "nonsense", "127.0.0.1", "127.0.0.1:70000"]
)
def test_it_does_not_listen_beyond_this_machine_without_a_token(
    listen: str, memory_pool: Any
) -> None:
    pool = memory_pool()
    with pytest.raises(UserError, match="Fix: "):
        ServerThread(pool, ServeConfig(listen=listen), max_boxes=1)
    assert pool.closed


def test_it_listens_in_one_place(tmp_path: Path, memory_pool: Any) -> None:
    both = ServeConfig(listen="127.0.0.1:0", socket=tmp_path / "s")
    for config in (ServeConfig(), both, ServeConfig(socket=tmp_path / ("x" * 200))):
        with pytest.raises(UserError):
            ServerThread(memory_pool(), config, max_boxes=1)


def test_the_socket_is_for_its_user_alone_and_goes_with_the_server(
    tmp_path: Path, memory_pool: Any
) -> None:
    path = tmp_path / "socket"
    server = ServerThread(memory_pool(), ServeConfig(socket=path), max_boxes=1)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    with pytest.raises(UserError, match="listens at"):
        ServerThread(memory_pool(), ServeConfig(socket=path), max_boxes=1)
    server.close()
    assert not path.exists()


def test_a_socket_that_a_killed_server_left_is_replaced_and_nothing_else(
    tmp_path: Path, memory_pool: Any
) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    ServerThread(memory_pool(), ServeConfig(socket=path), max_boxes=1).close()
    path.write_text("precious")
    with pytest.raises(UserError, match="in the way"):
        ServerThread(memory_pool(), ServeConfig(socket=path), max_boxes=1)
    assert path.read_text() == "precious"


# Garbage


@pytest.mark.parametrize(
    "path",
    [
        "/v4/boxes/../../etc/passwd/exec",
        "/v4/boxes/..%2f..%2fetc/exec",
        "/v4/boxes/%2e%2e/exec",
        "/v4/boxes/000000000000/exec",
        "/v4/boxes/" + "a" * 4000 + "/exec",
        "/v4/boxes/%00/exec",
        "/v4/boxes/x/unknown",
        "/v4/files/../../etc/passwd",
        "/v4/files/..%2f..%2f..%2fetc%2fpasswd",
    ],
)
def test_names_that_lead_elsewhere_lead_nowhere(served: Served, path: str) -> None:
    method = "GET" if "/files/" in path else "POST"
    body = m.encode(m.Exec(argv=(b"true",))) if method == "POST" else None

    async def main() -> Answer:
        import yarl

        connector = aiohttp.UnixConnector(served.url.removeprefix("http+unix://"))
        url = yarl.URL("http://localhost" + path, encoded=True)
        async with (
            aiohttp.ClientSession(connector=connector) as http,
            http.request(method, url, data=body, headers=HEADERS) as response,
        ):
            return response.status, await response.read()

    answer = asyncio.run(main())
    assert answer[0] in (400, 404)
    assert b"root:" not in answer[1]
    assert served.pool.num_started == 0


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v4/boxes HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v4/boxes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 50_000 + b"\r\n",
        b"\x00" * 10_000,
    ],
)
def test_what_is_not_http_harms_nobody(served: Served, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        assert raw(served, data)[9:12] in (b"", b"400", b"414", b"404", b"431", b"505")
    assert ask(served, "GET", "/health")[0] == 200


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(["/v4/boxes", "BOX/exec", "BOX/write", "BOX/fork", "BOX/read", "BOX/import"]),
    st.binary(max_size=300),
    st.text("abcdef0123456789", min_size=8, max_size=16),
)
def test_bodies_of_garbage_are_answered(
    served: Served, path: str, body: bytes, request_id: str
) -> None:
    boxes = m.decode(ask(served, "GET", "/v4/boxes")[1], m.Boxes).boxes
    box = boxes[0].id if boxes else create(served, "request-create")
    path = path.replace("BOX", f"/v4/boxes/{box}")
    status, answer = ask(served, "POST", path, body, Burnish_Request=request_id)
    assert status != 500, answer
    for info in m.decode(ask(served, "GET", "/v4/boxes")[1], m.Boxes).boxes[1:]:
        ask(served, "DELETE", f"/v4/boxes/{info.id}")


@pytest.mark.parametrize("name", [m.SESSION_HEADER, m.REQUEST_HEADER])
@pytest.mark.parametrize("value", ["", "short", "x" * 65, "../../../x", "a b c d e f"])
def test_names_of_sessions_and_requests_are_checked(served: Served, name: str, value: str) -> None:
    answer = ask(served, "POST", "/v4/boxes", m.encode(m.CreateBox()), **{name: value})
    assert problem(answer).kind is ProblemKind.MALFORMED


def test_another_version_is_told_apart(served: Served) -> None:
    found = problem(ask(served, "GET", "/v1/pool"))
    assert found.kind is ProblemKind.VERSION
    assert f"version {m.API_VERSION}" in found.message


def test_a_body_over_the_bound_is_refused(serve: Callable[..., Served]) -> None:
    served = serve(max_request_bytes=4096)
    box = create(served)
    message = m.WriteFile(path=b"f", data=bytes(5000))
    answer = use(served, box, "write", message, "request-2")
    assert problem(answer).kind is ProblemKind.TOO_LARGE
    assert "4096" in problem(answer).message
    assert served.pool.boxes[0].files == {}


def test_a_body_without_end_is_refused_at_the_bound(serve: Callable[..., Served]) -> None:
    served = serve(max_request_bytes=4096, max_file_bytes=10_000)
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        while sent < 100 * 2**20:
            sent += 65536
            yield bytes(65536)

    for method, path in (("POST", "/v4/boxes"), ("PUT", "/v4/files")):
        sent = 0
        with contextlib.suppress(aiohttp.ClientError):
            answer = ask(served, method, path, endless())
            assert problem(answer).kind is ProblemKind.TOO_LARGE
        assert sent < 100 * 2**20
    assert ask(served, "GET", "/health")[0] == 200


# Once, and by its owner


def test_a_replay_gets_the_same_answer_and_does_nothing(served: Served) -> None:
    box = create(served)
    assert create(served) == box
    message = m.Exec(argv=(b"cat",), stdin=b"in")
    answers = [use(served, box, "exec", message, "request-2") for _ in range(3)]
    assert len(set(answers)) == 1
    assert (served.pool.num_made, served.pool.num_started) == (1, 1)


def test_another_request_under_a_used_id_is_refused(served: Served) -> None:
    box = create(served)
    use(served, box, "exec", m.Exec(argv=(b"cat",)), "request-2")
    answer = use(served, box, "exec", m.Exec(argv=(b"cat", b"x")), "request-2")
    assert problem(answer).kind is ProblemKind.VALUE
    assert served.pool.num_started == 1


def test_a_command_ends_when_its_client_disconnects(serve: Callable[..., Served]) -> None:
    served = serve(poll_s=1000)
    box = create(served)
    with begin_to_wait(served, box):
        while served.pool.num_started == 0:
            os.sched_yield()
        served.pass_time(11)
        assert served.pool.num_cancelled == 0
    # The connection is closed now; the server hears of it, and then nobody comes back.
    while served.pool.num_cancelled == 0:
        served.pass_time(11)
    assert m.decode(ask(served, "GET", "/v4/stats")[1], m.Stats).num_running == 0


def test_where_connections_do_not_break_a_client_that_hangs_up_ends_its_command_at_once(
    serve: Callable[..., Served],
) -> None:
    served = serve(poll_s=1000, hang_up_ends=True)
    box = create(served)
    with begin_to_wait(served, box):
        while served.pool.num_started == 0:
            os.sched_yield()
        served.pass_time(11)
        assert served.pool.num_cancelled == 0
    # No time passes: the server only has to hear of it.
    while served.pool.num_cancelled == 0:
        os.sched_yield()
    assert m.decode(ask(served, "GET", "/v4/stats")[1], m.Stats).num_running == 0


def test_one_of_two_that_wait_for_a_command_may_hang_up(serve: Callable[..., Served]) -> None:
    served = serve(poll_s=1000, hang_up_ends=True)
    box = create(served)
    with begin_to_wait(served, box) as other:
        while served.pool.num_started == 0:
            os.sched_yield()
        begin_to_wait(served, box).close()
        # Both connections are of one request; this answer comes after the end of the other.
        assert m.decode(ask(served, "GET", "/v4/stats")[1], m.Stats).num_running == 1
        served.pool.go.set()
        assert b"200 OK" in other.recv(65536)
    assert served.pool.num_cancelled == 0


def test_a_box_that_was_made_for_somebody_who_left_does_not_stay(served: Served) -> None:
    create(served)
    assert len(served.pool.boxes) == 1
    assert ask(served, "DELETE", "/v4/requests/request-1")[0] == 200
    assert served.pool.boxes == []


def test_detached_boxes_are_refused_where_they_are_not_allowed(served: Served) -> None:
    answer = ask(served, "POST", "/v4/boxes", m.encode(m.CreateBox(detached=True)))
    assert problem(answer).kind is ProblemKind.USER
    assert served.pool.num_made == 0


def test_waiting_is_bounded(serve: Callable[..., Served]) -> None:
    served = serve(1, poll_s=0.001, max_waiting=2)
    create(served)
    body = m.encode(m.CreateBox())
    for n in range(2):
        answer = ask(served, "POST", "/v4/boxes", body, Burnish_Request=f"waiting-{n}")
        assert answer[0] == 202
    answer = ask(served, "POST", "/v4/boxes", body, Burnish_Request="waiting-9")
    assert problem(answer).kind is ProblemKind.BUSY


def test_a_silent_session_loses_its_boxes_and_no_other_does(serve: Callable[..., Served]) -> None:
    served = serve(lease_s=100)
    box = create(served)
    other = {"Burnish_Session": "session-2", "Burnish_Request": "request-2"}
    ask(served, "POST", "/v4/boxes", m.encode(m.CreateBox()), **other)
    for _ in range(5):
        served.pass_time(24)
        ask(served, "POST", "/v4/sessions/heartbeat", b"\x80", Burnish_Session="session-2")
    boxes = m.decode(ask(served, "GET", "/v4/boxes")[1], m.Boxes).boxes
    assert box not in [info.id for info in boxes]
    assert len(boxes) == len(served.pool.boxes) == 1
    assert m.decode(ask(served, "GET", "/v4/stats")[1], m.Stats).num_expired == 1


def test_a_silent_session_loses_its_snapshots_and_no_other_does(
    serve: Callable[..., Served],
) -> None:
    served = serve(lease_s=100)
    box = create(served)
    other = {"Burnish_Session": "session-2", "Burnish_Request": "request-2"}
    answer = ask(served, "POST", "/v4/boxes", m.encode(m.CreateBox()), **other)[1]
    second = m.decode(answer, m.BoxInfo).id
    ask(served, "POST", f"/v4/boxes/{box}/snapshot", b"\x80", Burnish_Request="request-3")
    other["Burnish_Request"] = "request-4"
    answer = ask(served, "POST", f"/v4/boxes/{second}/snapshot", b"\x80", **other)[1]
    for _ in range(5):
        served.pass_time(24)
        ask(served, "POST", "/v4/sessions/heartbeat", b"\x80", Burnish_Session="session-2")
    assert set(served.pool.snapshots) == {m.decode(answer, Snapshot).id}


def test_a_lost_file_is_removed_after_a_while(served: Served, tmp_path: Path) -> None:
    status, answer = ask(served, "PUT", "/v4/files", b"data")
    assert status == 200
    name = m.decode(answer, m.Uploaded).file
    assert ask(served, "GET", f"/v4/files/{name}") == (200, b"data")
    served.pass_time(601)
    assert ask(served, "GET", f"/v4/files/{name}")[0] == 404


def test_the_end_of_a_server_tells_those_who_wait(serve: Callable[..., Served]) -> None:
    served = serve(poll_s=1000)
    box = create(served)

    async def main() -> Answer:
        running = asyncio.create_task(
            asyncio.to_thread(use, served, box, "exec", m.Exec(argv=(b"wait",)), "request-2")
        )
        await until(lambda: served.pool.num_started)
        await asyncio.to_thread(served.server.close)
        return await running

    assert problem(asyncio.run(main())).kind is ProblemKind.NO_REQUEST
    assert served.pool.num_cancelled == 1


def test_an_upload_goes_with_its_session(served: Served) -> None:
    name = m.decode(ask(served, "PUT", "/v4/files", b"a tar")[1], m.Uploaded).file
    assert ask(served, "GET", f"/v4/files/{name}") == (200, b"a tar")
    ask(served, "DELETE", "/v4/sessions")
    gone = problem(ask(served, "GET", f"/v4/files/{name}"))
    assert gone.kind is ProblemKind.NO_REQUEST
