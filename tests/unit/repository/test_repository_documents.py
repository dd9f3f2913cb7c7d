"""Documents follow from the code, and their code runs."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.core.vocabulary import Split
from burnish.envs import registry

ROOT = Path(__file__).parents[3]
GENERATED = runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"]


@pytest.mark.parametrize("name", sorted(GENERATED))
def test_generated_pages_are_current(name: str) -> None:
    current = (ROOT / "docs" / name).read_text()
    assert current == GENERATED[name](), "run `make docs`"


def environment_source() -> str:
    (block,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "environment.md").read_text(), flags=re.DOTALL
    )
    return str(block)


def test_the_example_environment_has_at_most_forty_lines_of_code() -> None:
    lines = [line for line in environment_source().splitlines() if line.strip()]
    assert len(lines) <= 40


def test_the_example_environment_passes_the_audit(tmp_path: Path) -> None:
    (tmp_path / "my_environments.py").write_text(environment_source())
    command = [
        sys.executable,
        "-m",
        "burnish.cli.main",
        "check",
        "my_environments:Vowels",
        "--json",
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    (report,) = json.loads(done.stdout)
    assert report["verdict"] == "pass", report


def test_recipes_name_environments_that_exist_and_teach() -> None:
    from burnish.core.config import load_config
    from burnish.run.config import RunConfig

    for recipe in sorted((ROOT / "recipes").glob("*.toml")):
        for name in load_config(RunConfig, [recipe]).value.domains:
            assert registry.get(name).task(Split.TRAIN, 0).domain == name
