"""Medusa: the token that each head is taught, trees that follow the heads, and a target that is
trained with them.
"""

import json
import math
import shutil
import sys
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.cli.main import dispatch_command
from spectrain.config.build import GroupSpec
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.base import TrainingState, stage_at
from spectrain.drafters.medusa import Medusa
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.features import Features
from spectrain.models.forward_plan import ForwardPlan
from spectrain.models.loading import load_hf
from spectrain.models.target import Target
from spectrain.training.checkpoints import select_trained_groups
from spectrain.training.trainer import Trainer
from spectrain.trees import Auto, Chain, Eagle2, Static, TreeBuilder
from spectrain.trees.measurements import Calibration, Latency
from spectrain.trees.token_tree import TokenTree
from tests.decoding.rounds import begun, proposed
from tests.factories import add_noise
from tests.installed import load_cases
from tests.targets import cut_tiny
from tests.trees.tables import check_structure

HEADS = 3
ADAPTATIONS: dict[str, dict[str, Any]] = {
    "lora": {"adapt": "lora"},
    "distilled": {"adapt": "lora", "self_distillation": True},
    "full": {"adapt": "full"},
}
ADAPTED = pytest.mark.parametrize("options", list(ADAPTATIONS.values()), ids=list(ADAPTATIONS))


def make_drafter(target: Target, noise: float = 0.0, **options: Any) -> Medusa:
    """Make a prepared drafter; with `noise`, its weights are moved off their start."""
    torch.manual_seed(3)
    drafter = Medusa(target, **{"num_heads": HEADS, "vocab_size": 256, "rank": 4, **options})
    drafter.prepare(target, torch.randint(0, 1000, (target.head.vocab_size,)))
    add_noise(drafter.parameters(), noise)
    return drafter


def make_dataset(count: int = 6) -> Dataset:
    """Sequences of unequal length whose second half is the assistant's."""
    torch.manual_seed(5)
    rows = torch.randint(3, 2000, (count, 20)).tolist()
    return Dataset(
        [
            Example(row[: 20 - n % 5], [i >= 8 for i in range(20 - n % 5)])
            for n, row in enumerate(rows)
        ],
        count,
        0,
        0,
    )


def batch_of(target: Target, drafter: Medusa, stage: int) -> Batch:
    return LiveSource().make_batch(
        BatchRequest(make_dataset()[[0, 1, 2]], target, drafter.stages[stage].layers)
    )


@torch.no_grad()
def disturb_adapters(drafter: Medusa) -> None:
    """Give the adapters random weights, which change the target's logits."""
    assert drafter.target_training is not None
    for parameter in drafter.target_training.parameters:
        parameter.normal_(std=0.05)


# Heads


def make_cyclic_batch(shallow: Target, period: int = 11, base: int = 100) -> Batch:
    """A cycle of tokens base, base + 1, .., whose features tell the phase within the cycle and
    nothing else.
    """
    phase = torch.arange(30) % period
    final = F.one_hot(phase, shallow.width).float()[None]
    tokens = (base + phase)[None]
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, :9] = False
    return Batch(tokens, mask, Features(tokens, ("final",), final[:, :, None]))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("offset", range(7))
def test_head_k_is_taught_token_t_plus_2_plus_k(shallow: Target, offset: int, layers: int) -> None:
    """A head that predicts token t + offset of a cycle is right everywhere if offset is 2 + k,
    and nowhere else.
    """
    drafter = Medusa(shallow, num_heads=HEADS, num_layers=layers, vocab_size=256)
    with torch.no_grad():
        for head in drafter.heads:
            head.lm_head.weight.zero_()
            head.lm_head.weight[100 + (torch.arange(11) + offset) % 11, torch.arange(11)] = 30.0
    losses = drafter.loss(make_cyclic_batch(shallow), shallow, TrainingState())
    for k in range(HEADS):
        right = offset == 2 + k
        assert losses.counts[k] == 21 and losses.hits[k] == (21 if right else 0)
        assert (losses.terms[f"head{k}"] < 1e-6) if right else (losses.terms[f"head{k}"] > 100)


