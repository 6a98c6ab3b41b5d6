"""Skipped layers: the search finds the set with the most tokens per forward, and a drafter
stores it.
"""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from spectrain.config.build import GroupSpec, build
from spectrain.config.spec import RunSpec
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.decoding.session import tune_drafter
from spectrain.drafters.base import drafting_cost
from spectrain.errors import UserError
from spectrain.models.forward_plan import ForwardPlan, LayerSpan, Sublayer, layer_index
from spectrain.models.reference_model import generate
from spectrain.models.target import Target
from spectrain.runs.drafters import load_weights, save_drafter
from spectrain.trees import Chain, Eagle2, TreeBuilder
from spectrain_research.layer_skip.drafter import (
    LayerSkipping,
    measure_agreement,
    mutate_layers,
    search_layers,
)
from spectrain_research.layer_skip.sets import pad_texts
from tests.decoding.rounds import Keeping, begun

# an output layer as large as two layers, so that leaving out more is not always worth it
VOCAB = 600
PROMPTS = [[5, 6, 7, 8], [40, 41], [9, 3, 22, 17, 30, 4]]


def pair(tiny: Target, num_layers: int, seed: int = 0) -> tuple[Target, Any]:
    """Make a random target whose layers all matter in part, and the same model of transformers'
    own.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    reference, model = (
        AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=name).eval()
        for name in ("eager", "spectrain")
    )
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if ".layers." in name and parameter.dim() > 1:
                parameter.normal_(
                    std=(0.2 + 0.4 * float(torch.rand(()))) * parameter.shape[-1] ** -0.5
                )
            elif parameter.dim() > 1:
                parameter.normal_()
    model.load_state_dict(reference.state_dict())
    return Target(model, tiny.tokenizer, "random", ""), reference


@contextmanager
def skip_layers(reference: Any, skipped: tuple[int, ...]) -> Iterator[Any]:
    """Shorten the list of layers of transformers' model."""
    layers = reference.model.layers
    reference.model.layers = nn.ModuleList(
        [layer for n, layer in enumerate(layers) if n not in skipped]
    )
    reference.config.num_hidden_layers = len(reference.model.layers)
    try:
        yield reference
    finally:
        reference.model.layers = layers
        reference.config.num_hidden_layers = len(layers)


def list_sets(num_layers: int) -> list[tuple[int, ...]]:
    """List every set that leaves something out and something in."""
    return [
        subset
        for count in range(1, num_layers)
        for subset in itertools.combinations(range(num_layers), count)
    ]


@torch.no_grad()
def compute_objectives(
    target: Target, reference: Any, depth: int, answer_tokens: int
) -> dict[frozenset[int], float]:
    """Compute tokens over forwards per round of every set, from greedy answers and shorter
    models of transformers' own.
    """
    answers = [generate(reference, prompt, answer_tokens, target.stop_ids) for prompt in PROMPTS]
    objectives = {}
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in reference.model.layers]
    head = reference.lm_head.weight.numel()
    for skipped in list_sets(target.num_layers):
        same = total = 0
        with skip_layers(reference, skipped) as shorter:
            for prompt, answer in zip(PROMPTS, answers):
                predicted = (
                    shorter(torch.tensor([prompt + answer]), use_cache=False)
                    .logits.argmax(-1)[0]
                    .tolist()
                )
                same += sum(
                    predicted[len(prompt) - 1 + n] == token for n, token in enumerate(answer)
                )
                total += len(answer)
        a = same / total
        cost = (head + sum(size for n, size in enumerate(sizes) if n not in skipped)) / (
            head + sum(sizes)
        )
        emitted = depth + 1 if a == 1 else (1 - a ** (depth + 1)) / (1 - a)
        objectives[frozenset(skipped)] = emitted / (depth * cost + 1)
    return objectives


def make_answers(
    target: Target, prompts: list[list[int]], count: int
) -> list[tuple[list[int], list[int]]]:
    """Pair prompts with the target's greedy answers, as a session gives them to a search."""
    limits = [min(count, target.max_length - len(prompt)) for prompt in prompts]
    return [
        (prompt, decode(target, [prompt], Greedy(), limit)[0].output)
        for prompt, limit in zip(prompts, limits)
    ]


