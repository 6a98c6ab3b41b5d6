"""Gated LoRA: it changes no ordinary token, masks learn their labels, and decoding equals
training.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_module
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from packages.research.tests.decoding.test_guard import Switch
from spectrain.config.spec import RunSpec
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match
from spectrain.decoding.acceptance.rejection import RecursiveRejection, SpeculativeSampling
from spectrain.decoding.calibration import calibrate_builders
from spectrain.decoding.latency import LatencyProbe
from spectrain.decoding.loop import decode
from spectrain.decoding.session import Session
from spectrain.decoding.teacher_forcing import run_teacher_forced
from spectrain.drafters.base import TrainingState, drafting_cost
from spectrain.drafters.context import Context
from spectrain.drafters.layers.mask_blocks import add_blocks, replace_embeddings
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.features import Features
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.loading import load_hf, load_tiny
from spectrain.models.reference_model import reference_model
from spectrain.models.target import Target
from spectrain.runs.drafters import load_weights, save_drafter
from spectrain.trees import Auto, Chain, Eagle2, Rollout, Static, TreeBuilder
from spectrain.trees.base import Prefix
from spectrain.trees.measurements import Calibration, Latency
from spectrain.trees.rollout import Draft
from spectrain.trees.token_tree import AcceptedPath, TokenTree
from spectrain_research.cast.builder import Cast
from spectrain_research.gated_lora.drafter import GatedLora, GatedLoraConfig
from spectrain_research.sequoia.builder import Sequoia
from spectrain_research.shared import learned_masks
from spectrain_research.shared.draft_replay import DraftRecorder
from tests.decoding.rounds import Keeping
from tests.factories import add_noise
from tests.models.architectures import save_small
from tests.targets import cut_tiny

MASKS = 3
LIMIT = 16
STRATEGIES = ("quadratic", "linear")
STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES)
EVERY: tuple[Any, ...] = (*range(4), "final")
FittedCase = tuple[GatedLora, list[list[int]], list[list[int]]]


def make_drafter(target: Target, **options: Any) -> GatedLora:
    """Make a drafter whose every LoRA factor, mask and sampler weight is random and not zero."""
    torch.manual_seed(3)
    drafter = GatedLora(
        target, GatedLoraConfig(**{"num_masks": MASKS, "rank": 4, "alpha": 6.0, **options})
    )
    drafter.prepare(target, torch.zeros(target.head.vocab_size))
    add_noise(drafter.parameters(), 0.7)
    assert all(parameter.count_nonzero() == parameter.numel() for parameter in drafter.parameters())
    return drafter.eval()


def make_ragged_batch(count: int) -> Batch:
    """Make sequences of unequal length, padded on the right, with assistant tokens in two spans."""
    rows = [24 - 2 * (n % 5) for n in range(count)]
    tokens = torch.zeros(count, 24, dtype=torch.int64)
    mask = torch.zeros(count, 24, dtype=torch.bool)
    for row, length in enumerate(rows):
        tokens[row, :length] = torch.randint(3, 2000, (length,))
        mask[row, 3:6] = mask[row, 9:length] = True
    return Batch(tokens, mask)


@contextmanager
def disable_adapter(drafter: GatedLora) -> Iterator[None]:
    """Set every product B A to zero; masks are embedded as before."""
    weights = [factors.lora_B.weight.detach().clone() for factors in drafter.factors]  # type: ignore[union-attr]
    with torch.no_grad():
        for factors in drafter.factors:
            factors.lora_B.weight.zero_()  # type: ignore[union-attr]
        yield
        for factors, weight in zip(drafter.factors, weights):
            factors.lora_B.weight.copy_(weight)  # type: ignore[union-attr]


def open_gate(drafter: GatedLora, patch: pytest.MonkeyPatch) -> None:
    """Let LoRA act at every token, and mask vectors at masks only, as before."""
    gated = drafter.insert_masks

    @contextmanager
    def insert_everywhere(
        target: Target, numbers: Tensor, *positions: Tensor | None, **hosts: Tensor
    ) -> Iterator[None]:
        with patch.context() as inner:
            inner.setattr(
                learned_masks,
                "replace_embeddings",
                lambda e, vectors, _: replace_embeddings(e, vectors, numbers),
            )
            stack = gated(target, torch.zeros_like(numbers))
            stack.__enter__()
        try:
            yield
        finally:
            stack.__exit__(None, None, None)

    patch.setattr(drafter, "insert_masks", insert_everywhere)


# The gate


@torch.no_grad()
def check_packed(shallow: Target, drafter: GatedLora, batch: Batch) -> None:
    """Compare features of all layers, and logits, of ordinary tokens with and without the
    adapter in training's forward.
    """
    blocks = add_blocks(batch, drafter.prefixes(batch, 0))
    width = batch.tokens.shape[1]

    def run() -> Features:
        with drafter.insert_masks(shallow, blocks.mask_index):
            return shallow.run(
                blocks.tokens,
                ForwardPlan(
                    layers=EVERY, logits=True, positions=blocks.positions, mask=blocks.visible
                ),
            )

    on = run()
    with disable_adapter(drafter):
        off = run()
    plain = shallow.run(batch.tokens, ForwardPlan(layers=EVERY, logits=True))
    assert on.logits is not None and off.logits is not None and plain.logits is not None
    masks = blocks.mask_index >= 0
    assert masks.sum() >= len(batch.tokens) * MASKS
    assert (on.hidden[masks][:, -1] - off.hidden[masks][:, -1]).abs().amax(-1).min() > 1e-2, (
        "the adapter must act at masks"
    )
    assert torch.equal(on.hidden[~masks], off.hidden[~masks]) and torch.equal(
        on.logits[~masks], off.logits[~masks]
    )
    for actual, expected in ((on.hidden, plain.hidden), (on.logits, plain.logits)):
        real = batch.tokens > 0
        torch.testing.assert_close(actual[:, :width][real], expected[real], rtol=1e-4, atol=1e-4)


def check_rounds(shallow: Target, drafter: GatedLora, builder: TreeBuilder, batch: int) -> None:
    """Compare features, logits, keys and values of a tree's own nodes in every round, with and
    without adapter and masks.
    """
    verify = drafter.verify
    rounds = []

    def check_and_verify(context: Context, tree: TokenTree) -> Features:
        cache = context.cache
        count = int(tree.can_emit[0].sum())
        assert (
            torch.equal(tree.can_emit.sum(1), torch.full((batch,), count))
            and tree.can_emit[:, :count].all()
        )
        slots = (cache.lengths[:, None] + torch.arange(count)).tolist()

        def run() -> tuple[Tensor, Tensor, Tensor]:
            features = verify(context, tree)
            assert features.logits is not None and cache.storage is not None
            stored = torch.stack([cache.storage[:, :, b, row] for b, row in enumerate(slots)])
            cache.roll_back()
            return features.hidden[:, :count], features.logits[:, :count], stored

        with disable_adapter(drafter):
            off = run()
            off_states = cast(Tensor, drafter.states)
        on = run()
        on_states = cast(Tensor, drafter.states)
        own_tree = TokenTree.from_parents(
            tree.tokens[:, :count], tree.parents[:, :count], tree.valid[:, :count]
        )
        plain = shallow.verify(own_tree, cache, ("final",))
        assert plain.logits is not None
        cache.roll_back()
        real = own_tree.valid
        rounds.append(count)
        assert (on_states - off_states).abs().amax(-1).min() > 1e-2, "the adapter must act at masks"
        assert all(torch.equal(actual, expected) for actual, expected in zip(on, off))
        torch.testing.assert_close(on[0][real], plain.hidden[real], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(on[1][real], plain.logits[real], rtol=1e-4, atol=1e-4)
        return verify(context, tree)

    drafter.verify = check_and_verify  # type: ignore[method-assign]
    prompts = [torch.randint(3, 2000, (4 + 3 * n % 7,)).tolist() for n in range(batch)]
    decode(shallow, prompts, Greedy(), 5, drafter, builder, ignore_eos=True)
    assert len(rounds) >= 2 and max(rounds) > 2


@pytest.mark.parametrize("count", [1, 8])
def test_ordinary_tokens_are_untouched_in_training(shallow: Target, count: int) -> None:
    """At ordinary tokens results are equal bit by bit with and without adapter, and within 1e-4
    of the plain target.
    """
    check_packed(shallow, make_drafter(shallow), make_ragged_batch(count))


@pytest.mark.sweep(4)
@STRATEGY
@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("builder", [Chain(3), Eagle2(3, 6, 2)], ids=["chain", "eagle2"])
def test_ordinary_nodes_are_untouched_in_decoding(
    shallow: Target, builder: TreeBuilder, count: int, strategy: str
) -> None:
    """The same holds for the nodes of every round's tree, and for the keys and values that they
    leave in the cache.
    """
    drafter = make_drafter(shallow, strategy=strategy)
    if strategy == "linear":
        drafter.commit = make_commit_everywhere(drafter)  # type: ignore[method-assign]
    check_rounds(shallow, drafter, builder, count)


def make_commit_everywhere(drafter: GatedLora) -> Callable[[Context, AcceptedPath], None]:
    """Make a commit after which drafts are ready although the node with masks was rejected: any
    states do for this test.
    """

    def commit(context: Context, accepted: AcceptedPath) -> None:
        assert drafter.states is not None
        drafter.states = drafter.states[:, 0]
        drafter.ready_at = context.cache.lengths

    return commit


def test_an_open_gate_is_noticed(shallow: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """With LoRA acting at every token, both checks above fail, although the adapter acts at
    masks.
    """
    drafter = make_drafter(shallow)
    open_gate(drafter, monkeypatch)
    with pytest.raises(AssertionError, match="torch.equal"):
        check_packed(shallow, drafter, make_ragged_batch(2))
    with pytest.raises(AssertionError, match="all"):
        check_rounds(shallow, drafter, Chain(3), 2)


def test_the_gate_leaves_the_target_as_it_was(shallow: Target) -> None:
    """After a forward, and after one that fails, the target's own forward is what it was, bit by
    bit.
    """
    drafter = make_drafter(shallow)
    tokens = torch.randint(3, 2000, (2, 7))
    before = shallow.run(tokens, ForwardPlan(logits=True)).logits
    with drafter.insert_masks(shallow, torch.zeros_like(tokens)):
        assert not torch.equal(before, shallow.run(tokens, ForwardPlan(logits=True)).logits)
    assert torch.equal(before, shallow.run(tokens, ForwardPlan(logits=True)).logits)
    with pytest.raises(ZeroDivisionError), drafter.insert_masks(shallow, torch.zeros_like(tokens)):
        raise ZeroDivisionError
    assert torch.equal(before, shallow.run(tokens, ForwardPlan(logits=True)).logits)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A small random GPT-2, whose linears are of another class and whose positions are learned."""
    folder = tmp_path_factory.mktemp("gpt2")
    save_small("gpt2", folder)
    load_tiny().tokenizer.save_pretrained(folder)
    return load_hf(str(folder), "gpt2", device="cpu")