@pytest.mark.parametrize("position", [0, 4, 8, 9, 20, 29])
def test_only_the_assistants_tokens_carry_loss(shallow: Target, position: int) -> None:
    """With fixed features, another token at a position changes the loss if the assistant wrote
    it, and not in the prompt.
    """
    drafter = make_drafter(shallow, noise=1.0, vocab_size=2048)
    batch = make_cyclic_batch(shallow)
    tokens = batch.tokens.clone()
    tokens[0, position] = 777
    losses = [
        drafter.loss(
            Batch(t, batch.loss_mask, batch.features), shallow, TrainingState()
        ).total.item()
        for t in (batch.tokens, tokens)
    ]
    assert (losses[0] != losses[1]) == bool(batch.loss_mask[0, position])


def test_head_weights_are_powers_of_the_decay(shallow: Target) -> None:
    """The loss of head k is weighted by head_decay ** (k + 1)."""
    plain = make_drafter(shallow, noise=1.0, head_decay=1.0)
    decayed = make_drafter(shallow, noise=1.0, head_decay=0.5)
    batch = batch_of(shallow, plain, 0)
    terms = plain.loss(batch, shallow, TrainingState()).terms
    fewer = decayed.loss(batch, shallow, TrainingState()).terms
    for k in range(HEADS):
        assert fewer[f"head{k}"].item() == pytest.approx(
            0.5 ** (k + 1) * terms[f"head{k}"].item(), rel=1e-5
        )


@pytest.mark.parametrize("layers", [1, 2])
def test_heads_start_as_the_targets_own(shallow: Target, layers: int) -> None:
    """Before training every head's logits are the target's at the draft vocabulary."""
    drafter = make_drafter(shallow, num_layers=layers)
    final = shallow.features(torch.randint(3, 2000, (2, 9)), ("final",)).at_layer("final")
    for head in drafter.heads:
        torch.testing.assert_close(
            head(final), shallow.head.logits(final)[..., drafter.draft_ids], rtol=1e-5, atol=1e-4
        )


def test_heads_share_no_parameter_and_grow_apart(shallow: Target, tmp_path: Path) -> None:
    """Every parameter has its own storage, also in stacked blocks, and after one step all heads
    differ.
    """
    drafter = make_drafter(shallow, num_layers=2)
    pointers = [parameter.data_ptr() for parameter in drafter.parameters()]
    assert len(set(pointers)) == len(pointers) == HEADS * 5
    assert drafter.heads[0].blocks[0] is not drafter.heads[0].blocks[1]
    Trainer(lr=1e-3, max_steps=1).fit(drafter, shallow, make_dataset(), LiveSource(), tmp_path)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        for name, parameter in drafter.heads[first].named_parameters():
            assert not torch.equal(parameter, drafter.heads[second].get_parameter(name)), name


# Trees


def token_paths(tree: TokenTree, row: int) -> set[tuple[int, ...]]:
    """The token path of every node below the root."""
    nodes = [n for n in range(1, tree.tokens.shape[1]) if tree.valid[row, n]]
    return {tuple(tree.tokens[row, tree.ancestors[row, node]].tolist()[1:]) for node in nodes}


def head_log_probs(shallow: Target, drafter: Medusa, prompt: list[int]) -> Tensor:
    """[K, V] log q of every head after a prompt."""
    final = shallow.features(torch.tensor([prompt]), ("final",)).at_layer("final")[0, -1]
    return torch.stack([head(final) for head in drafter.heads]).log_softmax(-1)


SHAPE = [(0,), (1,), (4,), (0, 0), (0, 2), (4, 1), (0, 2, 0), (0, 2, 3)]


