"""Tables of what a drafter needs in an engine, from the times of its forwards."""

from collections.abc import Iterable
from typing import Any

from scripts.results_tables import format_interval, format_table
from spectrain.servers.engines import ENGINES
from spectrain_serve.times.row_times import CONTENT, SPEEDUPS, EngineTimes
from spectrain_serve.times.table import format_requirement


def engine_times_tables(result: dict[str, Any]) -> str:
    """Return the forwards of each engine with the acceptance that they need, and predicted
    against measured speedups.
    """
    measured = [CONTENT.validate_python(each) for each in result["measurements"]]
    titles = ["engine", "text", "drafted", "forward, ms", "quartiles", "ratio to one row"]
    titles += [f"tokens for {speedup:g}x" for speedup in SPEEDUPS]
    times = format_table(titles, (row for each in measured for row in engine_rows(each)))
    titles = [
        "engine",
        "drafted",
        "round, ratio to one row",
        "tokens per forward",
        "predicted",
        "measured",
        "predicted / measured",
    ]
    checks = (
        (
            each["engine"],
            str(each["drafts"]),
            f"{each['round_ratio']:.2f}",
            f"{each['tokens']:.2f}",
            f"{each['predicted']:.2f}x",
            f"{each['measured']:.2f}x {format_interval(each['ci95'])}",
            f"{each['predicted'] / each['measured']:.2f}",
        )
        for each in result["checks"]
    )
    return (
        f"{times}\n\nThe shipped drafter, predicted and measured:\n\n{format_table(titles, checks)}"
    )


def engine_rows(times: EngineTimes) -> Iterable[Iterable[str]]:
    """Return the rows of one measurement."""
    for length in times.lengths:
        ratios = {0: 1.0, **times.ratios(length)}
        for forward in (each for each in times.forwards if each.length == length):
            count = forward.rows - 1
            spread = forward.seconds
            yield [
                f"{ENGINES[times.engine].title}, {times.dtype}, {times.threads} "
                f"thread{'s' * (times.threads != 1)}",
                str(length),
                str(count),
                f"{1000 * spread.median:.1f}",
                f"{1000 * spread.low:.1f} to {1000 * spread.high:.1f}",
                f"{ratios[count]:.2f}",
                *(format_requirement(speedup * ratios[count], count) for speedup in SPEEDUPS),
            ]
