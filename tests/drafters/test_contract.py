"""Every drafter of conf/drafter, variants of some, and two toys, through the same trainer,
engine, save and reload.
"""

import copy
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from spectrain.config.build import build
from spectrain.config.choices import choice_files, conf_folders, load_yaml
from spectrain.config.spec import RunSpec
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.decoding.replay import record_answers, replay
from spectrain.decoding.session import Session
from spectrain.drafters.base import Drafter, TrainingState, stage_at
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest
from spectrain.features.live_source import LiveSource
from spectrain.models.lora import find_lora_layers
from spectrain.models.target import Target
from spectrain.runs.drafters import load_weights, save_drafter
from spectrain.runs.folder import find_shipped
from spectrain.runs.init_drafter import is_trainable
from spectrain.training import validation
from spectrain.training.adapters import LoraAdapter, merge_adapters
from spectrain.training.checkpoints import select_trained_groups
from spectrain.training.trainer import Trainer
from spectrain.trees import Chain, Eagle2, TreeBuilder
from spectrain.trees.base import PlanOptions, Prefix, RoundPlan, RoundPolicy
from tests.decoding.rounds import Keeping
from tests.targets import cut_tiny

from .toys import FrozenHeads, Independent

FILES = choice_files("drafter", conf_folders())
FAMILIES = sorted(name for name in FILES if find_shipped(name) is None)
MISSING = {"gated_lora"} - {*FAMILIES}
EAGLE3 = {"vocab_size": 512, "ttt_steps": 3}
SMALL: dict[str, dict[str, Any]] = {
    "eagle3": EAGLE3, "hybrid": {"inner": {"choice": "eagle3", **EAGLE3}},
    "peagle": {"num_layers": 2},
    "dflash": {"num_layers": 2, "block_size": 4}, "dspark": {"num_layers": 2, "block_size": 4},
    "dflash2": {"num_layers": 2, "block_size": 4},
    "respec": {"inner": {"choice": "eagle3", **EAGLE3}},
    "graft": {"inner": {"choice": "eagle3", **EAGLE3}, "prune": 0.001},
    **{name: {"inner": {"choice": "causal", "num_layers": 1}} for name in ("graph", "ouroboros",
        "other_device")},
    "specdec": {"num_drafts": 3}, "prompt_variants": {"num_layers": 1}, "pruned_images": EAGLE3,
    "supernet": {**EAGLE3, "num_layers": 2, "depth": 2},
    "domino": {"num_layers": 1, "block_size": 4, "gru_width": 16, "rank": 8},
    "blockwise": {"inner": {"choice": "medusa", "vocab_size": 512}},
    "cerberus": {"vocab_size": 512},
    "mixture": {"vocab_size": 512, "layers": [1, 3]},
    "xpress": {"num_layers": 1, "block_size": 4, "rank": 8},
    "lilicorr": {"num_layers": 1, "block_size": 4, "correction_width": 16, "correction_heads": 2,
        "factor_width": 8},
}  # fmt: skip
ARCHITECTURE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa lora distilled": ("medusa", {"adapt": "lora", "self_distillation": True}),
    "medusa full": ("medusa", {"adapt": "full"}),
    "transformer heads lora": ("transformer_heads", {"adapt": "lora", "num_heads": 2}),
    "early exit lora": ("early_exit", {"adapt": "lora", "rotate": 2}),
    "early exit gradual": (
        "early_exit",
        {"curriculum": "gradual", "dropout_schedule": "exponential"},
    ),
    "hybrid over heads": ("hybrid", {"inner": {"choice": "medusa", "num_heads": 2}}),
    "hybrid over an exit": ("hybrid", {"inner": "early_exit"}),
    "hybrid over a model": ("hybrid", {"inner": {"choice": "causal", "num_layers": 1}}),
    "hybrid over masks": ("hybrid", {"inner": "gated_lora"}),
    "uno with tiles": ("uno", {"consistency": 0.0, "tiles": [2, 4]}),
    "probed masks": (
        "gated_lora",
        {"strategy": "apart", "sampler": False, "noise": "mean", "rank": 0},
    ),
    "pard2": ("pard", {"num_layers": 1, "layers": [1, 3], "confidence": True}),
    "skipping the middle": ("layer_skip", {"skipped": [1]}),
    "eagle3 with norms": (
        "eagle3",
        {
            "architecture": {
                "norm_before_residual": True,
                "norm_before_fc": True,
                "norm_output": True,
            }
        },
    ),
    "eagle3 apart": (
        "eagle3",
        {"architecture": {"fc_norm": True, "own_embedding": True, "num_attention_heads": 2}},
    ),
    "eagle3 of two layers": (
        "eagle3",
        {"num_layers": 2, "window": 6, "architecture": {"qk_norm": True}},
    ),
    "peagle of one layer": (
        "peagle",
        {"num_layers": 1, "own_embedding": False, "window": 6, "architecture": {"qk_norm": True}},
    ),
    "hydra prefix": ("hydra", {"prefix_attention": True}),
    "causal architecture": ("causal", {"architecture": ARCHITECTURE}),
    "causal padded": ("causal", {"architecture": {**ARCHITECTURE, "vocab_size": 2112}}),
    "causal with a stop head": ("causal", {"num_layers": 1, "stop_head": 1}),
    "eagle3 with a slim head": ("eagle3", {"head_rank": 16}),
    "hydra with slim heads": ("hydra", {"head_rank": 16}),
    "hidden transfer": ("hidden_transfer", {"rank": 0, "sampler": False, "consistency": 0.0}),
    "speculative streaming": ("speculative_streaming", {"sampler": False, "consistency": 0.0}),
    "ppd": (
        "ppd",
        {"ensembles": 2, "num_hosts": 3, "rank": 0, "sampler": False, "step_decay": 0.8},
    ),
}
# A family of a package that is not installed has no variants.
VARIANTS = {
    name: (family, options)
    for name, (family, options) in VARIANTS.items()
    if family in FAMILIES and str(options.get("inner")) not in MISSING
}
# Families of which no validation can judge a draft: one judges drafts of others, and two draft in
# their own verification.
UNJUDGED = {"blockwise", "draft_judge", "jacobi"}
TOYS: dict[str, type[Drafter]] = {"frozen heads": FrozenHeads, "independent": Independent}