@pytest.mark.parametrize("kind", ["chain", "static", "eagle2"])
def test_tree_says_at_depth_d_what_head_d_says(shallow: Target, kind: str) -> None:
    """On every path the tokens at depth d are the likeliest of head d; a batch has the trees of
    its rows alone.
    """
    drafter = make_drafter(shallow, noise=1.0)
    builder: TreeBuilder = {
        "chain": Chain(3),
        "static": Static(paths=[list(path) for path in SHAPE]),
        "eagle2": Eagle2(depth=3, budget=6, top_k=5),
    }[kind]
    prompts = [[5, 6, 7, 8, 9], [40, 41]]
    with torch.no_grad():
        tree = proposed(drafter, begun(shallow, prompts, drafter, builder), builder)
    check_structure(tree)
    for row, prompt in enumerate(prompts):
        best = head_log_probs(shallow, drafter, prompt).sort(descending=True)
        tokens = drafter.draft_ids[best.indices].tolist()
        log_q = best.values.tolist()
        chosen = {"chain": [(0,), (0, 0), (0, 0, 0)], "static": SHAPE}.get(kind)
        if chosen is None:  # the five likeliest paths of all
            all_paths = [path for depth in (1, 2, 3) for path in product(range(5), repeat=depth)]
            chosen = sorted(
                all_paths, key=lambda path: -sum(log_q[d][c] for d, c in enumerate(path))
            )[:5]
        assert token_paths(tree, row) == {
            tuple(tokens[d][c] for d, c in enumerate(path)) for path in chosen
        }


def set_flat_costs(builder: TreeBuilder) -> TreeBuilder:
    """Give a builder measured times by which more drafting and verifying costs next to nothing."""
    verify = {n: 1.0 + 1e-4 * n for n in (1, 8, 64)}
    builder.prepare(
        Calibration(latency=Latency({0: verify}, {0: {n: 1e-4 for n in (1, 8, 64)}}, 1e-4))
    )
    return builder


# Cases of installed packages.
CASES = load_cases(__name__)

DEEP: list[TreeBuilder] = [
    Chain(7),
    Eagle2(6, 16, 4),
    Static(paths=[[0], [1], [0, 0], [0, 1], [0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0, 1]]),
    set_flat_costs(Auto(6, 16, 4)),
    *CASES.get("DEEP", ()),
]


@pytest.fixture(scope="module")
def fitted_drafter(
    shallow: Target, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Medusa, list[list[int]], list[list[int]]]:
    """Return a drafter fitted to the target's greedy answers, the prompts, and the answers."""
    torch.manual_seed(1)
    prompts = [torch.randint(3, 2000, (length,)).tolist() for length in (9, 4, 6)]
    answers = [
        decode(shallow, [prompt], Greedy(), 16, ignore_eos=True)[0].output for prompt in prompts
    ]
    rows = [Example(p + a, [False] * len(p) + [True] * len(a)) for p, a in zip(prompts, answers)]
    drafter = make_drafter(shallow, vocab_size=2048)
    run = tmp_path_factory.mktemp("fit")
    Trainer(lr=3e-3, max_steps=40, warmup=0.0).fit(
        drafter, shallow, Dataset(rows, 3, 0, 0), LiveSource(), run
    )
    return drafter.eval(), prompts, answers


@pytest.mark.sweep(4)
@pytest.mark.parametrize("builder", DEEP, ids=lambda builder: builder.name)
def test_trees_end_at_the_last_head_and_stay_lossless(
    shallow: Target,
    fitted_drafter: tuple[Medusa, list[list[int]], list[list[int]]],
    builder: TreeBuilder,
) -> None:
    """A builder that would go deeper stops at the number of heads, and the output is that of
    greedy decoding.
    """
    drafter, prompts, answers = fitted_drafter
    generations = decode(shallow, prompts, Greedy(), 16, drafter, builder, ignore_eos=True)
    assert [generation.output for generation in generations] == answers
    assert (
        builder.depth > HEADS
        and max(depth for generation in generations for depth in generation.depths) == HEADS
    )
    assert max(count for generation in generations for count in generation.round_lengths) > 2


# Medusa-2


def test_stages_and_their_groups() -> None:
    """The first stage trains the heads on features; the second trains heads and target without
    features, the target at its own rate."""
    target = cut_tiny(3)
    drafter = make_drafter(target, adapt="lora", heads_first=0.3, target_lr_scale=0.1)
    assert [stage_at(drafter.stages, step, 10) for step in range(10)] == [
        0,
        0,
        0,
        1,
        1,
        1,
        1,
        1,
        1,
        1,
    ]
    assert drafter.stages[0].layers == ("final",) and drafter.stages[1].layers == ()
    assert (
        batch_of(target, drafter, 0).features is not None
        and batch_of(target, drafter, 1).features is None
    )
    heads, adapted = drafter.stages[1].groups
    assert drafter.stages[0].groups == [heads] and heads["params"] == list(drafter.parameters())
    assert (
        adapted["params"] == drafter.capabilities.target_training.parameters
        and adapted["lr_scale"] == 0.1
    )
    assert (
        len(make_drafter(target).stages) == 1
        and make_drafter(target).capabilities.target_training is None
    )


