"""Where metrics go: always metrics.jsonl and the terminal; W&B or TensorBoard when it is configured."""

import importlib.util
import json
import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
from omegaconf import OmegaConf

from spectrain.config.spec import RunSpec
from spectrain.errors import UserError
from spectrain.files import write_text
from spectrain.training.metrics import RunKind, Tracker, read_metrics

from .wandb_account import logged_in
from .wandb_file import last_logged_step

Row = dict[str, Any]


class Wandb(Tracker):
    """Weights & Biases, offline where there is no account; it never asks, and at the end it waits `patience` seconds at most.

    A resumed run goes on in the W&B run whose id its folder keeps in tracker.json. With `checkpoints`, checkpoints and the
    final drafter become artifacts; an offline run's lie in its folder until `wandb sync` sends them.
    """

    def __init__(
        self,
        project: str = "spectrain",
        entity: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        checkpoints: bool = False,
        patience: float = 120.0,
    ) -> None:
        require("wandb")
        if patience <= 0:
            raise UserError(f"tracker.patience={patience}: use a number of seconds above 0")
        self.project, self.entity, self.mode = project, entity, mode
        self.checkpoints, self.patience = checkpoints, patience
        self.session: Any = None

    def start_run(self, run: Path, config: dict[str, Any], kind: RunKind = "train", step: int = 0) -> None:
        import wandb

        ours = names(config)
        run_id, continues = self._identity(run, kind)
        self.staging = run / "wandb"
        self.staging.mkdir(parents=True, exist_ok=True)  # else W&B writes to a temporary folder
        told: dict[str, Any] = {
            "project": self.project,
            "entity": self.entity,
            "id": run_id,
            "resume": "allow" if continues else None,
            "name": run.name if kind == "train" else f"{run.name}, {kind}",
            "group": "/".join(ours[key] for key in ("target", "family") if key in ours) or None,
            "job_type": kind,
            "tags": sorted({name[:64] for name in ours.values()}),
            "config": config,
            "dir": str(run),
            "reinit": "create_new",  # another run may be open
            "settings": wandb.Settings(finish_timeout=self.patience, init_timeout=min(self.patience, 60.0)),
        }
        try:
            self.session = wandb.init(mode=self._mode(), **told)
        except wandb.errors.Error as error:
            raise UserError(
                f"tracker=wandb: W&B takes no run ({' '.join(str(error).split())}); log in anew with wandb login, or use "
                "tracker.mode=offline"
            ) from error
        self.session.define_metric("step", hidden=True)
        self.session.define_metric("*", step_metric="step")
        self.known = max(self.session.starting_step - 1, last_logged_step(run, run_id)) if continues else 0
        if kind == "train":
            for metrics in read_metrics(run / "metrics.jsonl", step):
                self.log_metrics(metrics, metrics["step"])  # what a kill kept from it

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        if step > self.known:  # a step that a resumed run does again is there already, and W&B takes no step back
            self.session.log({"step": step, **flatten(metrics)}, step=step)

    def log_evaluation(self, summary: dict[str, Any], rows: list[Row], folder: Path) -> None:
        place = f"eval/{folder.name}"
        self.session.summary.update({f"{place}/{name}": value for name, value in drafter_values(rows).items()})
        self._show({f"{place}/systems": _table(rows), **_page(f"{place}/report", folder)})
        self._send(folder, "evaluation", folder.name)

    def log_comparison(self, comparison: dict[str, Any], rows: list[Row], folder: Path) -> None:
        shown = {"comparison": _table(rows), **_page("report", folder)}
        if comparison.get("recommendations"):
            shown["recommendations"] = _table(comparison["recommendations"])
            self.session.summary.update(
                {f"recommended/{advice['goal']}": advice["choice"] for advice in comparison["recommendations"]}
            )
        self._show(shown)
        self._send(folder, "comparison", "comparison", {"comparison": _table(rows)})

    def log_checkpoint(self, path: Path, step: int) -> None:
        if self.checkpoints:
            self._send(path, "checkpoint", "checkpoint", aliases=[f"step-{step}"], metadata={"step": step})

    def log_drafter(self, path: Path) -> None:
        if self.checkpoints:
            self._send(path, "drafter", "drafter", metadata=json.loads((path / "config.json").read_text()))

    def finish_run(self, failed: bool = False) -> None:
        if self.session is not None:
            self.session.finish(exit_code=int(failed))
            self.session = None

    def _identity(self, run: Path, kind: RunKind) -> tuple[str, bool]:
        """The id of the W&B run, and whether it was begun before: every evaluation is a run of its own."""
        file = run / "tracker.json"
        known: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
        if kind in known:
            return known[kind], True
        known[kind] = secrets.token_hex(4)
        if kind != "eval":
            run.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(known) + "\n")
        return known[kind], False

    def _mode(self) -> Any:
        """What the settings, the environment or `wandb offline` say; else online where there is an account."""
        import wandb

        settings = wandb.setup().settings
        said = self.mode or settings.mode
        if said != "online":
            return said
        if not (settings.api_key or settings.identity_token_file or logged_in(settings.base_url)):
            return "offline"
        try:
            httpx.get(settings.base_url, timeout=10)
        except httpx.HTTPError as error:
            print(f"spectrain: tracker=wandb: kept offline, {settings.base_url} cannot be reached ({error})", file=sys.stderr)
            return "offline"
        return "online"

    def _show(self, media: dict[str, Any]) -> None:
        with _staged_in(self.staging):
            self.session.log(media)

    def _send(
        self,
        folder: Path,
        kind: str,
        name: str,
        tables: dict[str, Any] | None = None,
        aliases: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """The files of a folder as an artifact; what lies in folders below it is left out."""
        import wandb

        artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", f"{self.session.id}-{name}")[:128], type=kind, metadata=metadata)
        with _staged_in(self.staging):
            for file in sorted(file for file in folder.iterdir() if file.is_file()):
                artifact.add_file(str(file))
            for title, table in (tables or {}).items():
                artifact.add(table, title)
            self.session.log_artifact(artifact, aliases=["latest", *(aliases or [])])


class TensorBoard(Tracker):
    """Event files below RUN/tensorboard; `tensorboard --logdir runs` shows those of all runs."""

    def __init__(self) -> None:
        require("tensorboard")
        self.writer: Any = None

    def start_run(self, run: Path, config: dict[str, Any], kind: RunKind = "train", step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run / "tensorboard"
        if kind != "train":
            folder = folder / f"{kind}-{1 + len(list(folder.glob(f'{kind}-*')))}"
        is_new = step == 0 or not folder.exists()
        self.step = step
        self.writer = SummaryWriter(str(folder), purge_step=step + 1 if step else 0)  # what will be done again is hidden
        if is_new:
            self.writer.add_text("config", _code(OmegaConf.to_yaml(OmegaConf.create(config))), 0)
            self.writer.add_text("run", _markdown([{"run": run.name, "kind": kind, **names(config)}]), 0)
        if is_new and kind == "train":
            for metrics in read_metrics(run / "metrics.jsonl", step):
                self.log_metrics(metrics, metrics["step"])

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        self.step = step
        self._scalars({name: value for name, value in flatten(metrics).items() if name != "step"})
        self.writer.flush()  # a kill loses nothing

    def log_evaluation(self, summary: dict[str, Any], rows: list[Row], folder: Path) -> None:
        place = f"eval/{folder.name}"
        self._scalars({f"{place}/{name}": value for name, value in drafter_values(rows).items()})
        self.writer.add_text(f"{place}/systems", _markdown(rows), self.step)
        self.writer.add_text(f"{place}/setting", _code(json.dumps(summary.get("setting"), indent=2)), self.step)

    def log_comparison(self, comparison: dict[str, Any], rows: list[Row], folder: Path) -> None:
        self.writer.add_text("comparison", _markdown(rows), self.step)
        if comparison.get("recommendations"):
            self.writer.add_text("recommendations", _markdown(comparison["recommendations"]), self.step)
        if comparison.get("caveats"):
            self.writer.add_text("caveats", "\n".join(f"- {caveat}" for caveat in comparison["caveats"]), self.step)

    def finish_run(self, failed: bool = False) -> None:
        if self.writer is not None:
            self.writer.add_text("status", "failed" if failed else "finished", self.step)
            self.writer.close()
            self.writer = None

    def _scalars(self, values: Row) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(name, value, self.step)


@contextmanager
def tracked(
    tracker: Tracker | None, run: Path, config: dict[str, Any], kind: RunKind = "train", step: int = 0
) -> Iterator[Tracker]:
    """A tracker between `start` and `finish`, which is told that the run failed where an exception ends it."""
    tracker = tracker or Tracker()
    try:
        tracker.start_run(run, config, kind, step)
        yield tracker
    except BaseException:
        tracker.finish_run(failed=True)
        raise
    tracker.finish_run()


def require(package: str) -> None:
    """Stop where a tracker's package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"tracker={package}: the package is not installed; pip install 'spectrain[{package}]'")


def names(config: dict[str, Any]) -> dict[str, str]:
    """What runs are grouped and found by: the target, the drafter's family and the recipe, where a configuration has them."""
    spec, names_by_kind = RunSpec.from_nodes(config), {}
    if spec.target:
        names_by_kind["target"] = spec.target_name
    if spec.drafter:
        names_by_kind |= {"family": str(spec.drafter.choice), "recipe": spec.name}
    return names_by_kind


def drafter_values(rows: list[Row]) -> Row:
    """Return the values of the drafter's own row, without its name and label."""
    row = next(row for row in rows if row["system"] == "drafter")
    return {name: value for name, value in row.items() if name not in ("system", "label")}


def flatten(metrics: dict[str, Any]) -> Row:
    """Nested metrics as curves of their own: agreement/1, time_share/target."""
    flat: Row = {}
    for name, value in metrics.items():
        if isinstance(value, (list, dict)):
            entries = value if isinstance(value, dict) else {str(number): entry for number, entry in enumerate(value, 1)}
            flat |= {f"{name}/{key}": entry for key, entry in flatten(entries).items()}
        else:
            flat[name] = value
    return flat


def columns_of(rows: list[Row]) -> list[str]:
    """The keys of all rows, in the order they first appear."""
    return list(dict.fromkeys(key for row in rows for key in row))


def _table(rows: list[Row]) -> Any:
    import wandb

    columns = columns_of(rows)
    return wandb.Table(columns=columns, data=[[row.get(key) for key in columns] for row in rows], allow_mixed_types=True)


def _page(name: str, folder: Path) -> dict[str, Any]:
    """A folder's report.html, shown as it is; nothing where there is none."""
    import wandb

    page = folder / "report.html"
    return {name: wandb.Html(page.read_text(), inject=False)} if page.exists() else {}


def _markdown(rows: list[Row]) -> str:
    columns = columns_of(rows)
    lines = [
        columns,
        ["---"] * len(columns),
        *(["" if row.get(key) is None else str(row[key]) for key in columns] for row in rows),
    ]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _code(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())


@contextmanager
def _staged_in(folder: Path) -> Iterator[None]:
    """While it is entered, W&B copies artifacts to a run's own folder, unless the environment names a place."""
    if "WANDB_DATA_DIR" in os.environ:
        yield
        return
    os.environ["WANDB_DATA_DIR"] = str(folder.resolve())
    try:
        yield
    finally:
        del os.environ["WANDB_DATA_DIR"]
