"""What a training shows: its metrics in metrics.jsonl, in the terminal and in a tracker."""

import math
from pathlib import Path
from typing import Any

from spectrain.output.streams import print_text

from .metrics import METRICS_NAME, MetricsFile, Tracker, TrainingProgress
from .run import TrainingRun


class TrainingReport:
    """Measures a training where that is due, and writes its metrics on the main process. Every
    process must call its methods.
    """

    def __init__(self, job: TrainingRun, tracker: Tracker | None) -> None:
        self.job = job
        self.tracker = tracker or Tracker()
        self.metrics_file = (
            MetricsFile(job.run / METRICS_NAME, job.step) if job.parallel.is_main else None
        )
        self.progress = TrainingProgress(
            round(job.num_steps), job.step, enabled=job.parallel.is_main
        )
        # The validation before the first step; None without.
        self.at_start: dict[str, Any] | None = None

    def __enter__(self) -> "TrainingReport":
        self.progress.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.progress.__exit__(*raised)

    def measure_start(self) -> None:
        """Validate before the first step, which shows whether training makes the drafter better;
        a progress line shows the time that a limit leaves.
        """
        job = self.job
        left = job.budget.seconds_until(1, job.parallel)
        seconds_left = None if math.isinf(left) else max(0.0, left)
        status = "measuring the start on held-out text"
        self.progress.bar.update(job.step, status, seconds_left=seconds_left)
        if job.step or job.is_done or job.held_out is None:
            return
        self.at_start = job.validate()
        history = job.validation_history
        if job.parallel.is_main and history.num_places:
            bounds = self.at_start.get("forecast_interval")
            interval = (
                "" if bounds is None else f" (95 % interval {bounds[0]:.3f} to {bounds[1]:.3f})"
            )
            print_text(
                f"start, before step 1: {history.start:.3f} tokens per forward over "
                f"{history.num_places:,} held-out positions{interval}, measured in "
                f"{history.newest_seconds:.1f} s"
            )

    def record_step(self) -> None:
        """Report a finished step, with its metrics where these are due."""
        job = self.job
        metrics = self._collect_metrics()
        if self.metrics_file is not None and metrics is not None:
            self.metrics_file.write(metrics)
            self.tracker.log_metrics(
                {key: value for key, value in metrics.items() if key != "step"}, job.step
            )
        self.progress.set_num_steps(job.step if job.is_done else round(job.num_steps))
        self.progress.update(job.step, metrics, job.budget.seconds_left, job.budget.is_paced)

    def _collect_metrics(self) -> dict[str, Any] | None:
        """Return the metrics of the last step where they are due, with a validation where one is
        due, and after the first step with that before it."""
        job = self.job
        is_end = job.is_done
        is_logged = job.step % job.trainer.log_every == 0
        measures = False
        if job.held_out is not None:
            # At steps of which all processes know, unless a setting says when.
            if not is_end and job.trainer.eval_every is None and (job.step == 2 or is_logged):
                job.plan_validations()
            measures = is_end or job.is_validation_due
        if not (is_end or job.step == 1 or is_logged or measures):
            return None
        metrics = job.collect_metrics()
        if job.step == 1 and self.at_start is not None:
            metrics["held_out_at_start"] = self.at_start
        if measures:
            metrics["held_out"] = job.validate()
            history = job.validation_history
            metrics["validation_seconds"] = round(job.recording_seconds + history.seconds, 2)
            if history.start is not None:
                metrics["forecast_at_start"] = history.start
                metrics["gain_interval"] = history.compare("start", "newest")
        return metrics

    def record_checkpoint(self, checkpoint: Path) -> None:
        if self.metrics_file is None:
            return
        if type(self.tracker) is not Tracker:
            self.job.finish_checkpoint()
        self.tracker.log_checkpoint(checkpoint, self.job.step)
