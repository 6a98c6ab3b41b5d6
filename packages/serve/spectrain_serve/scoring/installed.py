"""The score of a drafter in an engine for CPUs that is installed on this machine, after its
score by our own loop.
"""

from __future__ import annotations

import io
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from spectrain.config.build import GroupSpec
from spectrain.config.plain_files import read_json_object
from spectrain.config.spec import RunSpec
from spectrain.errors import RunError, UserError, first_line
from spectrain.eval.columns import format_speedup, format_speedup_interval
from spectrain.models.threads import format_threads
from spectrain.output.verbosity import result_output, shows_notes
from spectrain.runs.folder import find_results_folder
from spectrain.servers.engines import ENGINES
from spectrain.servers.ports import find_free_ports

from ..engines.serve import find_served_drafter
from ..engines.starters import find_starter
from ..servers.base import Server
from .command import score_server

# Prompts that are scored at most, from all categories in turn.
MAX_PROMPTS = 12
# Seconds that an engine may take to start.
START_SECONDS = 60
# Settings of `eval` that say which prompts are scored, and how many tokens are decoded for each.
PROMPT_SETTINGS = (
    "prompts",
    "categories",
    "context",
    "context_method",
    "documents",
    "max_new_tokens",
)
ENGINES_PYTHON = ".venv-engines/bin/python"


@dataclass(frozen=True)
class EngineTrial:
    """An engine for CPUs, and with which settings a drafter is tried in it."""

    name: str
    # Settings of its server, and those for a drafting method, by the engine's name of the method.
    settings: Mapping[str, Any] = field(default_factory=dict)
    by_method: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    has_threads: bool = True

    def make_settings(self, method: str | None = None) -> dict[str, Any]:
        """Return the settings of its server for a drafting method, with the threads of our own
        loop.
        """
        threads = {"threads": torch.get_num_threads()} if self.has_threads else {}
        return {**self.settings, **self.by_method.get(method or "", {}), **threads}


TRIALS = (
    EngineTrial(
        "openvino",
        by_method={"eagle3": {"draft_tokens": 4, "tree_depth": 2, "branching_factor": 2}},
    ),
    EngineTrial("llamacpp", by_method={"draft-eagle3": {"draft_tokens": 2}}),
    EngineTrial("vllm", {"python": ENGINES_PYTHON}, has_threads=False),
)
"""Engines in the order of what they promise for a small target: OpenVINO verifies trees, llama.cpp
starts at once, and vLLM takes half a minute to start."""


def score_in_engine(spec: RunSpec, run: Path) -> None:
    """Score the drafter of a run in the engine that eval.serve_in names; print what it gained and
    the command that serves it.

    What goes wrong in an engine fails no command: one sentence says what it was.
    """
    requested = spec.eval.settings.get("serve_in") if spec.eval else None
    if requested is None or int(os.environ.get("RANK", 0)) > 0:
        return
    trials = [trial for trial in TRIALS if requested in ("auto", trial.name)]
    reason = ""
    for trial in trials:
        try:
            settings = find_settings(trial, spec, run)
            break
        except (UserError, RunError) as error:
            reason = first_line(error)
    else:
        if requested != "auto":
            print(f"The drafter is not scored in {ENGINES[requested].title}: {reason}.")
            return
        if not shows_notes():
            return
        print(
            "No engine for CPUs that serves this drafter is installed here. After make openvino "
            f"or make llama-cpp, spectrain eval run={run} eval.serve_in=auto measures what the "
            "drafter gains in it."
        )
        return
    title = ENGINES[trial.name].title
    print(f"{title} is installed here, so the drafter is also scored in it", flush=True)
    try:
        summary = score_quietly(trial.name, settings, spec, run)
    except (UserError, RunError, OSError, ValueError) as error:
        print(f"{title} did not serve the drafter: {first_line(error)}.")
        return
    words = [f"server.{key}={value}" for key, value in settings.items()]
    command = shlex.join(["spectrain", "serve", f"run={run}", f"server={trial.name}", *words])
    with result_output():
        print(f"{describe_gain(title, summary)}\n{command}")


def find_settings(trial: EngineTrial, spec: RunSpec, run: Path) -> dict[str, Any]:
    """Return the settings of an engine for the drafter of a run; raise a UserError if it is not
    installed or does not serve the drafter."""
    server: Server = GroupSpec("server", trial.name, trial.make_settings()).build()
    find_starter(server).check_installed()
    drafter = find_served_drafter(replace(spec, run=str(run)), trial.name)
    launch = drafter.layout.drafter_launches(drafter.checkpoint, drafter.target, "")[trial.name]
    return trial.make_settings(launch.method)


def score_quietly(
    name: str, settings: Mapping[str, Any], spec: RunSpec, run: Path
) -> dict[str, Any]:
    """Score the drafter in an engine that runs with it and, in turn, without it; return the content
    of summary.json.

    The prompts are the first ones of our own score, whose number is in its summary, with the same
    limit of tokens.
    """
    own = find_results_folder(run) / "eval" / spec.evaluation_name / "summary.json"
    prompts = read_json_object(own)["setting"]["prompts"] if own.exists() else MAX_PROMPTS
    port, baseline_port = find_free_ports(2)
    ports = {"port": port, "baseline_port": baseline_port, "start_seconds": START_SECONDS}
    prompt_settings = {
        key: spec.eval.settings.get(key)
        for key in PROMPT_SETTINGS
        if spec.eval.settings.get(key) is not None
    }
    config = {
        "run": str(run),
        "server": GroupSpec("server", name, {**settings, **ports}).node,
        "serve": True,
        "eval": {
            **prompt_settings,
            "limit": min(prompts, MAX_PROMPTS),
            "check": False,
            "report": False,
        },
    }
    with redirect_stdout(io.StringIO()):
        return score_server(config)


def describe_gain(title: str, summary: Mapping[str, Any]) -> str:
    """Say how fast an engine is with and without the drafter."""
    speedup = summary["speedup"]
    rates = summary["tokens_per_second"]
    setting = summary["setting"]
    server = setting["server"]
    interval = format_speedup_interval(speedup)
    setting_words = ", ".join(
        filter(None, [server["weight_type"], format_threads(server["threads"])])
    )
    return (
        f"In {title} the drafter makes decoding {format_speedup(speedup)} times as fast"
        f"{f' (95 % {interval})' if interval else ''}: {rates['drafted']:.1f} tokens/s, without it "
        f"{rates['autoregressive']:.1f}, on {setting['prompts']} prompts, {setting_words}. "
        f"{judge_gain(speedup['ci95'])}. This command serves it there:"
    )


def judge_gain(interval: Sequence[float] | None) -> str:
    """Say whether a drafter pays, from the interval of its speedup."""
    low, high = interval or (0.0, float("inf"))
    if low > 1:
        return "It pays there"
    return (
        "It costs more than it gains there"
        if high < 1
        else "Whether it pays there is undecided, because the interval includes 1"
    )
