import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.core.errors import UserError
from burnish.sandbox.network.addresses import (
    choose,
    is_private,
    is_public,
    parse_private,
    parse_reachable,
)
from burnish.sandbox.network.events import Reason, printable
from burnish.sandbox.network.policy import MAX_ENTRIES, Host, decide, parse_allow, read_host

LABELS = st.from_regex(r"\A[a-z]([a-z0-9-]{0,8}[a-z0-9])?\Z")
NAMES = st.lists(LABELS, min_size=2, max_size=4).map(".".join)
PORTS = st.integers(1, 65535)


def allowed(host: str, port: int, *entries: str) -> bool:
    return decide(host, port, parse_allow(entries)).allowed


@given(name=NAMES, port=PORTS)
def test_an_entry_allows_its_name_on_the_default_ports_only(name: str, port: int) -> None:
    assert allowed(name, port, name) == (port in (80, 443))
    assert allowed(name, port, f"{name}:{port}")
    assert not allowed(name, port % 65535 + 1, f"{name}:{port}")


@given(name=NAMES, data=st.data())
def test_case_and_a_final_dot_make_no_difference(name: str, data: st.DataObject) -> None:
    def vary(text: str) -> str:
        cased = "".join(data.draw(st.sampled_from((c, c.upper()))) for c in text)
        return cased + data.draw(st.sampled_from(("", ".")))

    assert allowed(vary(name), 443, vary(name))


@given(listed=NAMES, asked=NAMES)
def test_another_name_is_not_allowed(listed: str, asked: str) -> None:
    assert allowed(asked, 443, listed) == (asked == listed)
    assert allowed(asked, 443, "*." + listed) == asked.endswith("." + listed)


@given(name=NAMES, label=LABELS)
def test_a_wildcard_means_names_below_and_not_the_name_or_its_look_alikes(
    name: str, label: str
) -> None:
    assert allowed(f"{label}.{name}", 443, f"*.{name}")
    assert not allowed(name, 443, f"*.{name}")
    assert not allowed(f"{label}{name}", 443, f"*.{name}")
    assert not allowed(f"{label}.{name}", 443, name)
    assert not allowed(f"{name}.zz-tail", 443, name, f"*.{name}")


@given(st.text(max_size=40), st.integers(-5, 70_000))
def test_whatever_is_asked_gets_a_decision_and_nothing_is_allowed_by_an_empty_list(
    host: str, port: int
) -> None:
    assert not decide(host, port, ()).allowed


@given(st.text(max_size=300))
def test_a_host_has_one_spelling(text: str) -> None:
    read = read_host(text)
    if isinstance(read, Host):
        assert read_host(read.text) == read
        assert read_host(read.text.upper()) == read
        assert set(read.text) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-_:")


@given(st.text(max_size=300))
def test_logged_text_is_short_printable_ascii(text: str) -> None:
    shown = printable(text)
    assert len(shown) <= 255
    assert all(" " <= character <= "~" for character in shown)


