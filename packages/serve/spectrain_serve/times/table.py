"""The times of an engine as a table, with the acceptance that a drafter needs there."""

from rich.table import Table

from spectrain.output.console import make_console

from .row_times import (
    SPEEDUPS,
    EngineTimes,
    Spread,
    advise_engine,
    predict_speedups,
    required_rate,
)

WIDTH = 120


def print_times(times: EngineTimes) -> None:
    """Print a table for each length of the text, and what it means."""
    console = make_console(soft_wrap=True)
    console.width = max(console.width, WIDTH)
    for length in times.lengths:
        console.print(make_table(times, length))
    console.print(
        "tokens: per forward of the target, the bonus token included; in brackets, the share of "
        "drafted tokens that has to be accepted, each after accepted ones. A tree of k nodes "
        "needs as many tokens as a chain of k.",
        highlight=False,
    )
    first = times.lengths[0]
    rates = None if times.drafter is None else times.drafter.acceptance_rates
    console.print(advise_engine(times, rates, times.round_ratios(first)), highlight=False)


def make_table(times: EngineTimes, length: int) -> Table:
    """Return the table of one length of the text: a row for each number of drafted tokens."""
    table = Table(title=f"{times.describe_setting()}: {times.target}, after {length} tokens")
    columns = ["drafted", "forward, ms (quartiles, count)", "ratio to one row"]
    columns += [f"tokens for {speedup:g}x" for speedup in SPEEDUPS]
    rounds = times.round_ratios(length)
    predicted = dict[int, float]()
    if times.drafter is not None:
        columns += ["drafter's round, ratio", "predicted speedup"]
        predicted = predict_speedups(rounds, times.drafter.acceptance_rates)
    for column in columns:
        table.add_column(column, justify="right")
    ratios = {0: 1.0, **times.ratios(length)}
    spreads = {
        forward.rows - 1: forward.seconds for forward in times.forwards if forward.length == length
    }
    for count, ratio in ratios.items():
        cells = [str(count), format_spread(spreads[count]), f"{ratio:.2f}"]
        cells += [format_requirement(speedup * ratio, count) for speedup in SPEEDUPS]
        if times.drafter is not None:
            cells += [f"{rounds[count]:.2f}" if count in rounds else ""]
            cells += [f"{predicted[count]:.2f}x" if count in predicted else ""]
        table.add_row(*cells)
    return table


def format_spread(spread: Spread) -> str:
    low, middle, high = (1000 * value for value in (spread.low, spread.median, spread.high))
    return f"{middle:.2f} ({low:.2f} to {high:.2f}, {spread.count})"


def format_requirement(num_tokens: float, num_drafts: int) -> str:
    """Return the tokens that a forward has to give, and the acceptance rate that gives them."""
    if num_drafts == 0:
        return ""
    rate = required_rate(num_tokens, num_drafts)
    return f"{num_tokens:.2f} (unreachable)" if rate is None else f"{num_tokens:.2f} ({rate:.0%})"
