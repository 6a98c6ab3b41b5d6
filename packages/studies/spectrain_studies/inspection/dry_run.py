"""`spectrain train --dry-run`: prints the plan of a training, loads and checks what it reads, and
shows samples with their loss masks. It trains and writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from spectrain.config.spec import RunSpec
from spectrain.data.chat import Example
from spectrain.export.targets import TargetFiles
from spectrain.files import require_writable
from spectrain.models.target import Target
from spectrain.output.console import make_console
from spectrain.output.verbosity import print_json, result_output
from spectrain.runs.drafters import build_target_without_weights
from spectrain.runs.init_drafter import apply_init_shape
from spectrain.runs.lock import require_folder
from spectrain.runs.train import check_is_new
from spectrain_studies.planning.plan import Plan, find_conversion

from .inspect import describe_example, format_example, format_legend

NUM_SAMPLES = 3


def dry_run(spec: RunSpec) -> None:
    """Print the plan of a training and its first samples; a mistake ends as in the training."""
    spec = apply_init_shape(spec)
    if spec.run is not None:
        require_folder(Path(spec.run))
        require_writable(Path(spec.run), "run")
        if spec.resume is None:
            check_is_new(Path(spec.run))
    # Hours need timed steps, which are the command's.
    plan = Plan(calibrate=False).run(spec)
    reader, evaluation, *_ = spec.build("data", "eval", "tree", "acceptance")
    reader.load_conversations()
    target = load_without_writing(spec)
    if evaluation is not None:
        evaluation.check_prompts(target)
    dataset = reader.make_dataset(target.template, target.vision)
    samples = [*islice(dataset.examples, NUM_SAMPLES)]
    print_json({"plan": plan, "samples": [describe_example(sample) for sample in samples]})
    with result_output():
        print_samples(dataset.summary_line() + reader.describe_omissions(), samples, target)


def print_samples(summary: str, samples: Sequence[Example], target: Target) -> None:
    """Print a line about the data, and samples with their loss masks."""
    console = make_console(highlight=False)
    console.print(summary, soft_wrap=True)
    console.print(format_legend())
    for number, example in enumerate(samples, 1):
        console.rule(
            f"sample {number}: {sum(example.mask)} supervised of {len(example.tokens)} tokens"
        )
        console.print(format_example(example, target.tokenizer))
    console.rule("nothing was trained or written")


def load_without_writing(spec: RunSpec) -> Target:
    """Load the target; where that would write converted weights, which take the space of a model,
    build it without them.
    """
    files = TargetFiles.from_settings(spec.target.node, with_weights=False)
    converted = find_conversion(spec, files)
    if converted is None:
        target: Target = spec.target.build()
        return target
    print(
        f"the weights of {files.gguf_file} are neither read nor checked here, because the training "
        f"converts them to {converted}",
        flush=True,
    )
    return build_target_without_weights(spec)
