"""Trackers of a run: always metrics.jsonl and the terminal; W&B or TensorBoard, through
accelerate, if one is configured.
"""

import importlib.util
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
from omegaconf import OmegaConf

from spectrain.config.plain_files import read_json_object
from spectrain.config.spec import RunSpec
from spectrain.errors import UserError
from spectrain.files import write_text
from spectrain.output.streams import print_warning
from spectrain.training.metrics import METRICS_NAME, RunKind, Tracker, read_metrics

from .wandb_account import logged_in

Row = dict[str, Any]


class Wandb(Tracker):
    """Weights & Biases, offline if there is no account; it never asks for a key.

    A resumed run continues the W&B run whose id and last step its folder keeps in tracker.json, and
    logs no step twice. An offline run's artifacts stay in its folder until `wandb sync` sends them.
    """

    def __init__(
        self,
        # Name of the W&B project.
        project: str = "spectrain",
        # W&B user or team that owns the project; null uses the default of the account.
        entity: str | None = None,
        # Whether W&B sends data; null is online if there is an account and its server can be
        # reached, and offline otherwise.
        mode: Literal["online", "offline", "disabled"] | None = None,
        # Send checkpoints and the final drafter as artifacts.
        checkpoints: bool = False,
        # Longest time to wait for W&B at the end of a run, in seconds.
        patience: float = 120.0,
    ) -> None:
        require_package("wandb")
        if patience <= 0:
            raise UserError(f"tracker.patience={patience}: use a number of seconds above 0")
        self.project, self.entity, self.mode = project, entity, mode
        self.checkpoints, self.patience = checkpoints, patience
        self.run: Any = None

    def start_run(
        self, run: Path, config: dict[str, Any], kind: RunKind = "train", step: int = 0
    ) -> None:
        import wandb
        from accelerate.tracking import WandBTracker

        init_accelerate()
        groups = list_groups(config)
        run_id, continues = self._identify_run(run, kind)
        self.staging = run / "wandb"
        # Without this folder W&B writes to a temporary one.
        self.staging.mkdir(parents=True, exist_ok=True)
        self.tracker = WandBTracker(
            self.project,
            entity=self.entity,
            id=run_id,
            resume="allow" if continues else None,
            name=run.name if kind == "train" else f"{run.name}, {kind}",
            group="/".join(groups[key] for key in ("target", "family") if key in groups) or None,
            job_type=kind,
            tags=sorted({name[:64] for name in groups.values()}),
            config=config,
            dir=str(run),
            mode=self._choose_mode(),
            # Another run may be open.
            reinit="create_new",
            settings=wandb.Settings(
                finish_timeout=self.patience, init_timeout=min(self.patience, 60.0)
            ),
        )
        try:
            self.tracker.start()
        except wandb.errors.Error as error:
            raise UserError(
                f"tracker=wandb: W&B takes no run ({' '.join(str(error).split())}); log in anew "
                "with wandb login, or use tracker.mode=offline"
            ) from error
        self.run = self.tracker.run
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")
        if kind == "train":
            for metrics in read_metrics(run / METRICS_NAME, step):
                self.log_metrics(metrics, metrics["step"])

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        # A resumed run repeats steps that W&B has already.
        if step > self.state.get("last_step", 0):
            self.state["last_step"] = step
            write_text(self.state_file, json.dumps(self.state) + "\n")
            self.tracker.log({"step": step, **flatten(metrics)}, step=step)

    def log_evaluation(self, summary: dict[str, Any], rows: list[Row], folder: Path) -> None:
        prefix = f"eval/{folder.name}"
        self.run.summary.update(
            {f"{prefix}/{name}": value for name, value in drafter_values(rows).items()}
        )
        self._log_media(
            {f"{prefix}/systems": make_table(rows), **make_page(f"{prefix}/report", folder)}
        )
        self._send_files(folder, "evaluation", folder.name)

    def log_comparison(self, comparison: dict[str, Any], rows: list[Row], folder: Path) -> None:
        media = {"comparison": make_table(rows), **make_page("report", folder)}
        if advice := comparison.get("recommendations"):
            media["recommendations"] = make_table(advice)
            self.run.summary.update(
                {f"recommended/{item['goal']}": item["choice"] for item in advice}
            )
        self._log_media(media)
        self._send_files(
            folder, "comparison", "comparison", tables={"comparison": make_table(rows)}
        )

    def log_checkpoint(self, path: Path, step: int) -> None:
        if self.checkpoints:
            self._send_files(
                path, "checkpoint", "checkpoint", {"step": step}, aliases=[f"step-{step}"]
            )

    def log_drafter(self, path: Path) -> None:
        if self.checkpoints:
            self._send_files(path, "drafter", "drafter", read_json_object(path / "config.json"))

    def finish_run(self, failed: bool = False) -> None:
        if self.run is not None:
            # accelerate's finish() takes no exit code.
            self.run.finish(exit_code=int(failed))
            self.run = None

    def _identify_run(self, run: Path, kind: RunKind) -> tuple[str, bool]:
        """Return the id of the W&B run, and whether it exists already; every evaluation is a run
        of its own.
        """
        self.state_file = run / "tracker.json"
        self.state: dict[str, Any] = (
            read_json_object(self.state_file) if self.state_file.exists() else {}
        )
        # The ids of the runs by kind, and the last step.
        kinds: dict[str, type[Any]] = {"last_step": int}
        if not all(isinstance(value, kinds.get(key, str)) for key, value in self.state.items()):
            raise UserError(
                f"{self.state_file}: it holds no ids of W&B; delete it, and a new run begins there"
            )
        if kind in self.state:
            return self.state[kind], True
        self.state[kind] = secrets.token_hex(4)
        if kind != "eval":
            run.mkdir(parents=True, exist_ok=True)
            write_text(self.state_file, json.dumps(self.state) + "\n")
        return self.state[kind], False

    def _choose_mode(self) -> Any:
        """Return the mode of the settings, the environment or `wandb offline`; else online if
        there is an account.
        """
        import wandb

        settings = wandb.setup().settings
        mode = self.mode or settings.mode
        if mode != "online":
            return mode
        if not (settings.api_key or settings.identity_token_file or logged_in(settings.base_url)):
            return "offline"
        try:
            httpx.get(settings.base_url, timeout=10)
        except httpx.HTTPError as error:
            print_warning(
                f"tracker=wandb: offline, as {settings.base_url} cannot be reached ({error})"
            )
            return "offline"
        return "online"

    def _log_media(self, media: dict[str, Any]) -> None:
        with stage_files_in(self.staging):
            self.tracker.log(media)

    def _send_files(
        self,
        folder: Path,
        kind: str,
        name: str,
        metadata: dict[str, Any] | None = None,
        tables: dict[str, Any] | None = None,
        aliases: list[str] | None = None,
    ) -> None:
        """Send the files of a folder as an artifact, without its subfolders."""
        import wandb

        artifact = wandb.Artifact(
            re.sub(r"[^\w.-]", "-", f"{self.run.id}-{name}")[:128], type=kind, metadata=metadata
        )
        with stage_files_in(self.staging):
            for file in sorted(file for file in folder.iterdir() if file.is_file()):
                artifact.add_file(str(file))
            for title, table in (tables or {}).items():
                artifact.add(table, title)
            self.run.log_artifact(artifact, aliases=["latest", *(aliases or [])])