def run_search(target: Target, steps: int, depth: int = 3, seed: int = 0) -> frozenset[int]:
    return search_layers(target, make_answers(target, PROMPTS, 12), depth, steps, seed)


@pytest.mark.sweep(1, free=("num_layers", "depth", "seed"))
@pytest.mark.parametrize("num_layers", [3, 4])
@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_no_set_near_the_one_found_promises_more(
    tiny: Target, num_layers: int, depth: int, seed: int
) -> None:
    """Of all sets, each measured on transformers' own model, none within two changes of it has a
    larger objective.
    """
    target, reference = pair(tiny, num_layers, seed)
    objective = compute_objectives(target, reference, depth, 12)
    chosen = run_search(target, 200, depth)
    near = {skipped for skipped in objective if len(skipped ^ chosen) <= 2}
    assert len({round(value, 6) for value in objective.values()}) > 2 and len(near) > 3
    assert objective[chosen] == pytest.approx(max(objective[skipped] for skipped in near), rel=1e-6)


def test_answers_are_the_targets_own(tiny: Target) -> None:
    """Each row is a prompt and its greedy answer, and the mask marks where the next token is the
    answer's.
    """
    target, reference = pair(tiny, 3)
    tokens, mask = pad_texts(make_answers(target, PROMPTS, 12), target.device)
    for row, prompt in enumerate(PROMPTS):
        answer = generate(reference, prompt, 12, target.stop_ids)
        assert tokens[row].tolist()[: len(prompt) + len(answer)] == prompt + answer
        assert mask[row].nonzero()[:, 0].tolist() == list(
            range(len(prompt) - 1, len(prompt) + len(answer) - 1)
        )
        assert not tokens[row, len(prompt) + len(answer) :].any()


def test_answers_end_with_the_context(tiny: Target) -> None:
    """A prompt near the target's longest context gets an answer as long as the context allows."""
    target, _ = pair(tiny, 3)
    prompt = [3 + n % 50 for n in range(60)]
    tokens, mask = pad_texts(make_answers(target, [prompt], 12), target.device)
    assert tokens.shape[1] <= 64 and 1 <= int(mask.sum()) <= 4


PLAIN = ForwardPlan()


@pytest.fixture
def measured_sets(monkeypatch: pytest.MonkeyPatch) -> list[frozenset[int]]:
    """The sets that a search measures, in order."""
    runs: list[frozenset[int]] = []
    run = Target.run

    def record_run(self: Target, tokens: torch.Tensor, plan: ForwardPlan = PLAIN) -> Any:
        if plan.span.skipped:
            runs.append(frozenset(plan.span.skipped))
        return run(self, tokens, plan)

    monkeypatch.setattr(Target, "run", record_run)
    return runs


@pytest.mark.sweep(3, free=("steps",))
@pytest.mark.parametrize("steps", [1, 2, 5, 14, 60])
def test_search_measures_as_many_sets_as_it_may(
    tiny: Target, steps: int, measured_sets: list[frozenset[int]]
) -> None:
    """A search measures `steps` of the 62 sets of six layers, none twice, none empty or full,
    and returns one of them.
    """
    target, _ = pair(tiny, 6)
    chosen = run_search(target, steps)
    assert len(measured_sets) == len(set(measured_sets)) and chosen in measured_sets
    assert all(0 < len(skipped) < 6 for skipped in measured_sets)
    assert len(measured_sets) == steps or (steps == 60 and 14 < len(measured_sets) <= 60)


def test_a_small_target_has_fewer_sets_than_steps(
    tiny: Target, measured_sets: list[frozenset[int]]
) -> None:
    """The search ends although there are fewer sets than steps; with two layers it measures
    both.
    """
    target, _ = pair(tiny, 2)
    assert run_search(target, 50) in {frozenset({0}), frozenset({1})} and set(measured_sets) == {
        frozenset({0}),
        frozenset({1}),
    }


