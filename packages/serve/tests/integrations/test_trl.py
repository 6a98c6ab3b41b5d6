"""A drafter that learns beside a policy: rollouts are those without drafts, the policy is as it
was, and only a proven candidate drafts.
"""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoModelForCausalLM

from spectrain.decoding.acceptance import Match
from spectrain.decoding.loop import decode
from spectrain.errors import RunError, UserError
from spectrain.models.loading import load_hf
from spectrain.models.target import Target
from spectrain_serve.integrations.learner import (
    DrafterLearner,
    DrafterLearningSettings,
    RolloutSampling,
)
from spectrain_serve.integrations.policy import make_policy_target
from spectrain_serve.integrations.process_state import preserve_process_state
from spectrain_serve.integrations.rollouts import RolloutStore
from spectrain_serve.integrations.trl import DrafterCallback, make_settings, read_sampling
from spectrain_serve.promotion import PairedGain, PromotionProof
from tests.export.small_targets import save_random

PROMPTS = [[{"role": "user", "content": f"Say {number}."}] for number in range(48)]
GAIN = PairedGain(16, 1.5, 1.8, 0.2, [0.1, 0.3], 16)


@pytest.fixture(scope="module")
def drafter_folder(shallow: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafters") / "eagle3"
    save_random(folder, shallow, "eagle3")
    return folder


@pytest.fixture
def policy(shallow_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(shallow_folder, dtype=torch.float32).train()


def make_args(**changes: Any) -> Any:
    """Return settings as those of TRL's GRPOConfig."""
    plain = {
        "world_size": 1,
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "generation_kwargs": None,
        "chat_template_kwargs": None,
        "max_completion_length": 6,
        "seed": 3,
    }
    return SimpleNamespace(**{**plain, **changes})


def make_trainer(policy: Any, target: Target) -> Any:
    """Return what stands in for TRL's trainer."""
    state = SimpleNamespace(global_step=0)
    return SimpleNamespace(
        args=make_args(), processing_class=target.tokenizer, model=policy, state=state
    )


def run_step(callback: DrafterCallback, trainer: Any, step: int) -> list[list[int]]:
    """Let a stand-in trainer write rollouts and end a step; return the rollouts."""
    given = {"model": trainer.model, "processing_class": trainer.processing_class}
    if step == 1:
        callback.on_train_begin(trainer.args, trainer.state, None, **given)
    rollouts: list[list[int]] = callback.generate_rollouts(PROMPTS, trainer)["completion_ids"]
    trainer.state.global_step = step
    callback.on_step_end(trainer.args, trainer.state, None, **given)
    return rollouts


def read_ledger(callback: DrafterCallback) -> list[dict[str, Any]]:
    text = (callback.learner.folder / "ledger.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_rollouts_are_those_of_the_changed_policy_without_drafts(
    drafter_folder: Path, policy: Any, shallow: Target, tmp_path: Path
) -> None:
    """Before and after the policy's weights have changed in place, as an optimizer changes them."""
    callback = DrafterCallback(drafter_folder, tmp_path / "rl", every=0)
    trainer = make_trainer(policy, shallow)
    rule = Match(0.7, seed=3)
    outputs = []
    for number in range(2):
        result = callback.generate_rollouts(PROMPTS, trainer)
        policy.eval().save_pretrained(tmp_path / "now")
        policy.train()
        shallow.tokenizer.save_pretrained(tmp_path / "now")
        ids = [*range(number * len(PROMPTS), (number + 1) * len(PROMPTS))]
        plain = decode(
            load_hf(str(tmp_path / "now")), result["prompt_ids"], rule, 6, sequence_ids=ids
        )
        assert result["completion_ids"] == [generation.output for generation in plain]
        outputs.append(result["completion_ids"])
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    assert outputs[0] != outputs[1]
    assert all(1 <= batch.tokens_per_forward <= 4 for batch in callback.learner.batches)


def test_learning_leaves_the_process_and_the_policy_as_they_were(
    drafter_folder: Path, policy: Any, shallow: Target, tmp_path: Path
) -> None:
    """A candidate is really trained and proven, and nothing of the policy's training changes."""
    # Earlier tests may have connected accelerate otherwise.
    with preserve_process_state():
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        policy.model.embed_tokens.weight.requires_grad_(False)
        policy.model.norm.weight.grad = torch.ones_like(policy.model.norm.weight)
        before = describe_process(policy)
        callback = DrafterCallback(
            drafter_folder, tmp_path / "rl", every=1, share=1.0, steps=1, prove_tokens=8
        )
        trainer = make_trainer(policy, shallow)
        callback.on_train_begin(trainer.args, trainer.state, None, processing_class=None)
        run_step(callback, trainer, 2)
        assert describe_process(policy) == before
        assert accelerator.mixed_precision == "bf16"
        assert accelerator.gradient_accumulation_steps == 2
    (proof,) = callback.learner.proofs
    assert proof.new.num_prompts >= 8 and proof.new.num_equal == proof.new.num_prompts
    event = read_ledger(callback)[-1]
    assert event["event"] in ("promoted", "kept for inspection") and event["train_seconds"] > 0
    assert (tmp_path / "rl/candidates/0001/run/drafter/model.safetensors").exists()
    used = callback.learner.active.is_relative_to(tmp_path)
    assert used == proof.is_promoted


def describe_process(policy: Any) -> list[Any]:
    """Return everything that a training around the callback could feel."""
    modules = [(module.training, len(module._forward_hooks)) for module in policy.modules()]
    parameters = [
        (
            parameter.requires_grad,
            parameter.grad is None,
            parameter.sum().item(),
            parameter._version,
        )
        for parameter in policy.parameters()
    ]
    generators = [
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    ]
    shared = [sorted(state._shared_state) for state in (AcceleratorState, GradientState)]
    attention = policy.config._attn_implementation
    return [modules, parameters, generators, shared, torch.get_num_threads(), attention]


def test_only_a_proven_candidate_drafts(
    drafter_folder: Path,
    policy: Any,
    shallow: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The publisher hears of promoted drafters alone, its failures and those of a candidate are
    recorded, and the next candidate continues the promoted one.
    """
    proofs = iter(
        [
            PromotionProof(GAIN, None, False, "not certain"),
            PromotionProof(GAIN, None, True, "gains"),
            RunError("the training diverged"),
        ]
    )

    def prove(*given: Any) -> PromotionProof:
        proof = next(proofs)
        if isinstance(proof, RunError):
            raise proof
        return proof

    published: list[Path] = []

    def publish(folder: Path) -> None:
        published.append(folder)
        raise RunError("the server does not answer")

    begins: list[Path] = []

    def train(learner: DrafterLearner, target: Target, folder: Path) -> Path:
        begins.append(learner.active)
        return drafter_folder

    monkeypatch.setattr(DrafterLearner, "prove", prove)
    monkeypatch.setattr(DrafterLearner, "train_candidate", train)
    monkeypatch.setattr(DrafterLearner, "is_due", lambda learner, step: True)
    callback = DrafterCallback(drafter_folder, tmp_path / "rl", publish=publish)
    trainer = make_trainer(policy, shallow)
    for step in (1, 2, 3):
        run_step(callback, trainer, step)
    events = [line["event"] for line in read_ledger(callback) if line["event"] != "rollouts"]
    assert events == ["kept for inspection", "not published", "promoted", "failed"]
    assert published == [drafter_folder] and len(begins) == 3
    batches = [line for line in read_ledger(callback) if line["event"] == "rollouts"]
    assert [line["drafter"] for line in batches] == [0, 0, 1]


def test_a_candidate_waits_for_its_share_of_the_time(drafter_folder: Path, tmp_path: Path) -> None:
    learner = DrafterLearner(drafter_folder, tmp_path, DrafterLearningSettings(every=10, share=0.1))
    learner.store.num_new = 1
    learner.store.held_out = {str(number): [number] for number in range(8)}
    learner.began -= 100
    assert learner.is_due(10) and not learner.is_due(11)
    learner.spent_seconds = 6.0
    learner.last_seconds = 3.0
    assert learner.is_due(10)
    learner.last_seconds = 5.0
    assert not learner.is_due(10)
    learner.last_seconds = 0.0
    learner.store.num_new = 0
    assert not learner.is_due(10)


def test_held_out_prompts_are_never_trained_on() -> None:
    store = RolloutStore(40, 8)
    prompts = [[number, number + 1] for number in range(100)]
    for prompt in prompts * 2:
        store.add(prompt, [1, 2, 3])
    trained = [example.prompt for example in store.recent]
    assert len(trained) == 40 and len(store.held_out) == 8
    assert not [prompt for prompt in store.held_out_prompts if prompt in trained]
    store.add([7], [1])
    assert store.num_new == 2 * (len(prompts) - count_held_out(prompts))


def count_held_out(prompts: list[list[int]]) -> int:
    """Count the prompts that a store without limits holds out."""
    store = RolloutStore(1000, 1000)
    for prompt in prompts:
        store.add(prompt, [1, 2])
    return len(store.held_out)


def test_recorded_rewards_are_the_rewards(
    drafter_folder: Path, policy: Any, shallow: Target, tmp_path: Path
) -> None:
    """Where another engine writes the rollouts, the reward function gives them to the store."""
    callback = DrafterCallback(drafter_folder, tmp_path / "rl", every=0)
    trainer = make_trainer(policy, shallow)
    callback.on_train_begin(trainer.args, trainer.state, None, processing_class=shallow.tokenizer)

    def reward(completion_ids: list[list[int]], **given: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    judge = callback.record_rollouts(reward)
    answers = [[number + 5, 6, 7] for number in range(len(PROMPTS))]
    assert judge(prompts=PROMPTS, completions=[], completion_ids=answers) == [3.0] * len(PROMPTS)
    store = callback.learner.store
    assert len(store.recent) + len(store.held_out) == len(PROMPTS)
    drawn = callback.generate_rollouts(PROMPTS[:1], trainer)["prompt_ids"][0]
    assert drawn in [*store.held_out_prompts, *(example.prompt for example in store.recent)]
    assert judge.__name__ == "reward"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"min_p": 0.1}, "min_p=0.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs"),
    ],
)
def test_sampling_that_drafts_cannot_keep_is_refused(changes: dict[str, Any], words: str) -> None:
    assert read_sampling(make_args(top_k=5)) == RolloutSampling(0.7, 5, 1.0, 3)
    with pytest.raises(UserError, match=words):
        read_sampling(make_args(**changes))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"evry": 3}, "evry: there is no such setting"),
        ({"share": 2}, "share=2: use at most 1"),
        ({"depth": 0}, "depth=0: use a number of at least 1"),
        ({"held_out": "8"}, "held_out=8: use a number"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_settings(settings)


def test_trainings_that_it_does_not_serve_are_refused(
    drafter_folder: Path, policy: Any, shallow: Target, tmp_path: Path
) -> None:
    callback = DrafterCallback(drafter_folder, tmp_path / "rl")
    with pytest.raises(UserError, match="2 processes train the policy"):
        callback.on_train_begin(make_args(world_size=2), None, None)
    spec = callback.learner.make_spec()
    policy.peft_config = {}
    with pytest.raises(UserError, match="it has adapters"):
        make_policy_target(spec, policy)
    del policy.peft_config
    del policy.model.layers[2]
    with pytest.raises(UserError, match=r"model\.layers\.2.* of one of the two only"):
        make_policy_target(spec, policy)
    trainer = make_trainer(policy, shallow)
    images = [[{"role": "user", "content": [{"type": "image"}]}]]
    with pytest.raises(UserError, match="other content than text"):
        callback.generate_rollouts(images, trainer)
    (tmp_path / "rl").mkdir()
    (tmp_path / "rl/ledger.jsonl").write_text("")
    with pytest.raises(UserError, match="a drafter has learned there"):
        DrafterCallback(drafter_folder, tmp_path / "rl")


def run_grpo(
    folder: Path, policy: Any, tokenizer: Any, drafter: Path, way: str
) -> tuple[list[float], dict[str, torch.Tensor], DrafterCallback | None]:
    """Train by TRL's GRPO; return the rewards by step, the weights, and the callback.

    Ways: without the callback (plain), with the rollouts of TRL's generator recorded (recorded),
    drafted by a drafter that stays (static), or by one that learns (learning).
    """
    trl = pytest.importorskip("trl", reason="pip install spectrain-serve[trl]")
    from datasets import Dataset

    def reward(completion_ids: list[list[int]], **given: Any) -> list[float]:
        return [-len(set(ids)) / len(ids) for ids in completion_ids]

    callback = None
    options: dict[str, Any] = {"reward_funcs": reward}
    if way != "plain":
        settings = {"every": 2 if way in ("learning", "recorded") else 0, "steps": 2, "share": 1.0}
        callback = DrafterCallback(drafter, folder / f"drafter-{way}", prove_tokens=8, **settings)
        options["callbacks"] = [callback]
    if way == "recorded":
        assert callback is not None
        options["reward_funcs"] = callback.record_rollouts(reward)
    elif callback is not None:
        options["rollout_func"] = callback.generate_rollouts
    args = trl.GRPOConfig(
        output_dir=str(folder / way),
        max_steps=6,
        per_device_train_batch_size=64,
        num_generations=2,
        max_completion_length=12,
        learning_rate=1e-3,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=5,
    )
    data = Dataset.from_dict({"prompt": PROMPTS * 2})
    trainer = trl.GRPOTrainer(
        model=policy, args=args, train_dataset=data, processing_class=tokenizer, **options
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return rewards, weights, callback


@pytest.mark.slow
@pytest.mark.parametrize("ways", [("plain", "recorded"), ("static", "learning")])
def test_the_training_of_trl_is_the_same_with_and_without_learning(
    drafter_folder: Path,
    shallow_folder: Path,
    shallow: Target,
    tmp_path: Path,
    ways: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rewards of every step and all weights at the end are equal to the last bit, by TRL's own
    generator and by drafted rollouts, also where another drafter drafts from some step on.
    """
    monkeypatch.setattr(
        "spectrain_serve.integrations.learner.decide_promotion",
        lambda gain: PromotionProof(gain, None, True, "every candidate is promoted here"),
    )
    runs = []
    for way in ways:
        policy = AutoModelForCausalLM.from_pretrained(shallow_folder, dtype=torch.float32)
        runs.append(run_grpo(tmp_path, policy, shallow.tokenizer, drafter_folder, way))
    (rewards, weights, _), (others, other_weights, callback) = runs
    assert len(rewards) == 6 and rewards == others
    assert all(torch.equal(weights[name], value) for name, value in other_weights.items())
    assert callback is not None and callback.learner.num_promoted >= 1
    assert not [line for line in read_ledger(callback) if line["event"] == "failed"]


def test_the_callback_is_imported_from_the_core() -> None:
    """Users import it by a path without the package's name; other names are no part of it."""
    assert importlib.import_module("spectrain.integrations.trl").DrafterCallback is DrafterCallback
    with pytest.raises(ImportError, match="DrafterCallbck"):
        exec("from spectrain.integrations.trl import DrafterCallbck")
