import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.core.records import Credit
from burnish.core.vocabulary import CreditSource, Outcome
from burnish.envs.answers import Form, kept, share_right
from burnish.envs.rewards import SHOWN_CHARS, WEIGHTS, compose, grade, shown

share = st.floats(0.0, 1.0)


def test_weights_are_a_partition_of_one():
    assert sum(WEIGHTS.values()) == pytest.approx(1.0)
    assert set(WEIGHTS) == set(CreditSource)


def test_full_credits_score_exactly_one():
    verdict = compose(tuple(Credit(source=s, value=1.0) for s in CreditSource), {})
    assert (verdict.score, verdict.passed) == (1.0, True)


@given(st.lists(st.tuples(st.sampled_from(CreditSource), share), max_size=12))
def test_any_credits_give_a_score_in_the_unit_interval(pairs):
    verdict = compose(tuple(Credit(source=s, value=v) for s, v in pairs), {})
    assert verdict.outcome is Outcome.SCORED
    assert 0.0 <= verdict.score <= 1.0


@given(share, share)
def test_more_of_one_credit_never_lowers_the_score(low, high):
    low, high = sorted((low, high))
    for source in CreditSource:
        scores = [compose((Credit(source=source, value=v),), {}).score for v in (low, high)]
        assert scores[0] <= scores[1]


def test_several_credits_of_one_source_are_averaged():
    credits = tuple(
        Credit(source=CreditSource.PROCESS, value=value, turn=turn)
        for turn, value in enumerate((1.0, 0.0))
    )
    assert compose(credits, {}).score == pytest.approx(0.15)


def test_no_outcome_credit_is_no_pass():
    assert compose((), {}).passed is False
    half = (Credit(source=CreditSource.OUTCOME, value=0.5),)
    assert compose(half, {}).passed is False


@given(st.booleans())
def test_form_without_progress_earns_nothing(in_form):
    verdict = grade(solved=False, progress=0.0, in_form=in_form, expected="x", got="y")
    assert verdict.score == 0.0


@given(st.text(st.characters(codec=None, exclude_categories=()), max_size=2000))
def test_evidence_can_always_be_stored(text):
    assert len(shown(text)) <= SHOWN_CHARS
    msgspec.json.encode(grade(solved=False, progress=0.5, in_form=True, expected="x", got=text))


def test_forms_are_plain():
    assert kept(Form.NUMBER, "-12")
    for text in ("", "12.", "+1", "1 2", "twelve", "1e3", "\u0661", "12\n"):
        assert not kept(Form.NUMBER, text)
    assert kept(Form.LIST, "a, b")
    for text in ("a,b", "a, ", ", a", "a, b\n"):
        assert not kept(Form.LIST, text)
    assert not kept(Form.WORD, "two words")


def test_progress_counts_leading_parts():
    assert share_right(Form.LIST, "1, 2, 3, 4", "1, 2, 4, 3") == 0.5
    assert share_right(Form.WORD, "abcd", "abdc") == 0.5
    assert share_right(Form.NUMBER, "123", "124") == pytest.approx(2 / 3)
    assert share_right(Form.NUMBER, "80", "0") == 0.0


@given(st.sampled_from(Form), st.text(min_size=1, max_size=30), st.text(min_size=1, max_size=30))
def test_full_progress_means_the_gold_answer(form, gold, answer):
    progress = share_right(form, gold, answer)
    assert 0.0 <= progress <= 1.0
    assert (progress == 1.0) == (gold == answer)
