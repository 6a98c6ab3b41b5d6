"""The command line: it composes a configuration, checks it, and calls one function. Logic lives
elsewhere.

Exit status: 0 for success, 1 for a failed run, 2 for a mistake of the user, which one sentence
reports.
"""

import importlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from spectrain.config.choices import check_files, named_folders, set_choice_folders
from spectrain.config.commands import (
    Task,
    add_installed_tasks,
    read_command,
    read_command_run,
    set_settings_file,
)
from spectrain.config.installed import load_entry_points
from spectrain.config.missing import explain_missing
from spectrain.errors import (
    RUST_FAILURE,
    SIGNAL_STATUS,
    RunError,
    RunInterrupted,
    Terminated,
    UserError,
    explain_missing_module,
    first_line,
    suggest_nearest,
)
from spectrain.files import FULL_DISK_ERRORS, PATH_ERRORS, shorten_path
from spectrain.output.streams import clean_output, drop_output, print_warning
from spectrain.output.verbosity import (
    command_output,
    is_quiet,
    print_json,
    read_level,
    result_output,
)
from spectrain.output.version import read_version

from .help import (
    COMMANDS,
    EXAMPLE_RECIPE,
    HELP_WORDS,
    explain_command,
    format_overview,
    split_help_topic,
)
from .overrides import (
    check_drafters,
    check_words,
    find_repeated,
    to_settings,
    write_overrides,
)
from .settings_file import split_settings_file
from .termination import raise_terminated

PRINT_CONFIG = "--print-config"
DRY_RUN = "--dry-run"
# What pathlib says of a path that begins with ~.
NO_HOME = "Could not determine home directory."


def main() -> None:
    """Run the command in sys.argv; a mistake in the settings never shows a traceback."""
    # Errors reach us; otherwise hydra would exit with 1.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    arguments = sys.argv[1:]
    with clean_output():
        try:
            run_command(arguments)
        except Exception:
            # Python itself would print it once the streams are no longer cleaned.
            traceback.print_exc()
            sys.exit(1)


def run_command(arguments: list[str]) -> None:
    """Run the command of these words, and exit with its status."""
    try:
        with raise_terminated():
            with_exit_codes(dispatch_and_flush)(arguments)
    except KeyboardInterrupt as error:
        again = (
            "; go on with the same command and trainer.resume=auto run=DIR"
            if arguments[:1] == ["train"]
            else ""
        )
        if isinstance(error, Terminated):
            sys.exit(print_failure(f"{error}{again}", error.status))
        sys.exit(print_failure(f"stopped{again}", SIGNAL_STATUS + signal.SIGINT))
    except BrokenPipeError:  # whoever read has had enough, as head has
        drop_output()
        sys.exit(1)


def print_failure(message: str, status: int) -> int:
    """Print why a command failed, where anybody can read it, and return its exit status."""
    with suppress(OSError):
        print_warning(message)
    return status


def dispatch_and_flush(arguments: list[str]) -> None:
    """Run a command, and fail here where its output cannot be written."""
    try:
        dispatch_command(arguments)
    finally:
        sys.stdout.flush()


def dispatch_command(arguments: list[str]) -> None:
    """Run the command that the first words name with the other words, or show help."""
    check_texts(arguments)
    folders = named_folders(arguments)
    check_files(folders)
    set_choice_folders(folders)
    if not arguments or (arguments[0] in HELP_WORDS and len(arguments) == 1):
        print(format_overview())
        sys.exit(0 if arguments else 2)
    if arguments[0] == "--version":
        return print(f"spectrain {read_version()}")
    if arguments[0] in HELP_WORDS:
        arguments = [*arguments[1:], "--help"]
    count = 2 if arguments[0] in ("data", "bench") or " ".join(arguments[:2]) in COMMANDS else 1
    name = " ".join(arguments[:count])
    words = arguments[count:]
    if name not in COMMANDS:
        inside = [command for command in COMMANDS if command.startswith(f"{arguments[0]} ")]
        if inside and arguments[1:] and {*arguments[1:]} <= {*HELP_WORDS, "all"}:
            return print(format_overview(arguments[0]))
        if inside and len(arguments) == 1:
            raise UserError(
                f"{arguments[0]}: say which, as in "
                f"{', '.join(f'spectrain {command}' for command in inside)}"
            )
        if (missing := explain_missing("command.", name, f"`spectrain {name}`")) is not None:
            raise UserError(missing)
        raise UserError(f"{name}: there is no such command; {suggest_nearest(name, COMMANDS)}")
    file, words = split_settings_file(name, words)
    set_settings_file(file)
    of_file = [] if file is None else [*file.words]
    if any(word in HELP_WORDS[:2] for word in words):
        return print_help(name, words, of_file)
    command = COMMANDS[name]
    flags = tuple(word for word in words if word in command.output)
    words = [word for word in words if word not in flags]
    if "--json" in flags and {"-m", "--multirun"} & {*words}:
        raise UserError("--json: a sweep has several results; leave out -m, or leave out --json")
    try:
        level = read_level(flags)
    except ValueError as error:
        raise UserError(str(error)) from error
    with command_output(level, "--json" in flags, command.is_result):
        run_named_command(name, words, of_file)


