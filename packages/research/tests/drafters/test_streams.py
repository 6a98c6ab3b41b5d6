"""Masks with other inputs: states made inside the target (Hidden Transfer, Speculative
Streaming) and ensembles (PPD).
"""

import copy
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from packages.research.tests.drafters.test_uno import PROMPTS, make_conversations
from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.captured import CapturedRunner
from spectrain.decoding.loop import decode
from spectrain.decoding.session import Session
from spectrain.drafters.base import TrainingState
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.models.reference_model import reference_model
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, Static, TreeBuilder
from spectrain.trees.token_tree import TokenTree
from spectrain_research.hidden_transfer.drafter import (
    FineTunedStreaming,
    HiddenTransfer,
    SpeculativeStreaming,
    TransferConfig,
    TransferDrafter,
)
from spectrain_research.ppd.drafter import PromptTokenConfig, PromptTokens, parallel_chains_mask
from spectrain_research.pruning.pruning import Pruning
from spectrain_research.shared.gated_masks import GatedMasks
from spectrain_research.shared.learned_masks import LearnedMasks
from spectrain_research.shared.mask_drafter import MaskDrafter
from spectrain_research.shared.tree_masks import end_probabilities
from tests.decoding.rounds import begun, proposed
from tests.factories import add_noise
from tests.targets import cut_tiny

MASKS = 3
LIMIT = 12
KINDS: dict[str, dict[str, Any]] = {
    "transfer": {"rank": 0, "transfer_layer": 2},
    "streams": {"rank": 4, "transfer_layer": 1},
    "ensembles": {"rank": 0, "ensembles": 2, "step_decay": 0.8},
}
FAMILIES: dict[str, Any] = {
    "transfer": (HiddenTransfer, TransferConfig),
    "streams": (SpeculativeStreaming, TransferConfig, TransferDrafter),
    "ensembles": (PromptTokens, PromptTokenConfig),
}
KIND = pytest.mark.parametrize("kind", KINDS)
BUILDERS: dict[str, TreeBuilder] = {
    "chain": Chain(4),
    "eagle2": Eagle2(4, 10, 3),
    "static": Static(paths=[[0], [1], [0, 0], [0, 1], [0, 0, 0]]),
}


def make_drafter(target: Target, kind: str, **options: Any) -> GatedMasks:
    """Make a drafter whose every weight is random and not zero."""
    torch.manual_seed(3)
    common = {
        "num_masks": MASKS,
        "alpha": 6.0,
        "sampler": False,
        "consistency": 0.0,
        "loss": "forward_kl",
    }
    drafter = FAMILIES[kind][0](target, FAMILIES[kind][1](**{**common, **KINDS[kind], **options}))
    drafter.prepare(target, torch.zeros(target.head.vocab_size))
    add_noise(drafter.parameters(), 0.5)
    return drafter.eval()


class GatedLinear(nn.Module):
    """W x, with scale B A x added at the rows from the gate on."""

    def __init__(
        self, linear: nn.Linear, factors: nn.Module, scale: float, gate: list[int]
    ) -> None:
        super().__init__()
        self.linear = linear
        self.factors = [factors]
        self.scale = scale
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + (torch.arange(x.shape[1]) >= self.gate[0])[
            :, None
        ] * self.scale * self.factors[0](x)


def make_reference(target: Target, drafter: GatedMasks) -> Callable[[list[int], int], Tensor]:
    """Return a function of a prefix and a number of masks to the masks' final states [M, D], by
    transformers' layers. The text runs alone up to the transfer layer, with the masks from there
    on; each chain of an ensemble runs by itself."""
    with reference_model(target) as model:
        plain: Any = copy.deepcopy(model)
    gate = [0]
    decoder = plain.get_decoder()
    for name, factors in zip(drafter.names, drafter.factors):
        scale = drafter.alpha / drafter.rank
        plain.set_submodule(name, GatedLinear(plain.get_submodule(name), factors, scale, gate))

    def run_layers(hidden: Tensor, layers: Any) -> Tensor:
        length = hidden.shape[1]
        bias = torch.full((length, length), float("-inf")).triu(1)[None, None]
        rope = decoder.rotary_emb(hidden, torch.arange(length)[None])
        for layer in layers:
            output = layer(hidden, attention_mask=bias, position_embeddings=rope)
            hidden = output[0] if isinstance(output, tuple) else output
        return hidden

    def compute_states(prefix: list[int], count: int) -> Tensor:
        embedded, gate[0] = plain.get_input_embeddings()(torch.tensor([prefix])), len(prefix)
        if isinstance(drafter, LearnedMasks):
            chains = drafter.masks.view(drafter.ensembles, MASKS, -1)[:, :count]
            chain_states = [
                decoder.norm(run_layers(torch.cat([embedded, chain[None]], 1), decoder.layers))[
                    0, -count:
                ]
                for chain in chains
            ]
            return torch.stack(chain_states).mean(0)
        assert isinstance(drafter, TransferDrafter)
        layer = drafter.transfer_layer
        transfer = drafter.transfer
        hidden = run_layers(embedded, decoder.layers[:layer])
        last = hidden[0, -1]
        if transfer.places is None:
            mask_states = [transfer.maps[j] @ last for j in range(count)]
        else:
            mask_states = [transfer.maps[0] @ last + transfer.places[j] for j in range(count)]
        joined = torch.cat([hidden, torch.stack(mask_states)[None]], dim=1)
        states: Tensor = decoder.norm(run_layers(joined, decoder.layers[layer:]))[0, -count:]
        return states

    return compute_states


