"""The drafted and the accepted tokens of a few prompts: drafts.jsonl, which report.html shows.

These prompts are decoded once more in the eager loop, apart from everything that is timed and with
a draft in every round: a tree that may decide not to draft is replaced by a chain of 3.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from spectrain.decoding.session import Session
from spectrain.eval.fixed_trees import make_chain
from spectrain.eval.metrics import Turn
from spectrain.eval.systems import System, describe_tree
from spectrain.models.target import Target
from spectrain.trees import TreeBuilder
from spectrain.trees.base import RoundResult, WrappedBuilder

# prompts, and tokens of each: little compared with what is timed
MAX_PROMPTS = 4
MAX_TOKENS = 128
# a node's position in its tree: the rank of each node on its path among its siblings
Position = tuple[int, ...]


@dataclass(frozen=True)
class EmittableTree:
    """One round's tree of nodes that can be emitted, the root first, and the number of tokens
    that it emitted.
    """

    tokens: list[int]
    # -1 at the root.
    parents: list[int]
    depths: list[int]
    count: int

    def accepted_nodes(self, following: list[int]) -> list[int]:
        """Return the nodes below the root whose path carries the tokens `following`."""
        paths: list[list[int]] = [[0]]
        for token in following:
            paths = [
                [*path, node]
                for path in paths
                for node, parent in enumerate(self.parents)
                if parent == path[-1] and self.tokens[node] == token
            ]
        assert paths, "a round drafted all tokens that it emitted before the last one"
        return paths[0][1:]


class TreeRecorder(WrappedBuilder):
    """Wraps a builder and records its complete trees, of one sequence that is decoded by itself."""

    def __init__(self, builder: TreeBuilder) -> None:
        super().__init__(builder)
        self.drafts: list[EmittableTree] = []

    def observe(self, round: RoundResult) -> None:
        self.builder.observe(round)
        tree = round.tree
        nodes = (tree.valid & tree.can_emit)[0].nonzero()[:, 0].tolist()
        index = {node: number for number, node in enumerate(nodes)}
        parents = [
            -1 if parent < 0 else index[parent] for parent in tree.parents[0, nodes].tolist()
        ]
        depths = cast(list[int], tree.depths[0, nodes].tolist())
        self.drafts.append(
            EmittableTree(tree.tokens[0, nodes].tolist(), parents, depths, int(round.counts[0]))
        )


def record_drafts(
    target: Target,
    system: System,
    turns: Sequence[Turn],
    texts: dict[str, str],
    max_new_tokens: int,
) -> list[dict[str, Any]]:
    """Return the lines of drafts.jsonl: one per prompt, then one that counts positions of the tree
    over all of them.

    The last line says how often each position was drafted and accepted, as {"tree": {"label":
    "chain of 3", "rounds": R, "places": {"0.1": [drafted, accepted]}}}. turns: every turn of the
    evaluation in the order of its rows. texts: the user's first turn by the prompt's id.
    """
    lines = []
    own = system.builder
    builder = make_chain(own) if own.round_policy.decides_to_draft else own
    drafted = Counter[Position]()
    accepted = Counter[Position]()
    rounds = 0
    tree_changes = tuple(change for change in system.changes if change.part == "tree")
    for row, turn in choose_turns(turns):
        recorder = TreeRecorder(builder)
        session = Session(target, system.rule, system.drafter, recorder, changes=tree_changes)
        (generation,) = session.decode(
            [turn.drafted.prompt], min(max_new_tokens, MAX_TOKENS), [row]
        )
        shown = []
        start = 1
        for number, draft in enumerate(recorder.drafts):
            path = draft.accepted_nodes(generation.output[start : start + draft.count - 1])
            before = generation.output[:start]
            tokens = node_texts(target.tokenizer, before, draft)
            shown.append(
                {
                    "tokens": tokens,
                    "parents": draft.parents,
                    "depths": draft.depths,
                    "kept": path,
                    "emitted": draft.count,
                }
            )
            start += draft.count
            if number < len(generation.complete_round_lengths):
                positions = tree_positions(draft.parents)
                drafted.update(positions[1:])
                accepted.update(positions[node] for node in path)
                rounds += 1
        pieces = output_texts(target.tokenizer, generation.output)
        lines.append(
            {
                "id": turn.id,
                "turn": turn.turn,
                "category": turn.category,
                "prompt": texts[turn.id],
                "pieces": pieces,
                "rounds": shown,
            }
        )
    counts = {
        ".".join(map(str, position)): [drafted[position], accepted[position]]
        for position in sorted(drafted)
    }
    return [
        *lines,
        {"tree": {"label": describe_tree(builder), "rounds": rounds, "places": counts}},
    ]


def choose_turns(turns: Sequence[Turn]) -> list[tuple[int, Turn]]:
    """Choose a few first turns with their rows, of as many categories as possible."""
    chosen = Counter[str]()
    ranked = []
    for row, turn in enumerate(turns, 1):
        if turn.turn == 0:
            ranked.append((chosen[turn.category], row, turn))
            chosen[turn.category] += 1
    return [(row, turn) for _, row, turn in sorted(ranked, key=lambda item: item[:2])[:MAX_PROMPTS]]


def tree_positions(parents: list[int]) -> list[Position]:
    """Return the position of every node; the root's is empty."""
    children = Counter[int]()
    positions: list[Position] = []
    for parent in parents:
        positions.append(() if parent < 0 else (*positions[parent], children[parent]))
        children[parent] += 1
    return positions


def text_after(tokenizer: Any, before: list[int], token: int) -> str:
    """Return what a token adds to the text; a character of several tokens belongs to its last
    one, the others end in U+FFFD.
    """
    text = tokenizer.decode([*before, token], clean_up_tokenization_spaces=False)
    prefix = (
        tokenizer.decode(before, clean_up_tokenization_spaces=False).rstrip("\ufffd")
        if before
        else ""
    )
    return str(text[len(prefix) :])


def output_texts(tokenizer: Any, output: list[int]) -> list[str]:
    """Return the pieces of a text, token by token; joined, they are the text."""
    pieces = [
        text_after(tokenizer, output[:end], token).rstrip("\ufffd")
        for end, token in enumerate(output)
    ]
    text = tokenizer.decode(output, clean_up_tokenization_spaces=False)
    return [*pieces[:-1], pieces[-1] + text[len("".join(pieces)) :]]


def node_texts(tokenizer: Any, before: list[int], draft: EmittableTree) -> list[str]:
    """Return the text of every node after its own ancestors; the last tokens before the round
    are enough context.
    """
    paths: list[list[int]] = []
    for token, parent in zip(draft.tokens, draft.parents):
        above = before[-9:-1] if parent < 0 else paths[parent]
        paths.append([*above, token])
    return [text_after(tokenizer, path[:-1], path[-1]) for path in paths]
