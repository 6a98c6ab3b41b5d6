"""The columns of all tables about an evaluation, each declared once.

The terminal, the report page, a comparison and the trackers show them. A column of a system reads
that system's entry in summary.json; a column of a run reads a row of comparison.json. A missing
value is an empty cell.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from spectrain.decoding.acceptance.base import is_declared_lossless
from spectrain.eval.kinds import POSITIONS, TEXT_POSITIONS, TURNS
from spectrain.eval.noise import is_possible

# ratio of the ends above which an interval is too wide to show: there were too few prompts
WIDE = 10
# name of the system that stands first: the drafter's tree merged with retrieved continuations
RECOMMENDED = "copies"
DRAFTER = "drafter"  # name of the system whose numbers stand at the top of summary.json
AUTOREGRESSIVE = "autoregressive"  # name of decoding without a drafter

ComparisonTable = Literal["terminal", "markdown"]
"""A table of a comparison: the printed one, of 100 characters, or the one for a README and for
docs/results.
"""
Entry = Mapping[str, Any]
Row = dict[str, Any]


def format_number(value: float) -> str:
    """Format a number with two decimals."""
    return f"{value:.2f}"


def format_interval(interval: Sequence[float] | None) -> str:
    """Format a 95 % interval: "" if there were too few prompts for one, "unknown" if it is too
    wide to mean anything.
    """
    ends = known_interval(interval)
    if ends is not None:
        return f"{ends[0]:.2f} to {ends[1]:.2f}"
    return "unknown" if interval else ""


def known_interval(interval: Sequence[float] | None) -> tuple[float, float] | None:
    """Return the ends of a 95 % interval; None if there were too few prompts for one, or if it
    is too wide to mean anything.
    """
    if not interval:
        return None
    low, high = interval
    return (low, high) if high < WIDE * low else None


def format_speedup(speedup: Entry, unit: str = "") -> str:
    """Format a speedup; one that may not be quoted is marked with "?", which stands alone for an
    impossible one.
    """
    if not is_possible(speedup):
        return "?"
    return f"{speedup['ratio']:.2f}{unit}" + ("" if speedup.get("quotable", True) else "?")


def format_speedup_interval(speedup: Entry) -> str:
    """Format the interval of a possible speedup."""
    return format_interval(speedup.get("ci95")) if is_possible(speedup) else ""


def format_identical(lossless: Entry) -> str:
    """Format how many answers equal their reference, or what the check of the distribution found;
    "not checked" if nothing was compared.
    """
    if lossless["checked"] and lossless["identical"] is not None:
        return f"{lossless['identical']} of {lossless['checked']}"
    if not is_declared_lossless(lossless):
        return "lossy"
    verdict = str((lossless.get("distribution") or {}).get("verdict"))
    return {"same": "in distribution", "different": "DIFFERENT"}.get(verdict, "not checked")


def format_milliseconds(value: float) -> str:
    """Format milliseconds with three digits or fewer after the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def format_bytes(count: float) -> str:
    """Format bytes as megabytes."""
    return f"{count / 1e6:.1f} MB"


def format_training(row: Entry) -> str:
    """Format the tokens and the seconds of a training run."""
    seconds = row.get("training_seconds")
    return (
        "" if seconds is None else f"{row.get('training_tokens', 0) / 1e3:.0f} k, {seconds:.0f} s"
    )


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    # Where the value stands, with dots between nested keys; "" is the entry itself.
    key: str
    title: str
    # Text of a value that is not null.
    format: Callable[[Any], str]
    description: str
    # Text of the value's 95 % interval; None for a value without one.
    interval: Callable[[Any], str] | None = None
    # What trackers log, name -> key; null logs the value itself, under its key with underscores for
    # dots.
    logged: Mapping[str, str] | None = None
    # Tables of a comparison that have this column; an evaluation's table, report.html and trackers
    # show every column.
    shown_in: tuple[ComparisonTable, ...] = ()
    # Which column an evaluation's table leaves out first where its names would wrap: the one with
    # the largest number. 0 is never left out.
    optional: int = 0

    def cell(self, entry: Entry) -> str:
        """Return the text of an entry's value."""
        value = get_value(entry, self.key)
        return "" if value is None else self.format(value)

    def interval_cell(self, entry: Entry) -> str:
        """Return the text of the interval of an entry's value."""
        value = get_value(entry, self.key)
        return "" if value is None or self.interval is None else self.interval(value)

    def values(self, entry: Entry) -> Row:
        """Return what trackers log of an entry, by name; values that were not measured are left
        out.
        """
        logged = self.logged or {self.key.replace(".", "_"): self.key}
        return {
            name: value
            for name, key in logged.items()
            if (value := get_value(entry, key)) is not None
        }


