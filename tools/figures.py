"""Writes the figures of `make bench` into the README, each with the command that repeats it.

python tools/figures.py build/bench/*.json
"""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- figures: make bench -->", "<!-- end of figures -->"


def table(files: list[Path]) -> str:
    """A Markdown table; a row without its peer says why."""
    lines = [
        f"`make bench` on {cpu_name()}: medians; `engine.py`: best of three interleaved rounds.",
        "A target that was not met is marked **missed**.",
        "",
        "| figure | Burnish | peer | ratio | target | command |",
        "|---|---|---|---|---|---|",
    ]
    for file in files:
        for row in json.loads(file.read_text(encoding="utf-8")):
            lines.append(f"{figure(row)} `python benchmarks/{file.stem}.py` |")
    return "\n".join(lines)


def figure(row: dict[str, Any]) -> str:
    """One row of the table, up to its command."""
    peer = row["note"] if row["peer_value"] is None else f"{row['peer']}: {row['peer_value']:,.4g}"
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    value = "-" if row["value"] is None else f"{row['value']:,.4g}"
    target = "-" if row["target"] is None else f"{row['target']:,.4g}"
    if row["ok"] is False:
        target += " **missed**"
    return f"| {row['name']} | {value} {row['unit']} | {peer} | {ratio} | {target} |"


def cpu_name() -> str:
    """What the processor calls itself."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def replaced(text: str, body: str) -> str:
    """The text with `body` between the marks."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    assert begin, "the README has lost the mark of its figures"
    assert end, "the README has lost the end mark of its figures"
    return f"{head}{BEGIN}\n{body}\n{END}{tail}"


def main() -> None:
    """Rewrite the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    files = sorted(parser.parse_args().files)
    README.write_text(replaced(README.read_text(), table(files)), encoding="utf-8")


if __name__ == "__main__":
    main()
