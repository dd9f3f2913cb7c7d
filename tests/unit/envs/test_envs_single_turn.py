import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.core.protocols import EpisodeContext
from burnish.core.vocabulary import Split
from burnish.envs import registry
from burnish.envs.extraction import Extraction, read_object
from burnish.envs.formatting import Formatting

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=20,
)
answers = st.text(max_size=200) | json_values.map(json.dumps)
SINGLE_TURN = tuple(
    name for name in registry.names() if not registry.get(name).tools and name != "code"
)


def judge(environment, task, answer):
    return asyncio.run(environment.judge(task, answer, EpisodeContext(None, 0)))


@pytest.mark.parametrize("name", SINGLE_TURN)
@settings(max_examples=25, deadline=None)
@given(index=st.integers(0, 50), answer=answers)
def test_any_answer_gets_a_score_and_only_right_ones_pass(name, index, answer):
    environment = registry.get(name)
    verdict = judge(environment, environment.task(Split.TRAIN, index), answer)
    assert 0.0 <= verdict.score <= 1.0
    assert verdict.passed == (verdict.score >= 0.9)


@pytest.mark.parametrize("name", SINGLE_TURN)
def test_text_around_a_right_answer_is_no_full_score(name):
    environment = registry.get(name)
    for index in range(10):
        task = environment.task(Split.TRAIN, index)
        gold = environment.reference(task)[0].content
        for wrapped in (f"The answer is {gold}.", f"not {gold}", f"{gold} or {gold}x"):
            assert judge(environment, task, wrapped).score < 1.0


class TestExtraction:
    environment = Extraction()
    task = environment.task(Split.TRAIN, 1)
    fields = task.payload["fields"]

    def score(self, answer: str):
        return judge(self.environment, self.task, answer)

    def test_order_and_space_do_not_matter(self):
        turned = dict(reversed(self.fields.items()))
        assert self.score(json.dumps(turned, indent=2)).score == 1.0

    def test_an_extra_key_or_a_missing_one_fails(self):
        assert not self.score(json.dumps(self.fields | {"more": "1"})).passed
        first = dict(list(self.fields.items())[:1])
        assert not self.score(json.dumps(first)).passed
        assert self.score(json.dumps(first)).score > 0.0

    def test_a_repeated_key_is_no_way_to_hedge(self):
        pairs = [f'"{k}": "{v}"' for k, v in self.fields.items()]
        assert not self.score("{" + ", ".join([*pairs, *pairs]) + "}").passed

    def test_numbers_instead_of_strings_are_wrong(self):
        wrong = dict.fromkeys(self.fields, 17)
        assert self.score(json.dumps(wrong)).score == 0.0

    def test_text_around_the_object_costs_compliance_only(self):
        verdict = self.score(f"Here it is:\n{json.dumps(self.fields)}")
        assert verdict.passed
        assert verdict.score == pytest.approx(0.9)

    def test_fields_are_in_the_note_with_distractors(self):
        for index in range(50):
            task = self.environment.task(Split.TRAIN, index)
            note = task.prompt[0].content
            for value in task.payload["fields"].values():
                assert value in note


@given(st.text(max_size=400))
def test_reading_an_object_never_raises(text):
    found = read_object(text)
    assert found is None or isinstance(found, dict)


@pytest.mark.parametrize("bomb", ['{"a":' * 20_000 + "1" + "}" * 20_000, "{" * 50_000 + "}" * 9])
def test_nested_bombs_are_no_object(bomb):
    assert read_object(bomb) is None


class TestFormatting:
    environment = Formatting()

    def tasks(self, part: str):
        pool = (self.environment.task(Split.TRAIN, index) for index in range(200))
        return [task for task in pool if part in task.prompt[0].content]

    def test_every_family_occurs(self):
        for part in ("upper case", "times", "different words", "alphabetical"):
            assert len(self.tasks(part)) > 10

    def test_open_tasks_accept_more_than_the_example(self):
        for task in self.tasks("different words"):
            example = task.payload["example"].split(", ")
            other = ", ".join([*reversed(example[1:]), example[0]])
            assert judge(self.environment, task, other).score == 1.0

    def test_each_broken_rule_is_named_and_costs_the_pass(self):
        task = self.tasks("upper case")[0]
        example = task.payload["example"]
        verdict = judge(self.environment, task, example.lower())
        assert not verdict.passed
        assert "upper" in verdict.evidence["broken"]
        assert 0.0 < verdict.score < 0.4

    def test_keeping_the_form_without_the_words_earns_nothing(self):
        task = self.tasks("upper case")[0]
        left, right = task.payload["example"][:2], task.payload["example"][-2:]
        assert judge(self.environment, task, f"{left}SOME THING{right}").score == 0.0
