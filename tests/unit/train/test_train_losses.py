"""Losses against closed forms: an enumerated bandit in float64."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from burnish.train.losses import (
    Algorithm,
    LossConfig,
    cispo,
    importance_ratio,
    kl_loss,
    policy_loss,
    ppo,
)

ARMS = 6
EXACT = 1e-14


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def bandit(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, rewards, log-probs of a reference."""
    g = torch.Generator().manual_seed(seed)
    logits, rewards, reference = torch.randn(3, ARMS, generator=g, dtype=torch.float64)
    return logits.requires_grad_(), rewards, torch.log_softmax(reference, 0)


def gradient(value: Tensor, at: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(value, at)
    return grad


def true_gradient(logits: Tensor, rewards: Tensor) -> Tensor:
    return gradient((torch.softmax(logits, 0) * rewards).sum(), logits)


def leave_one_out(rewards: Tensor) -> Tensor:
    return (len(rewards) * rewards - rewards.sum()) / (len(rewards) - 1)


def enumerated_gradient(logits: Tensor, rewards: Tensor, group: int, loss) -> Tensor:
    """-E over all groups of the gradient of the group's mean loss, samples held constant."""
    total = torch.zeros(ARMS, dtype=torch.float64)
    probs = torch.softmax(logits, 0).detach()
    for arms in itertools.product(range(ARMS), repeat=group):
        logp = torch.log_softmax(logits, 0)[list(arms)]
        token = loss(logp, logp.detach(), leave_one_out(rewards[list(arms)]))
        total -= probs[list(arms)].prod() * gradient(token.loss_N.mean(), logits)
    return total


@pytest.mark.parametrize("loss", [cispo, ppo])
def test_expected_on_policy_gradient_is_that_of_the_expected_reward(loss):
    logits, rewards, _ = bandit()
    found = enumerated_gradient(logits, rewards, 3, loss)
    assert (found - true_gradient(logits, rewards)).abs().max() < EXACT


@pytest.mark.parametrize("algorithm", list(Algorithm))
@pytest.mark.parametrize("decoupled", [False, True])
def test_every_loss_is_reinforce_at_ratio_one(algorithm, decoupled):
    g = torch.Generator().manual_seed(1)
    logp, advantage = torch.randn(2, 50, generator=g, dtype=torch.float64)
    logp.requires_grad_()
    config = LossConfig(algorithm=algorithm, decoupled=decoupled)
    token = policy_loss(config, logp, logp.detach(), advantage)
    assert torch.equal(gradient(token.loss_N.sum(), logp), -advantage)
    assert not token.clipped_N.any()


def test_off_policy_cispo_without_cap_is_importance_sampled_gradient():
    logits, rewards, behaviour = bandit()
    logp = torch.log_softmax(logits, 0)
    token = cispo(logp, behaviour, rewards, eps_high=1e9)
    found = -gradient((behaviour.exp() * token.loss_N).sum(), logits)
    assert (found - true_gradient(logits, rewards)).abs().max() < EXACT


def test_cispo_caps_at_one_plus_eps_has_no_lower_bound_and_never_drops_a_token():
    logp = double(math.log(10.0), math.log(4.0), math.log(0.01)).requires_grad_()
    advantage = double(1.0, -1.0, 2.0)
    token = cispo(logp, torch.zeros_like(logp), advantage, eps_high=4.0)
    assert torch.allclose(gradient(token.loss_N.sum(), logp), double(-5.0, 4.0, -0.02))
    assert token.clipped_N.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("ratio", "advantage", "wanted"),
    [
        (1.1, 1.0, -1.1),
        (1.5, 1.0, 0.0),
        (0.5, 1.0, -0.5),
        (1.5, -1.0, 1.5),
        (0.5, -1.0, 0.0),
        (2.9, -1.0, 2.9),
        (3.1, -1.0, 0.0),
    ],
)
def test_ppo_gradient_by_region(ratio, advantage, wanted):
    """d loss / d log pi: -r A inside, 0 where a clip binds, and where the dual clip does."""
    logp = double(math.log(ratio)).requires_grad_()
    token = ppo(logp, double(0.0), double(advantage))
    assert gradient(token.loss_N.sum(), logp).item() == pytest.approx(wanted, abs=1e-12)
    assert token.clipped_N.item() == (wanted == 0.0)