def test_linears_of_another_class_are_adapted(gpt2: Target) -> None:
    """GPT-2's weights are transposed: all four linears of a layer get LoRA, which changes masks
    and nothing else.
    """
    drafter = make_drafter(gpt2)
    tokens = torch.randint(3, 90, (1, 8))
    assert len(drafter.names) == 4 * gpt2.num_layers
    numbers = torch.tensor([[-1] * 5 + [0, 1, 2]])

    def compute_states() -> Tensor:
        with torch.no_grad(), drafter.insert_masks(gpt2, numbers):
            return gpt2.run(tokens, ForwardPlan(layers=("final",))).at_layer("final")[0]

    on = compute_states()
    with disable_adapter(drafter):
        off = compute_states()
    assert torch.equal(on[:5], off[:5]) and (on[5:] - off[5:]).abs().amax(-1).min() > 1e-2


def test_a_target_without_linears_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target without linears is refused rather than trained without LoRA; rank 0 needs none."""
    target = cut_tiny(2)
    target.decoder.layers = nn.ModuleList(nn.Identity() for _ in range(2))
    with pytest.raises(
        UserError, match=r"drafter\.rank: the layers of tiny have no linear .* use drafter\.rank=0"
    ):
        GatedLora(target, GatedLoraConfig())
    assert not GatedLora(target, GatedLoraConfig(rank=0)).names


@pytest.mark.parametrize("strategy", [*STRATEGIES, "apart"])
def test_a_text_may_end_where_learned_positions_do(gpt2: Target, strategy: str) -> None:
    """Masks and nodes past the last position are never accepted, so they may stand on it: the
    answer is greedy to its end.
    """
    drafter = make_drafter(gpt2, strategy=strategy)
    prompt = [torch.randint(3, 90, (gpt2.max_length - 6,)).tolist()]
    (plain,) = decode(gpt2, prompt, Greedy(), 6, ignore_eos=True)
    (generation,) = decode(gpt2, prompt, Greedy(), 6, drafter, Chain(MASKS), ignore_eos=True)
    assert generation.output == plain.output and len(generation.output) == 6


# An independent forward, on transformers' own model


class GatedLinear(nn.Module):
    """A linear W x that adds (alpha / rank) B A x at the positions that `gate` marks."""

    def __init__(
        self, linear: nn.Linear, a: Tensor, b: Tensor, scale: float, gate: list[int]
    ) -> None:
        super().__init__()
        self.linear = linear
        self.a = a
        self.b = b
        self.scale = scale
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        product = x @ self.linear.weight.T
        added = self.scale * ((x @ self.a.T) @ self.b.T)
        return product + added * (torch.arange(x.shape[1]) >= self.gate[0])[:, None]


def make_reference(shallow: Target, drafter: GatedLora) -> Callable[[list[int], int], Tensor]:
    """Return a function that computes the final states [T + M, D] of a prefix and the first M
    masks after it.
    """
    with reference_model(shallow) as model:
        plain: Any = copy.deepcopy(model)
    gate = [0]
    for number, name in enumerate(drafter.names):
        a, b = (
            drafter.get_parameter(f"factors.{number}.{factor}.weight")
            for factor in ("lora_A", "lora_B")
        )
        linear = plain.get_submodule(name)
        plain.set_submodule(name, GatedLinear(linear, a, b, drafter.alpha / drafter.rank, gate))
    linears = [
        name for name, child in plain.get_decoder().named_modules() if isinstance(child, nn.Linear)
    ]
    assert linears and all(name.endswith(".linear") for name in linears), (
        "LoRA acts on every linear of the decoder"
    )

    def compute_states(prefix: list[int], count: int) -> Tensor:
        gate[0] = len(prefix)
        embedded = torch.cat(
            [plain.get_input_embeddings()(torch.tensor(prefix)), drafter.masks[:count]]
        )
        final: Tensor = plain.get_decoder()(
            inputs_embeds=embedded[None], use_cache=False
        ).last_hidden_state[0]
        return final

    return compute_states


def compute_sampled_state(drafter: GatedLora, state: Tensor, previous: Tensor) -> Tensor:
    """Compute the sampler head by its equation: state + W2 norm(SiLU(W1 [state; token before at
    unit scale])).
    """
    sampler = drafter.sampler
    assert sampler is not None
    previous = previous / previous.pow(2).mean(-1, keepdim=True).sqrt()
    x = F.silu(torch.cat([state, previous], dim=-1) @ sampler.first.weight.T + sampler.first.bias)
    x = (x - x.mean(-1, keepdim=True)) / (
        x.var(-1, keepdim=True, correction=0) + sampler.first_norm.eps
    ).sqrt()
    x = x * sampler.first_norm.weight + sampler.first_norm.bias
    return state + x @ sampler.second.weight.T + sampler.second.bias


def compute_log_p(shallow: Target, states: Tensor) -> Tensor:
    """Compute log p of the target's head."""
    return (states @ shallow.head.output.weight.T).log_softmax(-1)


