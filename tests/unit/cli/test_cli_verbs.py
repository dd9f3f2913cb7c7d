"""The verbs, through the command line as users and programs call them."""

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from burnish import __version__
from burnish.cli.machine import (
    Status,
    _cgroups,
    _cpu,
    _disk,
    _memory,
    inspect_machine,
)
from burnish.cli.main import main
from burnish.envs import registry
from burnish.quality.report import ProbeVerdict, QualityReport

CONTROL = ("status", "pause", "resume", "stop", "add", "remove", "share")
COMMANDS = (
    *("", "run", "check", "report", "doctor", "env", "env list", "env play", "config explain"),
    *("bench engine", "simulate", "top"),
    *(f"control {verb}" for verb in CONTROL),
    *(f"jobs {verb}" for verb in ("serve", "submit", "list", "cancel", "stop")),
)
SANDBOX_FLAGS = {
    "create": ["--allow", "--deterministic", "--image", "--json", "--privileges"],
    "exec": [
        *("--cwd", "--disk", "--env", "--json", "--keep", "--memory", "--output", "--pids"),
        "--timeout",
    ],
    "allow": ["--json"],
    "list": ["--json"],
    "destroy": ["--json"],
    "snapshot": ["--json"],
    "rollback": ["--json"],
    "forget": ["--json"],
    "fork": ["--json", "--number", "--snapshot", "-n"],
    "export": ["--json", "--snapshot"],
    "import": ["--json"],
    "stats": ["--json"],
    "stop": ["--json"],
    "sweep": ["--json"],
    "serve": [
        *("--audit", "--backend", "--json", "--lease", "--listen", "--max-boxes", "--socket"),
        *("--storage", "--storage-directory", "--tls-cert", "--tls-key", "--token-file"),
    ],
    "audit verify": ["--heads", "--json"],
    "audit show": ["--json"],
    "image add": ["--json", "--mirror", "--package", "--suite", "--tag"],
    "image list": ["--json"],
    "image remove": ["--json"],
    "image verify": ["--json"],
}


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    code = caught.value.code
    assert code is None or isinstance(code, int)
    return code or 0


def options(text: str) -> list[str]:
    return sorted(set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text)))


