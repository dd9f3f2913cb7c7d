import math
import subprocess
import sys
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError, model_validator

from burnish.core.config import Config, Loaded, config_schema, diff_configs, load_config
from burnish.core.errors import UserError
from burnish.core.toml_text import key_lines, toml_value


class Algorithm(StrEnum):
    CISPO = "cispo"
    GRPO = "grpo"


class Domain(Config):
    weight: float = 1.0
    """Share of the floor."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Free keys."""


class Train(Config):
    renamed: ClassVar[dict[str, str]] = {"learning_rate": "lr"}

    lr: float = Field(1e-4, gt=0)
    """Peak learning rate."""
    steps: int = 10
    algorithm: Algorithm = Algorithm.CISPO
    betas: tuple[float, float] = (0.9, 0.95)
    resume_from: Path | None = None
    stop: int | str = 1


class Run(Config):
    renamed: ClassVar[dict[str, str]] = {"optimizer.lr": "train.lr"}

    seed: int = 0
    name: str = "run"
    quick: bool = False
    train: Train = Train()
    domains: dict[str, Domain] = Field(default_factory=dict)
    stages: tuple[Domain, ...] = ()

    @model_validator(mode="after")
    def _quick_is_short(self) -> "Run":
        if self.quick and self.train.steps > 100:
            raise ValueError("a quick run has at most 100 train.steps")
        return self


class Required(Config):
    class Inner(Config):
        path: str

    inner: Inner


def load(tmp_path: Path, text: str, *sets: str) -> Loaded[Run]:
    file = tmp_path / "q.toml"
    file.write_text(text)
    return load_config(Run, [file], sets)


def refusal(tmp_path: Path, text: str, *sets: str, cls: type[Config] = Run) -> str:
    file = tmp_path / "q.toml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(cls, [file], sets)
    message = str(caught.value).replace(f"{tmp_path}/", "")
    assert "\n" not in message
    assert "pydantic" not in message.lower()
    return message


def test_without_files_everything_is_default() -> None:
    loaded = load_config(Run)
    assert loaded.value == Run()
    assert set(loaded.origins.values()) == {"default"}


def test_set_beats_the_later_file_which_beats_the_earlier_which_beats_defaults(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("seed = 1\nname = 'first'\n[train]\nsteps = 1\nlr = 0.1\n")
    second.write_text("[train]\n\nsteps = 2\nlr = 0.2\n")
    loaded = load_config(Run, [first, second], ["train.steps=3"])
    assert (loaded.value.seed, loaded.value.name) == (1, "first")
    assert (loaded.value.train.lr, loaded.value.train.steps) == (0.2, 3)
    assert loaded.origins["seed"] == f"{first}:1"
    assert loaded.origins["train.lr"] == f"{second}:4"
    assert loaded.origins["train.steps"] == "--set"
    assert loaded.origins["train.algorithm"] == "default"


def test_tables_merge_deeply_over_layers(tmp_path: Path) -> None:
    loaded = load(tmp_path, "[domains.sort]\nweight = 2.0\n", "domains.add.params={n = 3}")
    assert loaded.value.domains["sort"].weight == 2.0
    assert loaded.value.domains["add"].params == {"n": 3}
    assert loaded.origins["domains.add.params.n"] == "--set"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.steps=7", "steps", 7),
        ("train.lr=1e-5", "lr", 1e-5),
        ("train.lr = 1e-5", "lr", 1e-5),
        ("train.algorithm=grpo", "algorithm", Algorithm.GRPO),
        ('train.algorithm="grpo"', "algorithm", Algorithm.GRPO),
        ("train.betas=[0.5, 0.6]", "betas", (0.5, 0.6)),
        ("train.resume_from=a/b=c", "resume_from", Path("a/b=c")),
        ("train={steps=4}", "steps", 4),
    ],
)
def test_set_reads_toml_or_else_a_string(override: str, key: str, value: object) -> None:
    assert getattr(load_config(Run, [], [override]).value.train, key) == value


