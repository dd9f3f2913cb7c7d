import re
import subprocess
import sys

import pytest

from burnish.core.errors import UserError
from burnish.core.protocols import Tiered
from burnish.core.vocabulary import Split
from burnish.envs import registry
from burnish.envs.formatting import Formatting
from burnish.envs.reasoning_gym import REFUSED, ReasoningGym, ReasoningGymConfig


def test_unknown_name_gets_the_nearest_one():
    with pytest.raises(UserError, match="chain_sum") as caught:
        registry.get("chain_sums")
    assert "\n" not in str(caught.value)


def test_the_beginning_of_a_name_is_enough_to_be_understood():
    with pytest.raises(UserError, match=r"use 'calculator'\."):
        registry.get("calc")


def test_far_fetched_names_are_not_suggested():
    with pytest.raises(UserError, match="use one of calculator, "):
        registry.get("letter_counting")


def test_hopeless_name_gets_the_list():
    with pytest.raises(UserError, match="extraction"):
        registry.get("zzz")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("no_such_package_x:Env", "PYTHONPATH"),
        ("burnish.envs.code:Cod", "burnish.envs.code:Code"),
        ("burnish.envs.code:", "no class"),
        (":Code", "cannot import"),
        ("a..b:C", "cannot import"),
        ("json:JSONDecoder", "lacks"),
        ("burnish.envs.reasoning_gym:ReasoningGym", "default"),
        ("burnish.envs.code:COMPILED_CREDIT", "no class"),
        ("os:path", "use os:Class with a class of that module, or one of calculator"),
        ("os:getcwd", "lacks"),
        ("builtins:dict", "builtins:dict"),
    ],
)
def test_bad_targets_are_user_errors_of_one_line(name, part):
    with pytest.raises(UserError, match=part) as caught:
        registry.get(name)
    assert "\n" not in str(caught.value)


def test_module_class_builds_an_environment():
    assert registry.get("burnish.envs.extraction:Extraction").name == "extraction"


def test_a_module_that_breaks_on_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "breaks_on_import.py").write_text("raise RuntimeError('boom')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="boom"):
        registry.get("breaks_on_import:Env")


BROKEN = """
import sys

class Raises:
    def __init__(self):
        raise ValueError("two\\nlines of trouble")

class Exits:
    def __init__(self):
        sys.exit(3)

class Whole:
    digest = description = "x"
    tools = ()
    task = start = reference = None

class RaisesLater(Whole):
    @property
    def name(self):
        raise KeyError("no name yet")

class Unnamed(Whole):
    name = None
"""


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("Raises", "two lines of trouble"),
        ("Exits", "SystemExit"),
        ("RaisesLater", "no name yet"),
        ("Unnamed", "None"),
    ],
)
def test_a_constructor_that_raises_is_named_with_its_exception(kind, part, tmp_path, monkeypatch):
    (tmp_path / "broken_constructors.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=part) as caught:
        registry.get(f"broken_constructors:{kind}")
    assert f"broken_constructors:{kind}" in str(caught.value)
    assert caught.value.fix
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["def broken(:\n", "import sys; sys.exit(3)\n"])
def test_a_module_that_cannot_be_run_is_named(text, tmp_path, monkeypatch):
    (tmp_path / "cannot_be_run.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="cannot import 'cannot_be_run'"):
        registry.get("cannot_be_run:Env")


def test_listing_names_imports_no_environment():
    program = (
        "import sys; from burnish.envs import registry; registry.names();"
        "bad = [m for m in sys.modules if m.startswith('burnish.envs.') and m != "
        "'burnish.envs.registry' or m == 'reasoning_gym']; sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def config(generator: str, **parameters: object) -> ReasoningGymConfig:
    return ReasoningGymConfig(
        name="x", description="X.", generator=generator, parameters=parameters, form="number"
    )


@pytest.mark.parametrize("generator", sorted(REFUSED))
def test_dangerous_generators_are_refused_by_name(generator):
    with pytest.raises(UserError, match=generator):
        ReasoningGym(config(generator))


@pytest.mark.parametrize(
    "bad", [config("no_such_generator"), config("chain_sum", min_terms=9, max_terms=2)]
)
def test_bad_generator_settings_are_user_errors(bad):
    with pytest.raises(UserError, match="generator"):
        ReasoningGym(bad)


def test_digest_follows_the_configuration():
    easy = ReasoningGym(config("chain_sum", max_terms=2))
    hard = ReasoningGym(config("chain_sum", max_terms=3))
    assert easy.digest != hard.digest
    assert easy.digest == ReasoningGym(config("chain_sum", max_terms=2)).digest


def test_digest_follows_the_code(tmp_path, monkeypatch):
    text = (
        "from burnish.envs.formatting import Formatting\nclass Mine(Formatting):\n    name = 'm'\n"
    )
    digests = []
    monkeypatch.syspath_prepend(tmp_path)
    for module, extra in (("mine_a", ""), ("mine_b", "    max_tokens = 9\n")):
        (tmp_path / f"{module}.py").write_text(text + extra)
        digests.append(registry.get(f"{module}:Mine").digest)
    assert digests[0] != digests[1]


def test_a_class_without_a_file_has_no_digest(monkeypatch):
    class Typed(Formatting):
        name = "typed"

    Typed.__module__ = "__typed_into_a_console__"
    with pytest.raises(UserError, match="module of its own"):
        Typed()


def test_the_tiers_of_a_shipped_ladder_are_the_lengths_of_its_items_in_both_splits():
    ladder = registry.get("sum_ladder")
    assert isinstance(ladder, Tiered)
    for split in Split:
        tasks = [ladder.task(split, index) for index in range(64)]
        for task in tasks:
            numbers = re.findall(r"\d+", task.prompt[0].content)
            assert ladder.tier(task) == len(numbers) - 2
            assert "tier" not in task.prompt[0].content
        assert {ladder.tier(task) for task in tasks} == set(range(ladder.num_tiers))
