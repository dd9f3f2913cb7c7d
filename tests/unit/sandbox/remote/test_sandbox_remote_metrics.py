"""`GET /metrics`: names, types and values, read by the parser of the Prometheus project."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from burnish.core.boxes import ExecStatus
from burnish.sandbox.audit import AuditedPool
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.remote.client import RemotePool
from burnish.sandbox.remote.config import ServeConfig
from burnish.sandbox.remote.hosting import ServerThread

Served = Any  # conftest.Served
TOKEN = "a-token-of-more-than-16-characters"


def scrape(url: str, token: str | None = None) -> tuple[int, str, str]:
    async def main() -> tuple[int, str, str]:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        connector, base = None, url
        if url.startswith("http+unix://"):
            connector = aiohttp.UnixConnector(url.removeprefix("http+unix://"))
            base = "http://localhost"
        async with (
            aiohttp.ClientSession(connector=connector) as http,
            http.get(f"{base}/metrics", headers=headers) as response,
        ):
            return response.status, response.headers["Content-Type"], await response.text()

    return asyncio.run(main())


def values(text: str) -> dict[str, float]:
    """Sample and its labels, in words, to value."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        assert family.type != "unknown", family.name
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sample.labels.items() if k != "version")
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_what_was_done_is_counted_and_what_is_there_is_shown(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    before = values(scrape(served.url)[2])
    # A rate needs a zero to start from: every way to end is there before it happens.
    assert {f"burnish_sandbox_commands_total{{status={status}}}" for status in ExecStatus} <= set(
        before
    )
    assert before["burnish_sandbox_commands_total{status=ok}"] == 0

    async def use(pool: RemotePool) -> dict[str, float]:
        async with pool.acquire() as box:
            await box.exec(("cat",))
            await box.exec(("cat",))
            return values((await asyncio.to_thread(scrape, served.url))[2])

    pool = RemotePool(served.url)
    after = asyncio.run(use(pool))
    asyncio.run(pool.close())
    assert after["burnish_sandbox_boxes"] == 1
    assert after["burnish_sandbox_boxes_created_total"] == 1
    assert after["burnish_sandbox_commands_total{status=ok}"] == 2
    assert after["burnish_sandbox_command_duration_seconds_count"] == 2
    assert after["burnish_sandbox_command_duration_seconds_bucket{le=+Inf}"] == 2
    assert after["burnish_sandbox_box_wait_seconds_count"] == 1
    assert after["process_open_fds"] > 0
    assert values(scrape(served.url)[2])["burnish_sandbox_boxes"] == 0


def test_counters_end_in_total_and_times_in_seconds(serve: Callable[..., Served]) -> None:
    _, kind, text = scrape(serve().url)
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, sort = line.split(" ")
            assert (sort == "counter") == name.endswith("_total"), line
            assert sort != "histogram" or name.endswith("_seconds"), line


def test_who_has_no_token_learns_nothing(serve: Callable[..., Served], tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    served = serve(listen="127.0.0.1:0", token_file=token_file)
    status, _, text = scrape(served.url)
    assert status == 401
    assert "burnish_sandbox_" not in text
    status, _, text = scrape(served.url, TOKEN)
    assert status == 200
    assert values(text)["burnish_sandbox_refused_requests_total"] == 1


def test_a_native_pool_inside_an_audited_one_shows_its_warm_boxes(tmp_path: Path) -> None:
    pool = AuditedPool(NativePool(SandboxConfig(max_boxes=2, warm_boxes=0)), tmp_path / "audit")
    server = ServerThread(pool, ServeConfig(socket=tmp_path / "socket"), max_boxes=2)
    try:
        found = values(scrape(server.url)[2])
    finally:
        server.close()
    assert found["burnish_sandbox_boxes_made_total"] >= 1
    assert found["burnish_sandbox_helpers_lost_total"] == 0
    assert found["burnish_sandbox_info{backend=native}"] == 1
