"""A plan as tables on the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

from spectrain.output.console import make_console
from spectrain.output.verbosity import shows_notes

# Characters of a line without a terminal; a terminal has its own number, but not fewer than 80.
WIDTH = 120
LEAST_WIDTH = 80
RESERVE = 0.08  # of a device, for what is no tensor: its context, workspaces, holes between blocks


def print_plan(summary: dict[str, Any]) -> None:
    """Print the verdict, what to change if it is no, the tables, and with --notes the commands that
    simulate acceptance.
    """
    console = make_console(soft_wrap=True)
    console.width = max(console.width, LEAST_WIDTH if console.is_terminal else WIDTH)
    console.print(describe_verdict(summary), style="bold", highlight=False, soft_wrap=False)
    if summary.get("changes"):
        console.print(change_table(summary["changes"]))
    tokens, memory, disk_, flops, hours_ = (
        summary[key] for key in ("tokens", "memory", "disk", "flops", "hours")
    )
    table = Table(title="spectrain plan", show_header=False)
    sizes = {name: format_count(number) for name, number in summary["parameters"].items()}
    table.add_row(
        "parameters",
        f"{sizes['trained']} trained; drafter {sizes['drafter']}, target {sizes['target']}",
    )
    training = summary["training"]
    table.add_row("trains", f"{training['trains']}; learns from {training['learns_from']}")
    how = "counted" if tokens["counted"] else "plan.tokens"
    epochs = f"{tokens['epochs']:.3g}"
    table.add_row(
        "tokens",
        f"{format_count(tokens['epoch'])} an epoch ({how}), {epochs} "
        f"epoch{'' if epochs == '1' else 's'}, "
        f"{tokens['steps']} steps",
    )
    table.add_section()
    table.add_row(
        f"memory a {memory['device']} device",
        f"{format_bytes(memory['peak_bytes'])} in tensors at the worst moment",
    )
    for part, size in sorted(memory["parts"].items(), key=lambda item: -item[1]):
        if size >= 0.001 * memory["peak_bytes"]:
            table.add_row(f"  {part}", format_bytes(size))
    for what, size in memory["sharded"].items():
        table.add_row(f"  {what} sharded over {memory['devices']}", format_bytes(size))
    table.add_section()
    run = format_bytes(disk_["run_bytes"])
    run += f": {disk_['checkpoints_kept']} checkpoints of {format_bytes(disk_['checkpoint_bytes'])}"
    run += f", drafter {format_bytes(disk_['drafter_bytes'])}"
    run += (
        f", target {format_bytes(disk_['trained_target_bytes'])}"
        if disk_["trained_target_bytes"]
        else ""
    )
    table.add_row("disk, the run", run)
    if disk_["store_bytes"]:
        stored = ", ".join(
            f"{dtype} {format_bytes(size)}" for dtype, size in disk_["store_bytes"].items()
        )
        table.add_row("disk, a feature store", stored)
    table.add_section()
    each = (
        f"{flops['target_per_token'] / 1e9:.3g} GFLOP a token in the target, "
        f"{flops['step_per_token'] / 1e9:.3g} in the step"
    )
    table.add_row("arithmetic", f"{flops['run']:.3g} FLOP; {each}")
    table.add_row("time", describe_hours(hours_))
    serving = summary["serving"]
    users = f"{serving['users']} text{'' if serving['users'] == 1 else 's'}"
    table.add_row(
        "keys and values, served",
        f"{format_bytes(serving['target'])} for {users} of {serving['context']} tokens, and "
        f"{format_bytes(serving['drafter'])} of the drafter (plan.users, plan.context)",
    )
    console.print(table)
    for note in summary["notes"]:
        console.print(note, highlight=False, soft_wrap=False)
    if shows_notes():
        print_simulation(console, summary["simulation"])
    elif summary["simulation"] is not None:
        console.print(
            "--notes prints commands that serve with simulated acceptance, before there is a "
            "drafter",
            highlight=False,
            soft_wrap=False,
        )


def describe_hours(hours: dict[str, Any]) -> str:
    """Return the hours and what they are based on, or where to get them if they are of another
    kind of device.
    """
    if hours.get("is_of_other_device"):
        return "not known; spectrain plan times steps on a CPU for them"
    return f"{format_hours(hours['value'])} ({hours['basis']})"


def format_hours(hours: float) -> str:
    """Format a duration in hours, and one below an hour in minutes."""
    if hours < 1:
        return f"{60 * hours:.2g} minutes"
    return f"{hours:.3g} hour{'' if hours == 1 else 's'}"


def describe_verdict(summary: dict[str, Any]) -> str:
    """Say whether the training fits, and the hours and the disk space that it takes."""
    memory = summary["memory"]
    hours = summary["hours"]
    time = "" if hours.get("is_of_other_device") else f"{format_hours(hours['value'])}, "
    needs = (
        f"{format_bytes(memory['peak_bytes'])} of memory a device, {time}"
        f"{format_bytes(summary['disk']['run_bytes'])} on disk"
    )
    if memory["limit_bytes"] is None:
        return (
            f"It takes {needs}; plan.device_gb=80 says whether it fits, and what to change if not"
        )
    verdict = "It fits" if summary["fits"] else "It does not fit"
    return (
        f"{verdict} in {format_bytes(memory['limit_bytes'])}, of which {RESERVE:.0%} stay free: it "
        f"takes {needs}"
    )


def change_table(changes: list[dict[str, Any]]) -> Table:
    """Return the changes that take less memory, with what each saves."""
    table = Table("change", "memory", "saves", "fits")
    for entry in changes:
        table.add_row(
            entry["change"],
            format_bytes(entry["peak_bytes"]),
            format_bytes(entry["saves_bytes"]),
            "yes" if entry["fits"] else "no",
        )
    return table


def print_simulation(console: Console, simulation: dict[str, Any] | None) -> None:
    """Print the commands that simulate acceptance."""
    if simulation is None:
        return
    rates = " ".join(f"{rate:g}" for rate in simulation["rates"])
    how = (
        "assumed; plan.acceptance_rates sets others"
        if simulation["assumed"]
        else "plan.acceptance_rates"
    )
    console.print(
        f"These commands serve with simulated acceptance, at the rates {rates} by position "
        f"({how}), and show what it is worth on this hardware. DRAFTER is any drafter of this "
        "shape; spectrain serve takes an untrained one.",
        highlight=False,
    )
    for engine, command in simulation["commands"].items():
        console.print(f"  {engine}: {command}", highlight=False, markup=False)


def format_bytes(size: float) -> str:
    """Format bytes with three digits, in a unit of which there are less than a thousand."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if size >= 0.9995 * unit:
            return f"{size / unit:.3g} {name}"
    return f"{size / 1e6:.3g} MB"


def format_count(number: float) -> str:
    for unit, name in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:g}"
