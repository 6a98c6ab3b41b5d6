"""The command line: it composes a configuration, checks it, and calls one function. Logic lives elsewhere.

Exit status: 0 success, 1 a failed run, 2 the user's mistake, told in one sentence.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from spectrain.settings.keys import COMPARE_KEYS, REGENERATE_KEYS, TRAIN_KEYS


def main() -> None:
    """Run the command in sys.argv; never shows a traceback for a mistake in the settings."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # lets errors through to us; hydra would exit with 1
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    arguments = sys.argv[1:]
    try:
        quietly(dispatch)(arguments)
    except KeyboardInterrupt:
        again = "; go on with the same command and trainer.resume=auto run=DIR" if arguments[:1] == ["train"] else ""
        sys.exit(fail(f"stopped{again}", 1))
    except BrokenPipeError:  # whoever read has had enough, as head has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def fail(message: str, status: int) -> int:
    print(f"spectrain: {message}", file=sys.stderr)
    return status


def commands() -> dict[str, tuple[str | None, Callable[..., None]]]:
    """Every command: the configuration that hydra composes for it, or None where it takes its words as they are."""
    return {
        "train": ("train", train),
        "plan": ("plan", plan_training),
        "eval": ("eval", evaluate),
        "compare": ("compare", compare),
        "chat": ("chat", chat),
        "data inspect": ("inspect", inspect_data),
        "data regenerate": ("regenerate", regenerate_data),
        "data store": ("train", store_data),
        "data verify": ("verify", verify_data),
        "bench decode": ("train", bench_decode),
        "bench train": ("train", bench_train),
        "bench kernels": ("bench_kernels", bench_machine),
        "bench engine": ("bench_engine", bench_machine),
        "bench report": ("bench_report", bench_machine),
        "export": ("export", export),
        "convert": (None, convert),
        "lint": (None, lint),
        "recipes": (None, recipes),
        "doctor": (None, doctor),
        "completion": (None, completion),
    }


def dispatch(arguments: list[str]) -> None:
    """Find the command that the first words name and run it with the others, or show help."""
    from spectrain.errors import UserError, nearest

    from .help import HELP, explain, overview, version
    from .overrides import check_words

    if not arguments or (arguments[0] in HELP and len(arguments) == 1):
        print(overview())
        sys.exit(0 if arguments else 2)
    if arguments[0] == "--version":
        return print(f"spectrain {version()}")
    if arguments[0] in HELP:
        arguments = [*arguments[1:], "--help"]
    words = 2 if arguments[0] in ("data", "bench") else 1
    name, rest, known = " ".join(arguments[:words]), arguments[words:], commands()
    if name not in known:
        inside = [one for one in known if one.startswith(f"{arguments[0]} ")]
        if inside and (len(arguments) == 1 or arguments[1] in HELP):
            raise UserError(f"{arguments[0]}: say which, as in {', '.join(f'spectrain {one}' for one in inside)}")
        raise UserError(f"{name}: there is no such command; {nearest(name, known)}")
    config_name, task = known[name]
    if any(word in HELP[:2] for word in rest):
        return print(explain(name, config_name, rest))
    if config_name is None:
        return task(rest)
    if name == "compare":
        rest = comparing(rest)
    if name == "plan":
        rest = ["plan.json=true" if argument == "--json" else argument for argument in rest]
    if name == "bench decode" and not any(argument.startswith(("drafter=", "recipe=")) for argument in rest):
        rest = ["drafter=ngram", *rest]  # the configuration wants one, though only the target is timed
    if name == "data store" and not any(argument.startswith("source=") for argument in rest):
        rest = ["source=store", *rest]
    if name == "chat" and "--once" in rest:
        place = rest.index("--once")
        if place + 1 == len(rest):
            raise UserError("--once: say what to ask, as in spectrain chat run=runs/NAME --once 'What is a bee?'")
        task, rest = partial(task, once=rest[place + 1]), [*rest[:place], *rest[place + 2 :]]
    check_words(name, config_name, rest)
    compose_and_call(config_name, task, rest)