class TensorBoard(Tracker):
    """Event files in RUN/tensorboard; `tensorboard --logdir runs` shows those of all runs."""

    def __init__(self) -> None:
        require_package("tensorboard")
        self.tracker: Any = None

    def start_run(
        self, run: Path, config: dict[str, Any], kind: RunKind = "train", step: int = 0
    ) -> None:
        from accelerate.tracking import TensorBoardTracker

        init_accelerate()
        folder = run / "tensorboard"
        if kind != "train":
            folder = folder / f"{kind}-{1 + len(list(folder.glob(f'{kind}-*')))}"
        is_new = step == 0 or not folder.exists()
        self.step = step
        # Steps that will run again are hidden.
        self.tracker = TensorBoardTracker(
            folder.name, folder.parent, purge_step=step + 1 if step else 0
        )
        self.tracker.start()
        if is_new:
            facts = make_markdown([{"run": run.name, "kind": kind, **list_groups(config)}])
            self.tracker.log(
                {"config": indent(OmegaConf.to_yaml(OmegaConf.create(config))), "run": facts},
                step=0,
            )
        if is_new and kind == "train":
            for metrics in read_metrics(run / METRICS_NAME, step):
                self.log_metrics(metrics, metrics["step"])

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        self.step = step
        self.tracker.log(
            {name: value for name, value in flatten(metrics).items() if name != "step"}, step=step
        )

    def log_evaluation(self, summary: dict[str, Any], rows: list[Row], folder: Path) -> None:
        values = {**drafter_values(rows), "systems": make_markdown(rows)}
        values["setting"] = indent(json.dumps(summary.get("setting"), indent=2))
        self.tracker.log(
            {f"eval/{folder.name}/{name}": value for name, value in values.items()}, step=self.step
        )

    def log_comparison(self, comparison: dict[str, Any], rows: list[Row], folder: Path) -> None:
        texts = {
            "comparison": make_markdown(rows),
            "recommendations": make_markdown(comparison.get("recommendations") or []),
        }
        texts["caveats"] = "\n".join(f"- {caveat}" for caveat in comparison.get("caveats") or [])
        self.tracker.log({name: text for name, text in texts.items() if text}, step=self.step)

    def finish_run(self, failed: bool = False) -> None:
        if self.tracker is not None:
            self.tracker.log({"status": "failed" if failed else "finished"}, step=self.step)
            self.tracker.finish()
            self.tracker = None


