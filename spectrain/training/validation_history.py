"""The validations of a training run so far, which weights are its result, and what the training
added to its start.
"""

from dataclasses import dataclass, field

from .validation import Validation, difference_interval


@dataclass(frozen=True)
class HeldOutGain:
    """What a training added to the tokens per forward of its start, at the same held-out places."""

    start: float
    end: float
    # Of the difference, which is known better than both ends.
    interval: list[float] | None
    num_places: int
    # The step whose weights are the result, and the last step.
    result_step: int
    num_steps: int
    # The forecast after the last step, and the interval of its difference from the start.
    last: float
    last_interval: list[float] | None

    def describe(self) -> str:
        """Return one sentence for the end of the training."""
        if self.result_step == 0:
            how = "Training added nothing to its start"
            values = (
                f"{self.start:.3f} tokens per forward before step 1, {self.last:.3f} after "
                f"step {self.num_steps}"
            )
            bounds = self.last_interval
            end = "the weights of the start are the result; lower trainer.lr or train on more data"
        else:
            share = (self.end - self.start) / self.start
            verb, end_word = ("added", "to") if share >= 0 else ("took", "from")
            how = f"Training {verb} {abs(100 * share):.1f} % {end_word} its start"
            values = f"{self.start:.3f} -> {self.end:.3f} tokens per forward"
            bounds = self.interval
            end = self._describe_result()
        positions = f"over {self.num_places:,} held-out positions{format_difference(bounds)}"
        return f"{how}: {values} {positions}" + (f"; {end}" if end else "")

    def _describe_result(self) -> str:
        """Return what else there is to know of a result with the weights of a step."""
        if self.end < self.start:
            return "leave out trainer.keep_best=false to keep the best weights, or lower trainer.lr"
        parts = []
        if self.interval is not None and self.interval[0] <= 0:
            parts.append("the interval includes 0, so this may be chance")
        if self.result_step < self.num_steps:
            parts.append(
                f"the result has the weights of step {self.result_step}, the best of "
                f"{self.num_steps}"
            )
        return "; ".join(parts)


def format_difference(bounds: list[float] | None) -> str:
    """Return the interval of a difference in brackets with a blank before it; nothing where it
    is unknown.
    """
    if bounds is None:
        return ""
    return f" (95 % interval of the difference {bounds[0]:+.3f} to {bounds[1]:+.3f})"


@dataclass
class ValidationHistory:
    """The results of the validations so far."""

    # The highest forecast; 0 before any validation.
    best: float = 0.0
    # The step after which it was measured; 0 before the first step.
    best_step: int = 0
    # Validations since then.
    without_gain: int = 0
    # The forecast before the first step, and the newest one; None where they were not measured.
    start: float | None = None
    newest: float | None = None
    # What each conversation adds to the error of the forecasts "start", "best" and "newest".
    influences: dict[str, list[float]] = field(default_factory=dict)
    # Places of a validation.
    num_places: int = 0
    # Number of validations, the step after which the newest one was, and the seconds that all of
    # them and the newest one took.
    count: int = 0
    newest_step: int = 0
    seconds: float = 0.0
    newest_seconds: float = 0.0

    def add_forecast(self, forecast: float, step: int, validation: Validation) -> bool:
        """Add a validation, of which all processes take this forecast; tell whether it is the
        best so far.
        """
        self.newest = forecast
        self.num_places = sum(validation.metrics.get("places", []))
        self.influences["newest"] = validation.influences
        self.count = self.count + 1
        self.newest_step = step
        if step == 0:
            self.start, self.influences["start"] = forecast, validation.influences
        if forecast > self.best:
            self.best = forecast
            self.best_step = step
            self.without_gain = 0
            self.influences["best"] = validation.influences
            return True
        self.without_gain += 1
        return False

    def add_seconds(self, seconds: float) -> None:
        """Add the time of the newest validation."""
        self.seconds = self.seconds + seconds
        self.newest_seconds = seconds

    def compare(self, before: str, after: str) -> list[float] | None:
        """Return the interval of the difference between two of the forecasts "start", "best" and
        "newest".
        """
        values = getattr(self, before), getattr(self, after)
        if None in values or not {before, after} <= self.influences.keys():
            return None
        return difference_interval(*values, (self.influences[before], self.influences[after]))

    def takes_best(self, keep_best: bool | None) -> bool:
        """Tell whether the result has the weights of the best validation instead of the last ones.

        By default (None) it has where the last ones are below the start, or below the best by more
        than chance. It never has for a drafter without a judged draft, which no validation can
        compare.
        """
        if not self.num_places or keep_best is not None:
            return bool(self.num_places and keep_best)
        assert self.newest is not None
        if self.start is not None and self.newest < self.start:
            return True
        lost = self.compare("newest", "best")
        return self.newest < self.best and lost is not None and lost[0] > 0

    def measure_gain(self, takes_best: bool, num_steps: int) -> HeldOutGain | None:
        """Return what the training added to its start; None where either was not measured, or no
        draft was judged.
        """
        end = "best" if takes_best else "newest"
        value = getattr(self, end)
        if self.start is None or self.newest is None or value is None or not self.num_places:
            return None
        return HeldOutGain(
            self.start,
            value,
            self.compare("start", end),
            self.num_places,
            self.best_step if takes_best else num_steps,
            num_steps,
            self.newest,
            self.compare("start", "newest"),
        )