def test_a_table_that_is_set_takes_over_the_origin_of_its_keys(tmp_path: Path) -> None:
    loaded = load(tmp_path, "[train]\nsteps = 5\nlr = 0.1\n", "train={steps = 6}")
    assert loaded.origins["train.steps"] == "--set"
    assert loaded.origins["train.lr"] == f"{tmp_path}/q.toml:3"
    message = refusal(tmp_path, "[train]\nsteps = 5\n", "train={steps = 'x'}")
    assert message.startswith('--set: train.steps got "x"')


@pytest.mark.parametrize("text", ["123", "true", "1e5", "", "x\ny = 2", "[1]", "2024-01-01"])
def test_set_of_a_string_keeps_what_was_typed(text: str) -> None:
    assert load_config(Run, [], [f"name={text}"]).value.name == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trian]\nlr = 1", 'q.toml:1: unknown key "trian" in the top level. Fix: did you mean '
         '"train" in the top level?'),
        ("\nlr = 1", 'q.toml:2: unknown key "lr" in the top level. Fix: did you mean "lr" in '
         "[train]?"),
        ("[train]\nstep = 1", 'q.toml:2: unknown key "step" in [train]. Fix: did you mean "steps" '
         "in [train]?"),
        ("[domains.add]\nwieght = 1", 'q.toml:2: unknown key "wieght" in [domains.add]. Fix: did '
         'you mean "weight" in [domains.add]?'),
        ("domains.add.wieght = 1", 'q.toml:1: unknown key "wieght" in [domains.add]. Fix: did '
         'you mean "weight" in [domains.add]?'),
        ("domains = {add = {wieght = 1}}", 'q.toml:1: unknown key "wieght" in [domains.add]. Fix: '
         'did you mean "weight" in [domains.add]?'),
        ("[[stages]]\n[[stages]]\nwaight = 1", 'q.toml:3: unknown key "waight" in [stages.1]. Fix: '
         'did you mean "weight" in [stages.1]?'),
        ("[train]\nqqqq = 1\nzzzz = 2", 'q.toml:2: unknown key "qqqq" in [train] (and 1 more). '
         "Fix: [train] has: lr, steps, algorithm, betas, resume_from, stop."),
    ],
)  # fmt: skip
def test_an_unknown_key_names_the_nearest_right_one(
    tmp_path: Path, text: str, message: str
) -> None:
    assert refusal(tmp_path, text) == message


def test_free_keys_are_not_unknown(tmp_path: Path) -> None:
    loaded = load(tmp_path, "[domains.add.params]\nanything = 1\ndeep.er = 2\n")
    assert loaded.value.domains["add"].params == {"anything": 1, "deep": {"er": 2}}


def test_an_unknown_key_of_set_is_told_as_such(tmp_path: Path) -> None:
    assert refusal(tmp_path, "", "train.stepz=1").startswith('--set: unknown key "stepz"')


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        ("[train]\nlearning_rate = 1", "train.learning_rate", "train.lr"),
        ("[zzz]\na = 1\n[optimizer]\nlr = 1", "optimizer.lr", "train.lr"),
    ],
)
def test_a_renamed_key_names_its_successor(tmp_path: Path, text: str, old: str, new: str) -> None:
    message = refusal(tmp_path, text)
    assert f'the key "{old}" was renamed. Fix: write "{new}".' in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\n\nsteps = 'a'", 'q.toml:3: train.steps got "a" (a string), needs an integer.'),
        ("[train]\nsteps = '7'", 'q.toml:2: train.steps got "7" (a string), needs an integer.'),
        ("[train]\nsteps = 1.5", "q.toml:2: train.steps got 1.5 (a float), needs an integer."),
        ("seed = true", "q.toml:1: seed got true (a boolean), needs an integer."),
        ("quick = 1", "q.toml:1: quick got 1 (an integer), needs true or false."),
        ("[train]\nlr = 0", "q.toml:2: train.lr got 0 (an integer), needs more than 0.0."),
        ("[train]\nalgorithm = 'ppo'", 'q.toml:2: train.algorithm got "ppo" (a string), needs '
         "'cispo' or 'grpo'."),
        ("[train]\nbetas = [1]", "q.toml:2: train.betas got [1] (an array), needs more items."),
        ("train = 3", "q.toml:1: train got 3 (an integer), needs a table."),
        ("name = 3", "q.toml:1: name got 3 (an integer), needs a string."),
        ("[train]\nstop = 1.5", "q.toml:2: train.stop got 1.5 (a float), needs an integer or a "
         "string."),
        ("domains.x.weight = 'q'", 'q.toml:1: domains.x.weight got "q" (a string), needs a '
         "number."),
        ("seed = 'x'\nname = 1", 'q.toml:1: seed got "x" (a string), needs an integer (and 1 more '
         "wrong values)."),
        ("quick = true\ntrain.steps = 200", "config: a quick run has at most 100 train.steps."),
    ],
)  # fmt: skip
def test_a_wrong_value_names_key_got_needed_and_origin(
    tmp_path: Path, text: str, message: str
) -> None:
    assert refusal(tmp_path, text).startswith(message)