class AlternatingPolicy(RoundPolicy):
    """Drafts in two of five rounds in a row, and in one more."""

    decides_to_draft = True
    num_rounds = 0

    def plan(self, prefix: Prefix, options: PlanOptions) -> RoundPlan:
        self.num_rounds += 1
        return RoundPlan(runs_drafter=self.num_rounds % 5 in (2, 3, 0))


class Alternating(Eagle2):
    """A builder that drafts in some rounds, two of them in a row, and makes plain steps of the
    others.
    """

    def __init__(self, depth: int, budget: int, top_k: int) -> None:
        super().__init__(depth, budget, top_k)
        self.round_policy = AlternatingPolicy()


@cache
def composed(*overrides: str) -> Any:
    """Compose the settings of a command, which nothing here changes."""
    with initialize_config_module("spectrain.conf", version_base="1.3"):
        return compose("train", overrides=list(overrides))


@cache
def read_settings(family: str) -> dict[str, Any]:
    """Read a family's yaml, with its references resolved; that a command composes the same is
    tested with all of conf/.
    """
    return {**OmegaConf.create({"drafter": load_yaml(FILES[family])}).drafter}


@cache
def get_shared_target() -> Target:
    return cut_tiny(3)


@cache
def make_prompts() -> list[list[int]]:
    """Return three random prompts of unequal length."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(3, 2000, (length,), generator=draw).tolist() for length in (5, 9, 2)]


@cache
def decode_alone(prompt: int) -> list[int]:
    """Return ten greedy tokens after a prompt, without a drafter."""
    prompts = [make_prompts()[prompt]]
    return decode(get_shared_target(), prompts, Greedy(), 10, ignore_eos=True)[0].output


def make(name: str, target: Target) -> Drafter:
    """Make a drafter by the name of its yaml or of a variant, or one of the toys."""
    torch.manual_seed(0)
    if name in TOYS:
        return TOYS[name](target)  # type: ignore[call-arg]
    family, options = VARIANTS.get(name, (name, {}))
    settings = {**read_settings(family), **SMALL.get(family, {}), **options}
    drafter: Drafter = build(settings, target=target)
    return drafter


def make_conversations(count: int = 4) -> Dataset:
    """Make short sequences of which the second half is the assistant's."""
    rows = torch.randint(3, 60, (count, 20)).tolist()
    return Dataset(
        [Example(row[: 20 - n], [i >= 8 for i in range(20 - n)]) for n, row in enumerate(rows)],
        count,
        0,
        0,
    )


