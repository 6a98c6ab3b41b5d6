"""Rollouts that a policy wrote before its last steps draft those that it writes now."""

from pathlib import Path

import torch

from spectrain.data.datastore import hash_vocabulary, write_store
from spectrain.decoding.acceptance import Match
from spectrain.decoding.loop import decode
from spectrain.drafters.retrieval import Retrieval
from spectrain.models.target import Target
from spectrain.trees import Chain
from tests.targets import cut_tiny

PROMPTS = [list(range(40, 60)), list(range(300, 320)), list(range(900, 920))]
TOKENS = 24


def sample(policy: Target, drafter: Retrieval | None = None) -> tuple[list[list[int]], int]:
    """Return the rollouts of a policy, drawn by the same keys each time, and their rounds."""
    runs = decode(policy, PROMPTS, Match(1.0, seed=3), TOKENS, drafter, Chain(4), [7, 8, 9])
    return [run.output for run in runs], sum(len(run.round_lengths) for run in runs)


def test_earlier_rollouts_draft_those_of_a_changed_policy(tmp_path: Path) -> None:
    """The rollouts are exactly those that the changed policy draws by itself, in fewer forwards
    than without the earlier ones. An unchanged policy takes all drafts of a text.
    """
    policy = cut_tiny(3)
    earlier, _ = sample(policy)
    texts = [prompt + rollout for prompt, rollout in zip(PROMPTS, earlier)]
    write_store(tmp_path / "ahead", texts, [], [], {"tokenizer": hash_vocabulary(policy.tokenizer)})
    store = str(tmp_path / "ahead")
    repeated, rounds = sample(policy, Retrieval(policy, store=store))
    assert repeated == earlier
    # One token of the prompt's forward, then 4 drafts and the target's own token in each round.
    assert rounds == len(PROMPTS) * -(-(TOKENS - 1) // 5)
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight += 0.02 * weight.std() * torch.randn(weight.shape, generator=source)
    plain, _ = sample(policy)
    assert plain != earlier
    drafted, ahead_rounds = sample(policy, Retrieval(policy, store=store))
    _, copied_rounds = sample(policy, Retrieval(policy))
    assert drafted == plain
    assert ahead_rounds < copied_rounds
