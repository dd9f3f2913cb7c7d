import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.sandbox.bubblewrap.argv import (
    BASE_ENV,
    REQUIRED_OPTIONS,
    BoxView,
    BwrapFeatures,
    box_options,
    encode_options,
    launcher_script,
    parse_features,
)
from burnish.sandbox.commands import check_argv
from burnish.sandbox.host_view import HostPath

VIEW = BoxView(
    system=(HostPath("/usr", None), HostPath("/bin", "usr/bin"), HostPath("/lib64", None)),
    etc=(("/base/passwd", "passwd"),),
    hidden=("/usr/lib/python3/dist-packages",),
    empty="/base/empty",
    storage="/base/box-1",
)
OLD = BwrapFeatures(options=REQUIRED_OPTIONS, version="0.4.0")
NEW = BwrapFeatures(options=REQUIRED_OPTIONS | {"--disable-userns"}, version="0.8.0")
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


def pairs(options: list[str], name: str) -> list[tuple[str, str]]:
    return [(options[i + 1], options[i + 2]) for i, text in enumerate(options) if text == name]


def test_everything_is_unshared_and_all_privilege_dropped() -> None:
    options = box_options(VIEW, OLD)
    for option in ("--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"):
        assert option in options
    assert options[options.index("--cap-drop") + 1] == "ALL"
    assert "--share-net" not in options


def test_only_the_boxs_own_storage_is_writable() -> None:
    options = box_options(VIEW, NEW)
    assert {source for source, _ in pairs(options, "--bind")} == {
        "/base/box-1/work",
        "/base/box-1/tmp",
        "/base/box-1/shm",
    }
    assert "--tmpfs" not in options
    remounted = [options[i + 1] for i, text in enumerate(options) if text == "--remount-ro"]
    assert remounted == ["/dev", "/"]
    assert max(i for i, text in enumerate(options) if text == "--bind") < options.index(
        "--remount-ro"
    )


def test_what_is_hidden_is_covered_after_its_parent_is_shown() -> None:
    bound = pairs(box_options(VIEW, OLD), "--ro-bind")
    cover = ("/base/empty", "/usr/lib/python3/dist-packages")
    assert bound.index(cover) > bound.index(("/usr", "/usr"))


def test_links_of_the_host_stay_links() -> None:
    options = box_options(VIEW, NEW)
    assert pairs(options, "--symlink") == [("usr/bin", "/bin")]
    assert ("/lib64", "/lib64") in pairs(options, "--ro-bind")


def test_newer_options_are_used_only_where_they_exist() -> None:
    assert "--disable-userns" in box_options(VIEW, NEW)
    assert "--disable-userns" not in box_options(VIEW, OLD)
    known = {text for text in box_options(VIEW, OLD) if text.startswith("--")}
    assert known <= REQUIRED_OPTIONS


def test_the_environment_is_set_by_name() -> None:
    assert dict(pairs(box_options(VIEW, NEW), "--setenv")) == BASE_ENV


def test_features_are_read_from_the_help_text() -> None:
    features = parse_features(
        "usage: bwrap\n\n    --args FD    Parse\n    --uid UID  x\n", "bubblewrap 0.8.0\n"
    )
    assert features.options == {"--args", "--uid"}
    assert features.version == "0.8.0"


def test_options_are_separated_by_nul() -> None:
    assert encode_options(["--setenv", "A", "b c"]) == b"--setenv\0A\0b c\0"


def run_script(script: bytes) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        ["sh", "-c", 'exec 5>/dev/null; eval "$1"', "sh", script], capture_output=True, check=False
    )


@settings(max_examples=30, deadline=None)
@given(arguments=st.lists(TEXT, max_size=5), value=TEXT)
def test_any_argument_reaches_the_program_as_it_is(arguments: list[str], value: str) -> None:
    code = 'printf "%s\\0" "$V" "$@"'
    script = launcher_script(("sh", "-c", code, "sh", *arguments), {"V": value}, "/work", ["true"])
    result = run_script(script)
    assert result.stdout == b"".join(text.encode() + b"\0" for text in (value, *arguments))


@pytest.mark.parametrize("ulimit", ["false", "ulimit -c nonsense", "exit 3"])
def test_a_program_does_not_start_without_its_limits(ulimit: str) -> None:
    script = launcher_script(("echo", "ran"), {}, "/work", [ulimit])
    result = run_script(script)
    assert b"ran" not in result.stdout
    assert result.returncode != 0


@pytest.mark.parametrize(
    "env", [{"A=B": "1"}, {"": "1"}, {"A;rm": "1"}, {"A": "\0"}, {"A": "x" * 99999}]
)
def test_bad_variables_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="env"):
        check_argv(("true",), env)