@pytest.mark.sweep(4, free=("progress", "factor"))
@pytest.mark.parametrize(("schedule", "progress", "factor"), [
    ("constant", 0.4, 1.0), ("constant", 0.7, 1.0), ("linear", 0.4, 0.0), ("linear", 0.7, 0.5),
    ("linear", 1.0, 1.0),
    ("sine", 0.4, 0.0), ("sine", 0.6, 0.5), ("sine", 0.7, math.sqrt(0.5)), ("sine", 1.0, 1.0),
])  # fmt: skip
def test_schedule_weighs_the_heads(schedule: str, progress: float, factor: float) -> None:
    """In the second stage, from progress 0.4 to 1, the heads' loss is coefficient * schedule
    times that of the first stage.
    """
    target = cut_tiny(3)
    drafter = make_drafter(
        target, noise=1.0, adapt="lora", heads_first=0.4, heads_coefficient=0.3, schedule=schedule
    )
    state = TrainingState(progress=progress)
    alone, joint = (
        drafter.loss(batch_of(target, drafter, stage), target, state) for stage in (0, 1)
    )
    assert set(alone.terms) == {"head0", "head1", "head2"} and set(joint.terms) == {
        *alone.terms,
        "language_model",
    }
    for name, term in alone.terms.items():
        assert joint.terms[name].item() == pytest.approx(
            0.3 * factor * term.item(), rel=1e-3, abs=1e-3
        )
    assert torch.equal(alone.counts, joint.counts) and torch.equal(alone.hits, joint.hits)


def test_language_model_loss_is_the_datas_cross_entropy() -> None:
    """Without self-distillation the target's own loss is the summed cross-entropy of the
    assistant's tokens.
    """
    target = cut_tiny(3)
    drafter = make_drafter(target, adapt="lora")
    disturb_adapters(drafter)
    batch = batch_of(target, drafter, 1)
    logits = target.run(batch.tokens, ForwardPlan(logits=True)).logits
    assert logits is not None
    labels = batch.tokens.masked_fill(~batch.loss_mask, -100)[:, 1:]
    expected = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    assert drafter.loss(batch, target, TrainingState()).terms[
        "language_model"
    ].item() == pytest.approx(float(expected), rel=1e-4)


def test_self_distillation_is_the_divergence_from_the_original() -> None:
    """The term is 0 while adapters change nothing, and then sum p (log p - log q), where p is
    that of an unchanged copy.
    """
    target = cut_tiny(3)
    original = cut_tiny(3)
    drafter = make_drafter(target, noise=1.0, adapt="lora", self_distillation=True)
    batch = batch_of(target, drafter, 1)
    assert drafter.loss(batch, target, TrainingState()).terms["language_model"].item() == 0.0
    disturb_adapters(drafter)
    finals = [
        model.features(batch.tokens, ("final",)).at_layer("final") for model in (original, target)
    ]
    log_p, log_q = (
        model.head.logits(final).log_softmax(-1) for model, final in zip((original, target), finals)
    )
    rows = batch.loss_mask[:, 1:]
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)[:, :-1][rows].sum()
    term = drafter.loss(batch, target, TrainingState()).terms["language_model"]
    assert term.item() == pytest.approx(float(expected), rel=1e-3) and expected > 1
    term.backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for p in drafter.stages[1].groups[1]["params"]
    )


