"""Every example runs as its first lines say."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.core.errors import UserError
from burnish.sandbox.start import open_pool

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 300


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(path: Path) -> None:
    if path.name.startswith("sandbox_"):
        try:
            asyncio.run(open_pool().close())
        except UserError as error:
            pytest.skip(str(error))
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_to_run_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < MAX_LINES
    assert f"python examples/{path.name}" in text
