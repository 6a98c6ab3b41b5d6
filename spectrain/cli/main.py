"""The command line: it composes a configuration, checks it, and calls one function. Logic lives elsewhere.

Exit status: 0 success, 1 a failed run, 2 the user's mistake, told in one sentence.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spectrain.settings.keys import COMPARE_KEYS, REGENERATE_KEYS, TRAIN_KEYS

from .overrides import FIRST, allow_new_keys, config_groups

Task = Callable[[Any], Any]


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


def dispatch(arguments: list[str]) -> None:
    """Find the command that the first words name and run it with the others, or show help."""
    from spectrain.errors import UserError, nearest

    from .help import COMMANDS, HELP, explain, overview, version
    from .overrides import as_settings, check_drafters, check_words

    if not arguments or (arguments[0] in HELP and len(arguments) == 1):
        print(overview())
        sys.exit(0 if arguments else 2)
    if arguments[0] == "--version":
        return print(f"spectrain {version()}")
    if arguments[0] in HELP:
        arguments = [*arguments[1:], "--help"]
    count = 2 if arguments[0] in ("data", "bench") else 1
    name, words = " ".join(arguments[:count]), arguments[count:]
    if name not in COMMANDS:
        inside = [one for one in COMMANDS if one.startswith(f"{arguments[0]} ")]
        if inside and (len(arguments) == 1 or arguments[1] in HELP):
            raise UserError(f"{arguments[0]}: say which, as in {', '.join(f'spectrain {one}' for one in inside)}")
        raise UserError(f"{name}: there is no such command; {nearest(name, COMMANDS)}")
    if any(word in HELP[:2] for word in words):
        return print(explain(name, as_settings(name, [word for word in words if word not in HELP[:2]])))
    if (config := COMMANDS[name].config) is None:
        return TASKS[name](words)
    words = as_settings(name, words)
    check_words(name, words)
    check_drafters(name, words)
    compose_and_call(config, TASKS[name], words)


def compose_and_call(config_name: str, task: Task, words: list[str]) -> None:
    """Let hydra compose the configuration and call `task` with it, once or, with -m, for every point of a sweep."""
    import hydra

    from spectrain.settings.build import register_resolvers
    from spectrain.settings.choices import look_in
    from spectrain.settings.schema import conf_folders

    register_resolvers()
    look_in(conf_folders(words))
    quiet_bars()
    groups = config_groups(words)
    sys.argv = ["spectrain", *(allow_new_keys(word, groups) for word in words)]
    hydra.main(version_base="1.3", config_path="pkg://spectrain.conf", config_name=config_name)(quietly(task))()


def quiet_bars() -> None:
    """No progress bars where nobody watches, so that a mistake is one line in a log."""
    if not sys.stderr.isatty():
        import transformers

        transformers.utils.logging.disable_progress_bar()


def quietly(task: Task) -> Task:
    """The task, leaving by SystemExit where it fails: hydra would print a line of its own about any other exception."""

    def run(config: Any) -> None:
        from spectrain.errors import RunError, Stopped, UserError

        try:
            task(config)
        except Stopped as stopped:
            sys.exit(fail(str(stopped), stopped.status) if str(stopped) else stopped.status)
        except (UserError, RunError) as error:
            sys.exit(fail(str(error), 2 if isinstance(error, UserError) else 1))
        except PermissionError as error:
            place = f"{error.filename}: " if error.filename else ""
            sys.exit(fail(f"{place}{error.strerror or error}; see that it is yours to read or write, or name another", 2))
        except Exception as error:
            if (message := hydra_mistake(error)) is None:
                raise
            sys.exit(fail(message, 2))

    return run


def library(place: str) -> Any:
    """A function of the package by its place, imported when it is needed."""
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(f"spectrain.{module}"), name)


def calls(place: str, known: tuple[str, ...], asked: bool = False) -> Task:
    """The task of calling a function with the checked configuration and, where it wants that, what the command itself set."""
    return lambda config: library(place)(checked(config, known), *([overridden()] if asked else []))


def builds(group: str, completed: bool = False) -> Task:
    """The task of running what a group constructs; `completed`, with the whole configuration of the run that is named."""

    def run(config: Any) -> None:
        if not completed:
            return library("settings.build.build")(checked(config, (group,))[group]).run()
        whole, folder = library("runs.defaults.complete")(config)
        whole = checked(whole, (*TRAIN_KEYS, group))
        library("settings.build.build")(whole[group]).run(whole, folder)

    return run


def plan(config: Any) -> None:
    library("settings.build.register_resolvers")(str(config.plan.get("device", "auto")))  # a recipe's, for the planned device
    complete = checked(config, (*TRAIN_KEYS, "plan"))
    library("runs.fresh.take_shape")(complete, overridden())
    library("settings.build.build")(complete.plan).run(complete)


def evaluate(config: Any) -> None:
    completed, folder = library("runs.defaults.complete")(config)
    library("runs.score.evaluate")(checked(completed, TRAIN_KEYS), folder)


def completion(words: list[str]) -> None:
    from spectrain.errors import UserError

    from .completion import complete, script

    if not words:
        raise UserError("completion: say for which shell, as in spectrain completion bash")
    print("\n".join(complete(words[2:])) + "\n" if words[0] == "words" else script(words[0]), end="")  # scripts ask for words


TASKS: Mapping[str, Task] = {
    "train": calls("runs.train.train", TRAIN_KEYS, asked=True),
    "plan": plan,
    "eval": evaluate,
    "compare": calls("eval.compare.compare", COMPARE_KEYS, asked=True),
    "chat": builds("chat", completed=True),
    "data inspect": calls("data.inspect.show", ("target", "data", "index")),
    "data index": calls("data.index.index", ("target", "data", "out")),
    "data regenerate": calls("regeneration.regenerate.regenerate", REGENERATE_KEYS),
    "data store": calls("features.capture.capture", TRAIN_KEYS),
    "data verify": calls("features.capture.verify", ("path", "drop")),
    "bench decode": calls("bench.throughput.decode_table", TRAIN_KEYS),
    "bench train": calls("bench.throughput.training_throughput", TRAIN_KEYS),
    **dict.fromkeys(("bench context", "bench kernels", "bench engine", "bench report"), builds("bench")),
    "export": calls("cli.export.export", ("run", "format", "out", "push", "private", "target")),
    "convert": calls("cli.export.convert_command", ("run", "format", "out", "target")),
    "lint": calls("cli.export.lint_command", ("run", "target")),
    "recipes": lambda words: print(library("cli.help.recipes")(words)),
    "doctor": lambda words: sys.exit(library("cli.doctor.examine")(words)),
    "completion": completion,
}
"""What each command of help.yaml does, with its configuration or, where it has none, with its words."""


def overridden() -> list[str]:
    """The settings that the command gave itself, as opposed to those of a recipe."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task)


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

    from spectrain.errors import nearest

    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return None
    text = str(error).strip()
    options = re.findall(r"^\t(\S+)$", text, re.MULTILINE)
    if missing := re.search(r"Could not find '([^']+)/([^'/]+)'", text):
        return f"{missing[1]}={missing[2]}: there is no such choice; {nearest(missing[2], options)}"
    if (unsaid := re.search(r"You must specify '(\w+)'", text)) and unsaid[1] == "drafter":
        recipes = sorted(path.stem for path in (Path(__file__).parents[1] / "conf" / "recipe").glob("*.yaml"))
        return f"recipe: say what to train, as in recipe={FIRST['recipe']}; there are {', '.join(recipes)}"
    if sweep := re.search(r"Ambiguous value for argument '\+*([^=]+)=(.*?)'\n", text):
        return (
            f"{sweep[1]}={sweep[2]}: values that a comma parts are a sweep, which wants -m; a list stands in brackets, and a "
            "fraction has a point"
        )
    return " ".join(text.split())
