"""Texts that are copied from: where what a text ends with stood before, and what followed it there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log2
from typing import NamedTuple

from spectrain.data.datastore import Datastore
from spectrain.errors import UserError
from spectrain.trees.trie import Trie

from ..context import Context

NEGLIGIBLE = 0.1  # of the mean share of a node: what is rarer has no place in a tree, and thousands of nodes take milliseconds


@dataclass(frozen=True)
class Occurrence:
    """An earlier place that reads like the text's end."""

    length: int  # tokens before it that are those at the text's end
    tokens: list[int]  # what followed there


class IndexedText:
    """A text that grows, and where each of its n-grams of up to `longest` tokens stood with a token behind it."""

    def __init__(self, tokens: list[int], longest: int) -> None:
        self.tokens, self.longest = tokens, longest
        self.ends: dict[tuple[int, ...], list[int]] = defaultdict(list)  # n-gram -> positions of the token behind it
        self.num_read = 1  # the n-grams that end with the newest token have nothing behind them

    def occurrences(self, depth: int, most: int, shortest: int = 1) -> list[Occurrence]:
        """Where the text's last tokens stood before: the longest match first, of equal ones the newest, each place once.

        A copy that reaches the text's end goes on with what it has copied, so that a text which repeats itself does so.
        """
        self._read()
        tokens, places = self.tokens, dict[int, int]()
        for length in range(min(self.longest, len(tokens) - 1), shortest - 1, -1):
            for end in reversed(self.ends.get(tuple(tokens[-length:]), ())):
                if len(places) >= most:
                    break
                places.setdefault(end, length)
        return [
            Occurrence(length, [tokens[end + step % (len(tokens) - end)] for step in range(depth)])
            for end, length in places.items()
        ]

    def _read(self) -> None:
        for end in range(self.num_read, len(self.tokens)):
            for size in range(1, min(self.longest, end) + 1):
                self.ends[tuple(self.tokens[end - size : end])].append(end)
        self.num_read = len(self.tokens)


class GrowingTexts:
    """The texts of a batch, roots included, which are followed from round to round."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.rows: list[IndexedText] = []

    def read(self, context: Context) -> list[list[int]]:
        """Add the tokens since the last draft, and return these; all tokens, where a decoding begins."""
        if context.round == 0:
            lengths = (context.lengths + 1).tolist()
            news = [tokens[:length] for tokens, length in zip(context.tokens.tolist(), lengths)]
            self.rows = [IndexedText([], self.longest) for _ in news]
        else:
            news = [tokens[:count] for tokens, count in zip(context.following.tolist(), context.counts.tolist())]
        for row, tokens in zip(self.rows, news):
            row.tokens += tokens
        return news


def weighted(occurrences: list[Occurrence], growth: float = 2.0, fading: float = 0.97) -> Trie:
    """Continuations by how much of the text they match and how often, those that come first a little ahead.

    Which growth hardly matters (2, 4 and 8: 1.77 tokens a forward each, tiny, trees of 16 nodes).
    """
    trie = Trie()
    for rank, occurrence in enumerate(occurrences):
        trie.add(occurrence.tokens, growth**occurrence.length * fading**rank)
    return trie


class SayingKind(NamedTuple):
    """What a source says of a token after a path: how such sayings are told apart when their truth is counted."""

    source: str
    length: int  # tokens that match up to here, in classes; 0 for a drafter
    share: int  # of what the source has at this place, in classes
    places: int  # that say so, 3 for more


class Saying(NamedTuple):
    """A source's estimate of a token, before it is known how far to trust it."""

    key: SayingKind
    estimate: float

    @classmethod
    def of(cls, source: str, length: int, share: float, count: int) -> Saying:
        kinds = length if length < 4 else 4 if length < 6 else 6 if length < 9 else 9
        shares = -1 if share > 0.97 else min(7, int(-1.5 * log2(max(share, 1e-3))))
        trust = length / (length + 1) if length else 1.0
        return cls(SayingKind(source, kinds, shares, min(count, 3)), 0.02 + 0.9 * share * trust)


