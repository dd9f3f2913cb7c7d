"""The engine that a configuration names."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from engine_backends import CONFIG, state
from engine_server import EngineServer

from burnish.core.config import load_config
from burnish.core.errors import UserError
from burnish.core.records import GenerateRequest, SamplingParams
from burnish.model.config import to_hf
from burnish.run.config import RunConfig
from burnish.run.engines import check_engine, open_engine

REMOTE = ("engine.backend=vllm", "engine.canary_tolerance=1.0")
URLS = 'engine.remote.urls=["http://127.0.0.1:1"]'


def configured(*overrides: str) -> RunConfig:
    return load_config(RunConfig, (), overrides).value


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ((URLS,), "engine.backend"),
        (REMOTE, "engine.remote.urls"),
        ((*REMOTE, URLS, "run.deterministic=true"), "run.deterministic"),
        (("engine.backend=vllm", URLS), "engine.canary_tolerance"),
        (("engine.speculation=lookup", "engine.kv.policy=h2o"), "engine.speculation"),
        (
            ("engine.speculation=self", "engine.exact=true", "engine.draft_sampling=rejection"),
            "engine.draft_sampling",
        ),
        (("engine.exact=true", "engine.kv_dtype=int8"), "engine.kv_dtype"),
        (("engine.device=gpu9",), "engine.device 'gpu9'"),
        (("engine.device=",), "engine.device ''"),
        (("engine.device=meta", "engine.canary_tolerance=0.05"), "engine.device 'meta'"),
        (("engine.exact=true", "engine.dtype=float32"), "engine.dtype"),
        (("train.exact=true", "train.dtype=float32"), "train.dtype"),
        (("engine.kv.policy=quest", "engine.kv.budget_tokens=8"), "engine.kv.budget_tokens"),
    ],
)
def test_keys_that_do_not_go_together_are_told_at_once(
    overrides: tuple[str, ...], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        check_engine(configured(*overrides))


def test_drafts_that_do_not_fit_are_told_before_any_weight_is_read(tmp_path: Path) -> None:
    paths = {}
    for name, config in (
        ("policy", CONFIG),
        ("other", msgspec.structs.replace(CONFIG, vocab_size=64)),
    ):
        # Nothing but a configuration: whoever wanted weights would fail otherwise.
        paths[name] = tmp_path / name
        paths[name].mkdir()
        (paths[name] / "config.json").write_text(json.dumps(to_hf(config)))
    source = f"model.source={paths['policy']}"
    for layers in (CONFIG.num_layers, 99):
        with pytest.raises(UserError, match=r"draft_layers is \d+, the model has 2 .*use 1\.\.1"):
            check_engine(
                configured(source, "engine.speculation=self", f"engine.draft_layers={layers}")
            )
    check_engine(configured(source, "engine.speculation=self", "engine.draft_layers=1"))
    draft = ("engine.speculation=draft", f"engine.draft_model={paths['other']}")
    with pytest.raises(UserError, match="vocabulary of 64 tokens, the model has one of 120"):
        check_engine(configured(source, *draft))


def test_an_unknown_backend_names_those_there_are(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[engine]\nbackend = "vlm"\n')
    with pytest.raises(UserError, match="vllm"):
        load_config(RunConfig, [file])


def loaded(seed: int) -> Any:
    decoder = SimpleNamespace(state_dict=lambda: state(seed))
    return SimpleNamespace(config=CONFIG, decoder=decoder)


def test_servers_are_given_the_weights_of_the_run_at_the_start() -> None:
    server = EngineServer("vllm", CONFIG, state(0))
    urls = f'engine.remote.urls=["{server.url}"]'

    async def main() -> None:
        engine = await open_engine(configured(*REMOTE, urls), loaded(1), None)
        try:
            assert engine.weight_version == 0
            request = GenerateRequest(
                request_id="a", prompt_ids=(1, 2), params=SamplingParams(max_tokens=2)
            )
            assert (await engine.generate(request)).weight_versions == (0, 0)
            assert server.label.startswith("burnish-")
            assert engine.stats().sampled_tokens == 2
        finally:
            await engine.close()

    try:
        asyncio.run(main())
    finally:
        server.stop()


def test_a_server_that_cannot_be_updated_is_no_engine_for_training() -> None:
    server = EngineServer("openai", CONFIG, state(0))
    urls = f'engine.remote.urls=["{server.url}"]'
    config = configured("engine.backend=openai", "engine.canary_tolerance=1.0", urls)
    try:
        with pytest.raises(UserError, match="update_weights"):
            asyncio.run(open_engine(config, loaded(0), None))
    finally:
        server.stop()