def test_decoupled_ppo_at_the_proximal_policy_weights_by_the_truncated_ratio():
    behaviour = double(-1.0, -1.0, -2.0)
    proximal = double(-1.2, 0.5, -2.0)
    logp = proximal.clone().requires_grad_()
    advantage = double(1.0, -2.0, 0.5)
    token = ppo(logp, behaviour, advantage, proximal_N=proximal, tis_cap=2.0)
    weight = (proximal - behaviour).exp().clamp(max=2.0)
    assert torch.allclose(gradient(token.loss_N.sum(), logp), -advantage * weight, atol=EXACT)


def exact_kl(logits: Tensor, reference: Tensor) -> Tensor:
    logp = torch.log_softmax(logits, 0)
    return (logp.exp() * (logp - reference)).sum()


@pytest.mark.parametrize("estimator", ["ratio_k3", "k2"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_kl_component_has_the_exact_gradient_of_reverse_kl(estimator, on_policy):
    logits, _, reference = bandit(2)
    logp = torch.log_softmax(logits, 0)
    behaviour = logp.detach() if on_policy else torch.log_softmax(bandit(3)[0], 0).detach()
    token = kl_loss(logp, reference, behaviour, estimator=estimator)
    found = gradient((behaviour.exp() * token).sum(), logits)
    wanted = gradient(exact_kl(logits, reference), logits)
    assert (found - wanted).abs().max() < EXACT


def test_ratio_k3_also_has_the_value_of_reverse_kl():
    logits, _, reference = bandit(4)
    logp = torch.log_softmax(logits, 0)
    token = kl_loss(logp, reference, logp.detach())
    value = (logp.exp() * token).sum()
    assert value.item() == pytest.approx(exact_kl(logits, reference).item(), abs=1e-13)


def test_plain_k3_in_the_loss_would_point_the_other_way():
    """The trap that the ratio avoids: without it, the gradient of KL(reference || policy)."""
    logits, _, reference = bandit(5)
    logp = torch.log_softmax(logits, 0)
    delta = reference - logp
    found = gradient((logp.detach().exp() * (delta.exp() - delta - 1)).sum(), logits)
    forward = gradient((reference.exp() * (reference - torch.log_softmax(logits, 0))).sum(), logits)
    assert (found - forward).abs().max() < EXACT
    assert (found - gradient(exact_kl(logits, reference), logits)).abs().max() > 1e-2


@given(
    st.lists(
        st.tuples(st.floats(-200, 0), st.floats(-200, 0), st.floats(-10, 10)),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from(list(Algorithm)),
)
def test_losses_stay_finite_at_any_log_ratio(rows, algorithm):
    logp, behaviour, advantage = torch.tensor(rows, dtype=torch.float32).unbind(1)
    logp = logp.clone().requires_grad_()
    token = policy_loss(LossConfig(algorithm=algorithm), logp, behaviour, advantage)
    penalty = kl_loss(logp, behaviour, behaviour)
    assert token.loss_N.isfinite().all()
    assert gradient((token.loss_N + penalty).sum(), logp).isfinite().all()


@given(st.integers(1, 7), st.integers(0, 100))
def test_a_global_denominator_makes_micro_batches_equal_the_whole(num_parts, seed):
    g = torch.Generator().manual_seed(seed)
    logp, noise, advantage = torch.randn(3, 40, generator=g, dtype=torch.float64)
    logp.requires_grad_()
    behaviour = (logp + 0.3 * noise).detach()
    whole = gradient(ppo(logp, behaviour, advantage).loss_N.sum() / 40, logp)
    parts = torch.zeros(40, dtype=torch.float64)
    for index in torch.arange(40).tensor_split(num_parts):
        token = ppo(logp[index], behaviour[index], advantage[index])
        parts += gradient(token.loss_N.sum() / 40, logp)
    assert torch.allclose(whole, parts, atol=1e-16)


def test_ratio_is_differentiable_and_bounded():
    logp = double(100.0, 0.5).requires_grad_()
    ratio = importance_ratio(logp, double(0.0, 0.0))
    assert ratio[0].item() == pytest.approx(math.exp(20.0))
    assert gradient(ratio[1], logp)[1].item() == pytest.approx(math.exp(0.5))
