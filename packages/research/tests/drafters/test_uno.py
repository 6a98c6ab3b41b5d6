"""Uno: gated LoRA over random tokens. Training equals the paper's doubled forward, and decoding
takes two forwards a round.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import chisquare
from torch import Tensor, nn

from spectrain.decoding.acceptance import Greedy, Match
from spectrain.decoding.acceptance.rejection import RecursiveRejection, SpeculativeSampling
from spectrain.decoding.captured import CapturedRunner
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.features.batch import Batch
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.reference_model import reference_model
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, Static, TreeBuilder
from spectrain.trees.token_tree import TokenTree
from spectrain_research.gated_lora.drafter import GatedLora, GatedLoraConfig
from spectrain_research.shared.gated_masks import GatedMasks
from spectrain_research.uno.drafter import Uno, UnoConfig
from tests.factories import add_noise

UNO: dict[str, Any] = {
    "num_masks": 4,
    "rank": 4,
    "alpha": 8.0,
    "strategy": "apart",
    "sampler": False,
    "loss": "total_variation",
    "consistency": 0.0,
    "tiles": [2, 3, 4],
}
LIMIT = 14


def make_drafter(
    target: Target, size: float = 0.4, noise: str = "uniform", **options: Any
) -> GatedMasks:
    """Make a drafter with random weights that are not zero: Uno for random tokens, else gated
    LoRA.
    """
    torch.manual_seed(3)
    settings: dict[str, Any] = {**UNO, **options}
    drafter: GatedMasks = (
        Uno(target, UnoConfig(**settings))
        if noise == "uniform"
        else GatedLora(target, GatedLoraConfig(noise=noise, **settings))
    )
    drafter.prepare(target, torch.zeros(target.head.vocab_size))
    add_noise(drafter.parameters(), size)
    return drafter.eval()


def make_conversations(*lengths: int) -> Batch:
    """Make rows padded on the right; all tokens but the first five are the assistant's."""
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros(len(lengths), max(lengths)).bool()
    for row, length in enumerate(lengths):
        tokens[row, :length], mask[row, 5:length] = torch.randint(3, 2000, (length,)), True
    return Batch(tokens, mask)


# Training


class GatedLinear(nn.Module):
    """W x, with (alpha / rank) B A x added on the noisy half."""

    def __init__(self, linear: nn.Linear, factors: nn.Module, scale: float, clean: int) -> None:
        super().__init__()
        self.linear = linear
        self.factors = [factors]
        self.scale = scale
        self.clean = clean

    def forward(self, x: Tensor) -> Tensor:
        noisy = (torch.arange(x.shape[1]) >= self.clean)[:, None]
        return self.linear(x) + noisy * self.scale * self.factors[0](x)


@contextmanager
def gated_reference(target: Target, drafter: GatedMasks, clean: int) -> Iterator[Any]:
    """Yield transformers' own model with LoRA on the rows from `clean` on."""
    with reference_model(target) as model:
        linears = {name: model.get_submodule(name) for name in drafter.names}
        for (name, linear), factors in zip(linears.items(), drafter.factors):
            model.set_submodule(
                name, GatedLinear(linear, factors, drafter.alpha / drafter.rank, clean)
            )
        try:
            yield model
        finally:
            for name, linear in linears.items():
                model.set_submodule(name, linear)