def shown_flags(command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert call(*command.split(), "--help") == 0
    # Flags stand at the start of a row of a box.
    rows = [
        line.strip("\u2502 ").split("  ")[0]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("\u2502 -")
    ]
    return options(" ".join(rows))


def test_the_flags_are_frozen(capsys: pytest.CaptureFixture[str]) -> None:
    # Files describe runs, flags describe actions. Before adding one, ask whether it is an action.
    found = {command: shown_flags(command, capsys) for command in COMMANDS}
    assert found == {
        "": ["--help", "--version", "-h"],
        "run": ["--config", "--dry-run", "--json", "--resume", "--set", "-c"],
        "check": ["--json", "--set"],
        "report": ["--json"],
        "doctor": ["--json", "--quiet"],
        "env": [],
        "env list": ["--json"],
        "env play": ["--index", "--json", "--split"],
        "config explain": ["--config", "--json", "--set", "-c"],
        "bench engine": ["--json", "--plot", "--quick", "--set"],
        "simulate": ["--json", "--plot", "--policy", "--seeds", "--tier"],
        "top": ["--json", "--once"],
        **{f"control {verb}": ["--json"] for verb in CONTROL},
        "control add": ["--environment", "--json", "--max-share", "--min-share", "--weight"],
        "control share": ["--false-pass", "--json", "--max-share", "--min-share", "--weight"],
        **{f"jobs {verb}": ["--directory", "--json"] for verb in ("list", "cancel", "stop")},
        "jobs serve": ["--directory", "--json", "--lend-after", "--quota", "--units"],
        "jobs submit": ["--directory", "--json", "--priority", "--set", "--tenant", "--units"],
    }


def test_the_flags_of_the_sandbox_are_frozen(capsys: pytest.CaptureFixture[str]) -> None:
    found = {verb: shown_flags(f"sandbox {verb}", capsys) for verb in SANDBOX_FLAGS}
    assert found == SANDBOX_FLAGS


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out.strip() == __version__


def test_env_list_names_every_shipped_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("env", "list", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(registry.names())
    assert all(row["digest"].startswith("sha256:") and row["description"] for row in rows)
    assert call("env", "list") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in registry.names())


def test_config_explain_tells_value_origin_and_meaning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[run]\nsteps = 7\n")
    assert call("config", "explain", "run.steps", str(file)) == 0
    shown = capsys.readouterr().out
    assert "run.steps = 7" in shown
    assert "a.toml:2" in shown
    assert call("config", "explain", "run", str(file), "--set", "run.seed=3", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["run.seed"] == {"value": 3, "origin": "--set"}
    assert values["run.steps"]["value"] == 7
    assert call("config", "explain", "domains.new", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values == {"domains.new.environment": {"value": None, "origin": "default"}}


def play(monkeypatch: pytest.MonkeyPatch, text: str, *arguments: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return call("env", "play", *arguments)


def test_the_reference_passes_when_a_person_plays_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(monkeypatch, "/reference\n", "chain_sum", "--split", "held_out", "--json") == 0
    captured = capsys.readouterr()
    verdict = json.loads(captured.out)
    assert (verdict["score"], verdict["passed"]) == (1.0, True)
    assert "held-out task 0" in captured.err


def test_a_wrong_answer_of_several_lines_is_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(monkeypatch, "I\n\nthink so\n.\n", "chain_sum") == 0
    shown = capsys.readouterr().out
    assert "not passed, score 0.00" in shown
    assert "I\n\nthink so" in shown


@pytest.mark.parametrize("text", ["", "/quit\n", "/call x [\n"])
def test_leaving_gives_no_verdict(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(monkeypatch, text, "calculator") == 0
    assert "score" not in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "/quit\n"])
def test_leaving_is_an_outcome_for_programs(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(monkeypatch, text, "formatting", "--json") == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"outcome": "abandoned"}
    assert "/reference" in captured.err
    assert "/quit" in captured.err


def test_control_characters_of_an_answer_do_not_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play(monkeypatch, "\x1b]0;owned\x07\n.\n", "chain_sum")
    assert "\x1b" not in capsys.readouterr().out


def test_check_passes_a_good_environment_and_fails_a_broken_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "from burnish.envs.formatting import Formatting\n"
        "class Broken(Formatting):\n"
        "    def reference(self, task):\n"
        "        raise RuntimeError('no reference')\n"
    )
    (tmp_path / "broken_environment.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert call("check", "formatting", "broken_environment:Broken", "--json") == 1
    good, broken = json.loads(capsys.readouterr().out)
    assert (good["verdict"], broken["verdict"]) == ("pass", "fail")


def test_check_names_what_cannot_be_built_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("check", "absent_module:Nothing", "formatting", "--json") == 1
    captured = capsys.readouterr()
    broken, good = json.loads(captured.out)
    assert (broken["environment"], broken["verdict"]) == ("absent_module:Nothing", "fail")
    assert "absent_module" in broken["findings"][0]["reason"]
    assert good["verdict"] == "pass"
    assert captured.err.splitlines() == [
        "checking 1/2 absent_module:Nothing",
        "checking 2/2 formatting",
    ]


def test_check_takes_the_keys_of_quality_and_no_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    async def audit(environment: object, pool: object, config: object) -> object:
        seen.append(config)
        return QualityReport(environment="x", digest="", verdict=ProbeVerdict.PASS, findings=())

    monkeypatch.setattr("burnish.quality.audit.audit", audit)
    assert call("check", "formatting", "--set", "quality.num_tasks=5") == 0
    assert seen[0].num_tasks == 5
    assert call("check", "formatting", "--set", "train.lr=1e-5") == 2
    assert "only the keys of [quality]" in capsys.readouterr().err
    assert call("check", "formatting", "--set", "quality.num_tasks=1") == 2


def test_a_dry_run_tells_values_and_origins_to_programs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = '[run]\nsteps = 7  # a.toml:2\n\n[domains.x]\nenvironment = "y"  # --set\n'
    monkeypatch.setattr(
        "burnish.run.local.start", lambda *_, **__: SimpleNamespace(resolved=resolved)
    )
    assert call("run", "a.toml", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "config": {"run": {"steps": 7}, "domains": {"x": {"environment": "y"}}},
        "origins": {"run.steps": "a.toml:2", "domains.x.environment": "--set"},
    }


def test_doctor_reports_what_a_run_needs(capsys: pytest.CaptureFixture[str]) -> None:
    status = call("doctor", "--json")
    rows = json.loads(capsys.readouterr().out)
    assert {"python", "cpu", "memory", "disk", "sandbox"} <= {row["name"] for row in rows}
    assert status == int(any(row["status"] == "fail" for row in rows))
    assert all(row["fix"] for row in rows if row["status"] == "fail")


def test_doctor_names_the_fix_when_bubblewrap_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    rows = {row.name: row for row in inspect_machine(tmp_path)}
    # Where the native sandbox runs, nothing needs it.
    native = rows["sandbox native"].status is Status.OK
    assert rows["sandbox bubblewrap"].status is (Status.ABSENT if native else Status.FAIL)
    assert "apt" in rows["sandbox bubblewrap"].fix


def test_doctor_tells_slow_processors_and_small_machines(tmp_path: Path) -> None:
    cpuinfo, meminfo = tmp_path / "cpuinfo", tmp_path / "meminfo"
    cpuinfo.write_text("model name\t: Old CPU\nflags\t\t: sse avx2\n")
    assert _cpu(cpuinfo).status is Status.WARN
    cpuinfo.write_text("model name\t: New CPU\nflags\t\t: avx512_bf16 amx_bf16\n")
    assert _cpu(cpuinfo).detail == "New CPU, amx_bf16, avx512_bf16"
    meminfo.write_text("MemTotal: 4000000 kB\nMemAvailable: 3000000 kB\n")
    assert _memory(meminfo).status is Status.WARN


def test_doctor_finds_the_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert str(tmp_path) in _disk(tmp_path / "a" / "b").detail


def test_doctor_tells_versions_of_cgroups_apart(tmp_path: Path) -> None:
    assert _cgroups(tmp_path / "absent").status is Status.WARN
    assert _cgroups(tmp_path).detail == "v1: none"
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    assert _cgroups(tmp_path).detail == "v2: cpu, memory, pids"


BROKEN = {
    "no toml": ("[run\nsteps = 1", ".toml:1:"),
    "no key": ("[run]\nstps = 1", 'unknown key "stps"'),
    "wrong value": ("[run]\nsteps = -1", "steps"),
    "binary": ("\0\x01", "invalid TOML"),
    "deep": ("x = " + "[" * 100_000, "broken.toml"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize(
    "words",
    [["jobs", "submit", "name"], ["run"], ["bench", "engine"], ["config", "explain", "run"]],
)
def test_a_broken_configuration_is_one_line_with_its_place(tmp_path, capsys, words, name):
    text, says = BROKEN[name]
    file = tmp_path / "broken.toml"
    file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main([*words, str(file)])
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert str(file) in err
    assert says in err
    assert "Fix:" in err


def test_a_file_that_is_no_configuration_is_not_read_to_its_end(capsys):
    for path, says in (("/dev/zero", "no configuration"), ("/", "cannot be read")):
        with pytest.raises(SystemExit) as ended:
            main(["jobs", "submit", "name", path])
        assert ended.value.code == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["control", "share", "RUN", "d", "--min-share", "nan"], "--min-share 'nan': expected"),
        (["control", "share", "RUN", "d", "--weight", "0"], "--weight '0.0': expected"),
        (["control", "share", "RUN", "d"], "nothing to change"),
        (["jobs", "cancel", "a/b", "--directory", "RUN"], "the name 'a/b': expected"),
    ],
)
def test_a_value_that_makes_no_sense_is_told_by_its_flag(tmp_path, capsys, words, says):
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path) if word == "RUN" else word for word in words])
    err = capsys.readouterr().err
    assert (ended.value.code, err.count("\n")) == (2, 1)
    assert says in err