def test_search_starts_with_the_layers_that_turn_least(
    tiny: Target, measured_sets: list[frozenset[int]]
) -> None:
    """The first sets are the layer whose output is most like its input, the two such layers, and
    so on.
    """
    target, reference = pair(tiny, 5)
    run_search(target, 8)
    likeness = [0.0] * 5
    with torch.no_grad():
        for prompt in PROMPTS:
            answer = generate(reference, prompt, 12, target.stop_ids)
            ends: list[Any] = []
            handle = reference.model.layers[-1].register_forward_hook(
                lambda m, args, output, ends=ends: ends.append(output)
            )
            states = reference(
                torch.tensor([prompt + answer]), output_hidden_states=True, use_cache=False
            ).hidden_states
            handle.remove()
            for n, (x, y) in enumerate(itertools.pairwise([*states[:-1], ends[0]])):
                likeness[n] += float(
                    torch.cosine_similarity(x[0], y[0], dim=-1)[len(prompt) - 1 : -1].sum()
                )
    order = sorted(range(5), key=lambda n: -likeness[n])
    assert measured_sets[:4] == [frozenset(order[:count]) for count in range(1, 5)]


def test_search_depends_on_nothing_but_its_seed(
    tiny: Target, measured_sets: list[frozenset[int]]
) -> None:
    """A seed measures the same sets in the same order, whatever else drew random numbers;
    another seed measures other sets.
    """
    target, _ = pair(tiny, 6)
    tried = []
    for noise, seed in ((1, 0), (2, 0), (1, 7)):
        torch.manual_seed(noise)
        measured_sets.clear()
        chosen = run_search(target, 20, seed=seed)
        tried.append((chosen, list(measured_sets)))
    assert tried[0] == tried[1] and tried[0][1] != tried[2][1]


def test_search_leaves_the_target_as_it_was(tiny: Target) -> None:
    """After a search the target's states are those of before."""
    target, _ = pair(tiny, 4)
    tokens = torch.randint(3, VOCAB, (2, 9))
    before = target.run(tokens, ForwardPlan(layers=("final",))).hidden
    run_search(target, 20)
    assert torch.equal(target.run(tokens, ForwardPlan(layers=("final",))).hidden, before)


@pytest.mark.parametrize("skipped", [[], [-1], [8], [2, 9], list(range(8)), [*range(8), 3]])
def test_wrong_sets_are_refused(tiny: Target, skipped: list[int]) -> None:
    """No layer, a layer that is not there, and all of them are refused; the message names the
    valid layers.
    """
    with pytest.raises(UserError, match=r"drafter.skipped=\[.*0 to 7 of tiny"):
        LayerSkipping(tiny, skipped=skipped)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"search_steps": 0}, "drafter.search_steps=0"),
        ({"answer_tokens": 1}, "drafter.answer_tokens=1"),
    ],
)
def test_wrong_settings_are_named(tiny: Target, options: dict[str, Any], message: str) -> None:
    """A setting out of range is refused with what to write."""
    with pytest.raises(UserError, match=message):
        LayerSkipping(tiny, **options)


def test_given_layers_are_not_searched_for(
    tiny: Target, measured_sets: list[frozenset[int]]
) -> None:
    """Given `skipped` layers do not change, and no prompt is read."""

    def prompts() -> list[list[int]]:
        raise AssertionError

    drafter = LayerSkipping(tiny, skipped=[5, 2, 5])
    tune_drafter(drafter, tiny, prompts, 3)
    assert (
        drafter.skipped == {2, 5}
        and drafter.saved.settings == {"skipped": [2, 5]}
        and not measured_sets
    )


def test_a_searched_set_is_saved_and_not_searched_again(
    tiny: Target, tmp_path: Path, measured_sets: list[frozenset[int]]
) -> None:
    """Before the search no layers are saved; after it the saved description builds a drafter
    with the same layers.
    """
    node = {
        "_target_": "spectrain_research.layer_skip.drafter.LayerSkipping",
        "search_steps": 8,
        "answer_tokens": 6,
        "seed": 3,
    }
    drafter: LayerSkipping = build(node, target=tiny)
    assert drafter.saved.settings == {}
    tune_drafter(drafter, tiny, lambda: PROMPTS, 3)
    assert drafter.skipped == search_layers(tiny, make_answers(tiny, PROMPTS, 6), 3, 8, seed=3)
    num_measured = len(measured_sets)
    save_drafter(tmp_path / "drafter", drafter, RunSpec.from_nodes({"drafter": node}))
    described = json.loads((tmp_path / "drafter/config.json").read_text())["drafter"]
    spec = GroupSpec.from_saved("drafter", described, "")
    assert spec.node == {**node, "skipped": sorted(drafter.skipped)}
    reloaded: LayerSkipping = spec.build(target=tiny)
    load_weights(reloaded, tmp_path / "drafter")
    tune_drafter(reloaded, tiny, lambda: PROMPTS, 3)
    assert reloaded.skipped == drafter.skipped and reloaded.saved.settings == drafter.saved.settings
    assert len(measured_sets) == num_measured


