"""Acceptance rules: which path of a verified tree is kept, and which token follows it.

Shapes: B batch, N nodes, P path length, V vocabulary. A rule says in `lossless` whether its output is the target's. Rules
that weigh the target's p against the drafter's q walk one row at a time and ask `Dice` for every random outcome, so that a
proof can enumerate all of them, with fractions in place of tensors, through this very code.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.kernels import counter
from spectrain.kernels.counter import fold, gumbel, host_key, uniform
from spectrain.kernels.tree_verify import Draws, Nodes, shape_logits, tree_greedy, tree_match, tree_recursive
from spectrain.randomness import ACCEPT, SAMPLE
from spectrain.trees.token_tree import Accepted, Children, TokenTree

Vector = Any  # [V] a distribution over the vocabulary: a tensor or, in a proof, a numpy array of fractions
DRAWN: tuple[Children, ...] = ("sampled", "without_replacement")
ANY: tuple[Children, ...] = ("deterministic", *DRAWN)


def _nodes(tree: TokenTree) -> Nodes:
    """The tree as kernels take it."""
    most_children = tree.tokens.shape[1] - 1 if tree.most_children is None else tree.most_children
    return Nodes(tree.tokens, tree.parents, tree.valid & tree.emitted, tree.longest_path - 1, most_children)


class AcceptanceRule(ABC):
    """What every rule does: judge a tree by the target's logits."""

    name: str
    lossless: bool
    children: tuple[Children, ...] = ANY  # how the children of a node may have been chosen
    chains_only = False
    on_device = False  # it judges without asking the device for anything

    @abstractmethod
    def choose(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """The target's own token [B, N] after nodes at `positions` [B, N] of the sequences `rows` [B]."""

    @abstractmethod
    def __call__(self, tree: TokenTree, logits: Tensor, rows: Tensor, positions: Tensor) -> Accepted:
        """Judge a tree by `logits` [B, N, V]; a tree that the rule is not valid for is a UserError."""

    def matched(self) -> "AcceptanceRule":
        """The rule that gives each place of a sequence one fixed token of the same distribution: how decoding without a
        drafter draws, and what deterministic drafts are judged by."""
        return self

    def check(self, children: Children, is_chain: bool) -> None:
        """Raise where the rule would be wrong about such trees."""
        if children not in self.children:
            raise UserError(
                f"acceptance={self.name}: it weighs p against the q that a child was drawn from, and the children of this tree "
                "are the likeliest ones, not drawn; use tree.children=sampled or without_replacement, or acceptance=match"
            )
        if self.chains_only and not is_chain:
            raise UserError(
                f"acceptance={self.name}: it judges one path and this tree branches; use tree=chain or acceptance=recursive"
            )


class Greedy(AcceptanceRule):
    """Keep what equals the target's most likely token; the output is the target's greedy output."""

    name = "greedy"
    lossless = True
    on_device = True

    def choose(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        return logits.argmax(-1)

    def __call__(self, tree: TokenTree, logits: Tensor, rows: Tensor, positions: Tensor) -> Accepted:
        return Accepted(*tree_greedy(_nodes(tree), logits))


class Sampling(AcceptanceRule):
    """Settings that every sampling rule shares. Temperature, top-k and top-p shape p for acceptance, residual and bonus alike.

    Each draw is keyed by seed, sequence and position, so a run repeats exactly, alone or in a batch.
    """

    def __init__(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> None:
        if not temperature > 0:
            raise UserError(f"acceptance.temperature={temperature}: use more than 0, or acceptance=greedy")
        if top_k < 0:
            raise UserError(f"acceptance.top_k={top_k}: use 1 or more, or 0 for the whole vocabulary")
        if not 0 < top_p <= 1:
            raise UserError(f"acceptance.top_p={top_p}: use more than 0 and at most 1")
        self.temperature, self.top_k, self.top_p, self.seed = temperature, top_k, top_p, seed

    def shape(self, logits: Tensor) -> Tensor:
        """Logits [..., V] after temperature, top-k and top-p."""
        return shape_logits(logits, self.temperature, self.top_k, self.top_p)

    def matched(self) -> AcceptanceRule:
        return Match(self.temperature, self.top_k, self.top_p, self.seed)

    def choose(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        noise = gumbel(counter.key(SAMPLE, self.seed, rows[:, None], positions), logits.shape[-1])
        return (self.shape(logits) + noise).argmax(-1)

    def draws(self, purpose: int, rows: Tensor, positions: Tensor) -> Draws:
        return Draws(host_key(purpose, self.seed), rows, positions, self.temperature, self.top_k, self.top_p)


class Match(Sampling):
    """Sample-and-match: draw the target's token at every node, keep the path that agrees with the draws.

    Lossless for any tree that was built without looking at these draws, and the safe rule for top-k, re-ranked and pruned
    trees; for such children it accepts as often as the q = 1 rule of EAGLE-2. Drafted decoding emits the very tokens that
    autoregressive decoding draws with the same seed.
    """

    name = "match"
    lossless = True
    on_device = True

    def __call__(self, tree: TokenTree, logits: Tensor, rows: Tensor, positions: Tensor) -> Accepted:
        return Accepted(*tree_match(_nodes(tree), logits, self.draws(SAMPLE, rows, positions)))


class Dice(Protocol):
    """Where a rule's random outcomes come from."""

    def coin(self, chance: Any, node: int, number: int = 0) -> bool:
        """True with this probability; no two coins that a verdict may toss at one depth have the same number."""

    def draw(self, weights: Vector, node: int) -> int:
        """A token by its probability, to follow a node."""


@dataclass(frozen=True)
class Row:
    """One row of a verified tree, as a rule walks it; only nodes that are asked for are normalised."""

    tokens: list[int]
    children: list[list[int]]  # of every node, in the order they were drawn
    p: Callable[[int], Vector]  # the target's distribution after a node
    q: Callable[[int], Vector]  # what the node's children were drawn from
    without_replacement: bool = False
    scores: Callable[[int], Vector] | None = None  # the logarithm of p up to a constant, where p itself may underflow


class Walking(Sampling):
    """A rule that decides node by node, one row at a time."""

    @abstractmethod
    def judge(self, row: Row, dice: Dice) -> tuple[list[int], int]:
        """The kept nodes, the root first, and the token that follows them."""

    def __call__(self, tree: TokenTree, logits: Tensor, rows: Tensor, positions: Tensor) -> Accepted:
        if tree.tokens.shape[1] > 1:  # a root alone has no children to weigh
            self.check(tree.children, not self.chains_only or tree.is_chain)
        verdicts = []
        for b, key in enumerate(rows.tolist()):
            dice = _Counted(fold(host_key(ACCEPT, self.seed), key), positions[b].tolist())
            verdicts.append(self.judge(self._row(tree, logits, b), dice))
        width = max(len(path) for path, _ in verdicts)
        device = logits.device
        padded = torch.tensor([path + path[-1:] * (width - len(path)) for path, _ in verdicts], device=device)
        counts = torch.tensor([len(path) for path, _ in verdicts], device=device)
        return Accepted(padded, counts, torch.tensor([bonus for _, bonus in verdicts], device=device))

    def _row(self, tree: TokenTree, logits: Tensor, b: int) -> Row:
        children: list[list[int]] = [[] for _ in range(tree.tokens.shape[1])]
        real = (tree.valid[b] & tree.emitted[b]).tolist()
        for node, parent in enumerate(tree.parents[b].tolist()):
            if parent >= 0 and real[node]:
                children[parent].append(node)

        @cache
        def p(node: int) -> Tensor:
            return self.shape(logits[b, node]).double().softmax(-1).cpu()

        @cache
        def q(node: int) -> Tensor:
            assert tree.q is not None, "a tree with drawn children says what they were drawn from"
            drawn = tree.q[b, node].double().cpu()
            ids = torch.arange(len(drawn)) if tree.draft_ids is None else tree.draft_ids.cpu()
            return drawn.new_zeros(logits.shape[-1]).scatter(0, ids, drawn)

        def scores(node: int) -> Tensor:
            return self.shape(logits[b, node])

        return Row(tree.tokens[b].tolist(), children, p, q, tree.children == "without_replacement", scores)


class Recursive(Walking):
    """Recursive rejection sampling (SpecInfer, Miao et al., 2023; RSD, Jeon et al., 2024; Sequoia, Chen et al., 2024).

    Children in the order they were drawn: keep x with probability min(1, P(x) / Q(x)), else P becomes the normalised
    max(P - Q, 0) and, drawn without replacement, Q loses x. Where none is kept, the next token is drawn from P.
    """

    name = "recursive"
    lossless = True
    children = DRAWN
    on_device = True

    def __call__(self, tree: TokenTree, logits: Tensor, rows: Tensor, positions: Tensor) -> Accepted:
        """What `judge` decides row by row, of all rows at once, with the same random numbers."""
        if tree.tokens.shape[1] == 1:  # nothing to weigh
            q, without_replacement = logits.new_ones(len(rows), 1, 1), False
        else:
            self.check(tree.children, not self.chains_only or tree.is_chain)
            assert tree.q is not None, "a tree with drawn children says what they were drawn from"
            q, without_replacement = tree.q, tree.children == "without_replacement"
        draws = self.draws(ACCEPT, rows, positions)
        return Accepted(*tree_recursive(_nodes(tree), logits, q, tree.draft_ids, without_replacement, draws))

    def judge(self, row: Row, dice: Dice) -> tuple[list[int], int]:
        path = [0]
        while True:
            node = path[-1]
            p = row.p(node)
            q: Vector = row.q(node) if row.children[node] else None
            for number, child in enumerate(row.children[node]):
                token = row.tokens[child]
                if dice.coin(ratio(p[token], q[token]), node, number):
                    path.append(child)
                    break
                p = normalised((p - q).clip(0), p)
                if row.without_replacement:
                    q = without(q, token)
            else:
                return path, dice.draw(p, node)


class SpeculativeSampling(Recursive):
    """Speculative sampling (Leviathan et al., 2023; Chen et al., 2023): recursive rejection where each node has one child."""

    name = "chain"
    chains_only = True


class Block(Walking):
    """Block verification (Sun et al., 2024, algorithm 2): a path is judged as a whole and keeps no less than token by token.

    b_i = min(1, b_{i-1} p_i / q_i); the longest prefix i is kept whose coin h_i = r_i / (r_i + 1 - b_i) falls, where r_i is
    the mass of max(b_i p - q, 0) after it, and h of the whole path is its b. The next token is drawn from that residual.
    """

    name = "block"
    lossless = True
    children = DRAWN
    chains_only = True

    def judge(self, row: Row, dice: Dice) -> tuple[list[int], int]:
        path, rates = [0], [1]
        while row.children[path[-1]]:
            (child,) = row.children[path[-1]]
            token = row.tokens[child]
            rates.append(min(1, rates[-1] * row.p(path[-1])[token] / row.q(path[-1])[token]))
            path.append(child)
        if dice.coin(rates[-1], path[-1]):
            return path, dice.draw(row.p(path[-1]), path[-1])
        for last in range(len(path) - 2, -1, -1):
            node, rate = path[last], rates[last]
            residual = (rate * row.p(node) - row.q(node)).clip(0)
            if last == 0 or dice.coin(share(residual.sum(), rate), node):
                return path[: last + 1], dice.draw(normalised(residual, row.p(node)), node)
        raise AssertionError("the root is always kept")


class Traversal(Walking):
    """Traversal verification (Weng et al., 2025): from the leaves to the root, so a node counts with all that is below it.

    A node has a rate (the root 1) and a residual P (at first p). Each child, in the order drawn, is visited with rate
    min(1, rate P(x) / Q(x)); where it fails, the mass S of max(rate P - Q, 0) gives the new residual and the new rate
    S / (S + 1 - rate). With no child left the node is kept with its rate. On a chain it is block verification.
    """

    name = "traversal"
    lossless = True
    children = DRAWN

    def judge(self, row: Row, dice: Dice) -> tuple[list[int], int]:
        found = self._visit(row, dice, 0, 1)
        assert found is not None, "the root is always kept"
        return found

    def _visit(self, row: Row, dice: Dice, node: int, rate: Any) -> tuple[list[int], int] | None:
        p = row.p(node)
        q: Vector = row.q(node) if row.children[node] else None
        for child in row.children[node]:
            token = row.tokens[child]
            found = self._visit(row, dice, child, min(1, rate * p[token] / q[token]))
            if found is not None:
                return [node, *found[0]], found[1]
            residual = (rate * p - q).clip(0)
            p = normalised(residual, p)
            rate = 1 if node == 0 else share(residual.sum(), rate)
            if row.without_replacement:
                q = without(q, token)
        return ([node], dice.draw(p, node)) if node == 0 or dice.coin(rate, node, number=node) else None


class Typical(Walking):
    """Typical acceptance (Cai et al., 2024, section 3.3.1): keep what the target finds likely enough. NOT lossless.

    A child is kept where p(x) > min(epsilon, delta exp(-H(p))), H the entropy; the longest kept path wins, then the
    likeliest. The next token is drawn from p.
    """

    name = "typical"
    lossless = False

    def __init__(
        self,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        epsilon: float = 0.09,  # what is always likely enough
        delta: float = 0.3,  # how much less that is where the target is unsure
    ) -> None:
        super().__init__(temperature, top_k, top_p, seed)
        for key, value in (("epsilon", epsilon), ("delta", delta)):
            if not 0 < value <= 1:
                raise UserError(f"acceptance.{key}={value}: use more than 0 and at most 1")
        self.epsilon, self.delta = epsilon, delta

    def judge(self, row: Row, dice: Dice) -> tuple[list[int], int]:
        best = (1, 0.0, [0])
        open_paths = [(0.0, [0])]
        while open_paths:
            likelihood, path = open_paths.pop()
            best = max(best, (len(path), likelihood, path))
            p = row.p(path[-1])
            entropy = -(p * (p + 1e-5).log()).sum()
            least = min(self.epsilon, self.delta * float((-entropy).exp()))
            for child in row.children[path[-1]]:
                if (chance := float(p[row.tokens[child]])) > least:
                    open_paths.append((likelihood + torch.tensor(chance).log().item(), [*path, child]))
        path = best[2]
        return path, dice.draw(row.p(path[-1]), path[-1])


class Interleaved(Walking):
    """Interleaved sampling (speculative knowledge distillation, Xu et al., 2024), which writes training text. NOT lossless.

    A drawn token is kept while it is among the target's `top_k` likeliest; the first that is not is replaced by a draw of the
    target, and what was drafted behind it is dropped. Temperature shapes the target's draw; `top_k` only judges.
    """

    name = "interleaved"
    lossless = False
    chains_only = True

    def __init__(self, temperature: float = 1.0, top_k: int = 25, seed: int = 0) -> None:
        super().__init__(temperature, 0, 1.0, seed)
        self.judged = top_k

    def judge(self, row: Row, dice: Dice) -> tuple[list[int], int]:
        path = [0]
        while row.children[path[-1]]:
            (child,) = row.children[path[-1]]
            scores = (row.scores or row.p)(path[-1])
            if int((scores > scores[row.tokens[child]]).sum()) >= self.judged:
                break
            path.append(child)
        return path, dice.draw(row.p(path[-1]), path[-1])


class _Counted:
    """Dice for decoding: each outcome has its own number, by the position of its node."""

    def __init__(self, key: Tensor, positions: list[int]) -> None:
        self.key, self.positions = key, positions

    def coin(self, chance: Any, node: int, number: int = 0) -> bool:
        return float(uniform(fold(self.key, self.positions[node]), torch.tensor(number))) < float(chance)

    def draw(self, weights: Vector, node: int) -> int:
        return int((weights.log() + gumbel(fold(fold(self.key, self.positions[node]), 1), len(weights))).argmax())


def ratio(p: Any, q: Any) -> Any:
    """min(1, p / q), and 1 where both are 0."""
    return 1 if p >= q else p / q


def share(mass: Any, rate: Any) -> Any:
    """mass / (mass + 1 - rate), and 1 where nothing was left to lose: the rate is 1 and p equals q."""
    total = mass + 1 - rate
    return mass / total if total > 0 else 1


def normalised(weights: Vector, otherwise: Vector) -> Vector:
    """The weights as a distribution; `otherwise` where rounding left none."""
    total = weights.sum()
    return weights / total if total > 0 else otherwise


def without(q: Vector, token: int) -> Vector:
    """q once `token` has been drawn from it for good."""
    left = q + 0
    left[token] = 0
    return normalised(left, left)
