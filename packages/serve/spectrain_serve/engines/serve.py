"""`spectrain serve`: an engine with the right flags for a run's drafter, for captured hidden
states, or for a target alone.
"""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import torch

from spectrain.config.spec import RunSpec
from spectrain.errors import Terminated, UserError
from spectrain.export.converter import read_drafter, resolve_target, write_checked
from spectrain.export.drafter_files import METADATA_FILE
from spectrain.export.launches import find_engine_layout
from spectrain.export.layout import DrafterCheckpoint, Layout
from spectrain.export.layouts import detect_layout, find_row, read_files
from spectrain.export.targets import TargetFiles
from spectrain.files import atomic_write, refuse_nonempty, require_writable
from spectrain.models.loading import resolve_device, resolve_dtype
from spectrain.models.target import Target
from spectrain.output.verbosity import print_json
from spectrain.runs.drafters import build_drafter, build_without_weights, save_drafter
from spectrain.runs.folder import require_drafter_directory
from spectrain.servers.commands import EngineLaunch

from ..servers.base import Server
from .launch import start_engine
from .starters import find_starter
from .versions import refuse_version


def serve_command(spec: RunSpec, capture: bool, print_only: bool, out: str | None) -> None:
    """Start an engine and wait until a signal stops it, or print its command."""
    server: Server = spec.server.build()
    with TemporaryDirectory(prefix="spectrain-serve-") as scratch, interrupt_on_signals():
        lines: list[str] = []
        if (
            spec.run is None
            and spec.recipe_name is not None
            and spec.server.settings.get("acceptance_rates")
            and not capture
        ):
            if print_only:
                raise UserError(
                    "--print: an untrained drafter is written only to be started; leave --print "
                    "out, or give run=DIR"
                )
            spec = write_untrained(spec, Path(scratch) / "untrained")
        if spec.run is None:
            launch = make_target_launch(spec, server, capture)
        else:
            drafter = find_served_drafter(spec, server.name, capture)
            default = (
                Path(f"{spec.run.rstrip('/')}-{server.name}")
                if print_only
                else Path(scratch) / "drafter"
            )
            folder = drafter.directory if drafter.is_exported else Path(out or default)
            if not drafter.is_exported:
                require_writable(folder, "out")
                # An export of before is written anew; any other folder stays as it is.
                if not (folder / METADATA_FILE).exists():
                    refuse_nonempty(folder)
                lines.append(drafter.export_line(folder))
            if not drafter.is_exported and not print_only:
                drafter.write(folder, getattr(server.settings, "python", None))
            launch = drafter.make_launch(server, folder)
        if print_only:
            command = find_starter(server).make_command(launch).format_shell()
            print_json({"command": command, "export_command": lines[0] if lines else None})
            print("\n".join([*lines, command]))
        else:
            run_engine(server, launch)


def run_engine(server: Server, launch: EngineLaunch) -> None:
    """Start an engine and wait until a signal stops it."""
    with start_engine(server, launch) as engine:
        print_json({"server": server.name, "model": launch.served_name, "url": engine.url})
        print(
            f"{server.name} serves {launch.served_name} at {engine.url}; an interrupt stops it",
            flush=True,
        )
        engine.wait()


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, and SIGTERM and SIGHUP `Terminated`, so that what was
    started is stopped.

    A shell lets a command in the background ignore SIGINT, and nohup lets it ignore SIGHUP, which
    stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> NoReturn:
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# The target


def make_target_launch(spec: RunSpec, server: Server, capture: bool) -> EngineLaunch:
    """Return the launch of a target without a drafter, for its answers or for its hidden states."""
    if not capture and spec.recipe_name is not None:
        raise UserError(
            f"recipe={spec.recipe_name}: it has no drafter to serve; serve a trained one with "
            "run=DIR, capture what the recipe reads with capture=true, or simulate acceptance "
            "with server.acceptance_rates=[0.7,0.4,0.2]"
        )
    launch = launch_target(TargetFiles.from_settings(spec.target.node), server)
    return replace(launch, capture_layers=find_captured_layers(spec)) if capture else launch