SYSTEM_COLUMNS = (
    Column(
        "acceptance_length",
        "tokens per forward",
        lambda length: format_number(length["pooled"]),
        "Mean number of tokens that one forward pass of the target emits.",
        interval=lambda length: format_interval(length.get("ci95")),
        logged={
            "acceptance_length": "acceptance_length.pooled",
            "acceptance_length_low": "acceptance_length.ci95.0",
            "acceptance_length_high": "acceptance_length.ci95.1",
        },
        shown_in=("terminal", "markdown"),
    ),
    Column(
        "tokens_per_second.drafted",
        "tokens/s",
        lambda rate: f"{rate:.1f}",
        "Decoded tokens per second, without the time to read the prompt.",
        optional=2,
        logged={
            "tokens_per_second": "tokens_per_second.drafted",
            "tokens_per_second_autoregressive": "tokens_per_second.autoregressive",
        },
    ),
    Column(
        "speedup",
        "speedup",
        format_speedup,
        "Tokens per second over those of autoregressive decoding in the same engine, on the same "
        "prompts.",
        interval=format_speedup_interval,
        logged={
            "speedup": "speedup.ratio",
            "speedup_low": "speedup.ci95.0",
            "speedup_high": "speedup.ci95.1",
        },
        shown_in=("terminal", "markdown"),
    ),
    Column(
        "speedup.predicted",
        "predicted",
        format_number,
        "Tokens per forward x time of one autoregressive step / time of one drafted round, which "
        "counts as a step where it was timed to take less.",
        shown_in=("markdown",),
        optional=3,
    ),
    Column(
        "lossless",
        "identical",
        format_identical,
        "Answers that equal the target's own, token by token. For a rule that is lossless in "
        "distribution alone, eval.check=distribution compares the distribution.",
        optional=1,
        logged={"identical": "lossless.identical", "checked": "lossless.checked"},
        shown_in=("terminal", "markdown"),
    ),
)
"""Columns of every system of an evaluation."""


def group_column(key: str, title: str, rounds: str, logged: str) -> Column:
    """Return the column of the tokens per forward of one group of rounds, a kind or a range of
    positions.
    """
    return Column(
        key,
        title,
        lambda group: format_number(group["acceptance_length"]),
        f"Mean number of tokens per forward of rounds that begin {rounds}.",
        interval=lambda group: format_interval(group.get("ci95")),
        logged={logged: f"{key}.acceptance_length"},
    )


KIND_COLUMNS = tuple(
    group_column(
        f"by_kind.{kind}",
        kind.replace("_", " "),
        f"with {kind.replace('_', ' ')}",
        f"acceptance_of/{kind}",
    )
    for kind in ("reasoning", "content", "tool_calls")
)
"""Tokens per forward by kind of token, in the order of an answer."""

POSITION_COLUMNS = tuple(
    group_column(
        f"by_position.{name}",
        name,
        f"in the range {name} of the answer's tokens",
        f"acceptance_at_position/{name}",
    )
    for name in POSITIONS
)
"""Tokens per forward by position in the answer."""

TEXT_POSITION_COLUMNS = tuple(
    group_column(
        f"by_text_position.{name}",
        f"text {name}",
        f"in the range {name} of the text's tokens, prompt included",
        f"acceptance_at_text_position/{name}",
    )
    for name in TEXT_POSITIONS
)
"""Tokens per forward by position in the text."""

TURN_COLUMNS = tuple(
    group_column(
        f"by_turn.{name}",
        name,
        f"in {name} of a conversation",
        f"acceptance_in/{name.replace(' ', '_')}",
    )
    for name in TURNS
)
"""Tokens per forward by turn of the conversation."""

GROUP_COLUMNS = (
    ("kind of token", KIND_COLUMNS),
    ("position in the answer, in tokens", POSITION_COLUMNS),
    ("position in the text, in tokens", TEXT_POSITION_COLUMNS),
    ("turn of the conversation", TURN_COLUMNS),
)
"""What rounds are grouped by -> the columns of the groups."""


