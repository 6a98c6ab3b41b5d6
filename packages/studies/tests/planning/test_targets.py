"""Every recipe on every target whose configuration ships, targets in GGUF files, and steps that
a plan times.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrain.config.build import GroupSpec
from spectrain.errors import RunError, RunInterrupted, UserError
from spectrain.models.bundled import convert_gguf
from spectrain.models.fast import batch_invariance
from spectrain_studies.machine.trial import trial_folder
from spectrain_studies.planning import footprint
from spectrain_studies.planning.plan import plan
from tests.installed import load_cases
from tests.models.checkpoints import save_gguf_file

from .test_plan import RECIPES, ROOT, compose_plan, make_plan, needs_smollm2

SMALL = ("data.limit=2", "data.max_length=64", "trainer.batch_tokens=128")
# The parameters of each target, in billions, as its authors state them.
PARAMETERS = {
    "tiny": 0.00174,
    "smollm2": 0.1345,
    "deepseek-v3": 671.0,
    "gpt-oss-120b": 116.8,
    "llama-3.1-70b": 70.55,
    "llama-3.1-8b": 8.03,
    "qwen3-235b-a22b": 235.1,
    "qwen3-30b-a3b": 30.53,
}
# CPU seconds of a plan, which decide on the sample.
COSTS = {"tiny": 0.4, "gpt-oss-120b": 0.6}
QUANTIZED = ("deepseek-v3", "gpt-oss-120b")
REFUSED = {
    **{(recipe, "deepseek-v3"): "it cannot be cut" for recipe in ("atspeed", "gkd", "pard")},
    **{
        (recipe, target): "cannot be trained"
        for recipe in ("cllm", "joint_exits", "layerskip")
        for target in QUANTIZED
    },
    **{
        (recipe, target): "adapters cannot be added"
        for recipe in ("fine_tuned_streaming", "medusa2", "space")
        for target in QUANTIZED
    },
}
"""The recipes that a target does not allow, and what the sentence says."""


def make_target(name: str) -> GroupSpec:
    """Return the settings of a target that ships, or of one whose configuration does."""
    if name in ("tiny", "smollm2"):
        return GroupSpec("target", name)
    return GroupSpec("target", "hf", {"model": str(ROOT / "lab" / "target_configs" / name)})


@pytest.mark.sweep(8, free=("recipe",), cost=lambda recipe, target: COSTS.get(target, 1.0))
@pytest.mark.parametrize("target", PARAMETERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_planned_on_every_target(recipe: str, target: str) -> None:
    """Each plan has the target's published parameters, memory, arithmetic and hours, or is
    refused in one sentence.
    """
    if target == "smollm2":
        needs_smollm2()
    spec, options = compose_plan(f"recipe={recipe}", "target=tiny", *SMALL)
    spec = replace(spec, target=make_target(target))
    if (recipe, target) in REFUSED:
        with pytest.raises(UserError, match=REFUSED[recipe, target]):
            plan(spec, options)
        return
    summary = plan(spec, options)
    # Adapters count as the target's parameters, and shared weights as the drafter's.
    frozen, drafter = (summary["parameters"][part] / 1e9 for part in ("target", "drafter"))
    assert frozen <= 1.25 * PARAMETERS[target] and frozen + drafter >= 0.95 * PARAMETERS[target]
    assert (
        summary["memory"]["peak_bytes"] > 0
        and summary["flops"]["run"] > 0
        and summary["hours"]["value"] > 0
    )


def test_shipped_configurations_are_planned() -> None:
    """The grid has every configuration that ships."""
    folders = {path.parent.name for path in (ROOT / "lab" / "target_configs").glob("*/config.json")}
    assert folders == PARAMETERS.keys() - {"tiny", "smollm2"} and len(folders) == 6


def test_modules_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a row does not depend on the batch: it is not counted again for each of them."""
    counted: list[Any] = []
    count_row_cost = footprint.row_cost

    def record(module: Any, trained: Any = ()) -> Any:
        counted.append(module)
        return count_row_cost(module, trained)

    monkeypatch.setattr(footprint, "row_cost", record)
    make_plan("recipe=medusa1", "target=tiny", "data.limit=24", "trainer.batch_tokens=128")
    assert 0 < len(counted) < 12


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf_file(tmp_path_factory.mktemp("gguf"))[0]


