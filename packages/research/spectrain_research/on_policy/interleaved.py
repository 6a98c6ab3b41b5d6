"""The rule of interleaved sampling."""

from typing import Any

from spectrain.decoding.acceptance.base import Siblings
from spectrain.decoding.acceptance.sequential import RandomSource, SequentialRule, VerifiedTree


class InterleavedSampling(SequentialRule):
    """Interleaved sampling (speculative knowledge distillation, Xu et al., 2024), which writes
    training text. NOT lossless.

    A drawn token is accepted while it is among the target's `top_k` likeliest; the first that is
    not is replaced by a draw of the target, and all later drafts are dropped. Temperature shapes
    the target's draw; `top_k` only judges. After a fully accepted draft the drafter's last token,
    not one of the target, ends the round.
    """

    name = "interleaved"
    lossless = False
    chains_only = True

    def __init__(
        self,
        # Temperature of the target's distribution; it must be above 0.
        temperature: float = 1.0,
        # Number of most likely target tokens among which a drafted token is accepted.
        top_k: int = 25,
        # Seed of the random draws.
        seed: int = 0,
    ) -> None:
        super().__init__(temperature, 0, 1.0, seed)
        self.num_candidates = top_k

    def select_path(self, tree: VerifiedTree, random: RandomSource) -> tuple[list[int], int]:
        path = [0]
        while tree.children[path[-1]]:
            (child,) = tree.children[path[-1]]
            scores = (tree.scores or tree.p)(path[-1])
            if int((scores > scores[tree.tokens[child]]).sum()) >= self.num_candidates:
                break
            path.append(child)
        if len(path) > 1 and not tree.children[path[-1]]:
            return path[:-1], tree.tokens[path[-1]]
        return path, random.draw_token(tree.p(path[-1]), path[-1])

    def acceptance_chances(self, siblings: Siblings, rate: Any = 1) -> list[Any]:
        """Return 1 for the first sibling that is accepted; a chain has only one sibling."""
        is_accepted = [
            int((siblings.p > siblings.p[token]).sum()) < self.num_candidates
            for token in siblings.tokens
        ]
        return [
            float(accepted and not any(is_accepted[:index]))
            for index, accepted in enumerate(is_accepted)
        ]