def percentile_column(
    key: str, title: str, description: str, logged_name: str | None = None
) -> Column:
    """Return the column of the percentiles of a time, which trackers get by `logged_name`."""
    names = ("p50", "p95", "p99")
    return Column(
        key,
        title,
        lambda times: " / ".join(format_milliseconds(times[name]) for name in names),
        f"{description}: percentiles 50, 95 and 99.",
        logged=None
        if logged_name is None
        else {f"{logged_name}/{name}": f"{key}.{name}" for name in names},
    )


SERVING_COLUMNS = (
    percentile_column(
        "serving.drafted.first_token_ms",
        "ms to the first token",
        "Milliseconds to the first token, waiting included",
        "first_token_ms",
    ),
    percentile_column(
        "serving.drafted.per_token_ms",
        "ms per token",
        "Milliseconds per later token, the mean of an answer",
        "per_token_ms",
    ),
    Column(
        "serving.drafted.tokens_per_second",
        "tokens/s of all",
        lambda rate: f"{rate:.1f}",
        "Tokens of all answers over the time from the first request to the last answer.",
    ),
    Column(
        "serving.drafted.requests_per_second",
        "requests/s",
        format_number,
        "Answers over the time of all of them together.",
    ),
    Column(
        "serving.drafted.within_slo",
        "within eval.slo",
        lambda share: f"{share:.0%}",
        "Share of the requests whose times are within eval.slo.",
    ),
)
"""Columns of a server's answers at one level of concurrency."""

RUN_COLUMNS = (
    Column(
        "batched",
        "batched speedup",
        lambda batched: f"{batched['speedup']['ratio']:.2f} at {batched['batch_size']}",
        "Speedup of the best tree with so many prompts decoded together.",
        logged={
            f"batched/{key.replace('.', '/')}": f"batched.{key}"
            for key in ("batch_size", "label", "speedup.ratio", "speedup.predicted")
        },
        shown_in=("terminal", "markdown"),
    ),
    Column(
        "trained_parameters",
        "trained parameters",
        lambda count: f"{count / 1e6:.2f} M" if count else "",
        "Number of parameters that training changed.",
        shown_in=("terminal", "markdown"),
    ),
    Column(
        "extra_memory",
        "extra memory",
        format_bytes,
        "Memory that decoding takes beyond decoding without the drafter.",
        shown_in=("markdown",),
    ),
    Column(
        "",
        "training",
        format_training,
        "Tokens and seconds of the training run.",
        logged={name: name for name in ("training_seconds", "training_tokens")},
        shown_in=("terminal", "markdown"),
    ),
    Column("lossless_to", "lossless to", str, "Model whose output the drafter leaves unchanged."),
)
"""Columns of a comparison's runs, which all systems of a run share."""


def get_value(entry: Entry, key: str) -> Any:
    """Return the value at a dotted key, whose parts are names or positions in a list; None if a
    part is missing or null.
    """
    value: Any = entry
    for part in filter(None, key.split(".")):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, Sequence) and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


# Rows


def autoregressive_entries(summary: Entry) -> list[Row]:
    """Return the entry of autoregressive decoding, the baseline of a summary, if there is one.

    It holds the values that are known without a drafter; the cell of any other column is empty. A
    metric that autoregressive decoding has too needs its key here.
    """
    rate = get_value(summary, "tokens_per_second.autoregressive")
    entry = {
        "label": "autoregressive",
        "acceptance_length": {"pooled": 1.0},
        "tokens_per_second": {"drafted": rate},
        "speedup": {"ratio": 1.0},
    }
    return [] if rate is None else [entry]


def order_systems(names: Sequence[str]) -> list[str]:
    """Put the drafter with retrieval first, if it was decoded."""
    return sorted(names, key=lambda name: name != RECOMMENDED)


def list_systems(summary: Entry) -> dict[str, Entry]:
    """Return the entries to show by name, that with retrieval first; without those that a sweep
    shows in a table of its own.
    """
    sweep = summary.get("sweep")
    entries = {DRAFTER: summary, **(summary.get("compared") or {})}
    return {
        name: entries[name]
        for name in order_systems([*entries])
        if not sweep or not name.startswith(f"{sweep['over']}-")
    }