# Training


def compute_independent_loss(
    shallow: Target, drafter: GatedLora, batch: Batch, detach: bool = True
) -> tuple[dict[str, Tensor], Any, Any]:
    """Compute terms, hits and counts, prefix by prefix and mask by mask."""
    run = make_reference(shallow, drafter)
    terms: dict[str, Any] = {}
    hits = [0.0] * drafter.num_masks
    counts = [0.0] * drafter.num_masks
    embedding = shallow.head.embedding.weight
    for tokens, mask, prefixes in zip(
        batch.tokens.tolist(), batch.loss_mask.tolist(), drafter.prefixes(batch, 0)
    ):
        ordinary = run(tokens, 0)
        num_supervised = 0
        # of this sequence, which counts as many terms as it has supervised tokens
        sequence_terms: dict[str, Any] = {}
        for end, size in prefixes:
            states = run(tokens[: end + 1], size)[end + 1 :]
            for j in range(size):
                answer = end + 2 + j
                if answer >= len(tokens) or not mask[answer]:
                    continue
                anchor = ordinary[answer - 1].detach() if detach else ordinary[answer - 1]
                log_p = compute_log_p(shallow, anchor)
                num_supervised = num_supervised + 1
                heads = {"masks": states[j]}
                if drafter.sampler is not None:
                    heads["sampler"] = compute_sampled_state(
                        drafter, states[j], embedding[tokens[answer - 1]]
                    )
                for name, read in heads.items():
                    log_q = compute_log_p(shallow, read)
                    if drafter.divergence == "cross_entropy":
                        term = -log_q[tokens[answer]]
                    else:
                        term = (log_p.exp() * (log_p - log_q)).sum()
                    sequence_terms[name] = sequence_terms.get(name, 0) + term
                distance = ((states[j] - anchor) ** 2).mean()
                sequence_terms["consistency"] = (
                    sequence_terms.get("consistency", 0) + drafter.consistency * distance
                )
                hits[j] += float(log_q.argmax() == log_p.argmax())
                counts[j] += 1
        for name, term in sequence_terms.items():
            terms[name] = terms.get(name, 0) + sum(mask) / num_supervised * term
    return terms, hits, counts


@pytest.mark.sweep(2, free=("options",))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss": "forward_kl"},
        {"sampler": False, "consistency": 0.3},
        {"num_masks": 5, "mask_ratio": 2.5, "alpha": 2.0},
        {"num_masks": 1, "loss": "forward_kl", "consistency": 2.0},
    ],
    ids=["default", "kl", "no sampler", "five masks", "one mask"],
)
def test_loss_is_that_of_every_prefix_alone(shallow: Target, options: dict[str, Any]) -> None:
    """Each term, its hits and counts equal a sum over prefixes and masks; so does the gradient
    of every parameter.
    """
    drafter = make_drafter(shallow, **options)
    batch = make_ragged_batch(3)
    losses = drafter.loss(batch, shallow, TrainingState())
    terms, hits, counts = compute_independent_loss(shallow, drafter, batch)
    assert (
        losses.terms.keys()
        == terms.keys()
        == {"masks", "consistency"} | ({"sampler"} if drafter.sampler else set())
    )
    for name, term in terms.items():
        torch.testing.assert_close(losses.terms[name].detach(), term.detach(), rtol=1e-4, atol=1e-3)
    assert losses.hits.tolist() == hits and losses.counts.tolist() == counts and sum(counts) > 10
    gradients, expected_gradients = (
        torch.autograd.grad(total, list(drafter.parameters()))  # type: ignore[arg-type]
        for total in (losses.total, sum(terms.values()))
    )
    for gradient, expected in zip(gradients, expected_gradients):
        torch.testing.assert_close(
            gradient, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())
        )


def test_no_consistency_no_term(shallow: Target) -> None:
    """With consistency=0 the other terms do not change."""
    batch = make_ragged_batch(2)
    with_term, without = (
        make_drafter(shallow, consistency=value).loss(batch, shallow, TrainingState()).terms
        for value in (1.0, 0.0)
    )
    assert with_term.pop("consistency") > 0
    assert {name: term.item() for name, term in with_term.items()} == {
        name: term.item() for name, term in without.items()
    }


def test_hits_count_the_targets_own_choices(shallow: Target) -> None:
    """A sampler head that returns the target's own states is correct everywhere, with the
    divergence of p from itself.
    """
    drafter = make_drafter(shallow, loss="forward_kl")
    batch = make_ragged_batch(2)
    blocks = add_blocks(batch, drafter.prefixes(batch, 0))
    final = shallow.features(batch.tokens, ("final",)).at_layer("final")
    target_states = final.gather(1, blocks.positions[..., None].expand(-1, -1, shallow.width))[
        blocks.supervised
    ]
    drafter.sampler.forward = lambda state, previous: target_states  # type: ignore[union-attr, method-assign]
    losses = drafter.loss(batch, shallow, TrainingState())
    assert torch.equal(losses.hits, losses.counts) and losses.counts.sum() == len(target_states)
    assert losses.terms["sampler"].abs() < 1e-3 * len(target_states) < losses.terms["masks"]


def test_an_untrained_sampler_adds_nothing(shallow: Target) -> None:
    """A new sampler head returns the mask's own state, bit by bit, whatever token is before;
    after one step it does not.
    """
    drafter = GatedLora(shallow, GatedLoraConfig(num_masks=MASKS, consistency=0.0))
    batch = make_ragged_batch(2)
    drafter.prepare(shallow, torch.zeros(shallow.head.vocab_size))
    assert drafter.sampler is not None
    state = torch.randn(2, 5, shallow.width)
    previous = shallow.head.embed(torch.randint(3, 2000, (2, 5)))
    assert torch.equal(drafter.sampler(state, previous), state)
    losses = drafter.loss(batch, shallow, TrainingState())
    assert torch.equal(losses.terms["sampler"], losses.terms["masks"])
    losses.total.backward()
    torch.optim.SGD(drafter.parameters(), lr=0.1).step()
    assert not torch.allclose(drafter.sampler(state, previous), state)


