"""Divergences equal their definitions, and their gradients equal numeric ones."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spectrain.drafters.layers.losses import (
    ACCEPTANCE_LOSSES,
    DIVERGENCES,
    TargetLogProbs,
    acceptance_rate,
    forward_kl,
    get_divergence,
    jensen_shannon,
    lk_hybrid,
    reverse_kl,
    top_k_loss,
    total_variation,
)

ROWS = 5
VOCAB = 9


def compute_kl(p: Tensor, q: Tensor) -> Tensor:
    """Compute KL(p || q) from probabilities."""
    return (p * (p / q).log()).sum(-1)


def compute_overlap(p: Tensor, q: Tensor) -> Tensor:
    """Compute sum_v min(p, q)."""
    return torch.where(p < q, p, q).sum(-1)


def compute_hybrid(p: Tensor, q: Tensor) -> Tensor:
    """Compute KL weighted by exp(-3 overlap), the rest total variation."""
    weight = (-3 * compute_overlap(p, q)).exp()
    return weight * compute_kl(p, q) + (1 - weight) * (1 - compute_overlap(p, q))


DIRECT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": compute_kl,
    "reverse_kl": lambda p, q: compute_kl(q, p),
    "jensen_shannon": lambda p, q: (
        (compute_kl(p, (p + q) / 2) + compute_kl(q, (p + q) / 2)) / 2 / 0.25
    ),
    "total_variation": lambda p, q: 1 - compute_overlap(p, q),
    "negative_log_acceptance": lambda p, q: -compute_overlap(p, q).log(),
    "lk_hybrid": compute_hybrid,
}


def draw_log_probs(mass: float = 1.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Draw log p, summing to `mass`, and log q."""
    log_p = (2 * torch.randn(ROWS, VOCAB, dtype=dtype)).log_softmax(-1) + math.log(mass)
    return log_p, (2 * torch.randn(ROWS, VOCAB, dtype=dtype)).log_softmax(-1)


def test_every_divergence_has_a_definition_here() -> None:
    """No divergence escapes the tests below."""
    assert DIRECT.keys() == DIVERGENCES.keys() and DIVERGENCES.keys() >= ACCEPTANCE_LOSSES


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_value_equals_its_definition(name: str, dtype: torch.dtype) -> None:
    """Each row's loss is the definition, computed from float64 probabilities."""
    log_p, log_q = draw_log_probs(dtype=dtype)
    actual = DIVERGENCES[name](log_p, log_q)
    assert actual.shape == (ROWS,) and actual.dtype == dtype
    expected = DIRECT[name](log_p.double().exp(), log_q.double().exp())
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", sorted(ACCEPTANCE_LOSSES))
def test_value_with_the_targets_own_mass(name: str) -> None:
    """Where p sums to less than 1, the missing mass counts as rejected."""
    log_p, log_q = draw_log_probs(mass=0.6)
    torch.testing.assert_close(
        DIVERGENCES[name](log_p, log_q), DIRECT[name](log_p.exp(), log_q.exp())
    )


@pytest.mark.parametrize("name", DIVERGENCES)
def test_zero_where_p_equals_q(name: str) -> None:
    """Every divergence vanishes at p = q and is positive elsewhere."""
    log_p, log_q = draw_log_probs()
    assert DIVERGENCES[name](log_p, log_p).abs().max() < 1e-12
    assert DIVERGENCES[name](log_p, log_q).min() > 0


def test_acceptance_rate_with_unnormalised_p() -> None:
    """The acceptance rate is the overlap of q with the mass that p has inside the draft
    vocabulary.
    """
    log_p = torch.tensor([[0.3, 0.1, 0.2]]).double().log()  # 0.4 lies outside the draft vocabulary
    log_q = torch.tensor([[0.2, 0.5, 0.3]]).double().log()
    assert acceptance_rate(log_p, log_q).item() == pytest.approx(0.2 + 0.1 + 0.2)
    log_p, log_q = draw_log_probs(mass=0.5)
    assert (acceptance_rate(log_p, log_q) <= 0.5).all()


