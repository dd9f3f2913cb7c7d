import shutil
from pathlib import Path

import pytest

MISTAKES = {
    "unknown key": (["--set", "train.learning_rate=1"], "learning_rate"),
    "wrong type": (["--set", "run.steps=many"], "run.steps"),
    "unknown domain": (["--set", "domains.chain_sums.environment=chain_sums"], "chain_sum"),
    "a rule for simulations": (["--set", "schedule.policy=tac"], "schedule.policy"),
    "seconds in a deterministic run": (
        ["--set", "run.deterministic=true", "--set", "schedule.cost_unit=seconds"],
        "schedule.cost_unit",
    ),
    "missing model": (["--set", "model.source=/nowhere/model.gguf"], "/nowhere/model.gguf"),
    "no such module": (["--set", "domains.x.environment=no_such_module:Thing"], "no_such_module"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_users_mistake_is_one_line_with_the_fix_and_makes_nothing(
    mistake, recipe, burnish_run, tmp_path
):
    arguments, named = MISTAKES[mistake]
    done = burnish_run(recipe(), *arguments)
    assert done.returncode == 2, done.stderr
    assert named in done.stderr
    assert "Fix:" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_missing_file_is_named(burnish_run):
    done = burnish_run("no/such/recipe.toml")
    assert done.returncode == 2
    assert "no/such/recipe.toml" in done.stderr


@pytest.mark.parametrize("damage", ["truncated", "not gguf", "empty"])
def test_damaged_weights_are_refused_by_name(damage, recipe, burnish_run, tmp_path):
    from burnish.model.loading import resolve

    path = tmp_path / "model.gguf"
    content = resolve("smollm2-135m-instruct").read_bytes()[: 40 * 2**20]
    path.write_bytes({"truncated": content, "not gguf": b"PK\x03\x04" * 999, "empty": b""}[damage])
    done = burnish_run(recipe(), "--set", f"model.source={path}")
    assert done.returncode == 2
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_without_a_chat_template_is_refused(recipe, burnish_run, tiny_model, tmp_path):
    model = tmp_path / "plain"
    shutil.copytree(tiny_model, model)
    for file in (model / "chat_template.jinja",):
        file.unlink(missing_ok=True)
    settings = model / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace('"chat_template"', '"chat_template_gone"'))
    done = burnish_run(recipe(), "--set", f"model.source={model}")
    assert done.returncode == 2
    assert "template" in done.stderr


def test_a_run_directory_of_another_version_is_refused(recipe, burnish_run):
    result = burnish_run.result(recipe())
    manifest = Path(result["run_dir"]) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version":1', '"format_version":99'))
    done = burnish_run("--resume", result["run_dir"])
    assert done.returncode == 2
    assert "99" in done.stderr


def test_a_dry_run_shows_the_resolved_configuration_and_makes_nothing(
    recipe, burnish_run, tmp_path
):
    done = burnish_run(recipe(), "--dry-run", "--set", "train.lr=0.002")
    assert done.returncode == 0, done.stderr
    assert "0.002" in done.stdout
    assert not (tmp_path / "runs").exists()