def launch_target(files: TargetFiles, server: Server) -> EngineLaunch:
    """Return the launch of a target alone, in the weight type that it has in this project too.

    An engine that reads other files than transformers' gets the target in those, which are written
    once.
    """
    name = (
        Path(files.reference).name
        if Path(files.reference).expanduser().is_dir()
        else files.reference
    )
    dtype = str(files.settings.get("dtype", "auto"))
    # A quantized checkpoint says itself in what its engine computes.
    if dtype != "auto" or not getattr(files.full_config, "quantization_config", None):
        dtype = str(resolve_dtype(resolve_device(), files.full_config, dtype)).removeprefix(
            "torch."
        )
    path = files.engine_path
    if find_starter(server).target_format == "gguf":
        from ..layouts.gguf_model import find_target_file

        path = str(find_target_file(files, dtype, getattr(server.settings, "dtype", None)))
    return EngineLaunch(path, name, dtype)


def find_captured_layers(spec: RunSpec) -> tuple[int, ...]:
    """Return the layers that the recipe's drafter reads, and the last layer's state before the
    final norm, in ascending order.

    The final norm of that state is the layer "final"; every check of captured states needs it.
    """
    target, drafter = build_without_weights(spec)
    layers = {layer for stage in drafter.stages for layer in stage.layers}
    if not layers:
        raise UserError(
            f"capture=true: drafter={spec.drafter.choice} reads no hidden states; say which "
            "drafter they are for, as in recipe=eagle3"
        )
    return tuple(sorted({layer for layer in layers if layer != "final"} | {target.num_layers}))


# The drafter


def write_untrained(spec: RunSpec, folder: Path) -> RunSpec:
    """Write an untrained drafter of a recipe, of which simulated acceptance needs only the cost,
    and return the spec that serves it."""
    target: Target = spec.target.build()
    drafter = build_drafter(spec.drafter, target)
    drafter.prepare(target, torch.ones(target.head.vocab_size, dtype=torch.long))
    save_drafter(folder, drafter, spec)
    return replace(spec, run=str(folder))


@dataclass(frozen=True)
class ServedDrafter:
    """A drafter, and the layout in which an engine reads it."""

    run: str
    # The files that it is read from, and whether they have the layout.
    directory: Path
    is_exported: bool
    checkpoint: DrafterCheckpoint
    layout: Layout
    target: TargetFiles

    def write(self, folder: Path, python: str | None = None) -> None:
        """Write it in the layout into a new folder, with the engine of an interpreter if the
        layout needs the engine.
        """
        layout = (
            self.layout.with_engine(python)
            if python is not None and self.layout.container.needs_engine
            else self.layout
        )
        with atomic_write(folder, folder=True) as scratch:
            write_checked(self.checkpoint, layout, self.target, scratch)

    def export_line(self, folder: Path) -> str:
        """Return the command that writes it in the layout."""
        formats = find_row(self.layout).formats
        return shlex.join(
            ["spectrain", "export", f"run={self.run}", f"format={formats[0]}", f"out={folder}"]
        )

    def make_launch(self, server: Server, folder: Path) -> EngineLaunch:
        """Return the launch of an engine with the drafter in a folder."""
        refuse_version(
            self.layout,
            server.name,
            find_starter(server).read_version,
            f"server.python={getattr(server.settings, 'python', None)}",
        )
        launch = launch_target(self.target, server)
        drafter = self.layout.drafter_launches(self.checkpoint, self.target, str(folder))[
            server.name
        ]
        return replace(
            launch,
            target=str(folder) if self.layout.holds_target else launch.target,
            drafter=drafter,
        )


def find_served_drafter(spec: RunSpec, engine: str, capture: bool = False) -> ServedDrafter:
    """Return the drafter of a run with the layout that an engine reads; raise a UserError if the
    engine reads none of it.
    """
    run = str(spec.run)
    if capture:
        raise UserError(
            "capture=true: an engine that captures states does not draft; leave run out and give "
            "recipe=NAME"
        )
    directory = require_drafter_directory("run", run)
    requested = (
        TargetFiles.from_settings(spec.target.node) if spec.target.layer == "command" else None
    )
    checkpoint = read_drafter(directory, requested)
    target = requested or resolve_target(checkpoint)
    own = detect_layout(read_files(directory))
    is_exported = engine in own.drafter_launches(checkpoint, target, "")
    layout = own if is_exported else find_engine_layout(checkpoint, target, engine)
    if layout is None:
        raise UserError(
            f"run={run}: {engine} does not serve drafter={checkpoint.family}; docs/serving.md "
            "lists what engines serve"
        )
    return ServedDrafter(run, directory, is_exported, checkpoint, layout, target)
