"""Writes the figures of `make bench` into the README, each with the command that repeats it.

python tools/figures.py build/bench/*.json

Another machine's figures have a table of their own, which `--table` names, as its mark does.
"""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- figures: {} -->", "<!-- end of figures -->"
FIRST = "make bench"


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


def replaced(text: str, body: str, name: str = FIRST) -> str:
    """The text with `body` between the marks of the table `name`."""
    head, begin, rest = text.partition(BEGIN.format(name))
    _, end, tail = rest.partition(END)
    assert begin, f"the README has no mark of figures named {name!r}"
    assert end, "the README has lost the end mark of its figures"
    return f"{head}{begin}\n{body}\n{END}{tail}"


def main() -> None:
    """Rewrite the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--table", default=FIRST, help="which one, by the name in its mark")
    options = parser.parse_args()
    text = replaced(README.read_text(), table(sorted(options.files)), options.table)
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