def comparing(arguments: list[str]) -> list[str]:
    """Folders of finished runs as runs=[..], and recipes=a,b, which hydra would take for a sweep, as a list."""
    runs = [argument for argument in arguments if "=" not in argument and not argument.startswith("-")]
    rest = [re.sub(r"^(recipes|runs)=([^\[].*,.*)$", r"\1=[\2]", argument) for argument in arguments if argument not in runs]
    return [*rest, f"runs=[{','.join(json.dumps(run) for run in runs)}]"] if runs else rest


def compose_and_call(config_name: str, task: Callable[[Any], None], arguments: list[str]) -> None:
    """Let hydra compose the configuration and call `task` with it, once or, with -m, for every point of a sweep."""
    import hydra

    from spectrain.settings.build import register_resolvers
    from spectrain.settings.choices import look_in
    from spectrain.settings.schema import conf_folders

    register_resolvers()
    look_in(conf_folders(arguments))
    quiet_bars()
    groups = config_groups(arguments)
    sys.argv = ["spectrain", *(allow_new_keys(argument, groups) for argument in arguments)]
    hydra.main(version_base="1.3", config_path="pkg://spectrain.conf", config_name=config_name)(quietly(task))()


def quiet_bars() -> None:
    """No progress bars where nobody watches, so that a mistake is one line in a log."""
    if not sys.stderr.isatty():
        import transformers

        transformers.utils.logging.disable_progress_bar()


def quietly(task: Callable[[Any], None]) -> Callable[[Any], None]:
    """The task, leaving by SystemExit where it fails: hydra would print a line of its own about any other exception."""

    def run(config: Any) -> None:
        try:
            task(config)
        except Exception as error:
            status = told(error)
            if status is None:
                raise
            sys.exit(status)

    return run


def told(error: Exception) -> int | None:
    """Tell the user what went wrong; the exit status, or None where the error is nobody's mistake but ours."""
    from spectrain.errors import RunError, Stopped, UserError

    if isinstance(error, Stopped):
        if str(error):
            fail(str(error), error.status)
        return error.status
    if isinstance(error, (UserError, RunError)):
        return fail(str(error), 2 if isinstance(error, UserError) else 1)
    message = hydra_mistake(error)
    return None if message is None else fail(message, 2)


def config_groups(arguments: list[str]) -> set[str]:
    """The names of configuration groups: ours, and those below --config-dir."""
    from spectrain.settings.schema import conf_folders

    return {entry.name for folder in conf_folders(arguments) for entry in folder.iterdir() if entry.is_dir()}


def allow_new_keys(argument: str, groups: set[str]) -> str:
    """`a.b=c` as hydra's `++a.b=c`: a default lives in its constructor, so a key need not stand in a yaml to be set.

    Unknown keys are caught afterwards, by `check_config`, which knows the constructors.
    """
    match = re.match(r"([A-Za-z_][\w.]*)=(.*)", argument, re.DOTALL)
    return f"++{match[1]}={quoted(match[2])}" if match and match[1] not in groups else argument


