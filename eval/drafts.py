"""What was proposed and what was kept, for a few prompts: drafts.jsonl, which report.html shows.

These prompts are decoded once more by the loop, apart from everything that is timed and with a draft in every round.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from spectrain.decoding.replay import DraftRecorder
from spectrain.decoding.session import Session
from spectrain.eval.metrics import Turn
from spectrain.eval.systems import System
from spectrain.models.target import Target
from spectrain.trees import TreeBuilder
from spectrain.trees.base import RoundResult

PROMPTS, LENGTH = 4, 128  # at most so many prompts, and tokens of each: little beside what is timed
Place = tuple[int, ...]  # where a node stands in its tree: the rank of each node on its path among its siblings


@dataclass(frozen=True)
class Drafted:
    """One round's tree of nodes that can be emitted, the root first, and the number of tokens that it emitted."""

    tokens: list[int]
    parents: list[int]  # -1 at the root
    depths: list[int]
    count: int

    def kept(self, following: list[int]) -> list[int]:
        """The nodes below the root whose path carries the tokens `following`."""
        paths: list[list[int]] = [[0]]
        for token in following:
            paths = [
                [*path, node]
                for path in paths
                for node, parent in enumerate(self.parents)
                if parent == path[-1] and self.tokens[node] == token
            ]
        assert paths, "what a round emitted before its last token was proposed in it"
        return paths[0][1:]


class TreeRecorder(DraftRecorder):
    """Another builder, whose whole trees are remembered: those of one sequence, decoded by itself."""

    def __init__(self, builder: TreeBuilder) -> None:
        super().__init__(builder)
        self.drafts: list[Drafted] = []

    def observe(self, round: RoundResult) -> None:
        self.builder.observe(round)
        tree = round.tree
        nodes = (tree.valid & tree.can_emit)[0].nonzero()[:, 0].tolist()
        place = {node: number for number, node in enumerate(nodes)}
        parents = [-1 if parent < 0 else place[parent] for parent in tree.parents[0, nodes].tolist()]
        depths = cast(list[int], tree.depths[0, nodes].tolist())
        self.drafts.append(Drafted(tree.tokens[0, nodes].tolist(), parents, depths, int(round.counts[0])))


def record_drafts(
    target: Target, system: System, turns: Sequence[Turn], texts: dict[str, str], max_new_tokens: int
) -> list[dict[str, Any]]:
    """The lines of drafts.jsonl: one a prompt, then one that counts over all of them how often a place in the tree was drafted
    and how often kept, as {"tree": {"rounds": R, "places": {"0.1": [drafted, kept]}}}.

    turns: every turn of the evaluation in the order of its rows. texts: what the user said first, by the prompt's id.
    """
    lines, drafted, kept, rounds = [], Counter[Place](), Counter[Place](), 0
    for row, turn in choose(turns):
        recorder = TreeRecorder(system.builder)
        session = Session(target, system.rule, system.drafter, recorder, pruning=system.pruning)
        (generation,) = session.decode([turn.drafted.prompt], min(max_new_tokens, LENGTH), [row])
        shown, start = [], 1
        for number, draft in enumerate(recorder.drafts):
            path = draft.kept(generation.output[start : start + draft.count - 1])
            before = generation.output[:start]
            tokens = node_texts(target.tokenizer, before, draft)
            shown.append({"tokens": tokens, "parents": draft.parents, "depths": draft.depths, "kept": path,
                          "emitted": draft.count})  # fmt: skip
            start += draft.count
            if number < len(generation.complete_round_lengths):
                places = positions(draft.parents)
                drafted.update(places[1:])
                kept.update(places[node] for node in path)
                rounds += 1
        pieces = output_texts(target.tokenizer, generation.output)
        lines.append({"id": turn.id, "turn": turn.turn, "category": turn.category, "prompt": texts[turn.id], "pieces": pieces,
                      "rounds": shown})  # fmt: skip
    counts = {".".join(map(str, place)): [drafted[place], kept[place]] for place in sorted(drafted)}
    return [*lines, {"tree": {"rounds": rounds, "places": counts}}]


def choose(turns: Sequence[Turn]) -> list[tuple[int, Turn]]:
    """A few first turns with their rows, of as many categories as there are."""
    seen = Counter[str]()
    ranked = []
    for row, turn in enumerate(turns, 1):
        if turn.turn == 0:
            ranked.append((seen[turn.category], row, turn))
            seen[turn.category] += 1
    return [(row, turn) for _, row, turn in sorted(ranked, key=lambda item: item[:2])[:PROMPTS]]


def positions(parents: list[int]) -> list[Place]:
    """The place of every node; the root's is empty."""
    children = Counter[int]()
    places: list[Place] = []
    for parent in parents:
        places.append(() if parent < 0 else (*places[parent], children[parent]))
        children[parent] += 1
    return places


def text_after(tokenizer: Any, before: list[int], token: int) -> str:
    """What a token adds to the text; characters of several tokens belong to their last one, the others end in U+FFFD."""
    whole = tokenizer.decode([*before, token], clean_up_tokenization_spaces=False)
    known = tokenizer.decode(before, clean_up_tokenization_spaces=False).rstrip("\ufffd") if before else ""
    return str(whole[len(known) :])


def output_texts(tokenizer: Any, output: list[int]) -> list[str]:
    """The pieces of a text, token by token; together they are the whole text."""
    pieces = [text_after(tokenizer, output[:end], token).rstrip("\ufffd") for end, token in enumerate(output)]
    whole = tokenizer.decode(output, clean_up_tokenization_spaces=False)
    return [*pieces[:-1], pieces[-1] + whole[len("".join(pieces)) :]]


def node_texts(tokenizer: Any, before: list[int], draft: Drafted) -> list[str]:
    """The text of every node behind its own ancestors; the last tokens before the round are context enough."""
    paths: list[list[int]] = []
    for token, parent in zip(draft.tokens, draft.parents):
        above = before[-9:-1] if parent < 0 else paths[parent]
        paths.append([*above, token])
    return [text_after(tokenizer, path[:-1], path[-1]) for path in paths]
