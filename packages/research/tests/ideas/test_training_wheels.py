"""A student that may ask its teacher: the equations of the best policy, the loss, and decoding."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from spectrain.data.chat import Example
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.features.base import BatchRequest
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.trees import Chain
from spectrain_research.exits.rule import Unverified
from spectrain_research.training_wheels.drafter import TrainingWheels
from spectrain_research.training_wheels.losses import asking_error, span_errors, writing_error
from tests.targets import cut_tiny

WORDS = 3
LENGTH = 3
PROMPTS = [[5, 6, 7, 8, 5, 6], [40, 41, 42, 40]]


@pytest.fixture(scope="module")
def target() -> Target:
    return cut_tiny(3)


class Problem:
    """Texts of three words over three tokens: the teacher's distribution [3] after every prefix,
    and the best policy and values by soft value iteration.
    """

    def __init__(self, seed: int, price: float) -> None:
        source = torch.Generator().manual_seed(seed)
        self.price = price
        self.teacher: dict[tuple[int, ...], Tensor] = {}
        self.values: dict[tuple[int, ...], Tensor] = {}
        # log-probabilities [4] of the tokens and of asking
        self.policy: dict[tuple[int, ...], Tensor] = {}
        self.solve((), source)

    def solve(self, prefix: tuple[int, ...], source: torch.Generator) -> Tensor:
        """Return the value of a prefix: the soft maximum of what its actions bring."""
        if len(prefix) == LENGTH:
            self.values[prefix] = torch.zeros((), dtype=torch.float64)
            return self.values[prefix]
        log_p = torch.randn(WORDS, generator=source, dtype=torch.float64).log_softmax(-1)
        self.teacher[prefix] = log_p
        after = torch.stack([self.solve((*prefix, word), source) for word in range(WORDS)])
        asking = -self.price + (log_p.exp() * after).sum()
        gains = torch.cat([log_p + after, asking[None]])
        self.values[prefix] = gains.logsumexp(0)
        self.policy[prefix] = gains - self.values[prefix]
        return self.values[prefix]

    def evaluate(self, policy: dict[tuple[int, ...], Tensor], prefix: tuple[int, ...]) -> Tensor:
        """Return the expected rewards and entropy of a policy after a prefix."""
        if len(prefix) == LENGTH:
            return torch.zeros((), dtype=torch.float64)
        log_p = self.teacher[prefix]
        after = torch.stack([self.evaluate(policy, (*prefix, word)) for word in range(WORDS)])
        gains = torch.cat([log_p + after, (-self.price + (log_p.exp() * after).sum())[None]])
        return (policy[prefix].exp() * (gains - policy[prefix])).sum()


@pytest.mark.parametrize("seed, price", [(0, 0.5), (1, 2.0), (2, 4.0)])
def test_the_best_policy_is_consistent_and_no_other_is_better(seed: int, price: float) -> None:
    """Writing is consistent at every token of every text, asking in the mean over the token that
    the teacher writes.
    """
    problem = Problem(seed, price)
    for prefix, log_policy in problem.policy.items():
        log_p = problem.teacher[prefix]
        ask_logit = log_policy[-1] - torch.log1p(-log_policy[-1].exp())
        student = log_policy[:-1] - torch.log1p(-log_policy[-1].exp())
        drop = problem.values[prefix] - torch.stack(
            [problem.values[(*prefix, word)] for word in range(WORDS)]
        )
        logits = ask_logit.expand(WORDS)
        assert writing_error(drop, logits, student, log_p).abs().max() < 1e-9
        asking = asking_error(drop, logits, torch.tensor([price], dtype=torch.float64))
        assert (log_p.exp() * asking).sum().abs() < 1e-9
    best = problem.evaluate(problem.policy, ())
    assert best == pytest.approx(float(problem.values[()]))
    for other in range(5):
        source = torch.Generator().manual_seed(100 + other)
        changed = {
            prefix: (policy + 0.3 * torch.randn(WORDS + 1, generator=source)).log_softmax(-1)
            for prefix, policy in problem.policy.items()
        }
        assert problem.evaluate(changed, ()) < best


@pytest.mark.parametrize("span", [1, 2, 3, 9])
def test_spans_of_the_best_policy_are_consistent(span: int) -> None:
    """Every text is a row. Spans that write have no inconsistency; those that ask first have none
    in the mean over the token that the teacher writes.
    """
    problem = Problem(4, 1.5)
    texts = list(itertools.product(range(WORDS), repeat=LENGTH))
    columns: list[list[Tensor]] = [[], [], [], []]
    for text in texts:
        for position, word in enumerate(text):
            prefix = text[:position]
            log_policy = problem.policy[prefix]
            writes = torch.log1p(-log_policy[-1].exp())
            drop = problem.values[prefix] - problem.values[(*prefix, word)]
            parts = (drop, log_policy[-1] - writes, log_policy[word] - writes)
            for column, part in zip(columns, (*parts, problem.teacher[prefix][word])):
                column.append(part)
    drop, ask_logits, student, teacher = map(torch.stack, columns)
    writing = writing_error(drop, ask_logits, student, teacher)
    asking = asking_error(drop, ask_logits, torch.tensor([1.5], dtype=torch.float64))
    is_row = torch.ones(len(texts), LENGTH, dtype=torch.bool)
    assert span_errors(writing, writing, is_row, span).abs().max() < 1e-9
    chances = torch.stack(
        [
            torch.stack([problem.teacher[text[:n]][word] for n, word in enumerate(text)]).sum()
            for text in texts
        ]
    ).exp()
    errors = span_errors(asking, writing, is_row, span).view(len(texts), LENGTH)
    assert (chances[:, None] * errors).sum(0).abs().max() < 1e-9
    # Another student is consistent over no span.
    other = span_errors(writing + 0.1, writing + 0.1, is_row, span).view(len(texts), LENGTH)
    assert other[0].tolist() == pytest.approx([0.1 * min(span, LENGTH - n) for n in range(LENGTH)])


def test_a_span_is_the_sum_of_its_actions_and_ends_with_the_answer() -> None:
    """Two texts are packed into the first row; their spans do not meet."""
    is_row = torch.tensor([[1, 1, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    torch.manual_seed(0)
    writing, first = torch.randn(2, int(is_row.sum()), dtype=torch.float64)
    runs = [[0, 1], [2, 3, 4], [5, 6, 7, 8]]
    for span in (1, 2, 3, 20):
        expected = [
            float(first[row] + writing[run[place + 1 : place + span]].sum())
            for run in runs
            for place, row in enumerate(run)
        ]
        assert span_errors(first, writing, is_row, span).tolist() == pytest.approx(expected)


def test_where_asking_is_dear_the_best_student_is_the_teacher() -> None:
    """Distillation is the limit: the policy is the teacher's and all values are 0."""
    problem = Problem(3, 60.0)
    for prefix, policy in problem.policy.items():
        torch.testing.assert_close(policy[:-1], problem.teacher[prefix], atol=1e-9, rtol=0)
        assert abs(float(problem.values[prefix])) < 1e-9


