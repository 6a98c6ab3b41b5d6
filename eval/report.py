"""The table that an evaluation prints."""

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spectrain.decoding.acceptance.typical import lossy_warning
from spectrain.eval.noise import is_possible

WIDTH = 100  # columns of what scoring prints
WIDE = 10  # an interval whose ends are so many times apart says nothing: there were too few prompts


def print_table(summary: dict[str, Any]) -> None:
    """Acceptance length and speed of every system with 95 % intervals, then what explains them."""
    setting = summary["setting"]
    console = Console(width=min(WIDTH, Console().width) if Console().is_terminal else WIDTH)
    table = Table(
        title=f"{setting['recipe']} on {setting['target']}: {setting['prompts']} prompts, {setting['max_new_tokens']} tokens",
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0,
    )  # fmt: skip
    table.add_column("", overflow="fold")
    for title in ("tokens per\nforward", "95 %", "tokens/s", "speedup", "95 %", "predicted", "identical"):
        table.add_column(title, justify="right", no_wrap=True)
    base = summary["tokens_per_second"]["autoregressive"]
    table.add_row("autoregressive", "1.00", "", f"{base:.1f}", "1.00", "", "", "")
    sweep = summary.get("sweep")
    for entry in rows(summary):
        length, speed, lossless = entry["acceptance_length"], entry["speedup"], entry["lossless"]
        identical = f"{lossless['identical']} of {lossless['checked']}" if lossless and lossless["checked"] else ""
        table.add_row(
            entry["label"], f"{length['pooled']:.2f}", _range(length["ci95"]),
            f"{entry['tokens_per_second']['drafted']:.1f}", speed_text(speed), speed_range(speed),
            f"{speed['predicted']:.2f}", identical,
        )  # fmt: skip
    console.print(table)
    if sweep:
        _print_sweep(console, summary)
    for sentence in (*fastest(summary), *explanation(summary), *caveats(summary)):
        console.print(sentence, markup=False)


def rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """What a table shows, first what to decode with: the drafter with copies, where these were tried."""
    found = [summary, *shown(summary)]
    copies = summary["compared"].get("copies")
    return found if copies is None else [copies, *(entry for entry in found if entry is not copies)]


