"""The target drafts for itself, reading less: drafts where nothing is left out, where something is, and what it reads."""

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
from spectrain.experimental.less_cache.bytes_read import BytesRead, key_bytes
from spectrain.experimental.less_cache.coded_target import load_coded
from spectrain.experimental.less_cache.drafter import SelfDraft
from spectrain.experimental.less_cache.evaluation import verification_reads
from spectrain.experimental.less_cache.key_selectors import QuestSelector, SelectionInput
from spectrain.experimental.less_cache.quantized_kv import CodedLinear, QuantizedLinear
from spectrain.features.batch import Batch
from spectrain.models import attention, kv_cache
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.loading import load_hf, load_tiny
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target
from spectrain.trees import Chain, Eagle2, TreeBuilder
from tests.decoding.rounds import begun
from tests.models import architectures

TEXTS = ("The bees find the hive. The bees find the hive and the bees", "one two three four one two three", "What is it?")
SMALL = {"choice": "causal", "num_layers": 1}
WHOLE: dict[str, dict[str, Any]] = {
    "window": {"cache": "window", "budget": 400},
    "snap": {"cache": "snap", "budget": 400},
    "quest": {"cache": "quest", "budget": 400, "page": 4},
    "quest_steps": {"cache": "quest", "budget": 400, "page": 4, "refresh": 0},
    "refreshed": {"cache": "snap", "budget": 400, "refresh": 1},
    **{name: {"cache": name, "budget": 400, "group": 4} for name in ("defensive", "compress", "signs", "clusters")},
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


# Where nothing is left out


@pytest.mark.parametrize("case", WHOLE)
def test_the_whole_text_drafts_what_the_target_says(shallow: Target, prompts: list[list[int]], case: str) -> None:
    """With a budget of the whole text every draft is kept: a round emits all of a chain and the bonus."""
    found = decode(shallow, prompts, Greedy(), 17, SelfDraft(shallow, **WHOLE[case]), Chain(3), ignore_eos=True)
    assert all(one.round_lengths == [4, 4, 4, 4] for one in found)


def windowed(tiny: Target, window: int) -> Target:
    """A random target whose layers all see their last positions alone."""
    config = MistralConfig(
        vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, sliding_window=window,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="spectrain").eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None
    return Target(model, tiny.tokenizer, "windowed", "")


@pytest.mark.parametrize("case", ["window", "snap", "quest", "compress"])
def test_window_layers_miss_nothing(tiny: Target, prompts: list[list[int]], case: str) -> None:
    """Layers that see 6 positions draft what they say from any 12 tokens: whatever is chosen, these hold the newest."""
    target = windowed(tiny, 6)
    assert {kept.range.window for kept in target.architecture.attention_layers.values()} == {6}
    options = {**LESS[case], "budget": 12, "refresh": 8}
    found = decode(target, prompts[:2], Greedy(), 17, SelfDraft(target, **options), Chain(3), ignore_eos=True)
    assert all(one.round_lengths == [4, 4, 4, 4] for one in found)


# Where something is


@pytest.mark.sweep(5, free=("case",))
@pytest.mark.parametrize("case", LESS)
@pytest.mark.parametrize("builder", [Chain(3), Eagle2(depth=3, budget=8, top_k=3)], ids=["chain", "eagle2"])
def test_drafted_equals_greedy(shallow: Target, prompts: list[list[int]], case: str, builder: TreeBuilder) -> None:
    """Texts of different lengths together, by chain and tree."""
    expected = [decode(shallow, [prompt], Greedy(), 14, ignore_eos=True)[0].output for prompt in prompts]
    drafter = SelfDraft(shallow, **LESS[case])
    for _ in range(2):  # nothing of one decoding is left to the next
        found = decode(shallow, prompts, Greedy(), 14, drafter, builder, ignore_eos=True)
        assert [one.output for one in found] == expected


def test_it_equals_generate(tiny: Target, prompts: list[list[int]]) -> None:
    """Of transformers' own model."""
    with reference_model(tiny) as model:
        expected = [generate(model, prompt, 16, tiny.stop_ids) for prompt in prompts]
    for case in ("quest", "coded"):
        found = decode(tiny, prompts, Greedy(), 16, SelfDraft(tiny, **LESS[case]), Chain(4))
        assert [one.output for one in found] == expected


def hidden_from(target: Target, context: Context, chosen: list[int]) -> Tensor:
    """What the whole target says after the root [V], if that saw these tokens of the text alone, which saw all before them."""
    length = int(context.lengths)
    cache = target.new_cache(1, length + 1)
    tokens = context.tokens[:, : length + 1]
    every = torch.ones(1, length, length, dtype=torch.bool).tril()
    target.run(tokens[:, :length], ForwardPlan(mask=every, cache=cache))
    seen = torch.zeros(1, 1, length + 1, dtype=torch.bool)
    seen[..., [*chosen, length]] = True
    plan = ForwardPlan(logits=True, positions=torch.tensor([[length]]), mask=seen, cache=cache)
    logits = target.run(tokens[:, length:], plan).logits
    assert logits is not None
    return logits[0, 0].log_softmax(-1)


def test_positions_stay_those_of_the_text(shallow: Target, prompts: list[list[int]]) -> None:
    """A draft behind sinks and a window is what the target says where all other tokens are hidden from it."""
    drafter = SelfDraft(shallow, "window", 7, sinks=2)
    context = begun(shallow, prompts[:1], drafter, Chain(3))
    draft = drafter.draft(context)
    assert draft.rollout is not None
    length = int(context.lengths)
    expected = hidden_from(shallow, context, [0, 1, *range(length - 5, length)])
    with torch.inference_mode():
        torch.testing.assert_close(draft.rollout.start()[0, 0], expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected, hidden_from(shallow, context, [*range(length)]), atol=1e-2)


@pytest.mark.parametrize("case", ["both", "coded", "window"])
def test_what_stays_is_what_a_prefill_writes(shallow: Target, prompts: list[list[int]], case: str) -> None:
    """After some rounds the target's cache holds what reading the texts at once gives: nothing that a draft computed."""
    drafter, builder = SelfDraft(shallow, **LESS[case]), Chain(3)
    runner = EagerRunner(shallow, Greedy(), drafter, builder)
    runner.prefill(make_request(shallow, prompts, 30, ignore_eos=True))
    with torch.inference_mode():
        for _ in range(4):
            runner.run_rounds(30)
        context = runner.context
        for row, length in enumerate(context.lengths.tolist()):
            fresh = shallow.new_cache(1, length)
            shallow.prefill(context.tokens[row : row + 1, :length], torch.tensor([length]), fresh, ())
            for layer in range(shallow.num_layers):
                for mine, theirs in zip(context.cache.keys_values(layer), fresh.keys_values(layer)):
                    torch.testing.assert_close(mine[row, :length], theirs[0, :length], rtol=1e-4, atol=1e-4)


def test_pages_are_selected_by_the_queries_of_each_step(shallow: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """With refresh=0 every layer of every draft step selects by its own query; what it reads is counted with each step."""
    queries: list[tuple[int, Tensor]] = []
    inner = QuestSelector.select_keys

    def recorded(self: QuestSelector, layer: int, selection: SelectionInput, counts: Tensor) -> Tensor:
        assert selection.queries is not None
        queries.append((layer, selection.queries))
        return inner(self, layer, selection, counts)

    monkeypatch.setattr(QuestSelector, "select_keys", recorded)
    prompt, read = [*range(10, 30)], []
    for depth in (1, 2):
        read.append(drafted(shallow, SelfDraft(shallow, **LESS["quest_steps"]), prompt, depth).keys)
    steps = [
        queries[: shallow.num_layers],
        queries[shallow.num_layers : 2 * shallow.num_layers],
        queries[2 * shallow.num_layers :],
    ]
    assert [layer for layer, _ in queries] == [*range(shallow.num_layers)] * 3 and read[1] > read[0]
    for first, again, second in zip(*steps):
        assert torch.equal(first[1], again[1]) and not torch.equal(first[1], second[1])


def test_one_set_of_codes_drafts_and_verifies() -> None:
    """QSpec: drafts run the target's own 4-bit codes on rounded activations, hold no weights, and leave its output."""
    target = load_coded("tiny", dtype="float32")
    assert not any(isinstance(child, nn.Linear) for child in target.layers.modules())
    codes = sum(part.numel() * part.element_size() for part in target.layers.buffers())
    assert codes < 0.65 * sum(2 * linear.in_features * linear.out_features for linear in coded_linears(target))
    prompt, drafter = [*range(10, 30)], SelfDraft(target, "full", activations="int4")
    with reference_model(target) as model:
        expected = generate(model, prompt, 12, target.stop_ids)
    (one,) = decode(target, [prompt], Greedy(), 12, drafter, Chain(3))
    assert one.output == expected and max(one.round_lengths) > 1
    assert extra_memory(target, drafter, Chain(3), Greedy(), prompt)["weights"] == 0


def coded_linears(target: Target) -> list[Any]:
    return [child for child in target.layers.modules() if isinstance(child, CodedLinear)]


def test_guesses_change_no_draft(shallow: Target) -> None:
    """Copies run along spare forwards of the drafting target, and nothing else: the same rounds, by fewer weights read."""
    prompt = [5, 6, 7, 8, 9, 10] * 3
    found, read = [], []
    for guesses in (0, 3):
        drafter = SelfDraft(shallow, "window", 12, guesses=guesses)
        (one,) = decode(shallow, [prompt], Greedy(), 30, drafter, Chain(4), ignore_eos=True)
        found.append((one.output, one.round_lengths))
        read.append(drafter.bytes_read.weights)
    assert found[0] == found[1] and read[1] < read[0]


def test_a_helper_that_is_right_saves_forwards(shallow: Target, prompts: list[list[int]]) -> None:
    """A small model drafts for the target on its reduced cache: the same rounds; where its guesses are what the target says,
    a chain of 4 takes the root's forward with three guesses and no other."""
    settings = {"cache": "window", "budget": 12, "guesses": 3}
    helped = SelfDraft(shallow, **settings, helper=SMALL)
    rounds = [
        [(one.output, one.round_lengths) for one in decode(shallow, prompts, Greedy(), 16, drafter, Chain(4), ignore_eos=True)]
        for drafter in (SelfDraft(shallow, **{**settings, "guesses": 0}), helped)
    ]
    assert rounds[0] == rounds[1]
    drafter = SelfDraft(shallow, **settings, helper=SMALL)
    context = begun(shallow, prompts[:1], drafter, Chain(4))
    with torch.inference_mode():
        tokens = Chain(4).grow(context, SelfDraft(shallow, **{**settings, "guesses": 0}).draft(context)).tokens[0, 1:].tolist()
        draft, nodes = drafter.draft(context), list[int]()
        rollout: Any = draft.rollout
        rollout.guesser.continue_paths = lambda paths, last, count: torch.tensor([[*tokens, 0, 0, 0][len(paths[0]) :][:count]])
        run = drafter.compute_log_probs
        drafter.compute_log_probs = lambda *given: nodes.append(given[1].shape[1]) or run(*given)  # type: ignore
        assert Chain(4).grow(context, draft).tokens[0, 1:].tolist() == tokens and nodes == [4]


# What it reads


@contextmanager
def handed_over(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of the keys and values that each call of attention in torch's operations is handed."""
    sizes: list[int] = []
    inner = kv_cache.tree_attention

    def measured(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        sizes.append(k.numel() * k.element_size() + v.numel() * v.element_size())
        return inner(q, k, v, *rest)

    with monkeypatch.context() as patch:
        patch.setenv("SPECTRAIN_KERNELS", "reference")
        for module in (attention, kv_cache):
            patch.setattr(module, "tree_attention", measured)
        yield sizes


def drafted(target: Target, drafter: SelfDraft, prompt: list[int], depth: int) -> BytesRead:
    """What drafting a chain in a first round reads, what choosing takes left out."""
    context = begun(target, [prompt], drafter, Chain(depth))
    with torch.inference_mode():
        draft = drafter.draft(context)
        before = drafter.bytes_read
        context.builder.grow(context, draft)
    return BytesRead(drafter.bytes_read.weights - before.weights, drafter.bytes_read.keys - before.keys)


@pytest.mark.parametrize("case", ["window", "snap", "quest", "weights8"])
def test_keys_are_counted_as_attention_is_handed_them(
    shallow: Target, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Drafting: every slot of the small cache, or of all of it, and of what was drafted."""
    drafter = SelfDraft(shallow, **LESS[case])
    context = begun(shallow, prompts[:1], drafter, Chain(3))
    with torch.inference_mode():
        draft = drafter.draft(context)
        before = drafter.bytes_read
        with handed_over(monkeypatch) as sizes:
            context.builder.grow(context, draft)
    assert len(sizes) == 3 * shallow.num_layers and drafter.bytes_read.keys - before.keys == sum(sizes)


def test_verification_is_counted_as_attention_is_handed_it(
    shallow: Target, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a whole decoding without a drafter's forwards: those of a drafter that copies."""
    from spectrain.drafters.ngram import Ngram

    with handed_over(monkeypatch) as sizes:
        (one,) = decode(shallow, prompts[:1], Greedy(), 12, Ngram(shallow), Chain(3), ignore_eos=True)
    assert verification_reads(shallow, one).keys == sum(sizes)


def test_few_bits_are_counted_as_they_are_held(shallow: Target) -> None:
    """Of a text of whole groups: all codes with their scales, and the drafted tokens as they are, in every layer."""
    prompt = [*range(10, 26)]
    drafter = SelfDraft(shallow, "int4", group=8)
    found = drafted(shallow, drafter, prompt, 2)
    assert drafter.quantized_kv is not None
    held = sum(codes.nbytes for codes in (*drafter.quantized_kv.keys.values(), *drafter.quantized_kv.values.values()))
    slot = 2 * 2 * 32 * 4  # keys and values of two heads of 32 in float32
    assert found.keys == 2 * held + (1 + 2) * slot * shallow.num_layers
    assert held == shallow.num_layers * 16 * 2 * (32 / 2 + 32 * 4 / 8 + 32 / 2 + 4)


@pytest.mark.parametrize("weights", ["full", "int4"])
def test_weights_are_counted_as_modules_read_them(
    prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, weights: Any
) -> None:
    """Every linear and norm that ran, by what it holds or by the codes in its place."""
    target, sizes = load_tiny(), []

    def hook(module: nn.Module, args: Any) -> None:
        coded = isinstance(vars(module).get("forward"), QuantizedLinear)
        if not coded and not [*module.children()] and not isinstance(module, nn.Embedding):
            sizes.extend(weight.numel() * weight.element_size() for weight in module.parameters())

    inner = QuantizedLinear.__call__

    def measured(self: QuantizedLinear, input: Tensor) -> Tensor:
        sizes.append(self.weight.nbytes)
        return inner(self, input)

    drafter = SelfDraft(target, "window", 8, weights=weights)
    drafter.drafting_weights(target)
    monkeypatch.setattr(QuantizedLinear, "__call__", measured)
    context = begun(target, prompts[:1], drafter, Chain(2))
    with torch.inference_mode():
        draft = drafter.draft(context)
        before = drafter.bytes_read
        handles = [module.register_forward_pre_hook(hook) for module in target.model.modules()]
        context.builder.grow(context, draft)
    for handle in handles:
        handle.remove()
    assert drafter.bytes_read.weights - before.weights == sum(sizes)


def test_a_window_layer_reads_what_it_reaches(tiny: Target) -> None:
    """As many slots as some node of a chain sees, by its mask."""
    target, length = windowed(tiny, 6), 20
    slot = 2 * 2 * 8 * 4
    for nodes in (1, 3, 9):
        sees = torch.arange(length + nodes) <= torch.arange(length, length + nodes)[:, None]
        sees &= torch.arange(length, length + nodes)[:, None] - torch.arange(length + nodes) < 6
        assert key_bytes(target, length, nodes) == target.num_layers * slot * int(sees.any(0).sum())


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "some"}, "drafter.cache=some: choose from full, window"),
        ({"weights": "int2"}, "drafter.weights=int2: choose from"),
        ({"cache": "full"}, "drafter.cache=full: with drafter.weights=full"),
        ({"cache": "window", "budget": 4}, "drafter.budget=4: use 5 or more"),
        ({"cache": "quest", "page": 20, "budget": 8}, "drafter.budget=8: use 20 or more"),
        ({"refresh": 0}, "drafter.refresh=0: use 1 or more"),
        ({"cache": "quest", "refresh": 0, "guesses": 2}, "drafter.guesses=2: guesses would choose pages too"),
        ({"guesses": -1}, "drafter.guesses=-1: use 0 or more"),
        ({"helper": "ngram"}, "drafter.helper: it guesses what a draft step runs; give drafter.guesses"),
        ({"cache": "merged", "merge": 0.6}, "drafter.merge=0.6: only every other token"),
        ({"cache": "sink4", "group": 4, "outliers": 5}, "drafter.outliers=5: a group has drafter.group=4"),
    ],
)
def test_mistakes_are_named(shallow: Target, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SelfDraft(shallow, **options)


def test_it_is_told_apart_from_its_class(shallow: Target) -> None:
    """What has nothing to train says so by the name that a command would use."""
    nothing = torch.zeros(1, 0, dtype=torch.int64)
    with pytest.raises(UserError, match="^drafter=self: it has nothing to train; score it with spectrain eval drafter=self$"):
        SelfDraft(shallow).loss(Batch(nothing, nothing.bool()), shallow, TrainingState())


@pytest.mark.parametrize(("name", "reason"), [("lfm2", "are recurrent"), ("llama4_text", "attend within chunks")])
def test_targets_that_cannot_are_refused(tmp_path: Any, tiny: Target, name: str, reason: str) -> None:
    """With the reason: layers that keep a state, and layers that see chunks."""
    architectures.save_small(name, tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=reason):
        SelfDraft(load_hf(str(tmp_path), device="cpu"))