@KIND
def test_loss_is_that_of_every_prefix_alone(shallow: Target, kind: str) -> None:
    """The loss is the mean of KL(target || mask j) over supervised masks, weighted by step_decay^j,
    times the tokens that carry loss; gradients are equal too."""
    drafter = make_drafter(shallow, kind)
    batch = make_conversations(19, 14)
    states = make_reference(shallow, drafter)
    weight = shallow.head.output.weight
    expected: Any = 0
    for row, (tokens, mask) in enumerate(zip(batch.tokens.tolist(), batch.loss_mask.tolist())):
        length = [19, 14][row]
        terms = []
        text = shallow.features(batch.tokens[row : row + 1, :length], ("final",)).at_layer("final")[
            0
        ]
        for end, size in drafter.prefixes(batch, 0)[row]:
            for j, state in enumerate(states(tokens[: end + 1], size)):
                answer = end + 2 + j
                if answer < length and mask[answer]:
                    p = (text[answer - 1] @ weight.T).log_softmax(-1)
                    q = (state @ weight.T).log_softmax(-1)
                    terms.append((drafter.step_decay**j, (p.exp() * (p - q)).sum()))
        assert len(terms) > 4
        expected = expected + sum(mask) * sum(share * term for share, term in terms) / sum(
            share for share, _ in terms
        )
    losses = drafter.loss(batch, shallow, TrainingState())
    torch.testing.assert_close(losses.total, expected, rtol=1e-3, atol=1e-3)
    actual, reference = (
        torch.autograd.grad(total, list(drafter.parameters())) for total in (losses.total, expected)
    )
    for gradient, reference_gradient in zip(actual, reference):
        assert reference_gradient.abs().max() > 0
        torch.testing.assert_close(
            gradient,
            reference_gradient,
            rtol=5e-3,
            atol=2e-3 * float(reference_gradient.abs().max()),
        )


@pytest.mark.parametrize("adapt", ["full", "lora"])
def test_fine_tuned_streams_share_their_target(
    adapt: Literal["full", "lora"],
) -> None:
    """The loss is the text's cross-entropy and `streams_weight` times that of the streams, each
    behind its prefix alone; all layers learn from the text, those from the transfer layer on also
    from the streams."""
    target = cut_tiny(2)
    torch.manual_seed(3)
    drafter = FineTunedStreaming(target, MASKS, 1, adapt, adapter_rank=2, streams_weight=0.5)
    drafter.prepare(target, torch.zeros(target.head.vocab_size))
    for parameter in drafter.target_training.parameters:
        # The trainer does so for the parameters of a stage.
        parameter.requires_grad_(True)
    add_noise(drafter.parameters(), 0.5)
    batch = make_conversations(19, 14)
    states = make_reference(target, drafter)
    weight = target.head.output.weight.detach()
    text_loss = streams_loss = 0.0
    for row, (tokens, mask) in enumerate(zip(batch.tokens.tolist(), batch.loss_mask.tolist())):
        length = [19, 14][row]
        text = target.features(batch.tokens[row : row + 1, :length], ("final",)).at_layer("final")
        text_loss -= sum(
            float((text[0, answer - 1] @ weight.T).log_softmax(-1)[tokens[answer]])
            for answer in range(1, length)
            if mask[answer]
        )
        terms = [
            -float((state @ weight.T).log_softmax(-1)[tokens[end + 2 + j]].detach())
            for end, size in drafter.prefixes(batch, 0)[row]
            for j, state in enumerate(states(tokens[: end + 1], size))
            if end + 2 + j < length and mask[end + 2 + j]
        ]
        assert len(terms) > 4
        streams_loss += sum(mask) * sum(terms) / len(terms)
    losses = drafter.loss(batch, target, TrainingState())
    assert float(losses.terms["language_model"].detach()) == pytest.approx(text_loss, rel=1e-3)
    assert float(losses.terms["masks"].detach()) == pytest.approx(0.5 * streams_loss, rel=1e-3)
    assert {*losses.terms} == {"language_model", "masks"}
    learning = [
        {
            name
            for name, parameter in target.named_parameters()
            if parameter.grad is not None and bool(parameter.grad.any())
        }
        for term in losses.terms.values()
        if not target.zero_grad(set_to_none=True)
        if not term.backward(retain_graph=True)
    ]
    for names in learning:
        for layer in ("layers.0.", "layers.1."):
            assert any(layer in name for name in names)