@ADAPTED
def test_target_learns_in_the_second_stage_only(options: dict[str, Any], tmp_path: Path) -> None:
    """In stage 0 the target has no gradient and stays; in stage 1 the adapted parameters move,
    and all others stay.
    """
    target = cut_tiny(3)
    drafter = make_drafter(target, **options)
    drafter_before = [parameter.detach().clone() for parameter in drafter.parameters()]
    select_trained_groups(drafter, target, 0)
    drafter.loss(batch_of(target, drafter, 0), target, TrainingState()).total.backward()
    assert all(p.grad is None for p in target.parameters()) and all(
        p.grad is not None for p in drafter.parameters()
    )
    drafter.zero_grad()
    before = {name: parameter.detach().clone() for name, parameter in target.named_parameters()}
    learning = {id(parameter) for parameter in drafter.stages[1].groups[1]["params"]}
    adapted = {name for name, parameter in target.named_parameters() if id(parameter) in learning}
    moved: list[set[str]] = []

    def record_moved(step: int) -> None:
        moved.append(
            {
                name
                for name, parameter in target.named_parameters()
                if not torch.equal(parameter, before[name])
            }
        )

    Trainer(lr=1e-3, max_steps=6, log_every=1).fit(
        drafter, target, make_dataset(), LiveSource(), tmp_path, on_step=record_moved
    )
    assert moved[:3] == [set()] * 3 and adapted
    assert moved[3] and moved[5] == adapted
    assert all(not torch.equal(*pair) for pair in zip(drafter_before, drafter.parameters()))
    assert not drafter.stages[1].groups[1]["params"]


