"""The rules of the house that no linter knows. The lists of exceptions may only shrink."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_VERB_LINES = 40
LONG_FILES: frozenset[str] = frozenset()
LONG_FUNCTIONS: frozenset[str] = frozenset()
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
TEXTS = {".py", ".toml", ".md", ".sh", ".txt", ".j2", ".css", ".lock", ".yml", ".c"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[tuple[str, int, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            yield f"{name_of(path)}:{node.name}", (node.end_lineno or first) - first + 1, node


def test_files_are_short() -> None:
    long = {name_of(p) for p in SOURCES if len(p.read_text().splitlines()) > MAX_FILE_LINES}
    assert long == LONG_FILES


def test_functions_are_short() -> None:
    # The docstring of a public function is reference text, not code to hold in mind.
    def code_lines(length: int, node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        first = node.body[0]
        documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        return length - ((first.end_lineno or 0) - first.lineno + 1 if documented else 0)

    found = {
        name
        for path in SOURCES
        for name, length, node in functions(path)
        if code_lines(length, node) > MAX_FUNCTION_LINES
    }
    assert found == LONG_FUNCTIONS


def test_verbs_are_thin() -> None:
    verbs = re.findall(
        r'"burnish\.cli\.(\w+):(\w+)"', (ROOT / "src/burnish/cli/app.py").read_text()
    )
    assert verbs
    for module, function in verbs:
        path = ROOT / f"src/burnish/cli/{module}.py"
        (length,) = [n for name, n, _ in functions(path) if name.endswith(f":{function}")]
        assert length <= MAX_VERB_LINES, f"{module}.{function}"


def test_nothing_is_called_utils() -> None:
    parts = {part.removesuffix(".py") for p in SOURCES for part in p.relative_to(ROOT).parts}
    assert parts & FORBIDDEN_NAMES == set()


def test_repository_texts_are_ascii() -> None:
    folders = (
        "src",
        "tests",
        "docs",
        "design",
        "benchmarks",
        "recipes",
        "examples",
        "tools",
        ".ci",
    )
    files = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in TEXTS]
    files += [p for p in ROOT.iterdir() if p.suffix in TEXTS or p.name in ("Makefile", "LICENSE")]
    assert [name_of(p) for p in files if not p.read_bytes().isascii()] == []


def test_every_folder_of_the_package_says_what_it_is_for() -> None:
    for path in (ROOT / "src").rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), name_of(path)


def test_test_files_have_unique_names() -> None:
    names = [p.name for p in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_commands_of_the_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
    verbs = set(re.findall(r'name="(\w+)"', (ROOT / "src/burnish/cli/app.py").read_text()))
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for document in documents:
        text = document.read_text()
        used = set(re.findall(r"(?:^ {4}|`)make ([a-z-]+)", text, flags=re.MULTILINE))
        assert used <= targets, document.name
        called = set(re.findall(r"(?:^ {4}|`)burnish ([a-z]+)", text, flags=re.MULTILINE))
        assert called <= verbs, document.name


def test_links_between_documents_lead_somewhere() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "design").glob("*.md")]
    for document in [ROOT / "README.md", *pages]:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
            if "://" not in link:
                assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_every_benchmark_takes_quick_and_json() -> None:
    folder = ROOT / "benchmarks"
    for script in folder.glob("*.py"):
        text = script.read_text()
        text += "".join(p.read_text() for p in folder.rglob("*.py") if f"{p.stem} import" in text)
        assert "--quick" in text, script.name
        assert "--json" in text, script.name


def test_the_lock_fits_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [*project["project"]["dependencies"]]
    asked += [d for group in project["project"]["optional-dependencies"].values() for d in group]
    asked += project["dependency-groups"]["dev"]
    lock = (ROOT / "requirements.lock").read_text()
    locked = set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE))
    names = {re.split(r"[<>=\[;]", d)[0].strip().lower().replace("_", "-") for d in asked}
    assert names - {"torch"} <= locked
    assert not re.search(r"==.*\+", lock)


def test_the_base_install_has_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [d for d in project["dependencies"] if d.startswith(("torch", "transformers"))]