@pytest.mark.sweep(2, free=("skipped",))
@pytest.mark.parametrize("skipped", [[0], [7], [1, 4, 5], [0, 1, 2, 3, 4, 5, 6]])
def test_drafts_are_the_shorter_models(tiny: Target, skipped: list[int]) -> None:
    """A first round's draft is that of the target without these layers, and the output is greedy
    decoding's.
    """
    drafter = LayerSkipping(tiny, skipped=skipped).eval()
    prompt = [5, 6, 7, 8, 9]
    recorder = Keeping(Chain(3))
    out = decode(tiny, [prompt], Greedy(), 12, drafter, recorder, ignore_eos=True)[0].output
    assert out == decode(tiny, [prompt], Greedy(), 12, ignore_eos=True)[0].output
    # the prompt was read by all layers, so what is drafted first is compared on keys and values of
    # the full target
    cache = tiny.new_cache(1, 32)
    tiny.prefill(torch.tensor([prompt]), torch.tensor([len(prompt)]), cache, ())
    tokens = [out[0]]
    for _ in range(3):
        logits = tiny.run(
            torch.tensor([tokens[-1:]]),
            ForwardPlan(logits=True, cache=cache, span=LayerSpan(skipped=skipped)),
        ).logits
        assert logits is not None
        tokens.append(int(logits[0, -1].argmax()))
    assert recorder.trees[0].tokens[0].tolist() == tokens


# Halves of layers, and a search while decoding


HALVES: dict[str, list[int | str]] = {
    "attention": ["attention1"],
    "feed-forward": ["mlp2"],
    "both of one": ["attention1", "mlp1"],
    "some": [2, "mlp1", "attention0"],
}


@pytest.mark.parametrize("case", HALVES)
def test_halves_are_left_out(tiny: Target, case: str) -> None:
    """The logits are those of transformers' own model with zeros for the attention or feed-forward
    matrices that write to the residual stream, and the target is afterwards as before."""
    target, reference = pair(tiny, 4)
    skipped = LayerSkipping(target, skipped=HALVES[case]).skipped
    tokens = torch.randint(3, VOCAB, (2, 9))
    full = target.run(tokens, ForwardPlan(logits=True)).logits
    logits = target.run(tokens, ForwardPlan(logits=True, span=LayerSpan(skipped=skipped))).logits
    for part in HALVES[case]:
        layer = reference.model.layers[int(str(part)[-1])]
        for name, matrix in (("attention", layer.self_attn.o_proj), ("mlp", layer.mlp.down_proj)):
            if isinstance(part, int) or part.startswith(name):
                torch.nn.init.zeros_(matrix.weight)
    with torch.no_grad():
        expected = reference(tokens, use_cache=False).logits
    assert logits is not None and torch.allclose(logits, expected, atol=1e-4)
    restored = target.run(tokens, ForwardPlan(logits=True)).logits
    assert restored is not None and full is not None and torch.equal(restored, full)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("builder", [Chain(3), Eagle2(3, 8, 2)], ids=lambda builder: builder.name)
@pytest.mark.parametrize("case", HALVES)
def test_drafts_without_halves_are_lossless(tiny: Target, case: str, builder: TreeBuilder) -> None:
    """The greedy output is the target's, which verifies from the first layer that lacks a part:
    skipped attention leaves no hole in the cache."""
    target, _ = pair(tiny, 4)
    drafter = LayerSkipping(target, skipped=HALVES[case]).eval()
    plain = decode(target, PROMPTS, Greedy(), 16, ignore_eos=True)
    generations = decode(target, PROMPTS, Greedy(), 16, drafter, builder, ignore_eos=True)
    assert [generation.output for generation in generations] == [
        generation.output for generation in plain
    ]
    assert drafting_cost(drafter).first_verified_layer() == min(
        int(str(part)[-1]) for part in HALVES[case]
    )