def each(*halves: int, toys: bool = True) -> list[Any]:
    """List every family, toys if `toys`, and these halves of the variants; the other variants
    are slow.
    """
    variants = [
        pytest.param(name, marks=() if n % 2 in halves else pytest.mark.slow)
        for n, name in enumerate(VARIANTS)
    ]
    return [*FAMILIES, *(TOYS if toys else ()), *variants]


@pytest.fixture(scope="module", params=[*FAMILIES, *VARIANTS, *TOYS])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def target() -> Target:
    """A target of the test's own, for a drafter may train it."""
    return copy.deepcopy(get_shared_target())


def prepare_drafter(name: str, target: Target) -> tuple[Drafter, Dataset]:
    dataset = make_conversations()
    drafter = make(name, target)
    drafter.prepare(target, dataset.token_counts(target.head.vocab_size))
    return drafter, dataset


@pytest.fixture(scope="module")
def trained_pair(name: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Drafter, Target]:
    """A drafter after three steps, and the target that it was trained for."""
    target = copy.deepcopy(get_shared_target())
    drafter, dataset = prepare_drafter(name, target)
    if is_trainable(drafter):
        trainer = Trainer(lr=3e-3, max_steps=3, batch_tokens=512)
        trainer.fit(drafter, target, dataset, LiveSource(), tmp_path_factory.mktemp("contract"))
    return drafter, target


def test_nestable_drafters_leave_verification_to_the_target(name: str) -> None:
    """A drafter inside another one is not called to verify, so one with a verification of its
    own is not nestable.
    """
    drafter = make(name, get_shared_target())
    assert not drafter.capabilities.nestable or type(drafter).verify is Drafter.verify


@pytest.mark.parametrize("name", each(toys=False), indirect=True)
def test_a_drafter_from_features_needs_no_target(name: str) -> None:
    """With recorded features it drafts what it drafts while the target runs the same tokens;
    others say that they cannot.
    """
    target = copy.deepcopy(get_shared_target())
    drafter = make(name, target)
    if not drafter.capabilities.drafts_from_features or not is_trainable(drafter):
        return
    drafter.eval().prepare(target, make_conversations().token_counts(target.head.vocab_size))
    texts = record_answers(target, [list(range(3, 11)), list(range(20, 25))], 6, drafter.layers)
    recorded = replay(target, drafter, texts, 3)
    drafter.capabilities = replace(drafter.capabilities, drafts_from_features=False)
    rerun = replay(target, drafter, texts, 3)
    assert torch.equal(recorded.is_judged, rerun.is_judged)
    assert torch.allclose(recorded.overlaps, rerun.overlaps, atol=2e-4)


def stages(drafter: Drafter, num_steps: int) -> list[int]:
    """Return the stage of every step."""
    return [stage_at(drafter.stages, step, num_steps) for step in range(num_steps)]