@ADAPTED
def test_trained_target_decodes_as_it_is_saved(options: dict[str, Any], tmp_path: Path) -> None:
    """A target that had decoded before training has, once trained, the logits of its saved copy
    and not the earlier ones.
    """
    target = cut_tiny(3)
    target.pack_weights()
    drafter = make_drafter(target, **options)
    tokens = torch.randint(3, 2000, (1, 12))
    before = target.run(tokens, ForwardPlan(logits=True)).logits
    Trainer(lr=3e-3, max_steps=4).fit(
        drafter, target, make_dataset(), LiveSource(), tmp_path / "run"
    )
    target.save(tmp_path / "target")
    after, saved = (
        model.run(tokens, ForwardPlan(logits=True)).logits
        for model in (target, load_hf(str(tmp_path / "target")))
    )
    assert before is not None and after is not None and saved is not None
    torch.testing.assert_close(after, saved, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(after, before, atol=1e-2)


def test_warm_up_starts_anew_with_the_second_stage(tmp_path: Path) -> None:
    """Rates warm up at the start of each stage on the same cosine, and the drafter is given the
    training's progress.
    """
    target = cut_tiny(3)
    drafter = make_drafter(target, adapt="lora")
    trainer = Trainer(lr=1e-3, max_steps=10, warmup=0.2, log_every=1)
    with patch.object(Medusa, "loss", autospec=True, side_effect=Medusa.loss) as loss:
        trainer.fit(drafter, target, make_dataset(), LiveSource(), tmp_path)
    assert [call.args[3] for call in loss.call_args_list] == [
        TrainingState(step, step / 10) for step in range(10)
    ]
    rates = [
        json.loads(line)["lr"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    schedule = [trainer.lr_at(step, 10) for step in range(10)]
    assert (
        rates[0] == pytest.approx(5e-4)
        and rates[1:5] == schedule[1:5]
        and rates[6:] == schedule[6:]
    )
    assert rates[5] == trainer.lr_at(5, 10, stage_start=5) == pytest.approx(schedule[5] / 2)


class Killed(Exception):
    """Stands for a kill between two steps."""


@pytest.mark.sweep(1, free=("options", "step"))
@ADAPTED
@pytest.mark.parametrize("step", [3, 4])
def test_resumed_equals_uninterrupted(options: dict[str, Any], tmp_path: Path, step: int) -> None:
    """A run killed at or after the change of stage, and resumed within warm-up, ends in the same
    weights, bit by bit.
    """
    trainer = Trainer(lr=1e-3, max_steps=6, batch_tokens=60, warmup=0.5, log_every=1, save_every=1)
    results = []
    for name in ("whole", "cut"):
        if name == "cut":

            def kill(at: int) -> None:
                if at == step:
                    raise Killed

            target = cut_tiny(3)
            with pytest.raises(Killed):
                trainer.fit(
                    make_drafter(target, **options),
                    target,
                    make_dataset(),
                    LiveSource(),
                    tmp_path / name,
                    on_step=kill,
                )
        target = cut_tiny(3)
        drafter = make_drafter(target, **options)
        trainer.fit(drafter, target, make_dataset(), LiveSource(), tmp_path / name)
        lines = [
            json.loads(line)
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        results.append(
            (
                {**drafter.state_dict(), **target.state_dict()},
                [(line["step"], line["loss"], line["lr"]) for line in lines],
            )
        )
    (uninterrupted, expected_metrics), (resumed, actual_metrics) = results
    assert uninterrupted.keys() == resumed.keys() and all(
        torch.equal(uninterrupted[key], resumed[key]) for key in uninterrupted
    )
    assert expected_metrics == actual_metrics and len(expected_metrics) == 6


WRONG = [
    ({"num_heads": 0}, "drafter.num_heads=0"),
    ({"num_layers": 0}, "drafter.num_layers=0"),
    ({"rank": 0}, "drafter.rank=0"),
    ({"heads_first": 1.0}, "drafter.heads_first=1.0"),
    ({"heads_first": -0.1}, "drafter.heads_first=-0.1"),
    ({"self_distillation": True}, "drafter.adapt=lora"),
    ({"self_distillation": True, "adapt": "full"}, "drafter.adapt=lora"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_settings_are_named(shallow: Target, options: dict[str, Any], message: str) -> None:
    """A setting out of range, and self-distillation without adapters, are refused with what to
    write instead.
    """
    with pytest.raises(UserError, match=message):
        GroupSpec("drafter", "medusa", options).build(target=shallow)


# A complete run

QUICK = ["recipe=medusa2", "drafter.vocab_size=256", "data.limit=12", "data.max_length=64",
    "data.held_out=0", "eval.limit=2",
         "eval.max_new_tokens=6", "eval.calibration_limit=1", "eval.baselines=[ngram]",
         "eval.oracle=false", "eval.repeats=1",
         "trainer.log_every=1", "trainer.max_steps=4"]  # fmt: skip


def run_training(*settings: str) -> None:
    """Run `spectrain train SETTINGS`."""
    argv = sys.argv
    try:
        dispatch_command(["train", *settings])
    finally:
        sys.argv = argv


@pytest.fixture(scope="module")
def finished_run(shallow_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short, complete run of the recipe."""
    run = tmp_path_factory.mktemp("runs") / "medusa2"
    run_training(*QUICK, "target=hf", f"target.model={shallow_folder}", f"run={run}")
    return run


def test_a_run_saves_its_target_and_scores_against_it(
    finished_run: Path, shallow_folder: Path
) -> None:
    """The trained target is saved in RUN/target and loads; drafting for it is lossless; its
    drift is in the summary.
    """
    summary = json.loads((finished_run / "eval/heldout/summary.json").read_text())
    assert summary["setting"]["target_path"] == str((finished_run / "target").resolve())
    for system in (summary, *summary["compared"].values()):
        assert system["lossless"]["identical"] == system["lossless"]["checked"] == 2
    drift = summary["target_drift"]
    assert (
        set(drift) == {"original", "trained", "agreement", "kl", "same_answers", "checked"}
        and drift["checked"] == 2
    )
    assert drift["original"]["most_likely"] == 1.0
    trained, original = (
        load_hf(folder).model.state_dict()
        for folder in (summary["setting"]["target_path"], str(shallow_folder))
    )
    changed = {key for key in original if not torch.equal(original[key], trained[key])}
    assert trained.keys() == original.keys()
    assert len(changed) == 7 * 3 and all("_proj" in key for key in changed)


@pytest.mark.slow
def test_resuming_a_finished_run_scores_it_again(finished_run: Path, shallow_folder: Path) -> None:
    """Without its score, resume=auto scores the saved drafter and target: the same acceptance
    and the same drift.
    """
    first = json.loads((finished_run / "eval/heldout/summary.json").read_text())
    weights = (finished_run / "drafter/model.safetensors").stat().st_mtime_ns
    shutil.rmtree(finished_run / "eval")
    run_training(
        *QUICK,
        "target=hf",
        f"target.model={shallow_folder}",
        f"run={finished_run}",
        "trainer.resume=auto",
    )
    second = json.loads((finished_run / "eval/heldout/summary.json").read_text())
    for key in ("acceptance_length", "acceptance_by_depth", "target_drift", "lossless"):
        assert second[key] == first[key], key
    assert second["setting"]["target_path"] == first["setting"]["target_path"]
    assert (finished_run / "drafter/model.safetensors").stat().st_mtime_ns == weights