def papers_loss(
    target: Target, drafter: GatedMasks, tokens: Tensor, noise: Tensor, mask: Tensor, block: int
) -> Tensor:
    """Half of sum_i ||p_student - p_teacher||_1 by one forward over a clean copy of the text and a
    noisy one.

    Row i of the clean copy sees clean rows up to i; of the noisy one, clean rows of earlier blocks
    and noisy rows of its own block up to i. Both stand at position i and say token i + 1: the clean
    one is the teacher. Only blocks that begin inside the text are trained, for those before have no
    prefix."""
    length = len(tokens)
    i = torch.arange(length)[:, None]
    j = torch.arange(length)
    clean = j <= i
    earlier = j // block < i // block
    own = (j // block == i // block) & (j <= i)
    visible = torch.cat(
        [torch.cat([clean, torch.zeros_like(clean)], 1), torch.cat([earlier, own], 1)]
    )
    with gated_reference(target, drafter, length) as model:
        bias = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        logits = model(
            torch.cat([tokens, noise])[None],
            attention_mask=bias[None, None],
            position_ids=torch.cat([j, j])[None],
        ).logits[0]
    teacher = logits[:length].detach().softmax(-1)
    student = logits[length:].softmax(-1)
    is_supervised = (j >= block) & F.pad(mask[1:], (0, 1))
    terms = 0.5 * (student - teacher).abs().sum(-1)[is_supervised]
    return terms.sum() * mask.sum() / len(terms)


@pytest.mark.parametrize("progress, block", [(0.0, 2), (0.34, 3), (0.5, 3), (0.99, 4), (1.0, 4)])
def test_loss_is_that_of_the_papers_doubled_forward(
    shallow: Target, progress: float, block: int
) -> None:
    """The loss and its gradients are those of the doubled forward, in every part of the
    curriculum, with this step's noise.
    """
    drafter = make_drafter(shallow)
    batch = make_conversations(21)
    state = TrainingState(step=5, progress=progress)
    blocks = drafter.make_blocks(batch, state)
    assert int(blocks.mask_index.max()) == block - 1
    noise = torch.zeros(21, dtype=torch.int64)
    # past the end a block repeats its last token
    for column in reversed((blocks.mask_index[0] >= 0).nonzero()[:, 0].tolist()):
        noise[blocks.positions[0, column]] = blocks.tokens[0, column]
    expected = papers_loss(shallow, drafter, batch.tokens[0], noise, batch.loss_mask[0], block)
    losses = drafter.loss(batch, shallow, state)
    assert losses.terms.keys() == {"masks"}
    torch.testing.assert_close(losses.total, expected, rtol=1e-4, atol=1e-4)
    actual, reference = (
        torch.autograd.grad(total, list(drafter.parameters())) for total in (losses.total, expected)
    )
    for gradient, reference_gradient in zip(actual, reference):
        torch.testing.assert_close(
            gradient,
            reference_gradient,
            rtol=2e-3,
            atol=1e-4 * float(reference_gradient.abs().max()),
        )


def test_noise_is_uniform_and_of_the_text_and_step(shallow: Target) -> None:
    """Noise is uniform over all ids, the same however a text is batched or packed, and different
    at every step.
    """
    drafter = make_drafter(shallow, num_masks=8, tiles=[8])
    batch = make_conversations(24, 17)
    drawn = []
    for step in range(300):
        batched = drafter.make_blocks(batch, TrainingState(step))
        single = drafter.make_blocks(
            Batch(batch.tokens[1:, :17], batch.loss_mask[1:, :17]), TrainingState(step)
        )
        noise = batched.tokens[:, 24:]
        assert torch.equal(noise[1, : single.tokens.shape[1] - 17], single.tokens[0, 17:])
        drawn.append(noise[0])
    packed = Batch(
        torch.cat([batch.tokens[0], batch.tokens[1, :17]])[None],
        torch.cat([batch.loss_mask[0], batch.loss_mask[1, :17]])[None],
        lengths=(24, 17),
    )
    blocks = drafter.make_blocks(packed, TrainingState(299))
    assert torch.equal(blocks.tokens[0, 24 : 24 + len(drawn[-1])], drawn[-1])
    counts = torch.bincount(torch.cat(drawn) // (shallow.head.vocab_size // 16), minlength=16)
    assert (
        chisquare(counts.numpy()).pvalue > 1e-4
        and len({tuple(row.tolist()) for row in drawn}) == 300
    )


@pytest.mark.parametrize(
    "tiles, message",
    [([], r"drafter\.tiles=\[\]"), ([5], "num_masks=4"), ([2, 0], r"tiles=\[2, 0\]")],
)
def test_wrong_tiles_are_refused(shallow: Target, tiles: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_drafter(shallow, tiles=tiles)


# Decoding

BUILDERS: dict[str, TreeBuilder] = {
    "chain": Chain(5),
    "short": Chain(2),
    "eagle2": Eagle2(5, 12, 3),
    "static": Static(paths=[[0], [1], [0, 0], [0, 1], [0, 0, 0]]),
}
BUILDER = pytest.mark.parametrize("builder", list(BUILDERS.values()), ids=list(BUILDERS))
PROMPTS = [[5, 6, 7, 8, 9], [40, 41], [100, 3, 44, 8, 12, 90, 1500]]


class RootStateRecorder:
    """Records the states of a drafter's own forward in every round, and checks that the cache is
    unchanged by it.
    """

    def __init__(self, drafter: GatedMasks) -> None:
        self.rounds: list[tuple[list[int], Tensor]] = []
        run_root_and_masks = drafter.run_root_and_masks

        def record_states(context: Context) -> Tensor:
            length = int(context.cache.lengths[0])
            states = run_root_and_masks(context)
            assert context.cache.uncommitted == 0 and int(context.cache.lengths[0]) == length
            self.rounds.append((context.tokens[0, : length + 1].tolist(), states[0]))
            return states

        drafter.run_root_and_masks = record_states  # type: ignore[method-assign]


@pytest.mark.sweep(3)
@BUILDER
@pytest.mark.parametrize("noise", ["uniform", "masks"])
@pytest.mark.parametrize("strategy", ["apart", "quadratic", "linear"])
def test_drafted_equals_greedy(
    shallow: Target, builder: TreeBuilder, noise: str, strategy: str
) -> None:
    """Drafted output is greedy with random tokens or vectors at masks, in one or two forwards,
    alone and in a ragged batch.
    """
    plain = [row.output for row in decode(shallow, PROMPTS, Greedy(), LIMIT, ignore_eos=True)]
    for count in (1, 3):
        drafter = make_drafter(shallow, noise=noise, strategy=strategy)
        generations = decode(
            shallow, PROMPTS[:count], Greedy(), LIMIT, drafter, builder, ignore_eos=True
        )
        assert [row.output for row in generations] == plain[:count]


@pytest.mark.parametrize(
    "builder", [BUILDERS["chain"], BUILDERS["eagle2"]], ids=["chain", "eagle2"]
)
def test_every_round_keeps_two_tokens_and_more(shallow: Target, builder: TreeBuilder) -> None:
    """Every round but the last emits two tokens or more: the first draft is the target's own
    next token, and the bonus.
    """
    for generation in decode(
        shallow, PROMPTS, Greedy(), LIMIT, make_drafter(shallow), builder, ignore_eos=True
    ):
        assert all(
            length >= 2
            for length, last in zip(
                generation.round_lengths, range(len(generation.round_lengths), 0, -1)
            )
            if last > 1
        )
        assert sum(generation.round_lengths[:-1]) >= 2 * (len(generation.round_lengths) - 1)


@torch.no_grad()
def test_proposals_are_those_of_the_two_copies(shallow: Target) -> None:
    """Row 0 of the draft forward is the target's own state; row j is that of a noisy row behind
    the text.
    """
    drafter = make_drafter(shallow)
    recorder = RootStateRecorder(drafter)
    decode(shallow, PROMPTS[:1], Greedy(), LIMIT, drafter, Chain(5), ignore_eos=True)
    assert len(recorder.rounds) > 2
    for text, states in recorder.rounds:
        positions = len(text) + torch.arange(4)[None]
        context: Any = type("Ids", (), {"sequence_ids": torch.zeros(1, dtype=torch.int64)})
        noise = drafter.random_tokens(context, positions)[0]
        with gated_reference(shallow, drafter, len(text)) as model:
            expected = model.get_decoder()(
                torch.cat([torch.tensor(text), noise])[None]
            ).last_hidden_state[0]
        torch.testing.assert_close(states, expected[len(text) - 1 :], rtol=1e-3, atol=1e-3)


def test_the_adapter_leaves_the_target_bit_by_bit(shallow: Target) -> None:
    """Row 0 of the draft forward and the verification's states and logits are the same, bit by
    bit, with LoRA and without.
    """
    tensors: dict[str, list[Tensor]] = {}
    for name, size in (("on", 0.4), ("off", 0.0)):
        drafter = make_drafter(shallow, size)
        tree = TokenTree.from_chain(torch.tensor([[8, 900, 77]]))
        cache = shallow.new_cache(1, 32)
        shallow.prefill(torch.tensor([PROMPTS[0]]), torch.tensor([5]), cache, ())
        context: Any = type(
            "Round",
            (),
            {
                "cache": cache,
                "builder": Chain(5),
                "root": torch.tensor([8]),
                "target": shallow,
                "sequence_ids": torch.tensor([0]),
            },
        )
        with torch.no_grad():
            states = drafter.run_root_and_masks(context)
            verified = shallow.verify(tree, cache, ("final",))
        assert verified.logits is not None
        tensors[name] = [states[:, 0], verified.hidden, verified.logits, states[:, 1:]]
    *same, masks = zip(tensors["on"], tensors["off"])
    assert all(torch.equal(on, off) for on, off in same)
    assert (masks[0] - masks[1]).abs().amax(-1).min() > 1e-2, "the adapter must act at the noise"


@pytest.mark.sweep(2)
@BUILDER
@pytest.mark.parametrize("temperature", [0.4, 1.0])
def test_drafted_equals_matched_sampling(
    shallow: Target, builder: TreeBuilder, temperature: float
) -> None:
    """With the same seed, drafted sampling draws the tokens of autoregressive sampling."""
    rule = Match(temperature=temperature, seed=5)
    plain = decode(shallow, PROMPTS, rule, LIMIT, ignore_eos=True)
    generations = decode(
        shallow, PROMPTS, rule, LIMIT, make_drafter(shallow), builder, ignore_eos=True
    )
    assert [row.output for row in generations] == [row.output for row in plain]


RULES: dict[str, tuple[TreeBuilder, Any]] = {
    "chain": (Chain(3, "sampled", 1.3), SpeculativeSampling),
    "tree": (
        Static(paths=[[0], [1], [0, 0], [0, 1], [0, 0, 0]], children="without_replacement"),
        RecursiveRejection,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_sampled_answers_have_the_targets_distribution(shallow: Target, name: str) -> None:
    """A chi-squared test compares the first three tokens of 400 samples with autoregressive
    probabilities.
    """
    builder, kind = RULES[name]
    torch.manual_seed(0)
    count = 400
    prompt = PROMPTS[0]
    rule = kind(temperature=0.5, top_k=3, seed=11)
    generations = decode(
        shallow,
        [prompt] * count,
        rule,
        4,
        make_drafter(shallow),
        builder,
        sequence_ids=list(range(count)),
        ignore_eos=True,
    )
    counts = Counter(tuple(row.output[:3]) for row in generations)
    probs = continuation_probs(shallow, prompt, 3, 0.5, 3)
    assert set(counts) <= set(probs)
    frequent = [path for path, p in probs.items() if p * count >= 8]
    rest = (
        count - sum(counts[path] for path in frequent),
        count * (1 - sum(probs[path] for path in frequent)),
    )
    pairs = [(counts[path], count * probs[path]) for path in frequent] + (
        [rest] if rest[1] > 1 else []
    )
    observed, expected = zip(*pairs)
    scale = sum(observed) / sum(expected)
    assert len(pairs) > 3 and chisquare(observed, [scale * row for row in expected]).pvalue > 1e-3


@torch.no_grad()
def continuation_probs(
    target: Target, prompt: list[int], depth: int, temperature: float, top_k: int
) -> dict[tuple[int, ...], float]:
    """Return the probability of every continuation of `depth` tokens that can be drawn."""
    probs = {(): 1.0}
    for _ in range(depth):
        paths = list(probs)
        logits = target.run(
            torch.tensor([prompt + list(path) for path in paths]), ForwardPlan(logits=True)
        ).logits
        assert logits is not None
        best = logits[:, -1].topk(top_k)
        p = (best.values / temperature).softmax(-1)
        probs = {
            (*path, token): probs[path] * chance
            for path, ids, chances in zip(paths, best.indices.tolist(), p.tolist())
            for token, chance in zip(ids, chances)
        }
    return probs


@pytest.mark.parametrize(
    "builder", [BUILDERS["chain"], BUILDERS["static"]], ids=["chain", "static"]
)
@pytest.mark.parametrize("options", [{}, {"noise": "mean", "rank": 0}], ids=str)
def test_captured_rounds_are_the_loops(
    shallow: Target, builder: TreeBuilder, options: dict[str, Any]
) -> None:
    """The engine without host synchronization emits the same tokens in the same rounds."""
    drafter = make_drafter(shallow, **options)
    plain = decode(shallow, PROMPTS, Greedy(), LIMIT, drafter, builder, ignore_eos=True)
    captured = CapturedRunner(shallow, Greedy(), drafter, builder).decode(
        PROMPTS, LIMIT, ignore_eos=True
    )
    assert [(row.output, row.round_lengths) for row in captured] == [
        (row.output, row.round_lengths) for row in plain
    ]