def test_a_gguf_file_is_planned_by_its_keys(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No weight is converted; the plan is that of the converted target, and says how large the
    converted file will be.
    """
    monkeypatch.setenv("SPECTRAIN_CACHE", str(tmp_path))
    words = (
        "recipe=eagle3",
        "target=hf",
        f"target.model={gguf_file}",
        *SMALL,
        "drafter.vocab_size=300",
    )
    spec, options = compose_plan(*words)
    by_keys = plan(spec, replace(options, calibrate=None))
    assert not [*tmp_path.rglob("*.safetensors")] and by_keys["hours"]["basis"].startswith(
        "assumed"
    )
    size = 4 * by_keys["parameters"]["target"] / 1e6  # the small model computes in float32
    assert any(f"{size:.3g} MB" in note and "float32" in note for note in by_keys["notes"])
    convert_gguf(gguf_file, torch.float32)
    converted = make_plan(*words)
    assert not any("float32" in note for note in converted["notes"])
    for key in ("parameters", "tokens", "memory", "disk", "flops", "simulation"):
        assert by_keys[key] == converted[key]


def test_a_missing_gguf_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        make_plan("recipe=eagle3", "target=hf", f"target.model={tmp_path / 'none.gguf'}")


@pytest.mark.skipif(not batch_invariance.packable_dtypes(), reason="oneDNN is not available")
def test_what_a_machine_multiplies_is_asked_outside_of_meta() -> None:
    """A plan asks for the first time while torch's default device has no data."""
    try:
        expected = batch_invariance.is_batch_invariant.__wrapped__(96, 2)
    except RuntimeError:
        pytest.skip("this processor has no products of bfloat16")
    with torch.device("meta"):
        assert batch_invariance.is_batch_invariant.__wrapped__(96, 2) == expected


def test_a_fitted_start_is_timed_apart(
    shallow_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps compute their own features, whose time is measured, and nothing is printed as if
    a run trained.
    """
    settings = (
        "drafter.ttt_steps=1",
        "drafter.vocab_size=300",
        "data.limit=6",
        "data.max_length=128",
    )
    spec, options = compose_plan(
        "recipe=eagle3", "target=hf", f"target.model={shallow_folder}", *settings
    )
    hours = plan(spec, replace(options, calibrate=True))["hours"]
    assert (
        hours["basis"].startswith("measured")
        and min(hours["value"], *hours["seconds_per_token"]) > 0
    )
    printed = capsys.readouterr()
    assert "timing up to 16 steps" in printed.err and not printed.out


@pytest.mark.parametrize("status, ended", [(0, 143), (130, 130)])
def test_an_interrupted_trial_advises_no_resume(status: int, ended: int) -> None:
    """Its folder is temporary; the sentence names the command and no folder. A training that is
    saved has status 0, but the command is not finished.
    """
    with (
        pytest.raises(RunInterrupted, match=r"^plan: stopped while it timed steps") as stopped,
        trial_folder("plan") as folder,
    ):
        raise RunInterrupted(
            f"stopped; go on with the same command, trainer.resume=auto run={folder}", status
        )
    assert (
        "resume" not in str(stopped.value) and stopped.value.status == ended and not folder.exists()
    )
    with (
        pytest.raises(RunError, match=r"^plan: no answer; use the same command again$"),
        trial_folder("plan") as folder,
    ):
        raise RunError(f"no answer; go on with the same command, trainer.resume=auto run={folder}")


def test_changes_that_a_family_refuses_are_not_suggested(shallow_folder: Path) -> None:
    """Half of the masks are fewer than the longest tile of this recipe."""
    target = ("target=hf", f"target.model={shallow_folder}")
    batches = ("data.limit=2", "data.max_length=512", "trainer.batch_tokens=512")
    summary = make_plan("recipe=uno", *target, *batches, "++plan.device_gb=0.001")
    changes = [entry["change"] for entry in summary["changes"]]
    assert changes and not any("num_masks" in change for change in changes)


@pytest.mark.parametrize(
    "target",
    load_cases("tests.planning.test_targets").get(
        "test_targets_that_need_their_weights_have_no_plan", ()
    ),
)
def test_targets_that_need_their_weights_have_no_plan(target: str) -> None:
    with pytest.raises(UserError, match="it is built with its weights alone"):
        make_plan("recipe=medusa1", *f"target={target}".split(), *SMALL)


def test_own_data_is_planned(tmp_path: Path) -> None:
    """Folders of texts and token rows are counted; a time limit is said to end the run."""
    (tmp_path / "a.txt").write_text("One text of some words. " * 20)
    words = (
        "recipe=medusa1",
        "target=tiny",
        "data=text",
        f"data.path={tmp_path}",
        "trainer.max_minutes=3",
    )
    summary = make_plan(*words)
    assert summary["tokens"]["counted"] and any(
        "trainer.max_minutes=3 ends the run" in note for note in summary["notes"]
    )