def print_help(name: str, words: list[str], of_file: list[str]) -> None:
    """Print the help of a command; the words beside --help choose whose keys it shows."""
    topic, words = split_help_topic(words)
    command = COMMANDS[name]
    words = to_settings(name, [word for word in words if word not in command.flags])
    if words and command.config is not None:
        check_words(name, words)
    print(explain_command(name, [*of_file, *words], topic))


def check_texts(arguments: list[str]) -> None:
    """Raise a UserError for a word that is no text, as the name of a file may be."""
    for word in arguments:
        try:
            word.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"{shorten_path(word)}: it is no UTF-8 text, so no file can hold it; rename the "
                "file"
            ) from error


def run_named_command(name: str, words: list[str], of_file: list[str]) -> None:
    """Run a command with these words, behind those of its settings file."""
    if (config := COMMANDS[name].config) is None:
        return COMMAND_TASKS[name](words)
    prints = name == "train" and PRINT_CONFIG in words
    is_dry = name == "train" and DRY_RUN in words and not prints
    if name == "train":
        words = [word for word in words if word not in (PRINT_CONFIG, DRY_RUN)]
    own = to_settings(name, words)
    words = [*of_file, *own]
    check_words(name, words)
    for sentence in find_repeated(own):
        print_warning(sentence)
    check_drafters(name, words)
    if is_dry:
        return compose_and_call(config, dry_run_command, words)
    compose_and_call(config, print_settings if prints else COMMAND_TASKS[name], words)


def compose_and_call(config_name: str, task: Task, words: list[str]) -> None:
    """Compose the configuration with hydra and call `task` with it, once or, with -m, for every
    point of a sweep.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from spectrain.config.build import register_resolvers

    register_resolvers()
    disable_progress_bars()
    sys.argv = ["spectrain", *write_overrides(words)]
    is_composed = False

    def call(config: Any) -> None:
        nonlocal is_composed
        is_composed = True
        task(config)

    try:
        hydra.main(version_base="1.3", config_path="pkg://spectrain.conf", config_name=config_name)(
            with_exit_codes(call)
        )()
    except (
        AssertionError,
        AttributeError,
        KeyError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        if is_composed or isinstance(error, (UserError, HydraException, OmegaConfBaseException)):
            raise
        raise UserError(
            f"{find_refused_word(words)}: hydra cannot read it ({first_line(error)}); leave it out"
        ) from error


def find_refused_word(words: Sequence[str]) -> str:
    """Return the word that hydra most likely refuses: the last one that is about hydra itself,
    or else all of them.
    """
    return next(
        (word for word in reversed(words) if word.lstrip("+~").startswith("hydra")), " ".join(words)
    )


def disable_progress_bars() -> None:
    """Disable progress bars of libraries without a terminal, so that a mistake is one line in a
    log; they read this before they are imported, which takes seconds.
    """
    if is_quiet() or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        if "transformers" in sys.modules:
            sys.modules["transformers"].utils.logging.disable_progress_bar()


def with_exit_codes(task: Task) -> Task:
    """Return the task with errors turned into SystemExit; hydra would print a line of its own
    for any other exception.
    """

    def run(config: Any) -> None:
        try:
            task(config)
        except RunInterrupted as stopped:
            sys.exit(
                print_failure(str(stopped), stopped.status) if str(stopped) else stopped.status
            )
        except (UserError, RunError) as error:
            sys.exit(print_failure(str(error), 2 if isinstance(error, UserError) else 1))
        except Exception as error:
            if missing := explain_missing_module(error):
                sys.exit(print_failure(missing, 1))
            message = explain_hydra_error(error) or explain_path_error(error)
            if message is None:
                raise
            sys.exit(print_failure(message, 2))
        except BaseException as error:
            # What fails in Rust, as a tokenizer does with damaged files, is no Exception.
            if type(error).__name__ != RUST_FAILURE:
                raise
            message = f"a library failed ({first_line(error)}); check the files of the tokenizer"
            sys.exit(print_failure(message, 1))

    return run


def lazy_import(path: str) -> Any:
    """Import a function of the package by its path, only when it is needed."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"spectrain.{module}"), name)


