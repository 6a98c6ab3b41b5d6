"""Whether a server drafts as our own chain does, and why it does not: other number types, near
ties, or a fault.

Our chain decodes the same prompts with the drafter as it was loaded, not packed to 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from spectrain.decoding.generation import Generation
from spectrain.drafters.base import Drafter
from spectrain.eval.metrics import Turn
from spectrain.models.fast import lowest_precision
from spectrain.models.target import Target
from spectrain.output.console import make_console
from spectrain.trees import Chain
from spectrain.trees.base import TreeBuilder

from .agreement import compare_rounds, decode_prompts, find_differing
from .search import MAX_SECONDS, CauseLister, CauseSearch
from .ties import MAX_PAIRS, measure_gap


class OwnChain:
    """Our own chain with a run's drafter. `server_dtype` is the type of the server's weights,
    where it is known.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        causes: CauseLister,
        make_builder: Callable[[int], TreeBuilder] = Chain,
        server_dtype: str | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.causes = causes
        self.make_builder = make_builder
        self.server_dtype = server_dtype
        self.console = make_console(stderr=True)

    @property
    def dtype(self) -> str:
        return str(self.target.dtype).removeprefix("torch.")

    def compare(self, turns: Sequence[Turn], max_new_tokens: int) -> dict[str, Any]:
        """Decode the prompts of a server's answers; return the entry `own_chain` of
        summary.json.
        """
        served = [turn.drafted for turn in turns]
        depth = max((depth for generation in served for depth in generation.depths), default=0)
        if not depth:
            return {"checked": 0}
        builder = self.make_builder(depth)
        own = decode_prompts(self.target, self.drafter, builder, served, max_new_tokens)
        agreement = compare_rounds(served, own)
        rounds = [length for generation in own for length in generation.complete_round_lengths]
        result = {
            **asdict(agreement),
            "share": round(agreement.share, 4),
            "acceptance_length": round(sum(rounds) / max(1, len(rounds)), 4),
            "depth": depth,
            "dtype": self.dtype,
            "drafter_dtype": lowest_precision(self.drafter),
            "server_dtype": self.server_dtype,
        }
        if agreement.equal == agreement.checked:
            return result
        self.console.print(
            f"{agreement.equal} of {agreement.checked} prompts have our chain's rounds"
        )
        return result | self._explain(served, own, builder, max_new_tokens)

    def _explain(
        self,
        served: Sequence[Generation],
        own: Sequence[Generation],
        builder: TreeBuilder,
        max_new_tokens: int,
    ) -> dict[str, Any]:
        """Return what explains the rounds that differ. Between other types rounding alone may,
        and no fault is searched.
        """
        if self.server_dtype not in (None, self.dtype):
            return {}
        pairs = find_differing(served, own)
        few = self.target.dtype == torch.float32 and len(pairs) <= MAX_PAIRS
        gaps = (
            [measure_gap(self.target, self.drafter, builder, pair) for pair in pairs]
            if few
            else [None] * len(pairs)
        )
        ties = [gap.to_json() for gap in gaps if gap is not None and gap.is_tie]
        unexplained = [pair for pair, gap in zip(pairs, gaps) if gap is None or not gap.is_tie]
        if not unexplained:
            return {"ties": ties}
        self.console.print(f"testing likely causes, for up to {MAX_SECONDS:.0f} seconds")
        return {
            "ties": ties,
            **CauseSearch(unexplained, builder, max_new_tokens).run(self.causes).to_json(),
        }