@pytest.mark.parametrize("mass", [1.0, 0.7])
def test_total_variation_and_acceptance_sum_to_1(mass: float) -> None:
    """TV + acceptance = 1; for full distributions TV is half the L1 distance, too."""
    log_p, log_q = draw_log_probs(mass)
    torch.testing.assert_close(
        total_variation(log_p, log_q) + acceptance_rate(log_p, log_q), torch.ones(ROWS).double()
    )
    half_l1 = (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    torch.testing.assert_close(total_variation(log_p, log_q), half_l1 + (1 - mass) / 2)


def test_forward_kl_has_the_gradient_of_cross_entropy() -> None:
    """KL(p || q) and soft cross-entropy differ by a constant: their gradients are equal, and are
    q - p.
    """
    log_p, _ = draw_log_probs()
    logits = torch.randn(ROWS, VOCAB, dtype=torch.float64, requires_grad=True)
    (by_kl,) = torch.autograd.grad(forward_kl(log_p, logits.log_softmax(-1)).sum(), logits)
    (by_entropy,) = torch.autograd.grad(
        torch.nn.functional.cross_entropy(logits, log_p.exp(), reduction="sum"), logits
    )
    torch.testing.assert_close(by_kl, by_entropy)
    torch.testing.assert_close(by_kl, logits.detach().softmax(-1) - log_p.exp())


@pytest.mark.parametrize("name", sorted(DIVERGENCES.keys() - {"lk_hybrid"}))
@pytest.mark.parametrize("mass", [1.0, 0.7])
def test_gradient_equals_the_numeric_gradient(name: str, mass: float) -> None:
    """Gradients in the drafter's logits pass gradcheck."""
    log_p, log_q = draw_log_probs(mass)
    assert torch.autograd.gradcheck(
        lambda logits: DIVERGENCES[name](log_p, logits.log_softmax(-1)), log_q.requires_grad_(True)
    )


def test_hybrid_gradient_holds_its_weight_constant() -> None:
    """The gradient of lk_hybrid is the weighted sum of its parts' gradients; the weight itself
    has none.
    """
    log_p, start = draw_log_probs()
    weight = (-3 * acceptance_rate(log_p, start)).exp()
    gradients = []
    for loss in (
        lk_hybrid,
        lambda p, q: weight * forward_kl(p, q) + (1 - weight) * total_variation(p, q),
    ):
        logits = start.clone().requires_grad_(True)
        gradients += torch.autograd.grad(loss(log_p, logits.log_softmax(-1)).sum(), logits)
    torch.testing.assert_close(*gradients)


def test_negative_log_acceptance_stays_finite() -> None:
    """Where p and q share nothing the loss is large and finite."""
    log_p = torch.tensor([[0.0, -100.0]])
    loss = DIVERGENCES["negative_log_acceptance"](log_p, log_p.flip(-1))
    assert loss.isfinite().all() and loss.item() > 10


BETAS = [0.05, 0.1, 0.3, 0.5, 0.9, 0.99]


def compute_gradient(
    loss: Callable[[Tensor, Tensor], Tensor], log_p: Tensor, log_q: Tensor
) -> Tensor:
    """Compute the gradient of a loss in the drafter's logits."""
    logits = log_q.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(loss(log_p, logits.log_softmax(-1)).sum(), logits)
    return gradient


@pytest.mark.parametrize("beta", BETAS)
def test_generalised_jensen_shannon_equals_its_definition(beta: float) -> None:
    """The loss is beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q, over beta
    (1 - beta), also by name.
    """
    log_p, log_q = draw_log_probs()
    p = log_p.exp()
    q = log_q.exp()
    m = beta * p + (1 - beta) * q
    expected = (beta * compute_kl(p, m) + (1 - beta) * compute_kl(q, m)) / (beta * (1 - beta))
    torch.testing.assert_close(jensen_shannon(log_p, log_q, beta), expected)
    assert torch.equal(
        get_divergence("jensen_shannon", beta)(log_p, log_q), jensen_shannon(log_p, log_q, beta)
    )
    assert torch.autograd.gradcheck(
        lambda logits: jensen_shannon(log_p, logits.log_softmax(-1), beta),
        log_q.requires_grad_(True),
    )


@pytest.mark.parametrize("name", sorted(DIVERGENCES.keys() - {"jensen_shannon"}))
def test_beta_is_that_of_jensen_shannon_only(name: str) -> None:
    """Every other divergence is returned by its name, whatever beta is."""
    assert get_divergence(name, 0.3) is DIVERGENCES[name]


@pytest.mark.parametrize(
    ("beta", "end"), [(1e-4, forward_kl), (1 - 1e-4, reverse_kl)], ids=["forward", "reverse"]
)
def test_generalised_jensen_shannon_tends_to_both_kls(
    beta: float, end: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Close to an end of beta, value and gradient are those of the KL there; in the middle they
    are not.
    """
    # Far apart, p / q itself is as large as 1 / beta.
    log_p, log_q = ((scores / 4).log_softmax(-1) for scores in draw_log_probs())

    def divergence_near_end(p: Tensor, q: Tensor) -> Tensor:
        return jensen_shannon(p, q, beta)

    torch.testing.assert_close(
        divergence_near_end(log_p, log_q), end(log_p, log_q), rtol=1e-2, atol=1e-6
    )
    torch.testing.assert_close(
        compute_gradient(divergence_near_end, log_p, log_q),
        compute_gradient(end, log_p, log_q),
        rtol=1e-2,
        atol=1e-5,
    )
    assert ((jensen_shannon(log_p, log_q) - end(log_p, log_q)).abs() > 1e-4).all()


@pytest.mark.parametrize("beta", [1e-4, *BETAS, 1 - 1e-4])
def test_curvature_near_equality_is_the_same_for_every_beta(beta: float) -> None:
    """At q = p + d the divergence is sum d^2 / 2p to second order, as both KLs are."""
    p = draw_log_probs()[0].exp()
    step = torch.randn(ROWS, VOCAB, dtype=torch.float64) * p
    step = 1e-3 * (step - p * step.sum(-1, keepdim=True))
    quadratic = (step**2 / p).sum(-1) / 2
    for loss in (forward_kl, reverse_kl, lambda left, right: jensen_shannon(left, right, beta)):
        torch.testing.assert_close(loss(p.log(), (p + step).log()), quadratic, rtol=1e-2, atol=0)


def test_target_rows_that_share_an_answer_are_computed_once() -> None:
    """With rows in order of their answers, each chunk requests its range once, and a range
    within it is not requested again.
    """
    log_p = draw_log_probs()[0]
    requests = []

    def get_log_probs(rows: slice) -> Tensor:
        requests.append((rows.start, rows.stop))
        return log_p[rows]

    target = TargetLogProbs(get_log_probs)
    answers = torch.tensor([0, 0, 0, 1, 1, 3, 3, 4])
    for start in range(0, 8, 4):
        rows = slice(start, start + 4)
        assert torch.equal(target.select_rows(answers)(rows), log_p[answers[rows]])
    assert requests == [(0, 2), (1, 5)] and torch.equal(target(slice(2, 4)), log_p[2:4])
    assert torch.equal(target.select_rows(torch.tensor([1, 4]))(slice(0, 2)), log_p[[1, 4]])
    assert (
        torch.equal(target.select_rows(torch.tensor([2, 3]))(slice(1, 2)), log_p[[3]])
        and len(requests) == 2
    )
    assert torch.equal(
        target.select_rows(torch.tensor([0, 3]))(slice(0, 2)), log_p[[0, 3]]
    ) and requests[2] == (0, 4)


def test_top_k_is_the_soft_cross_entropy_of_the_most_likely_tokens() -> None:
    """Over the full vocabulary the loss is the soft cross-entropy, and over one token it is -p
    log q of that token.
    """
    log_p, log_q = draw_log_probs()
    cross_entropy = -(log_p.exp() * log_q).sum(-1)
    torch.testing.assert_close(top_k_loss(log_p, log_q, VOCAB + 1), cross_entropy)
    best = log_p.argmax(-1, keepdim=True)
    torch.testing.assert_close(
        top_k_loss(log_p, log_q, 1), -(log_p.exp() * log_q).gather(-1, best)[:, 0]
    )
    assert torch.all(top_k_loss(log_p, log_q, 3) < cross_entropy)