def test_gradients_reach_exactly_the_named_parameters(name: str, target: Target) -> None:
    """In every stage the loss is finite, and every parameter of its groups, and no other, gets a
    gradient.
    """
    drafter, dataset = prepare_drafter(name, target)
    if not is_trainable(drafter):
        return
    for stage in sorted(set(stages(drafter, 8))):
        select_trained_groups(drafter, target, stage)
        drafter.zero_grad()
        target.zero_grad()
        layers = drafter.stages[stage].layers
        batch = LiveSource().make_batch(BatchRequest(dataset[[0, 1]], target, layers))
        assert (batch.features is None) == (layers == ())
        losses = drafter(batch, target, TrainingState())
        losses.total.backward()
        assert torch.isfinite(losses.total)
        named = {id(p) for group in drafter.stages[stage].groups for p in group["params"]}
        for parameter in [*drafter.parameters(), *target.parameters()]:
            assert (parameter.grad is not None) == (id(parameter) in named)


@pytest.mark.sweep(4, free=("name",))
@pytest.mark.parametrize("name", each(), indirect=True)
def test_loss_falls(name: str, target: Target, tmp_path: Path) -> None:
    """Twenty steps on a few sequences lower the loss in every stage."""
    drafter, dataset = prepare_drafter(name, target)
    if not is_trainable(drafter):
        return
    losses_by_stage: dict[int, list[float]] = {}
    step_stages = stages(drafter, 20)
    Trainer(lr="auto", max_steps=20, batch_tokens=512, log_every=1).fit(
        drafter, target, dataset, LiveSource(), tmp_path
    )
    for stage, line in zip(
        step_stages, (tmp_path / "metrics.jsonl").read_text().splitlines(), strict=True
    ):
        losses_by_stage.setdefault(stage, []).append(json.loads(line)["loss"])
    for losses in losses_by_stage.values():
        assert losses[-1] < 0.9 * losses[0]


