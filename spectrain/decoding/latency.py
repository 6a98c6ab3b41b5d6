"""Times of drafting and verifying trees on this machine, measured during ordinary decoding.
Shapes: B batch, N nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from spectrain.drafters.base import Drafter
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.device import measure_work
from spectrain.models.target import Target
from spectrain.trees.base import Prefix, RoundResult, TreeBuilder
from spectrain.trees.measurements import LARGEST_FACTOR, NUM_TIMED, Latency, list_timed_sizes
from spectrain.trees.rollout import Draft, Rollout
from spectrain.trees.token_tree import TokenTree

from .acceptance import Greedy
from .loop import EagerRunner, decode_steps, make_request

# Seconds of rounds after a prompt, beyond which no more rounds are timed, if every size was timed
# after a first time.
MAX_PROBE_SECONDS = 8.0


def measure_latency(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    builder: TreeBuilder,
    max_text_tokens: int,
    repeats: int = 5,
) -> Latency:
    """Time verification and draft steps over up to the builder's budget of nodes.

    They are timed after the shortest prompt and after the longest one, repeated up to
    `max_text_tokens` tokens, because attention over a long text costs more for every node. Where a
    round takes long, fewer are timed (MAX_PROBE_SECONDS).
    """
    sizes = list_timed_sizes(builder.budget)
    verify: dict[int, dict[int, float]] = {}
    step: dict[int, dict[int, float]] = {}
    starts: list[float] = []
    # rounds that emit one token, and as many again for lucky ones or empty drafts
    limit = 2 * len(sizes) * (repeats + 1)
    longest = max(prompts, key=len)
    long_prompt = (longest * -(-max_text_tokens // len(longest)))[
        : max(max_text_tokens, len(longest))
    ]
    timed_prompts = [
        prompt[: max(1, target.max_length - limit)]
        for prompt in (min(prompts, key=len), long_prompt)
    ]
    for prompt in {len(prompt): prompt for prompt in timed_prompts}.values():
        probe = LatencyProbe(sizes, builder.depth, target.head.vocab_size)
        request = make_request(target, [prompt], limit, ignore_eos=True)
        with closing(decode_steps(EagerRunner(target, Greedy(), drafter, probe), request)) as steps:
            for _ in steps:
                if probe.is_out_of_time:
                    break
        check_rollout(builder, probe.num_measured > 0)
        length = len(prompt) + limit // 2
        verify[length] = {
            size: float(np.median(times[1:] or times))
            for size, times in probe.verify_seconds.items()
            if times
        }
        step[length] = {
            size: float(np.median(times[1:] or times))
            for size, times in probe.step_seconds.items()
            if times
        } or {1: 0.0}
        starts += probe.start_seconds[1:]
    return Latency(
        verify,
        step,
        float(np.median(starts)),
        time_levels(target, min(prompts, key=len), builder.depth, repeats),
    )


@torch.inference_mode()
def time_levels(target: Target, prompt: list[int], depth: int, repeats: int = 5) -> float:
    """Return the seconds that each level after the first adds to verifying a tree: a chain minus as
    many children of the root.

    It is 0 but for targets with recurrent layers, which update their state level by level.
    """
    if not target.architecture.keeps_state or depth < 2:
        return 0.0
    nodes = torch.zeros(1, depth + 1, dtype=torch.int64, device=target.device)
    trees = TokenTree.from_chain(nodes), TokenTree.from_star(nodes)
    cache = target.new_cache(1, len(prompt) + depth + 1)
    lengths = torch.tensor([len(prompt)], device=target.device)
    target.prefill(torch.tensor([prompt], device=target.device), lengths, cache, ())
    seconds: list[list[float]] = [[], []]
    for _ in range(repeats):
        for tree, times in zip(trees, seconds):
            times.append(measure_work(partial(target.verify, tree, cache), target.device))
            cache.roll_back()
    chain_seconds, star_seconds = (float(np.median(times)) for times in seconds)
    return max(0.0, chain_seconds - star_seconds) / (depth - 1)


def time_verification(context: Context, sizes: list[int]) -> dict[int, float]:
    """Return the seconds to verify trees of these sizes behind the committed tokens, the children
    of the root at random.

    Sizes are timed in turn. The cache is left as it was.
    """
    times: dict[int, list[float]] = {}
    for repeat in range(1 + NUM_TIMED):
        for size in sizes if repeat == 0 else list(times):
            tokens = torch.randint(
                context.target.head.vocab_size,
                (len(context.root), size),
                device=context.root.device,
            )
            seconds = measure_work(partial(verify_greedily, context, tokens), tokens.device)
            times.setdefault(size, []).append(seconds)
            context.cache.roll_back()
            if repeat == 0 and times[size][0] > LARGEST_FACTOR * times[sizes[0]][0]:
                break
    return {size: float(np.median(each[1:])) for size, each in times.items()}


def verify_greedily(context: Context, tokens: Tensor) -> Tensor:
    """Verify the first of tokens [B, N] with the others as its children, and return the target's
    likeliest token [B, N] after each node.
    """
    features = context.target.verify(TokenTree.from_star(tokens), context.cache, context.layers)
    assert features.logits is not None
    return features.logits.argmax(-1)


class LatencyProbe(TreeBuilder):
    """Proposes random tokens after the root, in trees of each size in turn, to time them;
    copying is timed with them.
    """

    name = "probe"

    def __init__(
        self,
        sizes: list[int],
        depth: int,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        # The clock at the first round.
        self.start_time: float | None = None
        self.sizes = sizes
        self.depth = depth
        self.vocab_size = vocab_size
        self.num_measured = 0
        self.was_expanded = False
        self.budget = self.max_drafted = max(sizes)
        self.verify_seconds: dict[int, list[float]] = {size: [] for size in sizes}
        self.step_seconds: dict[int, list[float]] = {size: [] for size in sizes}
        self.start_seconds: list[float] = []
        self.extend_seconds = 0.0
        self.tree_size = 1

    @property
    def is_out_of_time(self) -> bool:
        """Whether every size was timed twice and more, and enough time was spent on that."""
        return (
            self.start_time is not None
            and self.num_measured >= 2 * len(self.sizes)
            and self.clock() - self.start_time > MAX_PROBE_SECONDS
        )

    def grow(self, prefix: Prefix, draft: Draft) -> TokenTree:
        if self.start_time is None:
            self.start_time = self.clock()
        self.tree_size = self.sizes[self.num_measured % len(self.sizes)]
        if draft.rollout is not None or draft.continuations is None:
            return super().grow(prefix, replace(draft, merge_copies=None))
        self.extend_seconds = 0.0
        self.was_expanded = True
        tree = self._make_tree(prefix, self._random_tokens(prefix, self.vocab_size))
        return tree if draft.add_mask_nodes is None else draft.add_mask_nodes(tree)

    def expand(self, prefix: Prefix, rollout: Rollout) -> TokenTree:
        tokens = rollout.to_target_ids(self._random_tokens(prefix, rollout.start().shape[-1]))
        extend = partial(rollout.extend, tokens, torch.zeros_like(tokens))
        self.extend_seconds = measure_work(extend, tokens.device)
        self.step_seconds[self.tree_size].append(self.extend_seconds)
        self.was_expanded = True
        return self._make_tree(prefix, tokens)

    def _random_tokens(self, prefix: Prefix, vocab_size: int) -> Tensor:
        source = torch.Generator().manual_seed(self.num_measured)
        ids = [torch.randperm(vocab_size, generator=source)[: self.tree_size] for _ in prefix.root]
        return torch.stack(ids).to(prefix.root.device)

    def _make_tree(self, prefix: Prefix, tokens: Tensor) -> TokenTree:
        """Make a tree with all tokens as children of the root."""
        nodes = torch.cat([prefix.root[:, None], tokens[:, : self.tree_size - 1]], dim=1)
        return TokenTree.from_star(nodes)

    def observe(self, round: RoundResult) -> None:
        if not self.was_expanded:
            return  # the drafter drafts by itself
        self.was_expanded = False
        if int((round.tree.valid & round.tree.can_emit)[0].sum()) < self.tree_size:
            return  # it had nothing ready: the size comes again
        self.num_measured += 1
        self.start_seconds.append(round.seconds["draft"] - self.extend_seconds)
        self.verify_seconds[self.tree_size].append(
            round.seconds["verify"] + round.seconds["accept"]
        )


def check_rollout(builder: TreeBuilder, has_rollout: bool) -> None:
    """Raise a UserError for a builder that was calibrated with a drafter that has no rollout."""
    if not has_rollout:
        raise UserError(
            f"tree={builder.name}: it is calibrated while the drafter drafts step by step, and "
            "this drafter copies text; use tree=chain"
        )
