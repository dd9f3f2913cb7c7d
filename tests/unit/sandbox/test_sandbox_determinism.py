"""What is alike in every box: the list, the docs, and two boxes that are compared by it."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from burnish.core.boxes import ExecStatus, Feature, Policy
from burnish.core.errors import UserError
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.determinism import ITEMS, Degree, determinism, summary
from burnish.sandbox.interpreter import python_argv
from burnish.sandbox.native.pool import NativePool

DOCS = Path(__file__).parents[3] / "docs" / "sandbox.md"
# Addresses first: what is allocated while a program waits for another depends on their timing.
PROBES = {
    "address space layout": "[hex(id(object())), open('/proc/self/maps').read()]",
    "process ids": "[os.getpid(), os.getppid(), subprocess.getoutput('echo $$')]",
    "host name": "os.uname().nodename",
    "user ids": "[os.getresuid(), os.getresgid(), os.getgroups()]",
    "environment, locale, time zone": "[sorted(os.environ.items()), time.tzname, time.timezone]",
    "hash seed of Python": "[hash('text'), list({'a', 'b', 'c'})]",
    "processors": "len(os.sched_getaffinity(0))",
}
CODE = "import os, subprocess, time\n" + "".join(
    f"print({what!r}, {probe})\n" for what, probe in PROBES.items()
)


def test_the_docs_have_the_list_and_nothing_else() -> None:
    text = DOCS.read_text(encoding="utf-8")
    head = "| item | how sure | by what |\n|---|---|---|\n"
    rows = [
        f"| {item.what} | {item.degree}{', asked' if item.asked else ''} | {item.why} |\n"
        for item in ITEMS
    ]
    assert head + "".join(rows) + "\n" in text


def test_every_item_that_is_guaranteed_is_the_same_in_two_boxes() -> None:
    assert set(PROBES) == {item.what for item in ITEMS if item.degree is Degree.GUARANTEED}
    try:
        pool = NativePool(SandboxConfig(max_boxes=1))
    except UserError as error:
        pytest.skip(str(error))

    async def show() -> str:
        async with pool.acquire(policy=Policy(deterministic=True)) as box:
            await box.write_file("show.py", CODE.encode())
            # Not isolated: that would ignore the hash seed.
            result = await box.exec((python_argv()[0], "-S", "show.py"))
        assert result.status is ExecStatus.OK, result
        return result.stdout.decode()

    try:
        assert determinism(pool.capabilities) == ITEMS
        first, second = asyncio.run(show()), asyncio.run(show())
    finally:
        asyncio.run(pool.close())
    assert first == second
    assert "('UTC', 'UTC'), 0" in first


def test_what_a_backend_cannot_do_is_not_called_guaranteed() -> None:
    try:
        pool = NativePool(SandboxConfig(max_boxes=1))
    except UserError as error:
        pytest.skip(str(error))
    asyncio.run(pool.close())
    features = pool.capabilities.features - {Feature.DETERMINISTIC}
    found = determinism(msgspec.structs.replace(pool.capabilities, features=features))
    assert [item.what for item in found] == [item.what for item in ITEMS]
    degrees = {item.what: item.degree for item in found}
    assert degrees["address space layout"] is degrees["processors"] is Degree.NOT_HERE
    assert degrees["host name"] is Degree.GUARANTEED
    assert "not possible: a fixed wall clock" in summary(found)