@pytest.mark.parametrize("loss", ["cross_entropy", "forward_kl"])
def test_gradients_reach_the_drafter_only(loss: str) -> None:
    """Factors, masks and sampler have non-zero gradients, the target has none, and its weights
    do not change.
    """
    target = cut_tiny(3)
    drafter = make_drafter(target, loss=loss)
    batch = make_ragged_batch(3)
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    drafter.loss(batch, target, TrainingState()).total.backward()
    named = dict(drafter.named_parameters())
    assert {name.split(".")[0] for name in named} == {"factors", "masks", "sampler"}
    assert all(
        parameter.grad is not None and parameter.grad.abs().sum() > 0
        for parameter in named.values()
    )
    assert drafter.masks.grad is not None and (drafter.masks.grad.abs().sum(-1) > 0).all()
    assert all(parameter.grad is None for parameter in target.parameters())
    assert {id(p) for group in drafter.stages[0].groups for p in group["params"]} == {
        id(p) for p in named.values()
    }
    torch.optim.SGD(
        [p for group in drafter.stages[0].groups for p in group["params"]], lr=0.1
    ).step()
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in target.model.state_dict().items()
    )


@pytest.mark.parametrize("loss", ["cross_entropy", "forward_kl"])
def test_nothing_flows_into_the_anchors(
    shallow: Target, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """The loss has no gradient for any state but those of masks that carry loss."""
    drafter = make_drafter(shallow, loss=loss)
    batch = make_ragged_batch(3)
    run = shallow.run
    leaves: list[Tensor] = []

    def run_detached(*args: Any, **options: Any) -> Features:
        features = run(*args, **options)
        leaves.append(features.hidden.detach().requires_grad_())
        return Features(features.tokens, features.layers, leaves[-1])

    monkeypatch.setattr(shallow, "run", run_detached)
    losses = drafter.loss(batch, shallow, TrainingState())
    mask = add_blocks(batch, drafter.prefixes(batch, 0)).supervised
    assert len(leaves) == 1 and leaves[0].shape[:2] == mask.shape
    for term in losses.terms.values():
        (gradient,) = torch.autograd.grad(term, leaves, retain_graph=True)
        assert torch.equal(gradient[:, :, 0].abs().sum(-1) > 0, mask)


# Prefixes


def select_rows(batch: Batch, rows: list[int], padding: int = 0) -> Batch:
    """Select rows in another order, with more padding."""
    return Batch(
        F.pad(batch.tokens[rows], (0, padding)), F.pad(batch.loss_mask[rows], (0, padding))
    )


@pytest.mark.parametrize(
    "num_masks, mask_ratio", [(3, 1.0), (4, 0.5), (8, 0.1), (2, 3.0), (1, 100.0)]
)
def test_prefixes_are_bounded_and_supervised(
    shallow: Target, num_masks: int, mask_ratio: float
) -> None:
    """Prefixes are distinct, with a supervised mask; at most mask_ratio masks per token, or one
    block; as many as fit.
    """
    drafter = make_drafter(shallow, num_masks=num_masks, mask_ratio=mask_ratio)
    batch = make_ragged_batch(5)
    for step in range(4):
        for tokens, mask, row in zip(batch.tokens, batch.loss_mask, drafter.prefixes(batch, step)):
            length = int((tokens > 0).sum())
            ends = [end for end, _ in row]
            possible = [
                end for end in range(len(tokens) - 2) if mask[end + 2 : end + 2 + num_masks].any()
            ]
            assert (
                ends == sorted(set(ends))
                and set(ends) <= set(possible)
                and {size for _, size in row} == {num_masks}
            )
            total = num_masks * len(row)
            assert total <= max(num_masks, mask_ratio * length)
            assert len(ends) == len(possible) or total + num_masks > mask_ratio * length


def test_prefixes_are_drawn_for_a_sequence_and_a_step(shallow: Target) -> None:
    """Prefixes do not depend on batch, order or padding; another step or seed draws others, and
    all occur.
    """
    drafter = make_drafter(shallow, mask_ratio=0.5)
    batch = make_ragged_batch(5)
    drawn = []
    for step in range(40):
        together = drafter.prefixes(batch, step)
        drawn.append(together)
        assert drafter.prefixes(select_rows(batch, [3, 0, 4], padding=9), step) == [
            together[row] for row in (3, 0, 4)
        ]
        assert [
            drafter.prefixes(select_rows(batch, [row]), step)[0] for row in range(5)
        ] == together
    for row in range(5):
        assert len({tuple(rows[row]) for rows in drawn}) > 20
        possible = {
            end for end in range(22) if batch.loss_mask[row, end + 2 : end + 2 + MASKS].any()
        }
        assert {end for rows in drawn for end, _ in rows[row]} == possible
    other = make_drafter(shallow, mask_ratio=0.5, seed=1)
    assert other.prefixes(batch, 39) != drawn[-1]


def test_corrections_teach_every_mask(shallow: Target) -> None:
    """Where single tokens carry loss, each is an answer at every depth, from a prefix of its
    own.
    """
    mask = torch.zeros(1, 24, dtype=torch.bool)
    mask[0, [8, 14, 23]] = True
    batch = Batch(torch.randint(3, 2000, (1, 24)), mask)
    assert (
        make_drafter(shallow, mask_ratio=9.0).loss(batch, shallow, TrainingState()).counts.tolist()
        == [3] * MASKS
    )


def test_rows_without_an_answer_have_no_prefix(shallow: Target) -> None:
    """An empty row, and one whose assistant tokens are the first two, are given no masks; the
    loss is still finite.
    """
    batch = make_ragged_batch(3)
    batch.tokens[0], batch.loss_mask[0], batch.loss_mask[1] = 0, False, False
    batch.loss_mask[1, :2] = True
    drafter = make_drafter(shallow)
    first, second, third = drafter.prefixes(batch, 0)
    assert (first, second) == ([], []) and third
    assert torch.isfinite(drafter.loss(batch, shallow, TrainingState()).total)
    assert drafter.loss(select_rows(batch, [0, 1]), shallow, TrainingState()).total == 0


# Decoding


@pytest.fixture(scope="module")
def fitted_case(shallow: Target) -> FittedCase:
    """A drafter fitted to the target's greedy answers, the prompts, and the answers."""
    torch.manual_seed(1)
    prompts = [torch.randint(3, 2000, (length,)).tolist() for length in (9, 4, 6)]
    answers = [
        decode(shallow, [prompt], Greedy(), LIMIT, ignore_eos=True)[0].output for prompt in prompts
    ]
    rows = [Example(p + a, [False] * len(p) + [True] * len(a)) for p, a in zip(prompts, answers)]
    drafter = GatedLora(shallow, GatedLoraConfig(num_masks=MASKS, rank=8, mask_ratio=3.0))
    drafter.prepare(shallow, torch.zeros(shallow.head.vocab_size))
    batch = LiveSource().make_batch(BatchRequest(Dataset(rows, 3, 0, 0)[[0, 1, 2]], shallow, ()))
    optimizer = torch.optim.Adam(drafter.parameters(), lr=5e-3)
    for step in range(6):  # so that some drafts are right
        optimizer.zero_grad()
        drafter.loss(batch, shallow, TrainingState(step)).total.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
    return drafter.eval(), prompts, answers


def copy_with_strategy(fitted_case: FittedCase, strategy: str) -> GatedLora:
    """Copy the fitted drafter with another strategy."""
    drafter = copy.copy(fitted_case[0])
    drafter.__dict__ = {
        **fitted_case[0].__dict__,
        "strategy": strategy,
        "states": None,
        "ready_at": None,
    }
    return drafter


BUILDERS: dict[str, TreeBuilder] = {
    "chain": Chain(3),
    "deep": Chain(7),
    "short": Chain(2),
    "eagle2": Eagle2(3, 8, 3),
    "static": Static(paths=[[0], [1], [0, 0], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1]]),
}
BUILDER = pytest.mark.parametrize("builder", list(BUILDERS.values()), ids=list(BUILDERS))