def test_a_missing_key_is_named_with_its_section(tmp_path: Path) -> None:
    message = refusal(tmp_path, "[inner]\n", cls=Required)
    assert message == 'the key "path" is missing from [inner]. Fix: set inner.path.'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = 1\nname =\n", "q.toml:2:7: invalid TOML: Invalid value."),
        ("seed = 1\n[train\n", "q.toml:2:"),
        ("stages = [1,", "q.toml:1: invalid TOML"),
        ("seed = 1\nseed = 2\n", "q.toml:2:"),
    ],
)
def test_invalid_toml_is_told_with_line_and_column(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text).startswith(message)


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"a = '\xff\xfe'")
    for name, reason in [("no.toml", "no such file"), ("binary.toml", "UTF-8"), (".", "directory")]:
        with pytest.raises(UserError, match=reason):
            load_config(Run, [tmp_path / name])


@pytest.mark.parametrize("override", ["seed", "=1", "a b=1", "train..lr=1", "a\n=1"])
def test_a_malformed_set_is_told(override: str) -> None:
    with pytest.raises(UserError):
        load_config(Run, [], [override])


def test_a_file_with_byte_order_mark_and_crlf_loads(tmp_path: Path) -> None:
    file = tmp_path / "w.toml"
    file.write_bytes(b"\xef\xbb\xbfseed = 1\r\n[train]\r\nsteps = 5\r\n")
    loaded = load_config(Run, [file])
    assert loaded.value.train.steps == 5
    assert loaded.origins["train.steps"] == f"{file}:3"


def test_explain_tells_value_origin_what_it_overrode_default_and_meaning(tmp_path: Path) -> None:
    loaded = load(tmp_path, "train.lr = 0.1\n", "train.lr=0.2")
    text = loaded.explain("train.lr").replace(f"{tmp_path}/", "")
    assert text.splitlines() == [
        "train.lr = 0.2",
        "  from     --set",
        "  over     0.1 from q.toml:1",
        "  default  0.0001",
        "  meaning  Peak learning rate.",
    ]
    assert loaded.explain("train").count("  from ") == len(Train.model_fields)
    with pytest.raises(UserError, match=r'did you mean "lr" in \[train\]'):
        loaded.explain("train.lrr")


def test_resolved_toml_carries_origins_and_loads_back(tmp_path: Path) -> None:
    loaded = load(tmp_path, "[domains.'a b']\nweight = 2\n[[stages]]\nweight = 3\n", "seed=4")
    text = loaded.to_toml()
    assert "seed = 4  # --set" in text
    assert f"weight = 2.0  # {tmp_path}/q.toml:2" in text
    assert "# resume_from is not set  # default" in text
    assert load(tmp_path, text).value == loaded.value


@settings(deadline=None)
@given(
    name=st.text(),
    weights=st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=4),
    path=st.none() | st.just(Path("a/#b = 'c\"")),
    params=st.dictionaries(st.text(), st.integers(-(2**63), 2**63 - 1) | st.text(), max_size=3),
)
def test_any_configuration_survives_its_own_toml(
    name: str,
    weights: dict[str, float],
    path: Path | None,
    params: dict[str, Any],
) -> None:
    value = Run(
        name=name,
        train=Train(resume_from=path),
        domains={k: Domain(weight=w, params=params) for k, w in weights.items()},
    )
    origins = _EveryKey()
    text = Loaded(value=value, origins=origins, layers={}).to_toml()
    table = tomllib.loads(text)
    assert Run.model_validate(table) == value
    assert key_lines(text)[("name",)] == text[: text.index("name = ")].count("\n") + 1


