"""The commands of this package, which the core's command line finds. What a command does is
imported when it is called.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectrain.config.commands import InstalledCommands, read_command, read_command_run
from spectrain.errors import UserError
from spectrain.output.verbosity import print_json

if TYPE_CHECKING:
    from spectrain.config.spec import RunSpec


def plan(config: Any) -> None:
    from spectrain.config.build import register_resolvers
    from spectrain.runs.init_drafter import apply_init_shape

    # Recipes depend on the planned device.
    register_resolvers(str(config.plan.get("device", "auto")))
    try:
        spec, settings = read_command_run(config, "plan")
        print_json(settings["plan"].build().run(apply_init_shape(spec)))
    finally:
        # Whatever this process composes next is for its own device.
        register_resolvers()


def compare(config: Any) -> None:
    spec, settings = read_command_run(config, "compare", "recipes", "runs")
    for run in settings["runs"] or ():
        if not Path(run).exists():
            raise UserError(
                f"{run}: there is no such folder; give run folders, which spectrain runs lists"
            )
    from .comparison.compare import compare

    print_json(compare(spec, **settings))


def audit(config: Any) -> None:
    from spectrain.data.images import content_text
    from spectrain.eval.prompts import read_prompts

    from .audit import audit_command

    settings = read_command(config, ("target", "data", "eval"))
    names = ("prompts", "limit", "categories")
    selected = read_prompts(*(settings["eval"].settings.get(name) for name in names)).prompts
    texts = [content_text(turn) for prompt in selected for turn in prompt.turns]
    audit_command(settings["target"], settings["data"], texts)


def inspect(config: Any) -> None:
    settings = read_command(config, ("target", "data", "index"))
    from .inspection.inspect import inspect_command

    inspect_command(**settings)


def dry_run(spec: RunSpec) -> None:
    from .inspection.dry_run import dry_run

    dry_run(spec)


def bench_decode(config: Any) -> None:
    spec, _ = read_command_run(config)
    from .machine.throughput import decode_table

    print_json(decode_table(spec))


def bench_train(config: Any) -> None:
    spec, _ = read_command_run(config)
    from .machine.throughput import training_throughput

    print_json(training_throughput(spec))


def doctor(words: list[str]) -> None:
    from .machine.doctor import run_doctor

    sys.exit(run_doctor(words))


COMMANDS = InstalledCommands(
    Path(__file__).with_name("help.yaml"),
    {
        "plan": plan,
        "compare": compare,
        "data inspect": inspect,
        "data audit": audit,
        "bench decode": bench_decode,
        "bench train": bench_train,
        "doctor": doctor,
    },
)
