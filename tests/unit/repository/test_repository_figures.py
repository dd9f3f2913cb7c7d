"""The figures of the README come from the benchmarks' rows."""

import json
import runpy
from pathlib import Path

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


def test_only_the_text_between_the_marks_changes() -> None:
    readme = (ROOT / "README.md").read_text()
    once = FIGURES["replaced"](readme, "| a |")
    assert FIGURES["replaced"](once, "| a |") == once
    assert once.count("| a |") == 1
    assert once.startswith(readme.partition("<!-- figures")[0])
