"""The target drafts for itself on a reduced cache or reduced weights: which drafts result, and
how many bytes are read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MistralConfig

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import EagerRunner, decode, make_request
from spectrain.drafters.base import TrainingState
from spectrain.drafters.context import Context
from spectrain.errors import UserError
from spectrain.eval.memory import extra_memory
from spectrain.features.batch import Batch
from spectrain.models import attention, kv_cache
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.loading import load_hf, load_tiny
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, TreeBuilder
from spectrain_research.less_cache.bytes_read import BytesRead, key_bytes
from spectrain_research.less_cache.coded_target import load_coded
from spectrain_research.less_cache.drafter import SelfDraft
from spectrain_research.less_cache.evaluation import verification_reads
from spectrain_research.less_cache.key_selectors import QuestSelector, SelectionInput
from spectrain_research.less_cache.quantized_kv import CodedLinear, QuantizedLinear
from tests.decoding.rounds import begun
from tests.models import architectures

TEXTS = (
    "The bees find the hive. The bees find the hive and the bees",
    "one two three four one two three",
    "What is it?",
)
SMALL = {"choice": "causal", "num_layers": 1}
FULL_BUDGET: dict[str, dict[str, Any]] = {
    "window": {"cache": "window", "budget": 400},
    "snap": {"cache": "snap", "budget": 400},
    "quest": {"cache": "quest", "budget": 400, "page": 4},
    "quest_steps": {"cache": "quest", "budget": 400, "page": 4, "refresh": 0},
    "refreshed": {"cache": "snap", "budget": 400, "refresh": 1},
    **{
        name: {"cache": name, "budget": 400, "group": 4}
        for name in ("defensive", "compress", "signs", "clusters")
    },
    "merged": {"cache": "merged", "merge": 0.0, "group": 4},
    "outliers": {"cache": "sink4", "outliers": 4, "group": 4},
}
LESS: dict[str, dict[str, Any]] = {
    "window": {"cache": "window", "budget": 7, "sinks": 2},
    "snap": {"cache": "snap", "budget": 9, "observe": 3, "refresh": 2},
    "quest": {"cache": "quest", "budget": 8, "page": 4, "refresh": 3},
    "quest_steps": {"cache": "quest", "budget": 8, "page": 4, "refresh": 0},
    "int8": {"cache": "int8", "group": 4},
    "rounded": {"cache": "full", "activations": "int4"},
    "int4": {"cache": "int4", "group": 8},
    "weights8": {"cache": "full", "weights": "int8"},
    "weights4": {"cache": "full", "weights": "int4", "guesses": 2},
    "both": {"cache": "quest", "budget": 8, "page": 4, "weights": "int4", "guesses": 2},
    "coded": {"cache": "int4", "group": 4, "weights": "int8"},
    "compress": {"cache": "compress", "budget": 6, "observe": 3, "refresh": 2},
    "defensive": {
        "cache": "defensive",
        "budget": 6,
        "observe": 3,
        "guesses": 2,
        "helper": {"choice": "causal", "num_layers": 1},
    },
    "signs": {"cache": "signs", "budget": 6, "group": 4, "refresh": 1},
    "clusters": {"cache": "clusters", "budget": 1},
    "merged": {"cache": "merged", "group": 8, "merge": 0.5},
    "sink4": {"cache": "sink4", "group": 4, "outliers": 1},
    "turbo4": {"cache": "turbo4", "group": 4},
}


@pytest.fixture(scope="module")
def prompts(tiny: Target) -> list[list[int]]:
    """Three prompts of different lengths."""
    return [tiny.tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]


# Nothing left out


@pytest.mark.parametrize("case", FULL_BUDGET)
def test_the_full_text_drafts_what_the_target_says(
    shallow: Target, prompts: list[list[int]], case: str
) -> None:
    """With a budget of the full text every draft is accepted: a round emits the chain and the
    bonus token.
    """
    generations = decode(
        shallow,
        prompts,
        Greedy(),
        17,
        SelfDraft(shallow, **FULL_BUDGET[case]),
        Chain(3),
        ignore_eos=True,
    )
    assert all(generation.round_lengths == [4, 4, 4, 4] for generation in generations)


def make_windowed_target(tiny: Target, window: int) -> Target:
    """Make a random target whose layers all attend within a window."""
    config = MistralConfig(
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        sliding_window=window,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="spectrain").eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None
    return Target(model, tiny.tokenizer, "windowed", "")


@pytest.mark.parametrize("case", ["window", "snap", "quest", "compress"])
def test_window_layers_miss_nothing(tiny: Target, prompts: list[list[int]], case: str) -> None:
    """Layers with a window of 6 draft exactly from any selection of 12 tokens, because it holds
    the newest ones.
    """
    target = make_windowed_target(tiny, 6)
    assert {layer.range.window for layer in target.architecture.attention_layers.values()} == {6}
    options = {**LESS[case], "budget": 12, "refresh": 8}
    generations = decode(
        target, prompts[:2], Greedy(), 17, SelfDraft(target, **options), Chain(3), ignore_eos=True
    )
    assert all(generation.round_lengths == [4, 4, 4, 4] for generation in generations)


# Keys or bits left out


@pytest.mark.sweep(5, free=("case",))
@pytest.mark.parametrize("case", LESS)
@pytest.mark.parametrize(
    "builder", [Chain(3), Eagle2(depth=3, budget=8, top_k=3)], ids=["chain", "eagle2"]
)
def test_drafted_equals_greedy(
    shallow: Target, prompts: list[list[int]], case: str, builder: TreeBuilder
) -> None:
    """Texts of different lengths, decoded together by chain and tree, have the greedy output."""
    expected = [
        decode(shallow, [prompt], Greedy(), 14, ignore_eos=True)[0].output for prompt in prompts
    ]
    drafter = SelfDraft(shallow, **LESS[case])
    for _ in range(2):  # a decoding leaves nothing to the next
        generations = decode(shallow, prompts, Greedy(), 14, drafter, builder, ignore_eos=True)
        assert [row.output for row in generations] == expected


def test_it_equals_generate(tiny: Target, prompts: list[list[int]]) -> None:
    """The output equals that of transformers' own `generate`."""
    with reference_model(tiny) as model:
        expected = [generate(model, prompt, 16, tiny.stop_ids) for prompt in prompts]
    for case in ("quest", "coded"):
        generations = decode(tiny, prompts, Greedy(), 16, SelfDraft(tiny, **LESS[case]), Chain(4))
        assert [row.output for row in generations] == expected