def make_drafter(target: Target, spread: float, span: int = 1) -> TrainingWheels:
    """Make a drafter of one layer whose heads are random."""
    torch.manual_seed(5)
    drafter = TrainingWheels(target, asks=0.4, num_layers=1, span=span)
    with torch.no_grad():
        for head in (drafter.stop_head.output, drafter.value_head):  # type: ignore[union-attr]
            head.weight.normal_(std=spread * target.width**-0.5)
    return drafter


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("span", [1, 3])
def test_the_loss_is_its_formula(target: Target, packed: bool, span: int) -> None:
    """Computed text by text and token by token; the value after the answer is 0. The price rises
    where the drafter asks more than it may.
    """
    drafter = make_drafter(target, 1.0, span)
    texts = [list(range(10, 22)), list(range(300, 307))]
    masks = [
        [3 <= position < 10 for position in range(12)],
        [position >= 2 for position in range(7)],
    ]
    examples = [Example(text, mask) for text, mask in zip(texts, masks)]
    batch = LiveSource().make_batch(BatchRequest(examples, target, ("final",), packed))
    losses = drafter.loss(batch, target, TrainingState())
    writing = asking = surplus = 0.0
    for text, mask in zip(texts, masks):
        tokens = torch.tensor([text])
        own = drafter.model.features(tokens, ("final",)).at_layer("final")[0]
        judged = target.features(tokens, ("final",)).at_layer("final")[0]
        log_q = drafter.model.head.logits(own).log_softmax(-1)
        log_p = target.head.logits(judged).log_softmax(-1)
        assert drafter.stop_head is not None
        write = drafter.stop_head(own).sigmoid()
        values = drafter.value_head(own)[:, 0]
        positions = [position for position in range(len(text) - 1) if mask[position + 1]]
        residuals: list[float] = []
        asked: list[float] = []
        for position in positions:
            after = values[position + 1] if position + 1 in positions else 0.0
            drop = values[position] - after
            token = text[position + 1]
            residual = (
                drop + write[position].log() + log_q[position, token] - log_p[position, token]
            )
            residuals.append(float(residual.detach()))
            asked.append(float((drop + (1 - write[position]).log() + drafter.price).detach()))
            surplus += float(1 - write[position].detach()) - 0.4
        for place in range(len(positions)):
            later = sum(residuals[place + 1 : place + span])
            writing += (residuals[place] + later) ** 2 / 2
            asking += (asked[place] + later) ** 2 / 2
    assert float(losses.terms["writing"].detach()) == pytest.approx(writing, rel=1e-3)
    assert float(losses.terms["asking"].detach()) == pytest.approx(asking, rel=1e-3)
    losses.total.backward()
    assert drafter.price_weight.grad is not None
    # Descent along the gradient raises the price where the surplus is positive.
    expected = -surplus * 30 * 0.5
    assert float(drafter.price_weight.grad) == pytest.approx(expected, rel=1e-3)


def test_decoding_asks_token_by_token(target: Target) -> None:
    """Without verification the answer is what the student writes, with the target's tokens where it
    asks, and after the longest draft.
    """
    drafter = make_drafter(target, 8.0).eval()
    assert drafter.stop_head is not None
    outputs = [run.output for run in decode(target, PROMPTS, Unverified(), 16, drafter, Chain(3))]
    num_asks = 0
    for prompt, output in zip(PROMPTS, outputs):
        text = [*prompt]
        drafted = 3  # the first token is the target's
        while len(text) < len(prompt) + len(output):
            tokens = torch.tensor([text])
            state = drafter.model.features(tokens, ("final",)).at_layer("final")[0, -1]
            asks = float(drafter.stop_head(state)) < 0
            writer = target if asks or drafted == 3 else drafter.model
            num_asks += asks and 0 < drafted < 3
            final = writer.features(tokens, ("final",)).at_layer("final")[0, -1]
            drafted = 0 if writer is target else drafted + 1
            text.append(int(writer.head.logits(final).argmax()))
        assert text[len(prompt) :] == output
    assert num_asks


def test_the_first_share_of_asking_is_the_constraint(target: Target) -> None:
    drafter = TrainingWheels(target, asks=0.25, num_layers=1)
    assert drafter.stop_head is not None
    share = 1 - float(drafter.stop_head(torch.zeros(drafter.model.width)).sigmoid())
    assert share == pytest.approx(0.25)
    assert float(drafter.price.detach()) == pytest.approx(math.log(2))