class RecordingRollout(Rollout):
    """A wrapped rollout that records the text, the path from the root, and log q after it, of
    rows that are not done.
    """

    def __init__(
        self,
        inner: Rollout,
        prefix: Prefix,
        alive: list[int],
        records: list[tuple[list[int], list[int], Tensor]],
    ) -> None:
        self.inner = inner
        self.alive = alive
        self.records = records
        self.depth_limit = inner.depth_limit
        self.texts = [prefix.tokens[b, :n].tolist() for b, n in enumerate(prefix.lengths.tolist())]
        self.paths = [[[root]] for root in prefix.root.tolist()]

    def start(self) -> Tensor:
        return self.note(self.inner.start(), 1)

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        for b, paths in enumerate(self.paths):
            paths += [
                [*paths[parent], token]
                for token, parent in zip(tokens[b].tolist(), parents[b].tolist())
            ]
        return self.note(self.inner.extend(tokens, parents), tokens.shape[1])

    def note(self, log_q: Tensor, count: int) -> Tensor:
        for b in self.alive:
            self.records += [
                (self.texts[b], path, log_q[b, n]) for n, path in enumerate(self.paths[b][-count:])
            ]
        return log_q


class DecodingRecorder(Keeping):
    """A builder that records a drafter's decoding: log q of its rollouts where drafts were
    ready, and every round.
    """

    def __init__(self, drafter: GatedLora, builder: TreeBuilder, prompts: list[list[int]]) -> None:
        super().__init__(
            builder,
            lambda rollout, prefix: RecordingRollout(
                rollout, prefix, self.alive, self.round_records
            ),
        )
        self.prompts = prompts
        self.records: list[tuple[list[int], list[int], Tensor]] = []
        self.round_records: list[tuple[list[int], list[int], Tensor]] = []
        # with the rows that are not done
        self.rounds: list[tuple[TokenTree, AcceptedPath, list[int]]] = []
        commit = drafter.commit

        def record_and_commit(context: Context, accepted: AcceptedPath) -> None:
            self.rounds.append((self.trees[-1], accepted, self.alive))
            commit(context, accepted)

        drafter.commit = record_and_commit  # type: ignore[method-assign]

    def grow(self, prefix: Prefix, draft: Draft) -> TokenTree:
        lengths = prefix.lengths.tolist()
        self.alive = [b for b, n in enumerate(lengths) if n + 1 - len(self.prompts[b]) < LIMIT]
        self.round_records = []
        tree = super().grow(prefix, draft)
        drafted = ((tree.depths > 0) & tree.valid & tree.can_emit).any(-1)
        texts = [prefix.tokens[b, : lengths[b]].tolist() for b in self.alive if drafted[b]]
        self.records += [entry for entry in self.round_records if entry[0] in texts]
        return tree


@torch.no_grad()
def check_proposals(shallow: Target, drafter: GatedLora, recorder: DecodingRecorder) -> None:
    """Check that log q after a path is the sampler head's at the mask of its depth, after the
    committed text.
    """
    run = make_reference(shallow, drafter)
    states = {}
    assert recorder.records
    for text, path, log_q in recorder.records:
        key = tuple(text)
        if key not in states:
            states[key] = run(text, drafter.num_masks)[len(text) :]
        state = states[key][min(len(path), drafter.num_masks) - 1]
        if drafter.sampler is not None:
            state = compute_sampled_state(drafter, state, shallow.head.embedding.weight[path[-1]])
        torch.testing.assert_close(log_q, compute_log_p(shallow, state), rtol=1e-3, atol=2e-3)


def list_real_nodes(tree: TokenTree, row: int) -> list[int]:
    """List a row's real nodes that can be emitted."""
    return (tree.valid & tree.can_emit)[row].nonzero()[:, 0].tolist()


def check_masks(drafter: GatedLora, recorder: DecodingRecorder) -> None:
    """Check that every host has its masks as a chain below it, and that none of them is emitted,
    accepted, or counted.
    """
    for tree, accepted, alive in recorder.rounds:
        for row in alive:
            real = list_real_nodes(tree, row)
            depths = tree.depths[row].tolist()
            deepest = next(node for node in real if depths[node] == max(depths[n] for n in real))
            hosts = real if drafter.strategy == "quadratic" else [deepest]
            masks = (tree.valid & ~tree.can_emit)[row].nonzero()[:, 0].tolist()
            chains = [
                masks[n : n + drafter.num_masks] for n in range(0, len(masks), drafter.num_masks)
            ]
            assert len(masks) == len(hosts) * drafter.num_masks
            assert sorted(int(tree.parents[row, chain[0]]) for chain in chains) == sorted(hosts)
            assert all(
                tree.parents[row, after] == before
                for chain in chains
                for before, after in pairwise(chain)
            )
            assert set(accepted.path[row, : int(accepted.counts[row])].tolist()) <= set(real)


def check_ready(drafter: GatedLora, recorder: DecodingRecorder) -> set[tuple[bool, bool]]:
    """Drafts are ready at first and after every round or, linear, exactly after those whose last
    accepted node has the masks.

    Returns the cases that occurred: (drafts were ready, in the round before as well).
    """
    first = recorder.rounds[0]
    assert all(len(list_real_nodes(first[0], row)) > 1 for row in first[2]), (
        "masks ran after the prompts"
    )
    outcomes = set()
    for (tree, accepted, _), (following, _, alive) in pairwise(recorder.rounds):
        for row in alive:
            real = list_real_nodes(tree, row)
            last = int(accepted.path[row, int(accepted.counts[row]) - 1])
            deepest = max(real, key=lambda node: (int(tree.depths[row, node]), -node))
            ready = drafter.strategy == "quadratic" or last == deepest
            drafted = len(list_real_nodes(following, row)) > 1
            assert drafted == ready
            outcomes.add((drafted, len(real) > 1))
    return outcomes