def log_probs_over(target: Target, context: Context, visible_positions: list[int]) -> Tensor:
    """Return log p [V] after the root if it sees only these positions of the text, which saw all
    positions before them.
    """
    length = int(context.lengths)
    cache = target.new_cache(1, length + 1)
    tokens = context.tokens[:, : length + 1]
    causal = torch.ones(1, length, length, dtype=torch.bool).tril()
    target.run(tokens[:, :length], ForwardPlan(mask=causal, cache=cache))
    visible = torch.zeros(1, 1, length + 1, dtype=torch.bool)
    visible[..., [*visible_positions, length]] = True
    plan = ForwardPlan(logits=True, positions=torch.tensor([[length]]), mask=visible, cache=cache)
    logits = target.run(tokens[:, length:], plan).logits
    assert logits is not None
    return logits[0, 0].log_softmax(-1)


def test_positions_stay_those_of_the_text(shallow: Target, prompts: list[list[int]]) -> None:
    """A draft from sinks and a window equals the target with all other tokens hidden from the
    root.
    """
    drafter = SelfDraft(shallow, "window", 7, sinks=2)
    context = begun(shallow, prompts[:1], drafter, Chain(3))
    draft = drafter.draft(context)
    assert draft.rollout is not None
    length = int(context.lengths)
    expected = log_probs_over(shallow, context, [0, 1, *range(length - 5, length)])
    with torch.inference_mode():
        torch.testing.assert_close(draft.rollout.start()[0, 0], expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(
        expected, log_probs_over(shallow, context, [*range(length)]), atol=1e-2
    )


@pytest.mark.parametrize("case", ["both", "coded", "window"])
def test_what_stays_is_what_a_prefill_writes(
    shallow: Target, prompts: list[list[int]], case: str
) -> None:
    """After some rounds the target's cache equals that of a prefill of the texts: nothing that a
    draft computed is left.
    """
    drafter = SelfDraft(shallow, **LESS[case])
    builder = Chain(3)
    runner = EagerRunner(shallow, Greedy(), drafter, builder)
    runner.prefill(make_request(shallow, prompts, 30, ignore_eos=True))
    with torch.inference_mode():
        for _ in range(4):
            runner.run_rounds(30)
        context = runner.context
        for row, length in enumerate(context.lengths.tolist()):
            cache = shallow.new_cache(1, length)
            shallow.prefill(
                context.tokens[row : row + 1, :length], torch.tensor([length]), cache, ()
            )
            for layer in range(shallow.num_layers):
                for actual, expected in zip(
                    context.cache.keys_values(layer), cache.keys_values(layer)
                ):
                    torch.testing.assert_close(
                        actual[row, :length], expected[0, :length], rtol=1e-4, atol=1e-4
                    )


def test_pages_are_selected_by_the_queries_of_each_step(
    shallow: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With refresh=0 every layer of every draft step selects pages by its own query, and the
    read bytes grow with each step.
    """
    queries: list[tuple[int, Tensor]] = []
    inner = QuestSelector.select_keys

    def record_queries(
        self: QuestSelector, layer: int, selection: SelectionInput, counts: Tensor
    ) -> Tensor:
        assert selection.queries is not None
        queries.append((layer, selection.queries))
        return inner(self, layer, selection, counts)

    monkeypatch.setattr(QuestSelector, "select_keys", record_queries)
    prompt = [*range(10, 30)]
    read = []
    for depth in (1, 2):
        read.append(
            draft_and_count(shallow, SelfDraft(shallow, **LESS["quest_steps"]), prompt, depth).keys
        )
    steps = [
        queries[: shallow.num_layers],
        queries[shallow.num_layers : 2 * shallow.num_layers],
        queries[2 * shallow.num_layers :],
    ]
    assert [layer for layer, _ in queries] == [*range(shallow.num_layers)] * 3 and read[1] > read[0]
    for first, again, second in zip(*steps):
        assert torch.equal(first[1], again[1]) and not torch.equal(first[1], second[1])


def test_the_same_codes_draft_and_verify() -> None:
    """QSpec: drafts run the target's own 4-bit codes on rounded activations, hold no weights,
    and leave its output.
    """
    target = load_coded("tiny", dtype="float32")
    assert not any(isinstance(child, nn.Linear) for child in target.layers.modules())
    codes = sum(part.numel() * part.element_size() for part in target.layers.buffers())
    assert codes < 0.65 * sum(
        2 * linear.in_features * linear.out_features for linear in coded_linears(target)
    )
    prompt = [*range(10, 30)]
    drafter = SelfDraft(target, "full", activations="int4")
    with reference_model(target) as model:
        expected = generate(model, prompt, 12, target.stop_ids)
    (generation,) = decode(target, [prompt], Greedy(), 12, drafter, Chain(3))
    assert generation.output == expected and max(generation.round_lengths) > 1
    assert extra_memory(target, drafter, Chain(3), Greedy(), prompt)["weights"] == 0


def coded_linears(target: Target) -> list[Any]:
    return [child for child in target.layers.modules() if isinstance(child, CodedLinear)]


def test_guesses_change_no_draft(shallow: Target) -> None:
    """Guessed continuations change no round and reduce the weights that are read."""
    prompt = [5, 6, 7, 8, 9, 10] * 3
    outputs = []
    read = []
    for guesses in (0, 3):
        drafter = SelfDraft(shallow, "window", 12, guesses=guesses)
        (generation,) = decode(shallow, [prompt], Greedy(), 30, drafter, Chain(4), ignore_eos=True)
        outputs.append((generation.output, generation.round_lengths))
        read.append(drafter.bytes_read.weights)
    assert outputs[0] == outputs[1] and read[1] < read[0]


def test_a_helper_that_is_right_saves_forwards(shallow: Target, prompts: list[list[int]]) -> None:
    """A helper drafts for the target on its reduced cache with the same rounds. If its three
    guesses are right, a chain of 4 takes one forward."""
    settings = {"cache": "window", "budget": 12, "guesses": 3}
    helped = SelfDraft(shallow, **settings, helper=SMALL)
    rounds = [
        [
            (generation.output, generation.round_lengths)
            for generation in decode(
                shallow, prompts, Greedy(), 16, drafter, Chain(4), ignore_eos=True
            )
        ]
        for drafter in (SelfDraft(shallow, **{**settings, "guesses": 0}), helped)
    ]
    assert rounds[0] == rounds[1]
    drafter = SelfDraft(shallow, **settings, helper=SMALL)
    context = begun(shallow, prompts[:1], drafter, Chain(4))
    with torch.inference_mode():
        tokens = (
            Chain(4)
            .grow(context, SelfDraft(shallow, **{**settings, "guesses": 0}).draft(context))
            .tokens[0, 1:]
            .tolist()
        )
        draft = drafter.draft(context)
        nodes = list[int]()
        rollout: Any = draft.rollout
        rollout.guesser.continue_paths = lambda paths, last, count: torch.tensor(
            [[*tokens, 0, 0, 0][len(paths[0]) :][:count]]
        )
        run = drafter.compute_log_probs
        drafter.compute_log_probs = lambda *args: nodes.append(args[1].shape[1]) or run(*args)  # type: ignore
        assert Chain(4).grow(context, draft).tokens[0, 1:].tolist() == tokens and nodes == [4]


# Bytes read


@contextmanager
def record_attention_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Record the bytes of the keys and values that each call of attention in torch's operations
    receives.
    """
    sizes: list[int] = []
    inner = kv_cache.tree_attention

    def record_bytes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        sizes.append(k.numel() * k.element_size() + v.numel() * v.element_size())
        return inner(q, k, v, *rest)

    with monkeypatch.context() as patch:
        patch.setenv("SPECTRAIN_KERNELS", "reference")
        for module in (attention, kv_cache):
            patch.setattr(module, "tree_attention", record_bytes)
        yield sizes


def draft_and_count(target: Target, drafter: SelfDraft, prompt: list[int], depth: int) -> BytesRead:
    """Return the bytes that drafting a chain in a first round reads, without those of selecting
    keys.
    """
    context = begun(target, [prompt], drafter, Chain(depth))
    with torch.inference_mode():
        draft = drafter.draft(context)
        before = drafter.bytes_read
        context.builder.grow(context, draft)
    return BytesRead(
        drafter.bytes_read.weights - before.weights, drafter.bytes_read.keys - before.keys
    )


@pytest.mark.parametrize("case", ["window", "snap", "quest", "weights8"])
def test_keys_are_counted_as_attention_is_handed_them(
    shallow: Target, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The counted bytes of drafting are those of the keys and values that attention receives."""
    drafter = SelfDraft(shallow, **LESS[case])
    context = begun(shallow, prompts[:1], drafter, Chain(3))
    with torch.inference_mode():
        draft = drafter.draft(context)
        before = drafter.bytes_read
        with record_attention_bytes(monkeypatch) as sizes:
            context.builder.grow(context, draft)
    assert len(sizes) == 3 * shallow.num_layers and drafter.bytes_read.keys - before.keys == sum(
        sizes
    )


def test_verification_is_counted_as_attention_is_handed_it(
    shallow: Target, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a decoding with a drafter that only copies, the counted bytes of verification are those
    that attention receives.
    """
    from spectrain.drafters.ngram import Ngram

    with record_attention_bytes(monkeypatch) as sizes:
        (generation,) = decode(
            shallow, prompts[:1], Greedy(), 12, Ngram(shallow), Chain(3), ignore_eos=True
        )
    assert verification_reads(shallow, generation).keys == sum(sizes)


def test_few_bits_are_counted_as_they_are_held(shallow: Target) -> None:
    """The counted bytes of a text of full groups are all codes with their scales and the drafted
    tokens, in every layer.
    """
    prompt = [*range(10, 26)]
    drafter = SelfDraft(shallow, "int4", group=8)
    read = draft_and_count(shallow, drafter, prompt, 2)
    assert drafter.quantized_kv is not None
    cached_bytes = sum(
        codes.nbytes
        for codes in (*drafter.quantized_kv.keys.values(), *drafter.quantized_kv.values.values())
    )
    slot = 2 * 2 * 32 * 4  # keys and values of two heads of 32 in float32
    assert read.keys == 2 * cached_bytes + (1 + 2) * slot * shallow.num_layers
    assert cached_bytes == shallow.num_layers * 16 * 2 * (32 / 2 + 32 * 4 / 8 + 32 / 2 + 4)


@pytest.mark.parametrize("weights", ["full", "int4"])
def test_weights_are_counted_as_modules_read_them(
    prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, weights: Any
) -> None:
    """The counted bytes are those of every linear layer and norm that ran, or of the codes in
    its place.
    """
    target = load_tiny()
    sizes = []

    def record_weights(module: nn.Module, args: Any) -> None:
        coded = isinstance(vars(module).get("forward"), QuantizedLinear)
        if not coded and not [*module.children()] and not isinstance(module, nn.Embedding):
            sizes.extend(weight.numel() * weight.element_size() for weight in module.parameters())

    inner = QuantizedLinear.__call__

    def record_codes(self: QuantizedLinear, input: Tensor) -> Tensor:
        sizes.append(self.weight.nbytes)
        return inner(self, input)

    drafter = SelfDraft(target, "window", 8, weights=weights)
    drafter.drafting_weights(target)
    monkeypatch.setattr(QuantizedLinear, "__call__", record_codes)
    context = begun(target, prompts[:1], drafter, Chain(2))
    with torch.inference_mode():
        draft = drafter.draft(context)
        before = drafter.bytes_read
        handles = [
            module.register_forward_pre_hook(record_weights) for module in target.model.modules()
        ]
        context.builder.grow(context, draft)
    for handle in handles:
        handle.remove()
    assert drafter.bytes_read.weights - before.weights == sum(sizes)


def test_a_window_layer_reads_what_it_reaches(tiny: Target) -> None:
    """The counted slots are as many as some node of a chain sees, by its mask."""
    target = make_windowed_target(tiny, 6)
    length = 20
    slot = 2 * 2 * 8 * 4
    for nodes in (1, 3, 9):
        visible = torch.arange(length + nodes) <= torch.arange(length, length + nodes)[:, None]
        visible &= torch.arange(length, length + nodes)[:, None] - torch.arange(length + nodes) < 6
        assert key_bytes(target, length, nodes) == target.num_layers * slot * int(
            visible.any(0).sum()
        )


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "some"}, "drafter.cache=some: choose from full, window"),
        ({"weights": "int2"}, "drafter.weights=int2: choose from"),
        ({"cache": "full"}, "drafter.cache=full: with drafter.weights=full"),
        ({"cache": "window", "budget": 4}, "drafter.budget=4: use 5 or more"),
        ({"cache": "quest", "page": 20, "budget": 8}, "drafter.budget=8: use 20 or more"),
        ({"refresh": 0}, "drafter.refresh=0: use 1 or more"),
        (
            {"cache": "quest", "refresh": 0, "guesses": 2},
            "drafter.guesses=2: guesses would choose pages too",
        ),
        ({"guesses": -1}, "drafter.guesses=-1: use 0 or more"),
        (
            {"helper": "ngram"},
            "drafter.helper: it guesses what a draft step runs; give drafter.guesses",
        ),
        ({"cache": "merged", "merge": 0.6}, "drafter.merge=0.6: only every other token"),
        (
            {"cache": "sink4", "group": 4, "outliers": 5},
            "drafter.outliers=5: a group has drafter.group=4",
        ),
    ],
)
def test_mistakes_are_named(shallow: Target, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SelfDraft(shallow, **options)


def test_the_refusal_names_the_choice(shallow: Target) -> None:
    """Training a drafter without weights is refused under the name that a command would use."""
    no_tokens = torch.zeros(1, 0, dtype=torch.int64)
    with pytest.raises(
        UserError,
        match="^drafter=self: it has nothing to train; score it with spectrain eval drafter=self$",
    ):
        SelfDraft(shallow).loss(Batch(no_tokens, no_tokens.bool()), shallow, TrainingState())


@pytest.mark.parametrize(
    ("name", "reason"), [("lfm2", "are recurrent"), ("llama4_text", "attend within chunks")]
)
def test_targets_that_cannot_are_refused(
    tmp_path: Any, tiny: Target, name: str, reason: str
) -> None:
    """Targets with recurrent layers or with chunked attention are refused with the reason."""
    architectures.save_small(name, tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=reason):
        SelfDraft(load_hf(str(tmp_path), device="cpu"))