def record_rounds(drafter: GatedMasks) -> list[tuple[list[int], Tensor]]:
    """Record of every drafting round the first text with its root, and the states [K, D] of its
    masks.
    """
    rounds: list[tuple[list[int], Tensor]] = []
    rollout = drafter.make_rollout

    def record_states(context: Context, states: Tensor) -> Any:
        length = int(context.cache.lengths[0])
        if context.active[0]:
            rounds.append((context.tokens[0, : length + 1].tolist(), states[0]))
        return rollout(context, states)

    drafter.make_rollout = record_states  # type: ignore[method-assign]
    return rounds


@torch.no_grad()
@KIND
@pytest.mark.parametrize("strategy", ["quadratic", "apart"])
def test_decoding_asks_what_was_trained(shallow: Target, kind: str, strategy: str) -> None:
    """In every round the masks' states are the reference's, behind the last committed token, or
    with strategy=apart behind the root."""
    drafter = make_drafter(shallow, kind, strategy=strategy)
    rounds = record_rounds(drafter)
    states = make_reference(shallow, drafter)
    decode(shallow, PROMPTS, Greedy(), LIMIT, drafter, BUILDERS["eagle2"], ignore_eos=True)
    assert len(rounds) > 2
    for text, actual in rounds:
        if strategy == "apart":
            torch.testing.assert_close(
                actual[1:], states(text, MASKS)[: len(actual) - 1], rtol=1e-3, atol=1e-3
            )
        else:
            torch.testing.assert_close(actual, states(text[:-1], MASKS), rtol=1e-3, atol=1e-3)


@pytest.mark.sweep(5)
@KIND
@pytest.mark.parametrize("strategy", ["quadratic", "linear", "apart"])
@pytest.mark.parametrize("builder", list(BUILDERS.values()), ids=list(BUILDERS))
@pytest.mark.parametrize("num_hosts", [None, 2])
def test_drafted_equals_greedy(
    shallow: Target, kind: str, strategy: str, builder: TreeBuilder, num_hosts: int | None
) -> None:
    """Drafted output equals plain decoding for every input and strategy of the masks, alone and in
    a ragged batch, drawn and not."""
    drafter = make_drafter(shallow, kind, strategy=strategy, num_hosts=num_hosts)
    for rule in (Greedy(), Match(temperature=0.8, seed=5)):
        plain = [row.output for row in decode(shallow, PROMPTS, rule, LIMIT, ignore_eos=True)]
        for count in (1, 3):
            generations = decode(
                shallow, PROMPTS[:count], rule, LIMIT, drafter, builder, ignore_eos=True
            )
            assert [row.output for row in generations] == plain[:count]


@KIND
@pytest.mark.parametrize("strategy", ["quadratic", "apart"])
def test_captured_rounds_are_the_loops(shallow: Target, kind: str, strategy: str) -> None:
    """The engine without host synchronization emits the same tokens in the same rounds."""
    drafter = make_drafter(shallow, kind, strategy=strategy)
    builder = BUILDERS["static"]
    plain = decode(shallow, PROMPTS, Greedy(), LIMIT, drafter, builder, ignore_eos=True)
    captured = CapturedRunner(shallow, Greedy(), drafter, builder).decode(
        PROMPTS, LIMIT, ignore_eos=True
    )
    assert [(row.output, row.round_lengths) for row in captured] == [
        (row.output, row.round_lengths) for row in plain
    ]


@torch.no_grad()
@KIND
def test_the_text_does_not_feel_its_masks(shallow: Target, kind: str) -> None:
    """Nodes have the same logits, bit for bit, with other weights at the masks, and those of a
    tree without masks.
    """
    drafter = make_drafter(shallow, kind)
    builder = BUILDERS["static"]
    results = []
    context = begun(shallow, PROMPTS, drafter, builder)
    tree = proposed(drafter, context, builder)
    nodes = int(tree.can_emit[0].sum())
    assert nodes < tree.tokens.shape[1]
    for _ in range(2):
        output = drafter.verify(context, tree)
        assert output.logits is not None and drafter.states is not None
        results.append((output.logits[:, :nodes], drafter.states))
        context.cache.roll_back()
        for parameter in drafter.parameters():
            parameter.mul_(0.5)
    bare = TokenTree(
        *(part[:, :nodes] for part in (tree.tokens, tree.parents, tree.valid, tree.can_emit))
    )
    plain = shallow.verify(bare, context.cache).logits
    assert torch.equal(results[0][0], results[1][0]) and not torch.allclose(
        results[0][1], results[1][1], atol=1e-2
    )
    torch.testing.assert_close(results[0][0], plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["transfer", "streams"])