def label_row(entry: Entry) -> str:
    """Return the label of a system's row, with the share of its rounds that drafted if it may
    decide not to draft.
    """
    label = str(entry.get("label") or "drafter")
    rounds = entry.get("rounds")
    if not rounds or get_value(entry, "tree.undrafted_share") is None:
        return label
    return f"{label}; {entry['drafted_rounds'] / rounds:.0%} of the rounds drafted"


def list_short_labels(entries: Sequence[Entry]) -> list[str]:
    """Return the labels of a terminal's rows: without the largest number of nodes where the others
    differ, and with the share of the rounds that drafted in two words.
    """
    labels = [str(entry.get("label") or "drafter") for entry in entries]
    short = [re.sub(r", up to \d+ nodes", "", label) for label in labels]
    names = short if len({*short}) == len({*labels}) else labels
    return [
        name + label_row(entry)[len(label) :].replace(";", ",").replace(" of the rounds", "")
        for name, label, entry in zip(names, labels, entries)
    ]


def choose_fastest(summary: Entry) -> str | None:
    """Return the name of the fastest system, the one to recommend: AUTOREGRESSIVE if none is faster
    than plain decoding.

    Every table and page takes its recommendation from here. None if no speedup may be quoted, or
    none was measured.
    """
    entries = {name: entry for name, entry in list_systems(summary).items() if entry.get("speedup")}
    if (
        not entries
        or summary.get("server")
        or not (summary.get("speedup") or {}).get("quotable", True)
    ):
        return None
    quotable = {
        name: entry["speedup"] for name, entry in entries.items() if is_quotable(entry["speedup"])
    }
    if not quotable:
        return None
    best = max(quotable, key=lambda name: float(quotable[name]["ratio"]))
    return best if quotable[best]["ratio"] > 1 else AUTOREGRESSIVE


def is_quotable(speedup: Entry) -> bool:
    """Tell whether a speedup may be quoted: it is possible, and the machine was quiet."""
    return is_possible(speedup) and bool(speedup.get("quotable", True))


def list_serving_rows(summary: Entry) -> list[tuple[str, Entry]]:
    """Return the labels and entries of a server's times by concurrency, with the drafter and, if
    measured, without.
    """
    rows: list[tuple[str, Entry]] = []
    for entry in list_systems(summary).values():
        serving = entry.get("serving") or {}
        label = f"{serving.get('concurrency')} at once"
        rows += [(label, entry)] if "drafted" in serving else []
        rows += (
            [(f"{label}, without", {"serving": {"drafted": serving["plain"]}})]
            if "plain" in serving
            else []
        )
    return rows


def list_groups(columns: Sequence[Column], entries: Sequence[Entry]) -> list[Column]:
    """Return the columns, of kinds or of positions, that some entry has; none if there is
    content alone, the first range or the first turn.
    """
    present = [column for column in columns if any(column.cell(entry) for entry in entries)]
    return (
        []
        if present
        in (
            [KIND_COLUMNS[1]],
            [POSITION_COLUMNS[0]],
            [TEXT_POSITION_COLUMNS[0]],
            [TURN_COLUMNS[0]],
        )
        else present
    )


def tracked_values(entry: Entry) -> Row:
    """Return what trackers log of a system, by name."""
    groups = (column for _, columns in GROUP_COLUMNS for column in list_groups(columns, [entry]))
    columns = (*SYSTEM_COLUMNS, *SERVING_COLUMNS, *groups)
    values = {name: value for column in columns for name, value in column.values(entry).items()}
    depths = enumerate(entry.get("acceptance_by_depth") or [], 1)
    return values | {f"acceptance_at_depth/{depth}": rate for depth, rate in depths}


def tracked_systems(summary: Entry) -> list[Row]:
    """Return a row of values for each system of an evaluation, the one with retrieval first."""
    entries = {DRAFTER: summary, **(summary.get("compared") or {})}
    return [
        {"system": name, "label": entries[name].get("label"), **tracked_values(entries[name])}
        for name in order_systems([*entries])
    ]


def tracked_comparison(comparison: Entry) -> list[Row]:
    """Return a row of values for each system of each run in a comparison."""
    rows = []
    for run in comparison["rows"]:
        facts = {key: run.get(key) for key in ("name", "label", "family", "trained")}
        costs = {
            name: value for column in RUN_COLUMNS for name, value in column.values(run).items()
        }
        rows += [
            {**facts, "drafting": system["label"], **tracked_values(system), **costs}
            for system in run["systems"]
        ]
    return rows