class _EveryKey(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "somewhere"


@settings(deadline=None)
@given(st.recursive(st.text() | st.integers() | st.booleans(), st.lists, max_leaves=5))
def test_values_are_written_on_one_line_and_read_back(value: object) -> None:
    text = toml_value(value)
    assert "\n" not in text
    assert tomllib.loads(f"v = {text}") == {"v": value}


def test_key_lines_look_past_strings_arrays_and_comments() -> None:
    text = '''# a = 1
first = """
second = 2 # "
[not_a_section]
"""
third = [ # [x]
  1, # ]
  "]", [2],
]
'fourth.x' . "fi\\u0066th" = 'it''s' # comment
[ section . "sub section" ] # y = 1
key = { a = 1, b = "}" }
[[many]]
x = 1
[many.inner]
y = 1
[[many]]
x = 2
'''.replace("'it''s'", "'its'")
    tomllib.loads(text)
    assert key_lines(text) == {
        ("first",): 2,
        ("third",): 6,
        ("fourth.x",): 10,
        ("fourth.x", "fifth"): 10,
        ("section", "sub section"): 11,
        ("section", "sub section", "key"): 12,
        ("many", "0"): 13,
        ("many", "0", "x"): 14,
        ("many", "0", "inner"): 15,
        ("many", "0", "inner", "y"): 16,
        ("many", "1"): 17,
        ("many", "1", "x"): 18,
    }


def test_diff_names_changed_added_and_removed_keys() -> None:
    old = Run(train=Train(lr=0.1), domains={"a": Domain()})
    new = Run(train=Train(lr=0.2), domains={"b": Domain()})
    assert diff_configs(old, new) == [
        "train.lr",
        "domains.b.weight",
        "domains.b.params",
        "domains.a.weight",
        "domains.a.params",
    ]
    assert diff_configs(old, old) == []
    nan = Run(domains={"a": Domain(weight=math.nan)})
    assert diff_configs(nan, Run(domains={"a": Domain(weight=math.nan)})) == []


def test_configs_are_frozen_and_described_in_json_schema() -> None:
    with pytest.raises(ValidationError):
        Run().seed = 1  # type: ignore[misc]
    schema = config_schema(Run)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Train"]["properties"]["lr"]["description"] == "Peak learning rate."


def test_importing_config_does_not_import_the_heavy_things() -> None:
    code = (
        "import sys, burnish.core.config, burnish.store.run_directory, burnish.store.reader;"
        "sys.exit(bool({'torch', 'numpy', 'pyarrow', 'hypothesis'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_key_under_a_name_not_in_use_is_explained_by_its_default_and_meaning() -> None:
    loaded = load_config(Run)
    shown = loaded.explain("domains.sums.weight")
    assert shown.splitlines() == [
        "domains.sums.weight is not set",
        "  default  1.0",
        "  meaning  Share of the floor.",
    ]
    assert "domains.sums.params is not set" in loaded.explain("domains.sums")
    with pytest.raises(UserError, match=r'did you mean "weight" in \[domains.sums\]'):
        loaded.explain("domains.sums.wieght")


def test_a_table_or_key_that_stands_twice_is_named(tmp_path: Path) -> None:
    told = refusal(tmp_path, "[train]\nlr = 1.0\n[train]\nsteps = 1\n")
    assert "q.toml:3" in told
    assert "the table [train] stands here a second time" in told
    assert "move these keys to the first [train]." in told
    told = refusal(tmp_path, "seed = 1\nseed = 2\n")
    assert "q.toml:2" in told
    assert "this key is set a second time" in told


@pytest.mark.parametrize("override", ["", "=3", " =3"])
def test_an_override_without_a_key_is_told_how_to_be_written(tmp_path: Path, override: str) -> None:
    assert "names no key. Fix: write --set KEY=VALUE" in refusal(tmp_path, "", override)