@pytest.mark.parametrize("builder", [Chain(3), Eagle2(3, 8, 2)], ids=lambda builder: builder.name)
def test_a_search_while_decoding_is_lossless_and_repeatable(
    tiny: Target, builder: TreeBuilder
) -> None:
    """The output is the target's, all tries are used, first and last layer stay, and a seed
    tries the same sets.
    """
    target, _ = pair(tiny, 4)
    plain = decode(target, PROMPTS, Greedy(), 22, ignore_eos=True)
    runs = []
    for seed in (0, 0, 1):
        drafter = LayerSkipping(target, skipped=[2], tries=3, window=8, seed=seed).eval()
        torch.manual_seed(len(runs))
        generations = decode(target, PROMPTS, Greedy(), 22, drafter, builder, ignore_eos=True)
        assert [generation.output for generation in generations] == [
            generation.output for generation in plain
        ]
        assert drafter.tries == 0 and not any(
            layer_index(part) in (0, 3) for part in drafter.skipped
        )
        runs.append(
            (
                drafter.skipped,
                drafter.random.getstate(),
                [generation.round_lengths for generation in generations],
            )
        )
    assert runs[0] == runs[1] and runs[0][1] != runs[2][1]


def test_agreement_is_teacher_forced(tiny: Target) -> None:
    """Agreement is the share of newest tokens that the target without the set accepts, after the
    keys and values of the full target, row by row; the cache is then bit by bit what it was, and
    the full target accepts all of its own."""
    target, _ = pair(tiny, 4)
    texts = [
        prompt + generation.output
        for prompt, generation in zip(
            PROMPTS, decode(target, PROMPTS, Greedy(), 12, ignore_eos=True)
        )
    ]
    context = begun(target, [text[:-1] for text in texts], None, Chain(3))
    context.active[:] = True
    assert (
        context.root.tolist() == [text[-1] for text in texts] and context.cache.storage is not None
    )
    before = context.cache.storage.clone()
    lengths = context.lengths.clone()
    skipped = [Sublayer(1, "attention"), 2]
    same = 0
    for text in texts:
        cache = target.new_cache(1, 64)
        target.prefill(torch.tensor([text[:-7]]), torch.tensor([len(text) - 7]), cache, ())
        plan = ForwardPlan(logits=True, cache=cache, span=LayerSpan(skipped=skipped))
        logits = target.run(torch.tensor([text[-7:-1]]), plan).logits
        assert logits is not None
        same += int((logits.argmax(-1)[0] == torch.tensor(text[-6:])).sum())
    assert measure_agreement(context, skipped, 6) == pytest.approx(same / 18)
    assert measure_agreement(context, (), 6) == 1
    assert torch.equal(context.lengths, lengths) and context.cache.longest == int(lengths.max())
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(context.cache.storage[:, :, row, :length], before[:, :, row, :length])


def test_moves_stay_inside(tiny: Target) -> None:
    """Any number of moves skips some layer, never the first or last one, and reaches most sets
    of three layers.
    """
    random = Random(0)
    skipped = frozenset({2})
    reached = set()
    for _ in range(400):
        skipped = mutate_layers(skipped, 5, random)
        assert skipped and {layer_index(part) for part in skipped} <= {1, 2, 3}
        reached.add(skipped)
    assert len(reached) > 40  # of 63


def test_settings_say_halves(tiny: Target) -> None:
    """A set is described as it was given, sorted; both halves of a layer are the layer, as in
    earlier descriptions.
    """
    drafter = LayerSkipping(tiny, skipped=["mlp5", 3, "attention4", "mlp4", "attention2"])
    assert drafter.saved.settings == {"skipped": ["attention2", 3, 4, "mlp5"]}
    assert (
        LayerSkipping(tiny, skipped=["attention4", "mlp4"]).skipped
        == LayerSkipping(tiny, skipped=[4]).skipped
        == {4}
    )
    assert LayerSkipping(tiny, skipped=[4], tries=1).capabilities.capture is None
    for wrong in (
        ["attention8"],
        ["head1"],
        ["mlp"],
        [f"{part}{layer}" for part in ("mlp", "attention") for layer in range(8)],
    ):
        with pytest.raises(UserError, match=r"drafter.skipped=\[.*attention1"):
            LayerSkipping(tiny, skipped=wrong)