def call_with_keys(path: str, *keys: str, check: str | None = None) -> Task:
    """Return the task that calls a function with the checked settings of these keys; `check` is
    the path of a light function that refuses settings before the other one is imported.
    """

    def run(config: Any) -> None:
        settings = read_command(config, keys)
        if check is not None:
            lazy_import(check)(**settings)
        lazy_import(path)(**settings)

    return run


def call_with_spec(path: str, *keys: str) -> Task:
    """Return the task that calls a function with the checked settings of a run and, by name,
    those of more keys.
    """

    def run(config: Any) -> None:
        spec, settings = read_command_run(config, *keys)
        lazy_import(path)(spec, **settings)

    return run


def print_settings(config: Any) -> None:
    lazy_import("cli.print_config.print_config")(config)


def dry_run_command(config: Any) -> None:
    spec, _ = read_command_run(config)
    tasks = load_entry_points("dry_run")
    if not tasks:
        raise UserError(str(explain_missing("group.", "dry_run", f"`spectrain train {DRY_RUN}`")))
    for dry_run in tasks:
        dry_run(spec)


def check_launch() -> None:
    """Raise a UserError where the variables of a launcher are not those of a launch."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        value = os.environ.get(name)
        # -1 stands for no launch.
        if value is not None and value != "-1" and not value.isdecimal():
            raise UserError(
                f"{name}={value}: this variable holds a number, which a launcher such as torchrun "
                "sets; unset it"
            )
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and "MASTER_ADDR" not in os.environ:
        raise UserError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: there is no MASTER_ADDR beside it; start the "
            "processes with torchrun, or unset the variable"
        )


def train_command(config: Any) -> None:
    check_launch()
    spec, _ = read_command_run(config)
    folder = lazy_import("runs.train.train_and_score")(spec)
    lazy_import("runs.server_scores.score_in_engine")(spec, folder)
    if int(os.environ.get("RANK", 0)) > 0:
        return
    name = spec.evaluation_name if spec.eval else None
    print_json(lazy_import("cli.results.TrainResult").from_folder(folder, name).to_dict())
    with result_output():
        family = str(spec.drafter.choice)
        lazy_import("cli.next_steps.print_after_training")(folder, family, name, spec.name)


def evaluate_command(config: Any) -> None:
    check_launch()
    if "server" in config or config.serve:
        print_json(lazy_import("runs.server_scores.score_server")(config))
        return
    spec, folder = lazy_import("runs.defaults.resolve_eval_spec")(config)
    summary = lazy_import("runs.score.evaluate")(spec, folder)
    # A run's own setting is about its training.
    if (config.get("eval") or {}).get("serve_in"):
        lazy_import("runs.server_scores.score_in_engine")(spec, folder)
    if int(os.environ.get("RANK", 0)) == 0:
        print_json(summary)
        with result_output():
            lazy_import("cli.next_steps.print_after_score")(folder, spec.evaluation_name)


def chat_command(config: Any) -> None:
    settings = lazy_import("config.build.to_containers")(config)
    chat = read_command({"chat": settings.pop("chat")}, ("chat",))["chat"]
    spec, folder = lazy_import("runs.defaults.resolve_eval_spec")(settings)
    chat.with_settings(**{"measured": not settings.get("tree"), **chat.settings}).build().run(
        spec, folder
    )


def completion_command(words: list[str]) -> None:
    from .completion import complete_word, read_script

    if not words:
        raise UserError("completion: say for which shell, as in spectrain completion bash")
    if words[0] != "words" and words[1:]:
        raise UserError(f"completion {' '.join(words)}: give one shell; leave out {words[1]}")
    print(
        "\n".join(complete_word(words[2:])) + "\n"
        if words[0] == "words"
        else read_script(words[0]),
        end="",
    )  # scripts ask for words


CORE_TASKS: Mapping[str, Task] = {
    "train": train_command,
    "eval": evaluate_command,
    "chat": chat_command,
    "data index": call_with_keys("data.index.index_command", "target", "data", "out"),
    "data regenerate": call_with_spec(
        "regeneration.command.regenerate_command",
        "writer",
        "sampling",
        "regenerate",
        "out",
        "check",
        "capture",
    ),
    "data store": call_with_spec("features.capture.capture_features"),
    "data verify": call_with_keys("features.capture.verify_store", "path", "drop"),
    "export": call_with_keys(
        "cli.export.run_export",
        "run",
        "format",
        "out",
        "push",
        "private",
        "target",
        "dtype",
        "engine_python",
        "quantize",
        "drafter",
        check="cli.export_checks.check_export",
    ),
    "convert": call_with_keys(
        "cli.export.convert_command",
        "run",
        "format",
        "out",
        "target",
        "dtype",
        check="cli.export_checks.check_convert",
    ),
    "lint": call_with_keys(
        "cli.export.lint_command", "run", "target", check="cli.export_checks.check_lint"
    ),
    "recipes": lambda words: lazy_import("cli.recipe_list.recipes_command")(words),
    "runs": lambda words: lazy_import("cli.run_table.runs_command")(words),
    "completion": completion_command,
}
"""What each command of help.yaml does, with its configuration or, where it has none, with its
words.
"""
COMMAND_TASKS = add_installed_tasks(CORE_TASKS)


def explain_path_error(error: Exception) -> str | None:
    """Return one sentence for what the system says of a full disk or a path that cannot be used;
    None for any other error.
    """
    if isinstance(error, RuntimeError) and str(error) == NO_HOME:
        return "a path begins with ~, and there is no such home folder; write the whole path"
    if not isinstance(error, OSError) or error.errno not in (*PATH_ERRORS, *FULL_DISK_ERRORS):
        return None
    path = f"{shorten_path(error.filename)}: " if error.filename else ""
    remedy = "free some space" if error.errno in FULL_DISK_ERRORS else "check its permissions"
    return f"{path}{error.strerror or error}; {remedy} or give another path"


def explain_hydra_error(error: Exception) -> str | None:
    """Return one sentence for a mistake that hydra or omegaconf reports; None for any other
    error.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return None
    text = str(error).strip()
    options = re.findall(r"^\t(\S+)$", text, re.MULTILINE)
    if missing := re.search(r"Could not find '([^']+)/([^'/]+)'", text):
        return (
            f"{missing[1]}={missing[2]}: there is no such choice; "
            f"{suggest_nearest(missing[2], options)}"
        )
    if (unsaid := re.search(r"You must specify '(\w+)'", text)) and unsaid[1] == "drafter":
        recipes = sorted(
            path.stem for path in (Path(__file__).parents[1] / "conf" / "recipe").glob("*.yaml")
        )
        return (
            f"recipe: say what to train, as in recipe={EXAMPLE_RECIPE}; there are "
            f"{', '.join(recipes)}"
        )
    if unknown := re.search(r"Interpolation key '([^']+)' not found", text):
        return (
            f"${{{unknown[1]}}}: no recipe and no word of the command sets {unknown[1]}; set it, "
            "because the default of a constructor has no name here"
        )
    if sweep := re.search(r"Ambiguous value for argument '\+*([^=]+)=(.*?)'\n", text):
        return (
            f"{sweep[1]}={sweep[2]}: comma-separated values are a sweep; add -m; a list stands in "
            "brackets, and a fraction has a point"
        )
    return " ".join(text.split())