def quoted(value: str) -> str:
    """A value as hydra reads it: text that its grammar refuses, such as a sentence, is text, which its shell quotes said."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(f"key={value}")
    except HydraException:
        escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
        return f"'{escaped}'"
    return value


def train(config: Any) -> None:
    from hydra.core.hydra_config import HydraConfig

    from spectrain.runs.train import train

    train(checked(config, TRAIN_KEYS), list(HydraConfig.get().overrides.task))


def plan_training(config: Any) -> None:
    from hydra.core.hydra_config import HydraConfig

    from spectrain.runs.fresh import take_shape
    from spectrain.settings.build import build, register_resolvers

    register_resolvers(str(config.plan.get("device", "auto")))  # a recipe's settings for the planned device
    complete = checked(config, (*TRAIN_KEYS, "plan"))
    take_shape(complete, list(HydraConfig.get().overrides.task))
    build(complete.plan).run(complete)


def evaluate(config: Any) -> None:
    from spectrain.runs.score import evaluate

    from .defaults import complete

    completed, folder = complete(config)
    evaluate(checked(completed, TRAIN_KEYS), folder)


def compare(config: Any) -> None:
    from hydra.core.hydra_config import HydraConfig

    from spectrain.eval.compare import compare

    compare(checked(config, COMPARE_KEYS), list(HydraConfig.get().overrides.task))


def chat(config: Any, once: str | None = None) -> None:
    from spectrain.settings.build import build

    from .defaults import complete

    completed, folder = complete(config)
    checked_config = checked(completed, (*TRAIN_KEYS, "chat"))
    build(checked_config.chat).run(checked_config, folder, once)


def inspect_data(config: Any) -> None:
    from spectrain.data.inspect import show

    show(checked(config, ("target", "data", "index")))


def regenerate_data(config: Any) -> None:
    from spectrain.regeneration.regenerate import regenerate

    regenerate(checked(config, REGENERATE_KEYS))


def store_data(config: Any) -> None:
    from spectrain.features.capture import capture

    capture(checked(config, TRAIN_KEYS))


def verify_data(config: Any) -> None:
    from spectrain.features.capture import verify

    verify(checked(config, ("path", "drop")))


def bench_decode(config: Any) -> None:
    from spectrain.bench.throughput import decode_table

    decode_table(checked(config, TRAIN_KEYS))


def bench_train(config: Any) -> None:
    from spectrain.bench.throughput import training_throughput

    training_throughput(checked(config, TRAIN_KEYS))


def bench_machine(config: Any) -> None:
    from spectrain.settings.build import build

    build(checked(config, ("bench",)).bench).run()


def export(config: Any) -> None:
    from .export import export

    export(checked(config, ("run", "format", "out", "push", "private", "target")))


def convert(arguments: list[str]) -> None:
    from .export import convert_command

    quiet_bars()
    convert_command(arguments)


def lint(arguments: list[str]) -> None:
    from .export import lint_command

    quiet_bars()
    lint_command(arguments)


def recipes(arguments: list[str]) -> None:
    from .help import recipes

    print(recipes(arguments))


def doctor(arguments: list[str]) -> None:
    from .doctor import examine

    sys.exit(examine(arguments))


def completion(arguments: list[str]) -> None:
    from spectrain.errors import UserError

    from .completion import complete, script

    if not arguments:
        raise UserError("completion: say for which shell, as in spectrain completion bash")
    if arguments[0] == "words":  # what the scripts call
        print("\n".join(complete(arguments[2:], {name: config for name, (config, _) in commands().items()})))
    else:
        print(script(arguments[0]), end="")


def checked(config: Any, known: tuple[str, ...]) -> Any:
    """The configuration after the schema check, with the recipe's name noted in it."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict

    from spectrain.settings.check import check_config

    choice = HydraConfig.get().runtime.choices.get("recipe") if HydraConfig.initialized() else None
    if choice is not None:
        with open_dict(config):
            config.recipe_name = choice
    return check_config(config, known)


def hydra_mistake(error: Exception) -> str | None:
    """One sentence for a mistake that hydra or omegaconf found; None for any other error."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return None
    text = str(error).strip()
    options = re.findall(r"^\t(\S+)$", text, re.MULTILINE)
    missing = re.search(r"Could not find '([^']+)/([^'/]+)'", text)
    if missing:
        from spectrain.errors import nearest

        return f"{missing.group(1)}={missing.group(2)}: there is no such choice; {nearest(missing.group(2), options)}"
    unsaid = re.search(r"You must specify '(\w+)'", text)
    if unsaid and unsaid.group(1) == "drafter":
        recipes = sorted(path.stem for path in (Path(__file__).parents[1] / "conf" / "recipe").glob("*.yaml"))
        return f"recipe: say what to train, as in recipe={recipes[0]}; there are {', '.join(recipes)}"
    sweep = re.search(r"Ambiguous value for argument '\+*([^=]+)=(.*?)'\n", text)
    if sweep:
        return (
            f"{sweep[1]}={sweep[2]}: values that a comma parts are a sweep, which wants -m; a list stands in brackets, and a "
            "fraction has a point"
        )
    return " ".join(text.split())