ADDRESSES = (
    *("127.0.0.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "127.1", "0", "0x"),
    *("[::1]", "::1", "[::ffff:127.0.0.1]", "::ffff:7f00:1", "169.254.169.254", "1.1.1.1"),
    *("1.1.1.1.", "[fe80::1%eth0]", "fd00:ec2::254", "1.2.3.4.5", "a.0x1", "08.8.8.8"),
)


@pytest.mark.parametrize("text", ADDRESSES)
def test_an_address_in_any_notation_is_no_name(text: str) -> None:
    decision = decide(text, 443, parse_allow(("*.example.org", "localhost")))
    assert (decision.allowed, decision.reason) == (False, Reason.IP_LITERAL)


def test_an_address_is_allowed_only_if_it_is_listed_as_such() -> None:
    assert allowed("1.1.1.1", 443, "1.1.1.1")
    assert allowed("[2606:4700::1111]", 443, "2606:4700:0:0::1111")
    assert allowed("2606:4700::1111", 8443, "[2606:4700::1111]:8443")
    assert not allowed("1.1.1.2", 443, "1.1.1.1")
    assert not allowed("0x01010101", 443, "1.1.1.1")


@pytest.mark.parametrize("name", ["", ".", "a..b", "-a.org", "a_.-", "a b.org", "a\0.org", "a/b"])
def test_what_is_not_a_host_name_is_refused(name: str) -> None:
    assert decide(name, 443, parse_allow(("*.a.org",))).reason is Reason.BAD_NAME


def test_international_names_are_compared_in_punycode() -> None:
    assert allowed("xn--bcher-kva.example", 443, "B\u00dcCHER.example")
    assert allowed("www.xn--bcher-kva.example", 443, "*.b\u00fccher.example.")
    assert not allowed("b\u00fccher.example", 443, "b\u00fccher.example")  # clients send ASCII
    assert not allowed("bucher.example", 443, "b\u00fccher.example")


@pytest.mark.parametrize(
    "entry",
    [
        *("", "*", "*.", "*.org", "a.*.org", "a*.org", "*.*.org", "**.a.org", "*.1.2.3.4"),
        *("10.0.0.0/8", "https://pypi.org", "pypi.org/simple", "user@pypi.org", "pypi.org:"),
        *("pypi.org:0", "pypi.org:65536", "pypi.org:80-90", "pypi.org:*", "pypi.org:+80"),
        *("[::1", "[::1]x", "[pypi.org]", "127.1", "0x7f.1", "a..b", "a b.org", "fe80::1%eth0"),
        *("stra\u00dfe.example", "\uff50ypi.org", "p\u2024ypi.org", "pypi.org:\u0664\u0664"),
    ],
)
def test_a_bad_entry_is_refused_by_name(entry: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_allow(("pypi.org", entry))
    assert f"`{entry}`" in str(caught.value)


@given(st.lists(st.text(alphabet="aA.*:/[]@-_0189xX \u00df\u3002", max_size=20), max_size=3))
def test_entries_are_read_or_refused(entries: list[str]) -> None:
    try:
        rules = parse_allow(tuple(entries))
    except UserError:
        return
    for rule in rules:
        assert read_host(rule.host) == Host(rule.host, rule.is_address)


def test_an_endless_list_is_refused() -> None:
    with pytest.raises(UserError, match="wildcards"):
        parse_allow(("a.org",) * (MAX_ENTRIES + 1))


NOT_PUBLIC = (
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1"),
    *("127.255.0.1", "169.254.169.254", "169.254.170.2", "172.16.0.1", "172.31.255.255"),
    *("192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.51.100.1"),
    *("203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255"),
    *("168.63.129.16", "::", "::1", "::ffff:8.8.8.8", "::ffff:127.0.0.1", "::8.8.8.8"),
    *("64:ff9b::808:808", "64:ff9b::7f00:1", "64:ff9b:1::1", "100::1", "2001::1"),
    *("2001:db8::1", "2002:7f00:1::", "2002:808:808::", "3fff::1", "5f00::1", "fc00::1"),
    *("fd00:ec2::254", "fe80::1", "fec0::1", "ff02::1"),
)


@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_near_and_special_addresses_are_not_public(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))
    assert choose([text], private=False) == ()


@pytest.mark.parametrize("text", ["8.8.8.8", "151.101.0.223", "172.32.0.1", "2a04:4e42::223"])
def test_addresses_of_the_internet_are_public(text: str) -> None:
    assert choose([text], private=False) == (text,)


@given(st.ip_addresses())
def test_what_is_public_is_global_by_the_book_too(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    if is_public(address):
        assert address.is_global
        assert not address.is_multicast
        assert not is_private(address)


def test_private_opens_private_addresses_but_no_metadata_service() -> None:
    never = ("169.254.169.254", "fd00:ec2::254", "100.100.100.200", "192.0.0.192", "0.0.0.0")
    answers = [*never, "168.63.129.16", "fe80::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "ff02::1"]
    assert choose(answers, private=True) == ()
    assert choose([*answers, "127.0.0.1", "10.1.1.1", "junk"], private=True) == (
        "127.0.0.1",
        "10.1.1.1",
    )


def test_the_public_part_of_a_mixed_answer_is_chosen() -> None:
    assert choose(["10.0.0.1", "8.8.8.8", "8.8.8.8", "8.8.4.4"], private=False) == (
        "8.8.8.8",
        "8.8.4.4",
    )


def test_private_entries_are_exact() -> None:
    assert parse_private(("Localhost:8443", "10.0.0.1:80")) == {
        ("localhost", 8443),
        ("10.0.0.1", 80),
    }
    for entry in ("localhost", "*.corp.example:80"):
        with pytest.raises(UserError, match="exact host"):
            parse_private((entry,))


@pytest.mark.parametrize(
    "entry",
    [
        *("169.254.169.254", "169.254.169.254:80", "0.0.0.0", "224.0.0.1", "168.63.129.16"),
        *("[fe80::1]:443", "fd00:ec2::254", "[::ffff:169.254.169.254]:80", "64:ff9b::a00:1"),
        *("10.0.0.1", "192.168.1.1:8443", "127.0.0.1", "100.64.0.1", "[::1]:80", "fc00::1"),
    ],
)
def test_an_address_that_no_box_can_reach_is_refused_in_the_list(entry: str) -> None:
    with pytest.raises(UserError, match="never be reached") as caught:
        parse_reachable(("pypi.org", entry), frozenset())
    assert entry in caught.value.what
    opened = is_private(ipaddress.ip_address(parse_allow((entry,))[0].host))
    assert ("private_hosts" in caught.value.fix) == opened


def test_what_private_opens_and_what_names_lead_to_is_not_judged_in_the_list() -> None:
    private = parse_private(("10.0.0.1:8081", "169.254.169.254:80"))
    allow = ("10.0.0.1:8081", "8.8.8.8", "2606:4700::1111", "localhost:1", "metadata.internal")
    assert parse_reachable(allow, private) == parse_allow(allow)
    for entry in ("10.0.0.1:8082", "10.0.0.1", "169.254.169.254:80"):
        with pytest.raises(UserError, match="never be reached"):
            parse_reachable((entry,), private)
