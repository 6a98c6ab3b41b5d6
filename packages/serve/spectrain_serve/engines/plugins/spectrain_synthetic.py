"""Simulated acceptance for vLLM's build for CPUs, whose kernels lack it. On a GPU vLLM needs
nothing of this.

vLLM imports this module in its own environment, by --worker-extension-cls. It serves greedy
requests.
Shapes: B requests, K the most draft tokens of a request, N draft tokens of all requests.
"""

from typing import Any

import torch
from vllm.v1.sample import rejection_sampler


class SimulatedGreedySample:
    """vLLM's greedy rejection sampling, with simulated acceptance in plain torch where there are
    rates.
    """

    def __init__(self, original: Any) -> None:
        self.original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def __call__(
        self,
        output: torch.Tensor,
        ends: torch.Tensor,
        drafts: torch.Tensor,
        target_tokens: torch.Tensor,
        bonus_tokens: torch.Tensor,
        is_greedy: torch.Tensor | None,
        *others: Any,
    ) -> None:
        """Fill `output` [B, K + 1] with the accepted drafts and the target's token after them.

        `others` are K, a random number [N] for each draft token, and the rate [K] at which a
        position is accepted after those before it.
        """
        _, uniform, rates = others
        if rates is None or output.device.type != "cpu":
            self.original(output, ends, drafts, target_tokens, bonus_tokens, is_greedy, *others)
            return
        first = 0
        for row, end in enumerate(ends.tolist()):
            count = end - first
            accepts = (uniform[first:end] < rates[:count]) & (drafts[first:end] >= 0)
            num_accepted = int(accepts.long().cumprod(0).sum())
            if is_greedy is None or is_greedy[row]:
                output[row, :num_accepted] = drafts[first : first + num_accepted]
                is_complete = num_accepted == count
                output[row, num_accepted] = (
                    bonus_tokens.flatten()[row]
                    if is_complete
                    else target_tokens[first + num_accepted]
                )
            first = end


if not isinstance(rejection_sampler._rejection_greedy_sample, SimulatedGreedySample):
    rejection_sampler._rejection_greedy_sample = SimulatedGreedySample(
        rejection_sampler._rejection_greedy_sample
    )


class SyntheticAcceptance:
    """The worker extension that vLLM asks for; importing its module is all that it does."""