def test_lower_layers_run_no_masks(shallow: Target, kind: str) -> None:
    """Verification runs masks from the transfer layer on, with the states that running them in
    all layers gives.
    """
    drafter = make_drafter(shallow, kind)
    builder = Static(paths=[[0], [1], [0, 0]])
    sizes = []
    context = begun(shallow, PROMPTS, drafter, builder)
    results = []
    tree = proposed(drafter, context, builder)
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[1]))
        for layer in shallow.layers
    ]
    with torch.inference_mode():
        for verify in (type(drafter).run_tree, MaskDrafter.run_tree):
            final = verify(drafter, context, tree, 4 * MASKS).at_layer("final")
            results.append(final[tree.valid])
            context.cache.roll_back()
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    count = shallow.num_layers
    first = KINDS[kind]["transfer_layer"]
    assert sizes == [4] * first + [4 + 4 * MASKS] * (2 * count - first)


@pytest.mark.parametrize("kind", ["transfer", "streams"])
def test_masks_follow_what_pruning_leaves(shallow: Target, kind: str) -> None:
    """Trees are pruned before masks join them, with the same output; pruning at a later layer,
    which runs masks, is refused.
    """
    drafter = make_drafter(shallow, kind)
    builder = Eagle2(4, 10, 3)
    expected = [row.output for row in decode(shallow, PROMPTS, Greedy(), LIMIT, ignore_eos=True)]
    first = KINDS[kind]["transfer_layer"]
    generations = Session(shallow, Greedy(), drafter, builder, changes=(Pruning(first, 2),)).decode(
        PROMPTS, LIMIT, ignore_eos=True
    )
    assert [row.output for row in generations] == expected and sum(
        sum(row.pruned_counts) for row in generations
    ) > 0
    late = "an earlier layer" if first + 1 < shallow.num_layers else "use fewer"
    with pytest.raises(UserError, match=rf"eval.prune_layer={first + 1}: .*{late}"):
        Session(shallow, Greedy(), drafter, builder, changes=(Pruning(first + 1, 2),)).decode(
            PROMPTS, LIMIT
        )


def test_a_single_chain_is_the_plain_masks(shallow: Target) -> None:
    """Two chains with the same vectors equal a single chain, in training and decoding."""
    single = make_drafter(shallow, "ensembles", ensembles=1)
    double = make_drafter(shallow, "ensembles")
    assert single.masks is not None and double.masks is not None
    with torch.no_grad():
        double.masks.copy_(single.masks.repeat(2, 1))
    batch = make_conversations(19, 14)
    losses = [drafter.loss(batch, shallow, TrainingState()) for drafter in (single, double)]
    torch.testing.assert_close(losses[0].total, losses[1].total, rtol=1e-4, atol=1e-4)
    assert torch.equal(losses[0].counts, losses[1].counts) and torch.equal(
        losses[0].hits, losses[1].hits
    )
    generations = [
        decode(shallow, PROMPTS, Greedy(), LIMIT, drafter, Chain(3), ignore_eos=True)
        for drafter in (single, double)
    ]
    assert [answer.round_lengths for answer in generations[0]] == [
        answer.round_lengths for answer in generations[1]
    ]


def test_masks_stand_where_a_round_is_likeliest_to_end() -> None:
    """With children accepted at 0.9, 0.5 and 0.3, a round ends at each node with the chance of
    it less that of its children.
    """
    scores = torch.tensor([[1.0, 0.9, 0.5, 0.3, 0.7]]).log()
    tree = TokenTree(
        torch.arange(5)[None],
        torch.tensor([[-1, 0, 1, 1, 0]]),
        torch.tensor([[True, True, True, True, False]]),
        torch.ones(1, 5, dtype=torch.bool),
        scores=scores,
    )
    torch.testing.assert_close(end_probabilities(tree), torch.tensor([[0.1, 0.1, 0.5, 0.3, -1.0]]))


def test_chains_do_not_see_each_other() -> None:
    visible = parallel_chains_mask(2, 2, 1, torch.device("cpu")).long().tolist()
    assert visible == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        ("transfer", {"transfer_layer": 9}, r"drafter\.transfer_layer=9: .* use 1 to"),
    ],
)
def test_wrong_settings_are_refused(
    shallow: Target, kind: str, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        make_drafter(shallow, kind, **options)