@pytest.mark.sweep(1)
@STRATEGY
@BUILDER
@pytest.mark.parametrize("count", [1, 3])
def test_drafted_equals_greedy(
    shallow: Target, fitted_case: FittedCase, strategy: str, builder: TreeBuilder, count: int
) -> None:
    """Output is greedy, proposals are those of an independent forward, no mask is emitted, and
    drafts are ready in time.
    """
    drafter, prompts, answers = copy_with_strategy(fitted_case, strategy), *fitted_case[1:]
    recorder = DecodingRecorder(drafter, builder, prompts[:count])
    generations = decode(
        shallow, prompts[:count], Greedy(), LIMIT, drafter, recorder, ignore_eos=True
    )
    assert [generation.output for generation in generations] == answers[:count]
    assert max(length for generation in generations for length in generation.round_lengths) > 1
    check_proposals(shallow, drafter, recorder)
    check_masks(drafter, recorder)
    linear = {(True, True), (False, True)} if count == 3 else {(False, True)}
    assert check_ready(drafter, recorder) >= (
        {(True, True)} if strategy == "quadratic" else linear | {(True, False)}
    )
    deepest = {depth for generation in generations for depth in generation.depths if depth}
    assert max(deepest) <= min(builder.depth, MASKS) and (
        not builder.traits.is_chain or deepest == {min(builder.depth, MASKS)}
    )
    assert recorder.rounds[0][0].tokens.shape[1] <= builder.budget + drafting_cost(
        drafter
    ).extra_nodes(builder)


@pytest.mark.parametrize("sampler", [True, False])
def test_a_chain_is_drafted_greedily_mask_by_mask(shallow: Target, sampler: bool) -> None:
    """Each draft is the most likely token after the mask of its depth and, with a sampler, the
    draft before.
    """
    drafter = make_drafter(shallow, sampler=sampler)
    prompt = [[5, 6, 7, 8]]
    recorder = DecodingRecorder(drafter, Chain(MASKS), prompt)
    run = make_reference(shallow, drafter)
    rounds = 0
    (generation,) = decode(shallow, prompt, Greedy(), LIMIT, drafter, recorder, ignore_eos=True)
    text = prompt[0]
    for tree, accepted, _ in recorder.rounds:
        real = list_real_nodes(tree, 0)
        root = int(tree.tokens[0, 0])
        if len(real) > 1:
            rounds += 1
            with torch.no_grad():
                states = run(text, MASKS)[len(text) :]
                drafts = [root]
                for state in states:
                    read = (
                        compute_sampled_state(
                            drafter, state, shallow.head.embedding.weight[drafts[-1]]
                        )
                        if sampler
                        else state
                    )
                    drafts.append(int(compute_log_p(shallow, read).argmax()))
            assert tree.tokens[0, real].tolist() == drafts
        accepted_nodes = accepted.path[0, : int(accepted.counts[0])]
        text = text + tree.tokens[0, accepted_nodes].tolist()
    assert (
        rounds == len(generation.round_lengths) > 5
        and text[: len(prompt[0]) + LIMIT - 1] == prompt[0] + generation.output[:-1]
    )


@pytest.mark.sweep(1)
@STRATEGY
@pytest.mark.parametrize(
    "builder", [BUILDERS["chain"], BUILDERS["eagle2"]], ids=["chain", "eagle2"]
)
@pytest.mark.parametrize("count", [1, 3])
def test_drafted_equals_matched_sampling(
    shallow: Target, fitted_case: FittedCase, strategy: str, builder: TreeBuilder, count: int
) -> None:
    """With the same seed, drafted sampling draws the tokens of autoregressive sampling."""
    drafter, prompts, _ = copy_with_strategy(fitted_case, strategy), *fitted_case[1:]
    rule = Match(temperature=0.3, top_k=50, seed=5)
    plain = decode(shallow, prompts[:count], rule, LIMIT, ignore_eos=True)
    generations = decode(shallow, prompts[:count], rule, LIMIT, drafter, builder, ignore_eos=True)
    assert [generation.output for generation in generations] == [
        generation.output for generation in plain
    ]
    assert any(max(generation.depths) > 0 for generation in generations)


DRAWN: list[tuple[TreeBuilder, Callable[..., AcceptanceRule]]] = [
    (Chain(3, "sampled", 0.7), SpeculativeSampling),
    (Chain(3, "sampled", 0.7), RecursiveRejection),
    (
        Static(paths=[[0], [1], [0, 0], [0, 1], [0, 0, 0]], children="without_replacement"),
        RecursiveRejection,
    ),
    (Static(paths=[[0], [1], [0, 0], [0, 1], [0, 0, 0]], children="sampled"), RecursiveRejection),
]


@pytest.mark.sweep(1)
@STRATEGY
@pytest.mark.parametrize(
    "builder, rule",
    DRAWN,
    ids=["chain", "recursive chain", "without replacement", "with replacement"],
)
def test_drawn_children(
    shallow: Target,
    fitted_case: FittedCase,
    strategy: str,
    builder: TreeBuilder,
    rule: Callable[..., AcceptanceRule],
) -> None:
    """Under rules that weigh p against q, output is greedy where p allows one token only;
    proposals and masks are as above.
    """
    drafter, prompts, answers = copy_with_strategy(fitted_case, strategy), *fitted_case[1:]
    recorder = DecodingRecorder(drafter, builder, prompts)
    generations = decode(shallow, prompts, rule(top_k=1), LIMIT, drafter, recorder, ignore_eos=True)
    assert [generation.output for generation in generations] == answers
    check_proposals(shallow, drafter, recorder)
    check_masks(drafter, recorder)
    check_ready(drafter, recorder)
    assert max(length for generation in generations for length in generation.round_lengths) > 1
    free = decode(shallow, prompts, rule(), 8, drafter, builder, ignore_eos=True)
    assert all(len(generation.output) == 8 for generation in free) and [
        generation.output for generation in free
    ] != [answer[:8] for answer in answers]