def shown(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The systems that the drafter is shown beside, without those that a sweep has a table for."""
    sweep = summary.get("sweep")
    return [entry for name, entry in summary["compared"].items() if not sweep or not name.startswith(f"{sweep['over']}-")]


def fastest(summary: dict[str, Any]) -> Iterator[str]:
    """Which row to take here, if any gains."""
    possible = [entry for entry in rows(summary) if is_possible(entry["speedup"])]
    if len(possible) < 2:
        return
    best = max(possible, key=lambda entry: entry["speedup"]["ratio"])
    speed = best["speedup"]
    if speed["ratio"] > 1:
        yield f"fastest here: {best['label']}, {speed_text(speed)} [{speed_range(speed)}] times as fast as without a drafter"
    else:
        yield "none of these is faster than decoding without a drafter here"


def speed_text(speed: dict[str, Any], unit: str = "") -> str:
    """A speedup as tables show it: none where it cannot be, and marked where it is not to be quoted."""
    if not is_possible(speed):
        return "not to be quoted"
    return f"{speed['ratio']:.2f}{unit}" + ("" if speed.get("quotable", True) else "?")


def speed_range(speed: dict[str, Any]) -> str:
    """Its interval, where it can be."""
    return _range(speed["ci95"]) if is_possible(speed) else ""


def noise_of(summary: dict[str, Any]) -> Iterator[str]:
    """Why speedups are not to be quoted, and what was done about unsteady times."""
    entries = [summary, *summary["compared"].values()]
    repeats = summary.get("noise", {}).get("repeats", 1)
    if repeats > 1:
        yield "times were unsteady: every pair of runs was decoded again, round by round in turn, and that counts"
    doubtful = [entry for entry in entries if not entry["speedup"].get("quotable", True)]
    for reason in dict.fromkeys(entry["speedup"]["reason"] for entry in doubtful):
        named = [entry["label"] for entry in doubtful if entry["speedup"]["reason"] == reason]
        who = "no speedup" if len(named) == len(entries) else f"the speedup of {', '.join(named)}"
        yield f"? {who} is to be quoted: {reason}" if who == "no speedup" else f"? {who} is not to be quoted: {reason}"


def _print_sweep(console: Console, summary: dict[str, Any]) -> None:
    """Two settings against each other: tokens per forward, and how fast that is or what it saved."""
    sweep = summary["sweep"]
    console.print(_sweep_table(summary))
    entries = [entry["lossless"] for name, entry in summary["compared"].items() if name.startswith(f"{sweep['over']}-")]
    if entries and all(entries):
        identical, checked = sum(e["identical"] for e in entries), sum(e["checked"] for e in entries)
        console.print(f"identical in all {len(entries)} settings: {identical} of {checked} answers")
    best, settings = sweep["fastest_speedup"], " ".join(f"{key}={value}" for key, value in sweep["fastest"].items())
    against = f", unpruned {speed_text(summary['speedup'], 'x')}" if sweep["over"] == "prune" else ""
    found = f"{speed_text(best, 'x')} [{speed_range(best)}]{against}"
    console.print(f"fastest on these prompts: {settings}, {found}; others may be as fast", markup=False)


def _sweep_table(summary: dict[str, Any]) -> Table:
    """A cell for every pair of settings."""
    sweep = summary["sweep"]
    pruned = sweep["over"] == "prune"
    what = "tokens per forward, node-layers saved, speedup" if pruned else "tokens per forward, speedup"
    table = Table(title=f"{what} by {sweep['row']} and {sweep['column']}")
    table.add_column(f"{sweep['row']} \\ {sweep['column']}", justify="right")
    for column in sweep["columns"]:
        table.add_column(str(column), justify="right")
    for i, row in enumerate(sweep["rows"]):
        cells = []
        for j, column in enumerate(sweep["columns"]):
            speed = summary["compared"][f"{sweep['over']}-{row}-{column}"]["speedup"]
            saved = f"  {sweep['node_layers_saved'][i][j]:.1%}" if pruned else ""
            cells.append(f"{sweep['acceptance_length'][i][j]:.2f}{saved}  {speed_text(speed, 'x')}")
        table.add_row(str(row), *cells)
    return table


def explanation(summary: dict[str, Any]) -> Iterator[str]:
    """Where the time went, what was kept, and what the speedup is to be read against."""
    setting = summary["setting"]
    share = ", ".join(f"{part} {value:.0%}" for part, value in summary["time_share"].items())
    together = f"; tokens/s are of {setting['batch_size']} prompts at once" if setting["batch_size"] > 1 else ""
    yield f"time of a drafted round: {share}{together}"
    yield f"kept by depth: {_rates(summary['acceptance_by_depth'])}; device {setting['device']}, {setting['dtype']}"
    forced, limits = summary.get("forced"), summary.get("bounds", {})
    if (forwards := limits.get("forwards_per_round", 1)) > 1:
        kept = summary["acceptance_length"]["pooled"]
        yield f"a round takes {forwards} forwards of the target, so each gives {kept / forwards:.2f} tokens"
    if forced:
        yield f"right on the target's own text, by depth: {_rates(forced['agreement_by_depth'])}"
    if forced and "forecast" in forced:
        ahead = forced["forecast"]
        yield (
            f"there, drawn tokens would be kept at {_rates(forced['overlap_by_depth'])} (the sum of min(p, q)), the likeliest "
            f"at {_rates(forced['likeliest_by_depth'])}: {ahead['sampled']:.2f} and {ahead['greedy']:.2f} tokens a forward "
            "of a chain so deep"
        )
    if (rules := summary.get("rules")) and rules["better"] == "recursive":
        yield better_rule(rules, used=summary["tree"]["children"] != "deterministic")
    if traffic := summary.get("traffic"):
        parts = (f"{name} {sum(traffic[name].values()) / 1e6:.2f}" for name in ("draft", "verify", "autoregressive"))
        yield (
            f"megabytes read a token behind {traffic['prompt_tokens']} tokens: {', '.join(parts)}; of these, a round reads "
            f"{traffic['ratio']:.2f} of what plain decoding does"
        )
    if optimum := summary.get("optimum"):
        rules = "; ".join(f"acceptance={name} {_rates(rates)}" for name, rates in optimum["kept_by_depth"].items())
        yield (
            f"of children that are {optimum['children']} any lossless rule keeps, by depth, at most "
            f"{_rates(optimum['best_by_depth'])}: {rules}"
        )
    if limits.get("oracle"):
        floor = limits["autoregressive_of_floor"]
        free = limits["zero_cost_draft"]
        yield (
            f"speedup if every draft were right (chain) {limits['oracle']:.2f}"
            + ("" if free is None else f", if drafting were free {free:.2f}")
            + (f"; an autoregressive step takes {1 / floor:.1f} times its floor" if floor else "")
        )
    for name, entry in summary.get("transformers", {}).items():
        yield (
            f"transformers {name}: {entry['tokens_per_second']:.1f} tokens/s with prefill, {entry['speedup']:.2f} of its plain "
            f"generate, {entry['tokens_per_forward']:.2f} tokens per forward"
        )


def better_rule(rules: dict[str, Any], used: bool = False) -> str:
    """What drawing children promises where the drafter is unsure."""
    match, recursive = rules["match"], rules["recursive"]
    return (
        f"with {rules['children']} children a place, acceptance=match keeps {_rates(match['kept_by_depth'])} by depth, and "
        f"acceptance=recursive tree.children=without_replacement {_rates(recursive['kept_by_depth'])}: "
        + ("so it was decoded" if used else "use that, or acceptance=sample")
    )


def caveats(summary: dict[str, Any]) -> Iterator[str]:
    """What can't be quoted, what changed the output or the drafter, what was left out, and what was checked."""
    setting = summary["setting"]
    yield from noise_of(summary)
    yield from _drifts(summary)
    if pruning := summary.get("pruning"):
        yield (
            f"pruned after {pruning['layer']} layers by their top {pruning['top_k']}: {pruning['nodes_pruned']:.1%} of the "
            f"nodes, {pruning['node_layers_saved']:.1%} of the node-layers and {pruning['work_saved']:.1%} of the work of "
            "verification, the early head counted"
        )
    if skipped := setting["drafter"].get("skipped"):
        yield f"drafted without layers {skipped}; drafter.skipped={str(skipped).replace(' ', '')} uses them again"
    if online := summary.get("online"):
        ends = ", ".join(f"{name} {values[-1]:.2f}" for name, values in online["curves"].items())
        yield (
            f"online: {online['updates']} updates in {online['seconds']:.1f} s, learning from {online['learn']}; tokens per "
            f"forward over the last {online['every']} prompts: {ends}"
        )
    if adversary := summary.get("adversary"):
        yield from _adversary(adversary)
    if guard := summary.get("guard"):
        yield f"guard: {guard['drafted_rounds']} rounds drafted, {guard['plain_rounds']} not"
    if setting.get("skipped"):
        yield ("left out: " + ", ".join(f"{count} {reason}" for reason, count in setting["skipped"].items()))
    if summary["lossless"] is not None:
        yield _checked(summary["lossless"])


def _adversary(found: dict[str, Any]) -> Iterator[str]:
    """What an edit of a few words takes from the drafter, and what the guard saves of it."""
    before, after, speed = found["before"]["pooled"], found["after"]["drafter"]["pooled"], found["speedup"]
    yield (
        f"adversary: {found['edited']} of {found['prompts']} prompts edited by at most {found['words']} words, {before:.2f} "
        f"tokens per forward before and {after:.2f} after, {found['ratio']:.2f} [{_range(found['ratio_ci95'])}] times as many; "
        f"{found['same_tokens']:.1%} of the answers' tokens stay the likeliest, {found['same_answers']} answers are the same"
    )
    yield (
        f"speedup at the edited prompts {speed['drafter']['ratio']:.2f} [{_range(speed['drafter']['ci95'])}], "
        f"with the guard {speed['guarded']['ratio']:.2f} [{_range(speed['guarded']['ci95'])}]"
    )


def _drifts(summary: dict[str, Any]) -> Iterator[str]:
    """What a lossy rule or training changed."""
    if drift := summary.get("drift"):
        before, after = drift["autoregressive"], drift["drafted"]
        yield (
            f"quality by the target's own judgement: perplexity {before['perplexity']:.2f} of its answers, "
            f"{after['perplexity']:.2f} of the drafted ones; most likely tokens {before['most_likely']:.1%} and "
            f"{after['most_likely']:.1%}"
        )
        if "agreement" in drift:
            yield (
                f"agreement with decoding without drafts: {drift['same_answers']} of {drift['checked']} answers the same, "
                f"{drift['agreement']:.1%} of its tokens before the first difference"
            )
    if task := summary.get("task"):
        yield from _task(task)
    if drift := summary.get("target_drift"):
        yield (
            f"drift of the trained target, on the original's greedy answers: perplexity {drift['original']['perplexity']:.2f} "
            f"before, {drift['trained']['perplexity']:.2f} after; KL from the original {drift['kl']:.3f} nats a token; "
            f"same most likely token {drift['agreement']:.1%}; "
            f"{drift['same_answers']} of {drift['checked']} answers the same"
        )
        yield f"output is that of the trained target in {summary['setting']['target_path']}"
    for name, found in summary.get("exits", {}).items():
        agreement = _rates(found["agreement"])
        yield f"{name}, by layers run: perplexity {_rates(found['perplexity'])}; same token as the last {agreement}"


def _task(task: dict[str, Any]) -> Iterator[str]:
    """How many answers were right."""
    if task["checked"]:
        yield (
            f"task: {task['drafted']} of {task['checked']} drafted answers right, {task['autoregressive']} of those without "
            "drafts"
        )
    if task["not_run"]:
        yield f"task: {task['not_run']} programs not run; eval.execute=true runs what the model wrote, on this machine"


def _checked(lossless: dict[str, Any]) -> str:
    """Whether outputs are the target's."""
    if lossless["differences"]:
        return f"NOT LOSSLESS: {len(lossless['differences'])} outputs differ from {lossless['reference']}"
    if not lossless["lossless"]:
        return lossy_warning(lossless["rule"])
    if lossless["checked"]:
        ties = len(lossless["near_ties"])
        return f"output identical to {lossless['reference']}, rule {lossless['rule']}; near ties: {ties}"
    return f"rule {lossless['rule']}: output follows {lossless['reference']}"


def _range(interval: list[float] | None) -> str:
    """A 95 % interval as tables show it: none where there were too few prompts for one, unknown where it says nothing."""
    if interval is None:
        return ""
    return f"{interval[0]:.2f} to {interval[1]:.2f}" if interval[1] < WIDE * interval[0] else "unknown"


def _rates(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


ONLY_IN_REPORT = ("predicted", "memory")  # columns for which a terminal has no room
MARKS = {"target": "", "trained target": "*", "nothing": "!"}


def print_comparison(comparison: dict[str, Any]) -> None:
    """One line a drafter and tree: what it reaches and what it costs; below, which to take for what."""
    setting = comparison["setting"]
    console = Console(width=min(WIDTH, Console().width) if Console().is_terminal else WIDTH)
    budget = f", {setting['budget']} each" if setting.get("budget") else ""
    table = Table(
        title=f"{setting['target']}: {setting['prompts']} prompts, {setting['max_new_tokens']} tokens{budget}; "
        f"{setting['device']}, {setting['dtype']}",
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    titles = comparison_titles(comparison)
    shown = [number for number, title in enumerate(titles) if title not in ONLY_IN_REPORT]
    for number in shown:
        folds, title = titles[number] in ("drafter", "tree", "trained"), titles[number]
        table.add_column(
            title.replace(" per ", " per\n"), justify="right" if number > 1 else "left", overflow="fold", no_wrap=not folds
        )
    for row in comparison["rows"]:
        for cells in comparison_cells(row, "\n", ""):
            table.add_row(*(escape(cells[number]) for number in shown))
    console.print(table)
    for sentence in [*legend(comparison), *comparison["caveats"]]:
        console.print(sentence, markup=False)
    for advice in comparison["recommendations"]:
        console.print(f"[bold]{advice['goal']}[/]: {escape(advice['choice'])}. {escape(advice['because'])}")


def comparison_titles(comparison: dict[str, Any]) -> list[str]:
    sizes = {row["batched"]["batch_size"] for row in comparison["rows"] if row["batched"]}
    at_once = f"{min(sizes)} at once" if sizes else "at once"
    return [
        "drafter",
        "tree",
        "tokens per forward",
        "speedup",
        "predicted",
        "identical",
        at_once,
        "learns",
        "memory",
        "trained",
    ]


def comparison_cells(row: dict[str, Any], begin: str, end: str) -> Iterator[list[str]]:
    """A drafter's lines, one a tree; intervals stand between `begin` and `end`."""

    def ranged(value: str, interval: list[float] | None) -> str:
        return f"{value}{begin}{_range(interval)}{end}" if interval else value

    for number, entry in enumerate(row["systems"]):
        length, speed, lossless = entry["acceptance_length"], entry["speedup"], entry["lossless"]
        identical = f"{lossless['identical']} of {lossless['checked']}" if lossless and lossless["checked"] else ""
        yield [
            row["label"] + MARKS[row["lossless_to"]] if number == 0 else "", entry["label"],
            ranged(f"{length['pooled']:.2f}", length["ci95"]),
            ranged(speed_text(speed), speed["ci95"] if is_possible(speed) else None), f"{speed['predicted']:.2f}",
            identical,
            *(costs_of(row) if number == 0 else ("",) * 4),
        ]  # fmt: skip


def legend(comparison: dict[str, Any]) -> Iterator[str]:
    """What columns and marks mean."""
    if any(row["batched"] for row in comparison["rows"]):
        yield "at once: the better tree's speedup with so many prompts decoded together"
    yield "learns: parameters that were trained; trained: tokens, seconds; predicted speedups and memory: in report.html"
    found = {row["lossless_to"] for row in comparison["rows"]}
    if "trained target" in found:
        yield "* changes the target: identical to the trained one"
    if "nothing" in found:
        yield "! lossy: its output is not the target's"
    if any(not entry["speedup"].get("quotable", True) for row in comparison["rows"] for entry in row["systems"]):
        yield "? not to be quoted: the machine was busy, or the speedup is above the tokens a forward"


def comparison_markdown(comparison: dict[str, Any]) -> str:
    """The same table for a README, with its setting."""
    titles, setting = comparison_titles(comparison), comparison["setting"]
    versions = ", ".join(f"{name} {setting['versions'][name]}" for name in ("torch", "transformers"))
    trained = f"{setting['budget'] or 'finished runs'}, from {setting['data']}"
    scored = f"{setting['prompts']} prompts of at most {setting['max_new_tokens']} tokens, rule {setting['rule']}"
    commit = (setting["commit"] or "unknown")[:12]
    machine = f"{setting['dtype']}, {setting['device']}, {setting['threads']} threads, {versions}, commit {commit}"
    lines = [f"`{setting['target']}`; {trained}; {scored}; {machine}:", ""]
    lines += ["| " + " | ".join(titles) + " |", "|---|---|" + "---:|" * (len(titles) - 2)]
    for row in comparison["rows"]:
        lines += ["| " + " | ".join(cells) + " |" for cells in comparison_cells(row, " [", "]")]
    advice = [f"- {one['goal']}: **{one['choice']}**. {one['because']}" for one in comparison["recommendations"]]
    return "\n".join([*lines, "", *advice, *(f"- {sentence}" for sentence in comparison["caveats"])])


def costs_of(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """Speedup of a batch, parameters, memory, training."""
    batched = f"{row['batched']['speedup']['ratio']:.2f}" if row["batched"] else ""
    learns = f"{row['trained_parameters'] / 1e6:.2f} M" if row["trained_parameters"] else ""
    memory = "" if row["extra_memory"] is None else f"{row['extra_memory'] / 1e6:.1f} MB"
    if row["training_seconds"] is None:
        return batched, learns, memory, ""
    return batched, learns, memory, f"{row['training_tokens'] / 1e3:.0f} k, {row['training_seconds']:.0f} s"
