"""Layers that keep a state, over trees, packed documents and what is forgotten again:
Qwen3-Next, three such layers of four.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from spectrain.decoding.latency import time_levels
from spectrain.errors import UserError
from spectrain.models.architectures.recurrent import Recurrent
from spectrain.models.architectures.recurrent_states import PathPolicy
from spectrain.models.forward_override import override_forwards
from spectrain.models.forward_plan import ForwardPlan, LayerSpan
from spectrain.models.loading import load_hf, load_tiny
from spectrain.models.target import Target
from spectrain.trees.token_tree import TokenTree
from tests.models.architectures import VOCAB, save_small


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("hybrid")
    save_small("qwen3_next", folder)
    load_tiny().tokenizer.save_pretrained(folder)
    return load_hf(str(folder), "hybrid", device="cpu")


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, shape)


def test_packed_documents_do_not_see_each_other(target: Target) -> None:
    """Each of two documents in a row has the features that it has alone."""
    tokens = random_tokens(1, 15)
    packed = target.features(tokens, (2, "final"), (7, 8)).hidden
    alone = [target.features(part, (2, "final")).hidden for part in tokens.split((7, 8), dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lengths", [[9], [4, 9]])
def test_a_staged_tree_after_a_discarded_tree_equals_verifying(
    target: Target, lengths: list[int]
) -> None:
    """A discarded tree leaves no trace, and a tree in two stages, committed, equals one in a
    single stage.
    """
    batch = len(lengths)
    prompts = random_tokens(batch, 9)
    tree = random_tokens(batch, 6)
    other = random_tokens(batch, 5)
    full_tree = TokenTree.from_parents(tree, torch.tensor([-1, 0, 0, 1, 2, 3]).expand(batch, -1))
    caches = [target.new_cache(batch, 32) for _ in range(2)]
    for cache in caches:
        target.prefill(prompts, torch.tensor(lengths), cache, ())
    target.verify(TokenTree.from_chain(other), caches[0])
    caches[0].roll_back()
    positions = caches[0].lengths[:, None] + full_tree.depths
    parts = []
    for new in (slice(0, 3), slice(3, 6)):
        mask = full_tree.ancestors[:, new, : new.stop]
        plan = ForwardPlan(logits=True, positions=positions[:, new], mask=mask, cache=caches[0])
        parts.append(target.run(full_tree.tokens[:, new], plan).logits)
    expected = target.verify(full_tree, caches[1]).logits
    torch.testing.assert_close(
        torch.cat([part for part in parts if part is not None], dim=1),
        expected,
        atol=1e-4,
        rtol=1e-4,
    )
    for cache in caches:
        cache.commit(torch.tensor([[0, 1, 3]]).expand(batch, -1), torch.tensor([3, 2][:batch]))
    after = [target.verify(TokenTree.from_chain(other), cache).logits for cache in caches]
    torch.testing.assert_close(*after, atol=1e-4, rtol=1e-4)


@contextmanager
def run_along(target: Target, policy: PathPolicy) -> Iterator[None]:
    before = target.architecture
    assert isinstance(before, Recurrent)
    target.architecture = replace(before, path_policy=policy)
    try:
        yield
    finally:
        target.architecture = before


@contextmanager
def record_runs(target: Target) -> Iterator[list[str]]:
    """Record what runs of the first layer's recurrent module: in, out, and what lies between."""
    assert isinstance(target.architecture, Recurrent)
    stateful = target.architecture.recurrent_modules[0]
    ran = list[str]()
    assert stateful.output_linear is not None and len(stateful.input_linears) == 2
    norm: Any = stateful.module.norm

    def wrap_forward(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run_recorded(*args: Any) -> Any:
            ran.append(name)
            return forward(*args)

        return run_recorded

    named = {"in": stateful.input_linears[0], "out": stateful.output_linear, "between": norm}
    with override_forwards(
        [(module, wrap_forward(name, module.forward)) for name, module in named.items()]
    ):
        yield ran


POLICIES: tuple[PathPolicy, PathPolicy] = ("never", "always")
PARENTS = ([-1, 0, 1, 2, 3, 4], [-1, 0, 0, 1, 2, 3], [-1, 0, 0, 0, 2, 2])


def test_recurrent_modules_allow_several_tokens_from_a_state(target: Target) -> None:
    """Loading detects that several tokens after a state equal the same tokens one after another."""
    assert (
        isinstance(target.architecture, Recurrent)
        and target.architecture.path_policy == "where cheaper"
    )


@pytest.mark.parametrize("parents", PARENTS)
@pytest.mark.parametrize("lengths", [[9], [4, 9]])
def test_running_along_paths_equals_level_by_level(
    target: Target, lengths: list[int], parents: list[int]
) -> None:
    """In each of two rounds every row accepts another number of nodes, one of them all where the
    tree is a chain.
    """
    batch = len(lengths)
    prompts = random_tokens(len(lengths), 9)
    trees = [
        TokenTree.from_parents(random_tokens(batch, 6), torch.tensor(parents).expand(batch, -1))
        for _ in range(2)
    ]
    trees.append(TokenTree.from_chain(random_tokens(batch, 1)))
    results = []
    for policy in POLICIES:
        with run_along(target, policy):
            cache = target.new_cache(batch, 40)
            target.prefill(prompts, torch.tensor(lengths), cache, ())
            logits = []
            for tree in trees:
                logits.append(target.verify(tree, cache).logits)
                accepted = tree.ancestors[:, -1]  # down to the last node, which is a deepest one
                counts = (accepted.sum(1) - torch.arange(batch)).clamp(min=1)
                cache.commit(accepted.long().argsort(dim=1, descending=True, stable=True), counts)
            results.append(torch.cat([part for part in logits if part is not None], dim=1))
    torch.testing.assert_close(*results, atol=1e-3, rtol=1e-3)


def test_staged_paths_survive_reordering(target: Target) -> None:
    """Nodes that were run along paths go on along paths, and by level where a stage asks for it."""
    prompts = random_tokens(1, 8)
    nodes = random_tokens(1, 6)
    full_tree = TokenTree.from_parents(nodes, torch.tensor([[-1, 0, 0, 1, 2, 3]]))
    results = []
    never, always = POLICIES
    for stages in ((never, never), (always, always), (always, never)):
        cache = target.new_cache(1, 32)
        target.prefill(prompts, torch.tensor([8]), cache, ())
        positions = cache.lengths[:, None] + full_tree.depths
        for policy, new in zip(stages, (slice(0, 4), slice(4, 6))):
            for recurrence in cache.recurrences.values():
                recurrence.path_policy = policy
            mask = full_tree.ancestors[:, new, : new.stop]
            plan = ForwardPlan(logits=True, positions=positions[:, new], mask=mask, cache=cache)
            staged = target.run(full_tree.tokens[:, new], plan).logits
        cache.reorder_nodes(torch.tensor([[0, 2, 4, 1, 3, 5]]))
        cache.commit(None, torch.tensor([3]))
        after = target.verify(TokenTree.from_chain(nodes), cache).logits
        assert staged is not None and after is not None
        results.append(torch.cat([staged, after], dim=1))
    torch.testing.assert_close(results[1], results[0], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(results[2], results[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("policy", "between"), [("never", 6), ("always", 1)])
def test_linears_run_once_per_chain(target: Target, policy: PathPolicy, between: int) -> None:
    """The linears at both ends run once a round, however deep the tree; what lies between once a
    level, or once. The commit of a part runs nothing but what lies between, and a commit of the
    whole nothing at all."""
    with run_along(target, policy), record_runs(target) as ran:
        cache = target.new_cache(1, 32)
        target.prefill(random_tokens(1, 5), torch.tensor([5]), cache, ())
        for count, again in ((4, 1), (6, 0)):
            ran.clear()
            target.verify(TokenTree.from_chain(random_tokens(1, 6)), cache)
            assert ran.count("in") == ran.count("out") == 1 and ran.count("between") == between
            cache.commit(None, torch.tensor([count]))
            assert ran.count("in") == ran.count("out") == 1
            assert ran.count("between") == between + (again if policy == "always" else 0)


def test_only_recurrent_targets_pay_per_tree_level(target: Target) -> None:
    """The measured time of a level, which shapes trees, is 0 for other targets."""
    with run_along(target, "never"):
        assert time_levels(target, random_tokens(6).tolist(), 6, 3) > 0
    assert time_levels(load_tiny(), [3, 4], 6) == 0


def test_recurrent_targets_refuse_partial_forwards_and_rollback(target: Target) -> None:
    """Trees without a cache, some of the layers only, and committed tokens that are taken back."""
    cache = target.new_cache(1, 16)
    target.prefill(random_tokens(1, 4), torch.tensor([4]), cache, ())
    mask = torch.ones(1, 2, 2, dtype=torch.bool).tril()
    with pytest.raises(UserError, match="keep a state"):
        target.run(random_tokens(1, 2), ForwardPlan(mask=mask))
    with pytest.raises(UserError, match="keep a state"):
        target.run(random_tokens(1, 2), ForwardPlan(cache=cache, span=LayerSpan(last=2)))
    with pytest.raises(UserError, match="keep a state"):
        cache.roll_back(committed=1)