class Always(Greedy):
    """A rule by which the target chooses the same token after every node."""

    def __init__(self, token: int) -> None:
        self.token = token

    def choose_tokens(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        return torch.full(logits.shape[:-1], self.token)

    def __call__(
        self, tree: TokenTree, logits: Tensor, rows: Tensor, positions: Tensor
    ) -> AcceptedPath:
        is_token = torch.arange(logits.shape[-1]) == self.token
        return super().__call__(tree, is_token.float().expand_as(logits), rows, positions)


@STRATEGY
def test_masks_are_never_accepted_whatever_the_target_chooses(
    shallow: Target, fitted_case: FittedCase, strategy: str
) -> None:
    """A target that chooses only the token which masks have in the tree accepts drafted nodes
    only.
    """
    drafter = copy_with_strategy(fitted_case, strategy)
    builder = Chain(2)
    prompts = fitted_case[1]
    recorder = DecodingRecorder(drafter, builder, prompts)
    token = 0
    generations = decode(shallow, prompts, Always(token), LIMIT, drafter, recorder, ignore_eos=True)
    for tree, _, _ in recorder.rounds:
        assert set(tree.tokens[tree.valid & ~tree.can_emit].tolist()) == {token}
    check_masks(drafter, recorder)
    for generation in generations:
        assert generation.output[1:] == [token] * (LIMIT - 1)
        assert all(
            length <= depth + 1
            for length, depth in zip(generation.round_lengths, generation.depths)
        )


@pytest.mark.sweep(1)
@STRATEGY
@pytest.mark.parametrize(
    ("pattern", "count"), [(".d", 3), ("dd.", 1), ("dd.", 3), (".d..ddd", 3), ("....", 3)]
)
def test_rounds_without_a_draft(
    shallow: Target, fitted_case: FittedCase, strategy: str, pattern: str, count: int
) -> None:
    """Whichever rounds draft, the output is greedy, and states are used in the next round or not
    at all.
    """
    drafter, prompts, answers, switch = (
        copy_with_strategy(fitted_case, strategy),
        *fitted_case[1:],
        Switch(pattern),
    )
    builder = Chain(3)
    recorder = DecodingRecorder(drafter, builder, prompts[:count])
    session = Session(shallow, Greedy(), drafter, recorder, changes=(switch,))
    generations = session.decode(prompts[:count], LIMIT, ignore_eos=True)
    assert [generation.output for generation in generations] == answers[:count]
    drafted = [recorded for recorded, _ in switch.recorded]
    for generation in generations:
        for turn in range(len(generation.depths)):
            masked = turn == 0 or drafted[turn - 1]  # after the prompt, or in the round before
            reached = (
                turn == 0
                or strategy == "quadratic"
                or generation.round_lengths[turn - 1] == generation.depths[turn - 1] + 1
            )
            assert (generation.depths[turn] > 0) == (drafted[turn] and masked and reached)
    if "dd" in pattern:
        check_proposals(shallow, drafter, recorder)
    check_masks(drafter, recorder)


def test_a_second_decode_starts_afresh(shallow: Target, fitted_case: FittedCase) -> None:
    """States of earlier prompts are never used: the same prompts, alone or in another batch,
    give the same rounds.
    """
    drafter = copy_with_strategy(fitted_case, "quadratic")
    prompts = fitted_case[1]

    def decode_rows(rows: list[int]) -> list[tuple[list[int], list[int], list[int]]]:
        generations = decode(
            shallow,
            [prompts[row] for row in rows],
            Greedy(),
            LIMIT,
            drafter,
            Chain(3),
            ignore_eos=True,
        )
        return [
            (generation.output, generation.round_lengths, generation.depths)
            for generation in generations
        ]

    together = decode_rows([0, 1, 2])
    assert decode_rows([0, 1, 2]) == together
    assert [decode_rows([row])[0] for row in range(3)] == together
    assert decode_rows([2, 0]) == [together[2], together[0]]


@STRATEGY
def test_masks_are_not_recorded_as_drafts(
    shallow: Target, fitted_case: FittedCase, strategy: str
) -> None:
    """A recorder of chains records as many tokens as were drafted, and none in rounds without a
    draft.
    """
    recorder = DraftRecorder(Chain(2))
    generations = decode(
        shallow,
        fitted_case[1],
        Greedy(),
        LIMIT,
        copy_with_strategy(fitted_case, strategy),
        recorder,
        ignore_eos=True,
    )
    assert [[len(drafted) for drafted, _ in rounds] for rounds in recorder.rounds] == [
        generation.depths for generation in generations
    ]


# Builders that measure


@pytest.mark.sweep(1, free=("builder",))
@STRATEGY
@pytest.mark.parametrize(
    "builder",
    [Sequoia(depth=4, budget=6), Static(depth=4, budget=6), Auto(4, 6, 2), Cast(4, 6, 2)],
    ids=lambda builder: builder.name,
)
def test_builders_that_need_calibration(
    shallow: Target, fitted_case: FittedCase, builder: TreeBuilder, strategy: str
) -> None:
    """After calibration on this drafter every builder's output is greedy, from trees no deeper
    than the masks reach.
    """
    drafter, prompts, answers = copy_with_strategy(fitted_case, strategy), *fitted_case[1:]
    builder = copy.deepcopy(builder)
    calibration = calibrate_builders(shallow, drafter, [builder], Greedy(), prompts[:1], 16)
    assert calibration is not None
    if "hits" in builder.requirements:
        assert 1 <= len(calibration.hits) <= MASKS and len(calibration.counts) == len(
            calibration.hits
        )
    generations = decode(shallow, prompts, Greedy(), LIMIT, drafter, builder, ignore_eos=True)
    assert [generation.output for generation in generations] == answers
    assert (
        ("latency" not in builder.requirements)
        <= max(depth for generation in generations for depth in generation.depths)
        <= MASKS
    )


@STRATEGY
def test_teacher_forcing_counts_the_hits_of_the_masks(
    shallow: Target, fitted_case: FittedCase, strategy: str
) -> None:
    """hits[d][k] counts how often the k-th most likely token after mask d and the right tokens
    before is the right token.
    """
    drafter, prompts, _ = copy_with_strategy(fitted_case, strategy), *fitted_case[1:]
    forced = run_teacher_forced(shallow, drafter, Chain(MASKS), Greedy(), prompts, LIMIT)
    run = make_reference(shallow, drafter)
    sums = torch.zeros(MASKS, forced.width)
    counts = [0] * MASKS
    for prompt in prompts:
        text = prompt + decode(shallow, [prompt], Greedy(), LIMIT)[0].output
        length = len(prompt)  # committed tokens
        while length + 1 < len(text):
            next_tokens = text[length + 1 : length + 1 + MASKS]
            with torch.no_grad():
                states = run(text[:length], len(next_tokens))[length:]
                for d, (state, token) in enumerate(zip(states, next_tokens)):
                    read = compute_sampled_state(
                        drafter, state, shallow.head.embedding.weight[text[length + d]]
                    )
                    sums[d] += (
                        compute_log_p(shallow, read).topk(forced.width).indices == token
                    ).float()
                    counts[d] += 1
            length += 1 + len(next_tokens)
    assert forced.counts == counts and sum(counts) > 20
    torch.testing.assert_close(forced.hit_sums.float(), sums)


@STRATEGY
def test_probe_times_trees_of_the_size_that_it_notes(
    shallow: Target, fitted_case: FittedCase, strategy: str
) -> None:
    """Every verification time that is used was measured with a tree of as many verified nodes."""
    drafter = copy_with_strategy(fitted_case, strategy)
    sizes = [1, 2, 4, 8]
    probe = LatencyProbe(sizes, 8, shallow.head.vocab_size)
    node_counts = dict[int, list[int]]()
    observe = probe.observe

    def record_round(round: Any) -> None:
        before = {size: len(times) for size, times in probe.verify_seconds.items()}
        observe(round)
        for size, times in probe.verify_seconds.items():
            if len(times) > before[size]:
                node_counts.setdefault(size, []).append(len(list_real_nodes(round.tree, 0)))

    probe.observe = record_round  # type: ignore[method-assign]
    decode(shallow, fitted_case[1][:1], Greedy(), 20, drafter, probe, ignore_eos=True)
    for size in sizes:  # of several times the first is left out
        assert set(node_counts[size][1:] or node_counts[size]) == {size}


@STRATEGY
def test_auto_learns_from_rounds_that_drafted(
    shallow: Target, fitted_case: FittedCase, strategy: str
) -> None:
    """The rate of its first draft is a running mean over rounds that had a draft; rounds without
    a draft do not count.
    """
    drafter = copy_with_strategy(fitted_case, strategy)
    prompts = fitted_case[1]
    builder = Auto(MASKS, 6, 2, memory=8)
    verify = {1: 1.0, 8: 1.01}
    builder.prepare(Calibration(latency=Latency({0: verify}, {0: {1: 1e-4, 8: 1e-4}}, 1e-4)))
    (generation,) = decode(shallow, prompts[:1], Greedy(), LIMIT, drafter, builder, ignore_eos=True)
    expected_rate = 1.0
    for depth, length in zip(generation.depths, generation.round_lengths):
        if depth:
            expected_rate += ((length > 1) - expected_rate) / 8
    assert builder.round_policy.acceptance.observed[0] == pytest.approx(expected_rate)


# Saved


def save_gated_drafter(drafter: GatedLora, directory: Path) -> None:
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        config = compose("train", overrides=["drafter=gated_lora", "target=tiny"])
    save_drafter(directory, drafter, RunSpec.from_nodes(config))


@pytest.mark.parametrize(
    "options", [{}, {"rank": 7, "alpha": 3.0, "sampler": False}], ids=["sampler", "none"]
)
def test_peft_reads_the_saved_adapter(
    shallow: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """transformers' model with the adapter in peft has the logits that ours has with the gate
    open at every token.
    """
    drafter = make_drafter(shallow, **options)
    tokens = torch.randint(3, 2000, (2, 9))
    save_gated_drafter(drafter, tmp_path / "drafter")
    plain: Any = AutoModelForCausalLM.from_pretrained(shallow.path, dtype=torch.float32).eval()
    with torch.no_grad():
        unadapted = plain(tokens).logits
        adapted: Any = PeftModel.from_pretrained(plain, str(tmp_path / "drafter")).eval()
        logits = adapted(tokens).logits
    assert adapted.peft_config["default"].base_model_name_or_path == shallow.path
    open_gate(drafter, monkeypatch)
    with torch.no_grad(), drafter.insert_masks(shallow, torch.full_like(tokens, -1)):
        ours = shallow.run(tokens, ForwardPlan(logits=True)).logits
    torch.testing.assert_close(logits, ours, rtol=1e-4, atol=1e-3)
    assert (logits - unadapted).abs().mean() > 0.1


def test_reloaded_equals_saved(shallow: Target, tmp_path: Path) -> None:
    """With another copy of the target, every tensor and every draft is as before; each tensor is
    in one file only.
    """
    drafter = make_drafter(shallow)
    prompts = [[5, 6, 7, 8], [40, 41]]
    save_gated_drafter(drafter, tmp_path)
    files = {
        name: set(load_file(tmp_path / name))
        for name in ("model.safetensors", "adapter_model.safetensors")
    }
    assert len(files["adapter_model.safetensors"]) == 2 * 7 * 3
    assert all(
        name.startswith("base_model.model.model.layers.")
        for name in files["adapter_model.safetensors"]
    )
    assert files["model.safetensors"] == {
        name for name in drafter.state_dict() if not name.startswith("factors.")
    }
    target_copy = load_hf(shallow.path)
    target_copy.pack_weights()
    torch.manual_seed(99)
    reloaded = GatedLora(target_copy, GatedLoraConfig(num_masks=MASKS, rank=4, alpha=6.0))
    load_weights(reloaded, tmp_path)
    first = drafter.state_dict()
    second = reloaded.eval().state_dict()
    assert first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )
    trees: list[list[TokenTree]] = []
    for target, loaded in ((shallow, drafter), (target_copy, reloaded)):
        recorder = DecodingRecorder(loaded, Chain(3), prompts)
        decode(target, prompts, Greedy(), 12, loaded, recorder, ignore_eos=True)
        trees.append(recorder.trees)
    assert all(
        torch.equal(tree.tokens, expected.tokens) for tree, expected in zip(*trees, strict=True)
    )


@STRATEGY
def test_rank_0_is_masks_alone(shallow: Target, tmp_path: Path, strategy: str) -> None:
    """Without LoRA the masks and the sampler learn, output is greedy, and one file holds all of
    it.
    """
    drafter = make_drafter(shallow, rank=0, strategy=strategy)
    prompts = [[5, 6, 7, 8], [40, 41]]
    assert not drafter.capabilities.adapts_layers and {
        name.split(".")[0] for name, _ in drafter.named_parameters()
    } == {
        "masks",
        "sampler",
    }
    drafter.loss(make_ragged_batch(2), shallow, TrainingState()).total.backward()
    assert all(
        parameter.grad is not None and parameter.grad.abs().sum() > 0
        for parameter in drafter.parameters()
    )
    generations = decode(shallow, prompts, Greedy(), 8, drafter, Chain(3), ignore_eos=True)
    assert [generation.output for generation in generations] == [
        generation.output for generation in decode(shallow, prompts, Greedy(), 8, ignore_eos=True)
    ]
    save_gated_drafter(drafter, tmp_path / "drafter")
    assert {path.name for path in (tmp_path / "drafter").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    reloaded = GatedLora(shallow, GatedLoraConfig(num_masks=MASKS, rank=0))
    load_weights(reloaded, tmp_path / "drafter")
    assert all(
        torch.equal(value, drafter.state_dict()[name])
        for name, value in reloaded.state_dict().items()
    )


def test_a_missing_file_is_refused(shallow: Target, tmp_path: Path) -> None:
    """Both files are needed, and the one that is missing is named."""
    drafter = make_drafter(shallow)
    for name in ("adapter_model.safetensors", "model.safetensors"):
        save_gated_drafter(drafter, tmp_path / name)
        (tmp_path / name / name).unlink()
        with pytest.raises(UserError, match=rf"{name}/{name}: there is no such file"):
            load_weights(make_drafter(shallow), tmp_path / name)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("file", "tensor_name", "name"),
    [
        (
            "adapter_model.safetensors",
            "base_model.model.model.layers.2.mlp.up_proj.lora_B.weight",
            "lora_B.weight",
        ),
        ("model.safetensors", "masks", "masks"),
        ("model.safetensors", "sampler.first.weight", "sampler.first.weight"),
    ],
)
@pytest.mark.parametrize("change", ["missing", "unknown", "misshapen"])
def test_a_tensor_that_does_not_fit_is_refused(
    shallow: Target, tmp_path: Path, file: str, tensor_name: str, name: str, change: str
) -> None:
    """The message names a missing, unknown or misshapen tensor, and the file that it should be
    in or is in.
    """
    drafter = make_drafter(shallow)
    save_gated_drafter(drafter, tmp_path / "drafter")
    path = tmp_path / "drafter" / file
    tensors = load_file(path)
    tensor = tensors[tensor_name]
    if change == "missing":
        del tensors[tensor_name]
    elif change == "unknown":
        tensors["another"], name = tensor.clone(), "another"
    else:
        tensors[tensor_name] = tensor[:-1].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    if change != "unknown" and name == "lora_B.weight":
        name = next(
            our_name
            for our_name, location in drafter.saved.layout.items()
            if location == (file, tensor_name)
        )
    with pytest.raises(UserError) as caught:
        load_weights(make_drafter(shallow), tmp_path / "drafter")
    assert name in str(caught.value)
    assert f"drafter/{file}: it does not fit" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_masks": 0}, r"drafter\.num_masks=0: use 1 or more"),
        ({"rank": -1}, r"drafter\.rank=-1: use 0 or more"),
        ({"mask_ratio": 0.0}, r"drafter\.mask_ratio=0\.0: use more than 0"),
        ({"mask_ratio": float("nan")}, r"drafter\.mask_ratio=nan"),
        ({"consistency": -1.0}, r"drafter\.consistency=-1\.0: use 0 or more"),
        ({"consistency": float("nan")}, r"drafter\.consistency=nan"),
    ],
)
def test_wrong_settings_are_refused(
    shallow: Target, options: dict[str, Any], sentence: str
) -> None:
    """The message names the key, the value and what to use."""
    with pytest.raises(UserError, match=sentence):
        GatedLora(shallow, GatedLoraConfig(**options))
