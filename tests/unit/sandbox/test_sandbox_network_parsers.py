import functools
import itertools
import ssl

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from burnish.sandbox.network.events import Reason, Refused
from burnish.sandbox.network.http_body import BodyFramer
from burnish.sandbox.network.http_head import (
    looks_like_http,
    parse_authority,
    parse_head,
    plain_request,
    split_absolute,
)
from burnish.sandbox.network.policy import Host
from burnish.sandbox.network.tls import MAX_HELLO_BYTES, HelloReader, server_name

HOST = Host("pypi.org", False)


@functools.cache
def client_hello(name: str | None) -> bytes:
    """What the TLS library of this Python sends first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def vector(size: int, body: bytes) -> bytes:
    return len(body).to_bytes(size) + body


def extension(kind: int, body: bytes) -> bytes:
    return kind.to_bytes(2) + vector(2, body)


def sni(name: bytes, kind: int = 0) -> bytes:
    return extension(0, vector(2, bytes((kind,)) + vector(2, name)))


def body(*extensions: bytes) -> bytes:
    start = b"\x03\x03" + bytes(32) + vector(1, b"") + vector(2, b"\x13\x01") + vector(1, b"\0")
    return start + vector(2, b"".join(extensions))


def records(message: bytes, *sizes: int) -> bytes:
    out, at = b"", 0
    for size in (*sizes, len(message)):
        if piece := message[at : at + size]:
            out += b"\x16\x03\x01" + vector(2, piece)
        at += size
    return out


def handshake(hello: bytes) -> bytes:
    return b"\x01" + vector(3, hello)


def read(data: bytes) -> str | None:
    return HelloReader().feed(data)


def test_the_name_in_a_real_hello_is_found() -> None:
    assert read(client_hello("pypi.org")) == "pypi.org"
    assert read(client_hello(None)) == ""


@given(cuts=st.lists(st.integers(0, 600), max_size=12))
def test_pieces_make_no_difference(cuts: list[int]) -> None:
    data = client_hello("pypi.org")
    reader = HelloReader()
    names = []
    edges = [0, *sorted(cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        names.append(reader.feed(data[start:end]))
    assert "pypi.org" in names
    assert bytes(reader.raw) == data


def test_byte_by_byte_only_the_last_byte_completes_it() -> None:
    data = client_hello("pypi.org")
    reader = HelloReader()
    answers = [reader.feed(data[at : at + 1]) for at in range(len(data))]
    assert set(answers[:-1]) == {None}
    assert answers[-1] == "pypi.org"


@given(sizes=st.lists(st.integers(1, 50), max_size=10))
def test_records_make_no_difference(sizes: list[int]) -> None:
    assert read(records(handshake(body(sni(b"pypi.org"))), *sizes)) == "pypi.org"


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (body(sni(b"a.org"), sni(b"b.org")), Reason.BAD_HELLO),
        (body(sni(b"a.org", kind=1)), Reason.BAD_HELLO),
        (body(sni(b"")), Reason.BAD_HELLO),
        (body(sni(b"\xff.org")), Reason.BAD_HELLO),
        (body(extension(0, vector(2, (b"\0" + vector(2, b"a.org")) * 2))), Reason.BAD_HELLO),
        (body(sni(b"a.org"), extension(0xFE0D, b"x")), Reason.HIDDEN_SERVER_NAME),
        (body(sni(b"a.org"), extension(0xFFCE, b"x")), Reason.HIDDEN_SERVER_NAME),
        (body(sni(b"a.org")) + b"x", Reason.BAD_HELLO),
        (body(sni(b"a.org"))[:-1], Reason.BAD_HELLO),
    ],
)
def test_a_hello_of_two_meanings_or_none_is_refused(hello: bytes, reason: Reason) -> None:
    with pytest.raises(Refused) as caught:
        server_name(hello)
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    "data",
    [
        b"\x17\x03\x01\x00\x01x",
        b"\x16\x02\x01\x00\x01\x01",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\xff\xff",
        b"\x16\x03\x01\x00\x01\x02",
        records(handshake(body(sni(b"a.org"))) + b"more"),
        records(b"\x01" + (MAX_HELLO_BYTES + 1).to_bytes(3)),
        records(b"\x01" + (MAX_HELLO_BYTES - 8).to_bytes(3) + bytes(MAX_HELLO_BYTES), *[1] * 9000),
    ],
)
def test_malformed_and_endless_records_are_refused(data: bytes) -> None:
    with pytest.raises(Refused) as caught:
        read(data)
    assert caught.value.reason is Reason.BAD_HELLO


@given(st.binary(max_size=300), st.binary(max_size=300), st.booleans())
def test_a_hello_reader_survives_garbage(first: bytes, second: bytes, shaped: bool) -> None:
    reader = HelloReader()
    try:
        if reader.feed(records(handshake(first)) if shaped and first else first) is None:
            reader.feed(second)
    except Refused:
        return


@settings(max_examples=300)
@given(flips=st.dictionaries(st.integers(0, 600), st.integers(1, 255), max_size=4))
def test_a_damaged_hello_names_a_server_or_is_refused(flips: dict[int, int]) -> None:
    data = bytearray(client_hello("pypi.org"))
    for at, change in flips.items():
        data[at % len(data)] ^= change
    try:
        name = read(bytes(data))
    except Refused:
        return
    assert name is None or name == "" or name.encode() in bytes(data)


def head(*lines: str) -> bytes:
    return "\r\n".join((*lines, "", "")).encode("latin-1")


def test_a_request_in_absolute_form_becomes_one_for_its_server() -> None:
    authority, parsed = split_absolute(
        parse_head(
            head(
                "GET http://PyPI.org/simple/?a=b HTTP/1.1",
                "Host: pypi.org:80",
                "Connection: keep-alive, X-Secret",
                "X-Secret: 1",
                "Proxy-Authorization: Basic eA==",
                "Upgrade: h2c",
                "Accept: */*",
            )
        )
    )
    assert authority == ("PyPI.org", 80)
    assert plain_request(parsed, HOST, 80).head == head(
        "GET /simple/?a=b HTTP/1.1", "Host: pypi.org", "Accept: */*", "Connection: close"
    )


@pytest.mark.parametrize(
    ("uri", "authority", "target"),
    [
        ("http://pypi.org", ("pypi.org", 80), "/"),
        ("HTTP://pypi.org?q", ("pypi.org", 80), "/?q"),
        ("http://pypi.org:8080/http://evil.org/", ("pypi.org", 8080), "/http://evil.org/"),
        ("http://[::1]:8080//evil.org/", ("[::1]", 8080), "//evil.org/"),
    ],
)
def test_absolute_uris(uri: str, authority: tuple[str, int], target: str) -> None:
    got, parsed = split_absolute(parse_head(head(f"GET {uri} HTTP/1.1")))
    assert (got, parsed.target) == (authority, target)


@pytest.mark.parametrize(
    "uri",
    [
        *("/", "*", "http://", "https://pypi.org/", "ftp://pypi.org/", "//pypi.org/"),
        *("http://pypi.org@evil.org/", "http://pypi.org\\@evil.org/", "http:pypi.org"),
        *("http://pypi.org:/", "http://pypi.org:0/", "http://pypi.org:99999/", "http://:80/"),
        *("http://pypi.org:80:80/", "http://[::1/", "http://pypi.org%2eevil.org/"),
    ],
)
def test_other_targets_are_refused(uri: str) -> None:
    with pytest.raises(Refused):
        split_absolute(parse_head(head(f"GET {uri} HTTP/1.1")))


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n",
        head("GET  / HTTP/1.1"),
        head("GET / HTTP/2.0"),
        head("PRI * HTTP/2.0"),
        head("get / HTTP/1.1"),
        head("GET /\x80 HTTP/1.1"),
        head("GET / HTTP/1.1", "Host : pypi.org"),
        head("GET / HTTP/1.1", " folded: yes"),
        head("GET / HTTP/1.1", "Host: pypi.org\nX: y"),
        head("GET / HTTP/1.1", "Host: pypi.org\rX: y"),
        head("GET / HTTP/1.1", "Host: pypi.org\0"),
        head("GET / HTTP/1.1", "no colon"),
        head("GET / HTTP/1.1", *(f"a{n}: b" for n in range(129))),
    ],
)
def test_heads_that_two_servers_could_read_in_two_ways_are_refused(data: bytes) -> None:
    with pytest.raises(Refused):
        parse_head(data)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (("GET / HTTP/1.1",), Reason.HOST_HEADER),
        (("GET / HTTP/1.1", "Host: evil.org"), Reason.HOST_HEADER),
        (("GET / HTTP/1.1", "Host: pypi.org:81"), Reason.HOST_HEADER),
        (("GET / HTTP/1.1", "Host: pypi.org", "hOST: pypi.org"), Reason.HOST_HEADER),
        (("GET / HTTP/1.1", "Host: pypi.org, evil.org"), Reason.BAD_REQUEST),
        (("CONNECT evil.org:443 HTTP/1.1", "Host: pypi.org"), Reason.NESTED_CONNECT),
        (("GET http://evil.org/ HTTP/1.1", "Host: pypi.org"), Reason.BAD_REQUEST),
    ],
)
def test_a_request_must_be_for_its_server(lines: tuple[str, ...], reason: Reason) -> None:
    with pytest.raises(Refused) as caught:
        plain_request(parse_head(head(*lines)), HOST, 80)
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("version", "lines"),
    [
        ("1.1", ("Content-Length: 3", "Content-Length: 3")),
        ("1.1", ("Content-Length: +3",)),
        ("1.1", ("Content-Length: 3, 3",)),
        ("1.1", ("Content-Length: 3", "Transfer-Encoding: chunked")),
        ("1.1", ("Transfer-Encoding: chunked, identity",)),
        ("1.1", ("Transfer-Encoding: xchunked",)),
        ("1.1", ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked")),
        ("1.0", ("Transfer-Encoding: chunked",)),
    ],
)
def test_ambiguous_lengths_are_refused(version: str, lines: tuple[str, ...]) -> None:
    parsed = parse_head(head(f"POST / HTTP/{version}", "Host: pypi.org", *lines))
    with pytest.raises(Refused) as caught:
        plain_request(parsed, HOST, 80)
    assert caught.value.reason is Reason.BAD_REQUEST


@given(st.binary(max_size=200))
@example(b"GET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n")
def test_heads_survive_garbage(data: bytes) -> None:
    try:
        _, parsed = split_absolute(parse_head(data + b"\r\n\r\n"))
        request = plain_request(parsed, Host("a", False), 80)
    except Refused:
        return
    assert request.head.count(b"\r\n\r\n") == 1
    assert request.head.endswith(b"\r\n\r\n")


@given(st.text(max_size=30))
def test_authorities_survive_garbage(text: str) -> None:
    try:
        host, port = parse_authority(text, 80)
    except Refused:
        return
    assert text in (host, f"{host}:{text.rpartition(':')[2]}")
    assert 0 < port < 65536


@given(
    length=st.integers(0, 50),
    extra=st.binary(max_size=20),
    cuts=st.lists(st.integers(0, 70), max_size=5),
)
def test_exactly_the_body_passes(length: int, extra: bytes, cuts: list[int]) -> None:
    data = b"x" * length + extra
    framer = BodyFramer(length)
    edges = [0, *sorted(cuts), len(data)]
    passed = b"".join(framer.feed(data[start:end]) for start, end in itertools.pairwise(edges))
    assert passed == b"x" * length
    assert framer.done


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=5),
    extra=st.binary(max_size=20),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_exactly_the_chunks_pass(chunks: list[bytes], extra: bytes, cuts: list[int]) -> None:
    whole = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    data = whole + extra
    framer = BodyFramer(None)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    passed = b"".join(framer.feed(data[start:end]) for start, end in itertools.pairwise(edges))
    assert passed == whole
    assert framer.done


@pytest.mark.parametrize(
    "data",
    [
        *(b"\r\n", b"-1\r\n", b"0x3\r\n", b"3;a=b\r\nabc\r\n", b"3\nabc", b"3 \r\nabc", b"g\r\n"),
        *(b"3\r\nabcd\r\n", b"3\r\nabcXX\r\n", b"0\r\nTrailer: x\r\n\r\n", b"1" * 30),
    ],
)
def test_malformed_chunks_are_refused(data: bytes) -> None:
    with pytest.raises(Refused):
        BodyFramer(None).feed(data)


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_chunks_survive_garbage(first: bytes, second: bytes) -> None:
    framer = BodyFramer(None)
    try:
        passed = framer.feed(first) + framer.feed(second)
    except Refused:
        return
    assert len(passed) <= len(first + second)


def test_ordinary_requests_are_told_from_other_protocols() -> None:
    assert looks_like_http(b"GET / HTTP/1.1")
    assert looks_like_http(b"\r\n\r\nCONNECT evil.org:443")
    assert looks_like_http(b"GE") is None
    assert looks_like_http(b"") is None
    assert looks_like_http(b"SSH-2.0-x") is False
    assert looks_like_http(b"EHLO me") is False