class Chances:
    """How likely a token is where a source says it, learnt while decoding: the share of such sayings that came true, which
    starts as the source's own estimate, worth `prior` of them.

    Learning gains over keeping that estimate: 2.35 to 2.25 tokens a forward from a store, 3.10 to 3.05 with the text's own
    copies (tiny, trees of 16 nodes). Where sources agree the surest counts; taking them as independent gave the same (3.12).
    """

    def __init__(self, prior: float = 4.0) -> None:
        self.prior = prior
        self.hits: dict[SayingKind, int] = defaultdict(int)
        self.trials: dict[SayingKind, int] = defaultdict(int)

    def __call__(self, saying: Saying) -> float:
        hits, trials = self.hits.get(saying.key, 0), self.trials.get(saying.key, 0)
        return min(1.0, (hits + self.prior * saying.estimate) / (trials + self.prior))

    def learn(self, proposal: Proposal, followed: list[int]) -> None:
        """Judge what was proposed against the tokens that followed, as far as it went along with them."""
        node: int | None = 0
        for truth in followed:
            if node is None:
                break
            for token, child in proposal.trie.children[node].items():
                for saying in proposal.sayings[child]:
                    self.trials[saying.key] += 1
                    self.hits[saying.key] += token == truth
            node = proposal.trie.children[node].get(truth)


class Proposal:
    """What sources say may follow a text, merged."""

    def __init__(self) -> None:
        self.trie = Trie()
        self.sayings: list[list[Saying]] = [[]]  # of every node

    def say(self, parent: int, token: int, saying: Saying) -> int:
        """Add a source's saying about a child of a node, and return the child."""
        node = self.trie.node(parent, token)
        if node == len(self.sayings):
            self.sayings.append([])
        self.sayings[node].append(saying)
        return node

    def copy(self, source: str, occurrences: Iterable[Occurrence], least: float) -> None:
        """Add a source's continuations but for paths that a share below `least` of them takes; a copy has matched a token more
        with every token."""
        found, lengths, counts = Trie(), [0], [0]
        for occurrence in occurrences:
            nodes = found.add(occurrence.tokens, 2.0**occurrence.length)
            lengths += [occurrence.length] * (len(found) - len(lengths))
            counts += [0] * (len(found) - len(counts))
            for node in nodes:
                counts[node] += 1
        here = [0] * len(found)
        for node in range(1, len(found)):
            if found.weights[node] < least * found.weights[0]:
                continue  # and so are all below it
            above = found.parents[node]
            length, share = lengths[node] + found.depths[above], found.weights[node] / found.weights[above]
            here[node] = self.say(here[above], found.tokens[node], Saying.of(source, length, share, counts[node]))

    def draft(self, tokens: list[int], parents: list[int], scores: list[float], valid: list[bool]) -> None:
        """Add a drafter's nodes, the root first, with the log of the chance of every path to them."""
        here = {0: 0}
        for node in range(1, len(tokens)):
            above = parents[node]
            if valid[node]:
                share = exp(min(0.0, scores[node] - scores[above]))
                here[node] = self.say(here[above], tokens[node], Saying.of("drafter", 0, share, 1))

    def weighed(self, chances: Chances) -> Trie:
        """The trie, every node weighing the chance that it is kept."""
        self.trie.weights[0] = 1.0
        for node in range(1, len(self.trie)):
            surest = max(map(chances, self.sayings[node]))
            self.trie.weights[node] = self.trie.weights[self.trie.parents[node]] * surest
        return self.trie


class Copying:
    """The text's own copies and those of a store, proposed round after round, and how far each is to be trusted."""

    def __init__(self, store: Datastore | None, longest: int, matches: int, enough: int) -> None:
        for key, value in (("longest", longest), ("matches", matches), ("enough", enough)):
            if value < 1:
                raise UserError(f"drafter.{key}={value}: use 1 or more")
        self.store, self.matches, self.enough = store, matches, enough
        self.texts = GrowingTexts(longest)
        self.chances = Chances()
        self.proposals: list[Proposal] = []

    def propose(self, context: Context) -> list[Proposal]:
        """What may follow every text, after learning from what did follow the last time."""
        news, depth = self.texts.read(context), context.builder.depth
        least = NEGLIGIBLE / context.builder.budget
        if context.round:
            for proposal, followed in zip(self.proposals, news):
                self.chances.learn(proposal, followed)
        self.proposals = [Proposal() for _ in self.texts.rows]
        for proposal, row, active in zip(self.proposals, self.texts.rows, context.active.tolist()):
            if active:
                proposal.copy("context", row.occurrences(depth, self.matches), least)
                if self.store is not None:
                    found = self.store.occurrences(row.tokens, depth, self.matches, self.enough)
                    proposal.copy("store", (Occurrence(length, tokens) for length, tokens in found), least)
        return self.proposals
