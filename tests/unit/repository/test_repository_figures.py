"""The figures of the README come from the benchmarks' rows."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FIGURES = runpy.run_path(str(ROOT / "tools" / "figures.py"))
ROW = {"name": "decode", "value": 1234.5, "unit": "tokens/s", "peer": "transformers"}
WITH_PEER = ROW | {
    "peer_value": 617.25,
    "ratio": 2.0,
    "target": 1.5,
    "ok": True,
    "n": 3,
    "note": "",
}
WITHOUT = ROW | {"peer_value": None, "ratio": None, "target": 1.5, "ok": None, "n": 3}


def test_every_row_names_its_command(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    file.write_text(json.dumps([WITH_PEER, WITHOUT | {"note": "not installed"}]))
    lines = FIGURES["table"]([file]).splitlines()
    command = "`python benchmarks/engine.py` |"
    assert lines[-2] == f"| decode | 1,234 tokens/s | transformers: 617.2 | 2.00 | 1.5 | {command}"
    assert lines[-1] == f"| decode | 1,234 tokens/s | not installed | - | 1.5 | {command}"


def test_a_missed_target_is_marked(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    file.write_text(json.dumps([WITH_PEER, WITH_PEER | {"ratio": 1.4, "ok": False}]))
    met, missed = FIGURES["table"]([file]).splitlines()[-2:]
    assert "missed" not in met
    assert "| 1.40 | 1.5 **missed** |" in missed


def test_every_script_of_the_bench_runs_whatever_the_others_miss(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to(sys.executable)
    for name, status in (("attention", 1), ("engine", 0), ("trainer", 1)):
        script = (
            f"import sys; open(sys.argv[2], 'w').write(' '.join(sys.argv[3:]))\nsys.exit({status})"
        )
        (tmp_path / f"benchmarks/{name}.py").write_text(script)
    make = ["make", "-o", "install-dev", "bench", "VENV=venv", "BENCH_ARGS=--quick"]
    done = subprocess.run(
        [*make, "ENGINE_ARGS=--vllm-python x"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode
    assert "below a target, or failed: attention trainer\n" in done.stderr
    found = {file.stem: file.read_text() for file in (tmp_path / "build/bench").iterdir()}
    assert found == {
        "attention": "--quick", "engine": "--quick --vllm-python x", "trainer": "--quick"
    }  # fmt: skip


def test_only_the_text_between_the_marks_changes() -> None:
    readme = (ROOT / "README.md").read_text()
    once = FIGURES["replaced"](readme, "| a |")
    assert FIGURES["replaced"](once, "| a |") == once
    assert once.count("| a |") == 1
    assert once.startswith(readme.partition("<!-- figures")[0])


def test_each_machine_has_a_table_of_its_own() -> None:
    marks = "<!-- figures: {} -->\nold {}\n<!-- end of figures -->\n"
    readme = marks.format("make bench", 1) + marks.format("another", 2)
    changed = FIGURES["replaced"](readme, "new", "another")
    assert changed == readme.replace("old 2", "new")
    with pytest.raises(AssertionError, match="'a third'"):
        FIGURES["replaced"](readme, "new", "a third")
