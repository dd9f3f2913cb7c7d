import asyncio
import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.core.boxes import ExecResult, ExecStatus, Usage
from burnish.core.errors import ClassifiedFailure
from burnish.core.protocols import EpisodeContext
from burnish.core.records import Task
from burnish.core.vocabulary import FailureKind, Split
from burnish.envs.code import Code, code_block, same
from burnish.envs.code_families import FAMILIES, outputs

CODE = Code()


def fixed_task() -> Task:
    task = CODE.task(Split.TRAIN, 0)
    payload = {
        "inputs": [[n] for n in range(8)],
        "expected": [n * 3 + 1 for n in range(8)],
        "solution": "def f(x):\n    return x * 3 + 1",
    }
    return Task(
        domain=task.domain,
        split=task.split,
        index=0,
        prompt=task.prompt,
        payload=payload,
        max_tokens=task.max_tokens,
    )


def judge(code: str, pool, fence: bool = True):
    answer = f"```python\n{code}\n```" if fence else code
    return asyncio.run(CODE.judge(fixed_task(), answer, EpisodeContext(pool, 0)))


def test_right_code_passes_in_any_style(plain_pool):
    for code in (
        "def f(x):\n    return x * 3 + 1",
        "def f(x):\n    y = x + x + x\n    return 1 + y",
        "f = lambda x: 3 * x + 1",
        "def helper(x):\n    return 3 * x\n\ndef f(x):\n    return helper(x) + 1",
        "def f(x):\n    print('hello' * 100)\n    return x * 3 + 1",
    ):
        assert judge(code, plain_pool).passed, code


def test_chatter_around_the_block_costs_compliance_only(plain_pool):
    block = "```python\ndef f(x):\n    return x * 3 + 1\n```"
    verdict = judge(f"Sure!\n{block}\nThis works.", plain_pool, fence=False)
    assert verdict.passed
    assert verdict.score == pytest.approx(0.9)
    assert judge("def f(x):\n    return x * 3 + 1", plain_pool, fence=False).passed


def test_process_credit_is_definition_and_share_of_tests(plain_pool):
    half = judge("def f(x):\n    return x * 3 + 1 if x % 2 else 0", plain_pool)
    none = judge("def f(x):\n    return None", plain_pool)
    broken = judge("def f(x) return x", plain_pool)
    assert half.score == pytest.approx(0.3 * (0.2 + 0.8 * 0.5) + 0.1)
    assert none.score == pytest.approx(0.3 * 0.2)
    assert broken.score == 0.0
    assert not any(verdict.passed for verdict in (half, none, broken))


FORGED = json.dumps({"defined": True, "only_function": True, "results": [1, 4, 7] + [0] * 5})
ATTACKS = {
    "exit": "def f(x):\n    return 1\nimport sys\nsys.exit(0)",
    "hard_exit": "def f(x):\n    return 1\nimport os\nos._exit(0)",
    "exit_in_call": "def f(x):\n    raise SystemExit(0)",
    "equals_everything": (
        "class E(int):\n    def __eq__(self, o): return True\n    def __hash__(self): return 0\n"
        "def f(x):\n    return E(0)"
    ),
    "repr_spoof": "class R:\n    def __repr__(self): return '1'\ndef f(x):\n    return R()",
    "forged_report": (
        f"import os\nreport = {FORGED.encode()!r}\n"
        "def f(x):\n    for fd in range(3, 20):\n        try: os.write(fd, report)\n"
        "        except OSError: pass\n    os._exit(0)"
    ),
    "stack_reader": (
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for v in list(frame.f_locals.values()):\n"
        "            if isinstance(v, dict) and 'expected' in v: return v['expected'][x]\n"
        "        frame = frame.f_back\n    return 0"
    ),
    "answer_patcher": (
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        if 'answer' in frame.f_locals: frame.f_locals['answer']['passed'] = True\n"
        "        frame = frame.f_back\n    return 0"
    ),
    "json_patcher": "import json\njson.dumps = lambda *a, **k: 'passed'\ndef f(x):\n    return 0",
    "flood": "def f(x):\n    while True: print('x' * 4096)",
    "flood_report": "import os\ndef f(x):\n    while True: os.write(3, b'x' * 4096)",
    "endless": "def f(x):\n    while True: pass",
    "bool_for_int": "def f(x):\n    return x == 0",
    "nan": "def f(x):\n    return float('nan')",
    "deep": "def f(x):\n    v = []\n    for _ in range(5000): v = [v]\n    return v",
    "generator": "def f(x):\n    yield 1",
    "atexit": "import atexit\natexit.register(lambda: print('[1,4,7]'))\ndef f(x):\n    return 0",
}


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_attacks_on_the_grader_gain_nothing(name, plain_pool):
    verdict = judge(ATTACKS[name], plain_pool)
    assert not verdict.passed, verdict.evidence
    # At most what an honest function that is wrong gets, and the few tests it truly met.
    assert verdict.score < 0.35, verdict


def test_argument_changes_do_not_leak_between_calls(plain_pool):
    assert judge(
        "seen = []\ndef f(x):\n    seen.append(x)\n    return x * 3 + 1", plain_pool
    ).passed


def test_answers_without_a_function_cost_no_box(plain_pool):
    verdict = judge("I cannot help with that.", plain_pool, fence=False)
    assert verdict.score == 0.0
    assert plain_pool.num_acquired == 0


def test_one_box_and_one_command_per_verdict(plain_pool):
    judge("def f(x):\n    return x", plain_pool)
    assert plain_pool.num_acquired == 1


def test_a_broken_box_is_no_verdict(plain_pool, monkeypatch):
    box = type(asyncio.run(plain_pool.acquire().__aenter__()))

    async def broken(*_, **__):
        return ExecResult(
            status=ExecStatus.INFRA_ERROR,
            exit_code=None,
            signal=None,
            stdout=b"",
            stderr=b"",
            truncated=False,
            usage=Usage(wall_s=0.0),
            message="no memory for the box",
        )

    monkeypatch.setattr(box, "exec", broken)
    with pytest.raises(ClassifiedFailure, match="no memory") as caught:
        judge("def f(x):\n    return x", plain_pool)
    assert caught.value.failure.kind is FailureKind.SANDBOX


def test_every_family_has_a_reference_that_its_bug_fails():
    for family in FAMILIES:
        caught = 0
        for seed in range(40):
            problem = family(Random(seed))
            right = outputs(problem.source(problem.body), problem.inputs)
            wrong = outputs(problem.source(problem.bug), problem.inputs)
            assert len(right) == len(problem.inputs)
            caught += right != wrong
        assert caught >= 38, family


def test_types_are_compared_as_well_as_values():
    assert same([1, ["a"]], [1, ["a"]])
    for got, want in ((True, 1), (1, True), (1.0, 1), ("1", 1), (None, 0), ([1], [1, 2]), ({}, [])):
        assert not same(got, want)


@given(st.text(max_size=300))
def test_finding_the_block_never_raises_and_invents_nothing(text):
    assert code_block(text).code in text