def init_accelerate() -> None:
    """Initialize accelerate's process state, which its trackers need; one that exists is left
    alone.
    """
    import torch
    from accelerate import PartialState

    PartialState(cpu=not torch.cuda.is_available())


def require_package(package: str) -> None:
    """Raise UserError if a tracker's package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"tracker={package}: the package is not installed; pip install 'spectrain[{package}]'"
        )


def list_groups(config: dict[str, Any]) -> dict[str, str]:
    """Return the target, the drafter's family and the recipe of a configuration, by which runs
    are grouped.
    """
    spec = RunSpec.from_nodes(config)
    groups = {}
    if spec.target:
        groups["target"] = spec.target_name
    if spec.drafter:
        groups |= {"family": str(spec.drafter.choice), "recipe": spec.name}
    return groups


def drafter_values(rows: list[Row]) -> Row:
    """Return the values of the drafter's own row, without its name and label."""
    row = next(row for row in rows if row["system"] == "drafter")
    return {name: value for name, value in row.items() if name not in ("system", "label")}


def flatten(metrics: dict[str, Any]) -> Row:
    """Name nested metrics by their path: agreement/1, time_share/target."""
    flat: Row = {}
    for name, value in metrics.items():
        if isinstance(value, (list, dict)):
            entries = (
                value
                if isinstance(value, dict)
                else {str(number): entry for number, entry in enumerate(value, 1)}
            )
            flat |= {f"{name}/{key}": entry for key, entry in flatten(entries).items()}
        else:
            flat[name] = value
    return flat


def list_columns(rows: list[Row]) -> list[str]:
    """Return the keys of all rows, in the order they first appear."""
    return list(dict.fromkeys(key for row in rows for key in row))


def make_table(rows: list[Row]) -> Any:
    """Return a table of W&B; accelerate's takes no columns of mixed types."""
    import wandb

    columns = list_columns(rows)
    return wandb.Table(
        columns=columns,
        data=[[row.get(key) for key in columns] for row in rows],
        allow_mixed_types=True,
    )


def make_page(name: str, folder: Path) -> dict[str, Any]:
    """Return the folder's report.html as media of W&B; nothing if there is none."""
    import wandb

    page = folder / "report.html"
    return {name: wandb.Html(page.read_text(), inject=False)} if page.exists() else {}


def make_markdown(rows: list[Row]) -> str:
    """Return a table in Markdown; "" for no rows."""
    columns = list_columns(rows)
    cells = [["" if row.get(key) is None else str(row[key]) for key in columns] for row in rows]
    lines = [columns, ["---"] * len(columns), *cells] if rows else []
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def indent(text: str) -> str:
    """Indent a text by four spaces, as code in Markdown."""
    return "\n".join("    " + line for line in text.splitlines())


@contextmanager
def stage_files_in(folder: Path) -> Iterator[None]:
    """Let W&B copy artifacts to a run's own folder, unless the environment names another."""
    if "WANDB_DATA_DIR" in os.environ:
        yield
        return
    os.environ["WANDB_DATA_DIR"] = str(folder.resolve())
    try:
        yield
    finally:
        del os.environ["WANDB_DATA_DIR"]