@pytest.mark.sweep(4, free=("name",))
@pytest.mark.parametrize("name", FAMILIES, indirect=True)
def test_a_training_says_what_it_added_to_its_start(
    name: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a setting, the drafter is measured before step 1 and after the last one, at the
    same places, and the result says what was added. Nothing is said of a family of which no
    draft can be judged.
    """
    monkeypatch.setattr(validation, "ANSWER_TOKENS", 4)
    monkeypatch.setattr(validation, "MIN_PLACES", 8)
    drafter, dataset = prepare_drafter(name, target)
    if not is_trainable(drafter):
        return
    dataset = replace(dataset, held_out=make_conversations(2).examples)
    result = Trainer(max_steps=1, batch_tokens=512).fit(
        drafter, target, dataset, LiveSource(), tmp_path
    )
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    before, after = line["held_out_at_start"], line["held_out"]
    assert before["places"] == after["places"]
    gain = result.gain
    if name in UNJUDGED:
        assert gain is None and not after["places"]
        return
    assert gain is not None and gain.num_places == sum(after["places"]) > 0
    assert (gain.start, gain.last) == (before["forecast"], after["forecast"])
    assert gain.interval is not None and gain.describe().startswith("Training ")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", each(0), indirect=True)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "builder",
    [Chain(3), Eagle2(3, 8, 3), Alternating(3, 8, 3)],
    ids=["chain", "eagle2", "alternating"],
)
def test_drafted_equals_greedy(name: str, target: Target, batch: int, builder: TreeBuilder) -> None:
    """Greedy drafted output equals greedy autoregressive output, from well-formed trees rooted at
    the newest token, also where some rounds are plain steps."""
    drafter, _ = prepare_drafter(name, target)
    drafter.eval()
    recorder = Keeping(builder)
    session = Session(target, Greedy(), drafter, recorder)
    generations = session.decode(make_prompts()[:batch], 10, ignore_eos=True)
    assert [generation.output for generation in generations] == [*map(decode_alone, range(batch))]
    assert recorder.trees


@pytest.mark.sweep(8, free=("name",))
@pytest.mark.parametrize("name", each(1), indirect=True)
def test_reloaded_equals_saved(
    name: str, trained_pair: tuple[Drafter, Target], tmp_path: Path
) -> None:
    """A drafter that was trained, saved and loaded has the same weights, bit by bit, and drafts
    the same.
    """
    drafter, target = trained_pair
    save_drafter(
        tmp_path / "drafter", drafter, RunSpec.from_nodes(composed("drafter=ngram", "target=tiny"))
    )
    if drafter.capabilities.target_training:
        target.save(tmp_path / "target")
        reloaded_target = build(
            {"_target_": "spectrain.models.loading.load_hf", "model": str(tmp_path / "target")}
        )
    else:
        reloaded_target = target
    reloaded = make(name, reloaded_target)
    load_weights(reloaded, tmp_path / "drafter")
    first = drafter.state_dict()
    second = reloaded.state_dict()
    assert first.keys() == second.keys() and all(
        torch.equal(first[key], second[key]) for key in first
    )
    if not drafter.capabilities.target_training:  # a trained target is saved in its own dtype
        prompts = [[5, 6, 7, 8, 5, 6]]
        lengths = [
            decode(reloaded_target, prompts, Greedy(), 8, d.eval(), Chain(3))[0].round_lengths
            for d in (drafter, reloaded)
        ]
        assert lengths[0] == lengths[1]


@pytest.mark.sweep(14, free=("name",))
@pytest.mark.parametrize("name", each(1), indirect=True)
def test_target_is_untouched(trained_pair: tuple[Drafter, Target]) -> None:
    """Training changes the target's weights only if the drafter declares it."""
    drafter, target = trained_pair
    before = get_shared_target().model.state_dict()
    changed = [
        key
        for key, value in target.model.state_dict().items()
        if not torch.equal(value, before[key])
    ]
    assert bool(changed) == bool(drafter.capabilities.target_training)


@pytest.mark.sweep(4, free=("name",))
@pytest.mark.parametrize("name", each(1, toys=False), indirect=True)
def test_merged_adapters_equal_the_adapted_drafter(name: str, target: Target) -> None:
    """Only adapters get gradients; merged into the weights, under the names of before, they give
    the same losses and drafts. Other families refuse an adapter."""
    drafter, dataset = prepare_drafter(name, target)
    names = [*drafter.state_dict()]
    try:
        LoraAdapter(rank=4, alpha=8.0).adapt_drafter(drafter, target.head.vocab_size)
    except UserError as refusal:
        assert "leave adapter out" in str(refusal)
        return
    for layer in find_lora_layers(drafter):
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    results = []
    for merge in (False, True):
        drafter.train()
        total = 0.0
        for stage in range(len(drafter.stages)):
            parameters = [
                p
                for group in select_trained_groups(drafter, target, stage)
                for p in group["params"]
            ]
            layers = drafter.stages[stage].layers
            losses = drafter(
                LiveSource().make_batch(BatchRequest(dataset[[0, 1]], target, layers)),
                target,
                TrainingState(),
            )
            if not merge:
                losses.total.backward()
                with_gradient = {key for key, p in drafter.named_parameters() if p.grad is not None}
                assert {
                    key
                    for key, p in drafter.named_parameters()
                    if any(p is parameter for parameter in parameters)
                } == with_gradient
            total += float(losses.total.detach())
        results.append(
            (
                total,
                decode(target, [[5, 6, 7, 8, 5, 6]], Greedy(), 8, drafter.eval(), Chain(3))[
                    0
                ].round_lengths,
            )
        )
        merge_adapters(drafter)
    assert [*drafter.state_dict()] == names and results[0][1] == results[1][1]
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-6)
