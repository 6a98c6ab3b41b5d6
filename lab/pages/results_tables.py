"""Tables of the pages of docs/results/, from the JSON files of lab/results/."""

from collections.abc import Iterable
from typing import Any

from lab.benchmarks.report import GOALS_PATH, render_goals
from spectrain.eval.report import comparison_markdown


def describe_setting(result: Any) -> str:
    """Return one line with the machine, the versions, the commit and the day of a measurement;
    empty where none is recorded.
    """
    facts = (
        list_facts(result.get("provenance", result.get("setting", {})))
        if isinstance(result, dict)
        else ""
    )
    return f"Setting: {facts}." if facts else ""


def list_facts(setting: dict[str, Any]) -> str:
    """Return the machine, the versions, the commit and the day of a measurement, as far as they
    are recorded.
    """
    packages = ("torch", "transformers") if "versions" in setting else ()
    versions = ", ".join(f"{name} {setting['versions'][name]}" for name in packages)
    hardware = setting.get("hardware", setting)
    cores = (
        f", {hardware['cores']} core{'s' * (hardware['cores'] > 1)}" if "cores" in hardware else ""
    )
    machine = f"{hardware['processor']}{cores}" if "processor" in hardware else ""
    commit = f"commit {setting['commit'][:12]}" if setting.get("commit") else ""
    day = setting.get("date", "")[:10]
    return "; ".join(filter(None, [machine, versions, commit, day]))


def format_table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a markdown table."""
    titles = list(titles)
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])


def format_interval(interval: list[float]) -> str:
    return f"[{interval[0]:.2f}, {interval[1]:.2f}]"


def format_length(system: dict[str, Any]) -> str:
    """Return tokens per forward with their interval; `system` holds them flat or below
    acceptance_length.
    """
    length = system["acceptance_length"]
    value, interval = (
        (length["pooled"], length["ci95"]) if isinstance(length, dict) else (length, system["ci95"])
    )
    return f"{value:.2f} {format_interval(interval)}"


def format_speed(system: dict[str, Any]) -> str:
    """Return the speedup with its interval."""
    return f"{system['speedup']['ratio']:.2f}x {format_interval(system['speedup']['ci95'])}"


def format_rates(rates: Iterable[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)


def comparison_table(comparison: dict[str, Any]) -> str:
    """Return the table of `spectrain compare`, with the labels of today."""
    return comparison_markdown(comparison)


def comparison_by_tree(comparison: dict[str, Any]) -> str:
    """Return the tree, the chain and the training of each recipe, the best tree first."""
    rows = []
    for row in comparison["rows"]:
        systems = {
            system["label"].split(",")[0].split(" of")[0]: system for system in row["systems"]
        }
        tree = systems["static"]
        chain = systems["chain"]
        speed = systems["static"]["speedup"]
        ratio = f"{speed['ratio']:.2f} {format_interval(speed['ci95'])}"
        cells = [
            f"`{row['name']}`",
            f"{row['training_tokens'] / 1e3:.0f} k",
            format_length(tree),
            format_length(chain),
        ]
        cells += [
            format_rates(chain["acceptance_by_depth"]),
            f"{tree['time_share']['draft']:.0%}",
            ratio,
        ]
        rows.append((tree["acceptance_length"]["pooled"], cells))
    titles = [
        "recipe",
        "tokens trained",
        "`static`, 16 nodes",
        "chain of 3",
        "accepted by depth (chain)",
        "drafting, of the tree's round",
        "speedup of the tree",
    ]
    return format_table(titles, [cells for _, cells in sorted(rows, key=lambda row: -row[0])])


def tiny_comparison(comparison: dict[str, Any]) -> str:
    return (
        f"{comparison_by_tree(comparison)}\n\n## The whole table\n\n{comparison_table(comparison)}"
    )


def heads_table(result: dict[str, Any]) -> str:
    """Return tokens per forward of every family after the same training."""
    rows = []
    for row in result["rows"]:
        name = ", ".join(f"`{part}`" for part in row["name"].split("+"))
        lengths = [format_length(row[kind]) for kind in ("chain", "tree")]
        rows.append([name, *lengths, format_rates(row["chain"]["acceptance_by_depth"])])
    return format_table(
        ["recipe", "chain of 4", "16 nodes of `eagle2`, 4 deep", "accepted by depth (chain)"], rows
    )


def cache_table(result: dict[str, Any]) -> str:
    """Return tokens per round and relative bytes per token of every reduced cache, by length of
    the text.
    """
    names = list(result["rows"][0]["drafters"])
    rows = []
    for row in result["rows"]:
        cells = [
            f"{row['drafters'][name]['acceptance_length']:.2f}, "
            f"{row['drafters'][name]['ratio']:.2f}"
            for name in names
        ]
        rows.append([f"{row['length']:,}", f"{row['perplexity']:.0f}", *cells])
    return format_table(["tokens of text", "perplexity of the text", *names], rows)


def engines_table(result: dict[str, Any]) -> str:
    """Return the accepted drafts by position of vLLM and of this project's chain."""
    rows = []
    for name, case in result["cases"].items():
        same = f"{case['identical_to_ours']} of {case['answers']}"
        rates = [
            " ".join(f"{rate:.3f}" for rate in case[engine]["by_position"])
            for engine in ("offline", "server", "ours")
        ]
        rows.append(
            [
                name,
                case.get("target", result["setting"]["target"]),
                f"{case['ours']['drafted']:,}",
                *rates,
                same,
            ]
        )
    return format_table(
        [
            "drafter",
            "target",
            "drafted tokens",
            "vLLM, class",
            "vLLM, server",
            "our chain",
            "same text",
        ],
        rows,
    )


def plan_tables(plan: dict[str, Any], large: dict[str, Any]) -> str:
    """Return the plan of an 8B target, and the plans of six large ones."""
    text = """## Six large targets

EAGLE-3 for targets of which only the configuration is here (`lab/target_configs/`), over 100
million tokens, planned without weights and without a GPU. The command of the first row takes
seconds; the settings of any other row stand in its last line:"""
    shared = " ".join(large["shared"]).replace(" trainer.grad", " \\\n    trainer.grad")
    command = f"spectrain plan {shared} \\\n    {' '.join(large['rows'][0]['settings'])}"
    stores = {
        row["settings"][0].removeprefix("target.model=lab/target_configs/"): row["store_bytes"]
        for row in large["rows"]
    }
    sizes = ", ".join(f"{size / 1e12:.1f} TB ({name})" for name, size in stores.items())
    store = f"A store of these features in fp8 takes {sizes}."
    return (
        f"{plan_table(plan)}\n\n{text}\n\n```sh\n{command}\n```\n\n{large_table(large)}\n\n{store}"
    )


def large_table(result: dict[str, Any]) -> str:
    """Return memory, arithmetic and hours of every planned target."""
    rows = []
    for row in result["rows"]:
        sharded = "" if row["sharded_bytes"] is None else format_gigabytes(row["sharded_bytes"])
        peak = format_gigabytes(row["peak_bytes"]) + ("" if row["fits"] else " (does not fit)")
        flops = [f"{row['target_flops'] / 1e9:.0f} + {row['step_flops'] / 1e9:.0f}"]
        cells = [
            format_gigabytes(row["target_bytes"]),
            peak,
            sharded,
            *flops,
            f"{row['hours']:.1f}",
        ]
        rows.append([f"`{' '.join(row['settings'])}`", *cells])
    titles = [
        "settings",
        "target's weights",
        "peak of a GPU",
        "sharded over 8",
        "GFLOP a token, target + step",
        "hours",
    ]
    return format_table(titles, rows)


def format_gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


def plan_table(plan: dict[str, Any]) -> str:
    """Return the parts of a device's memory, and hours."""
    memory = plan["memory"]
    rows = [[part, f"{size / 1e9:.1f} GB"] for part, size in memory["parts"].items()]
    rows.append(["**peak of a device**", f"**{memory['peak_bytes'] / 1e9:.1f} GB**"])
    rows += [
        [f"peak, sharded over {memory['devices']}: {what}", f"{size / 1e9:.1f} GB"]
        for what, size in memory["sharded"].items()
    ]
    hours = plan["hours"]
    return (
        f"{format_table(['memory of a device', 'size'], rows)}\n\nHours: {hours['value']:.1f} "
        f"({hours['basis']})."
    )


def store_table(result: dict[str, Any]) -> str:
    """Return bytes, error and acceptance length of every type of a feature store."""
    supervised = {
        store["features"]: store for store in result["stores"] if store.get("supervised_only")
    }
    rows = []
    for store in result["stores"]:
        if store.get("supervised_only"):
            continue
        name = store["features"]
        bytes_per_token = (
            [
                f"{entry['bytes_per_token']:,.0f}" if entry else ""
                for entry in (store, supervised.get(name))
            ]
            if "bytes_per_token" in store
            else ["", ""]
        )
        error = (
            f"{max(store['relative_error'].values()):.1%}" if "relative_error" in store else "none"
        )
        lengths = ", ".join(
            f"{training['acceptance_length']:.2f}" for training in store["trainings"]
        )
        rows.append([name, *bytes_per_token, error, lengths or "not trained"])
    titles = [
        "features",
        "bytes per token",
        "supervised positions only",
        "largest relative error",
        "tokens per forward, seeds 0 and 1",
    ]
    return format_table(titles, rows)


def targets_table(result: dict[str, Any]) -> str:
    """Return acceptance lengths of three families on targets of unlike kinds."""
    rows = []
    for row in result["rows"]:
        cells = [
            cell
            for kind in ("tree", "chain")
            for cell in (
                f"{row[kind]['acceptance_length']:.2f}",
                f"{row[kind]['identical']} of {row[kind]['checked']}",
            )
        ]
        rows.append([row["target"], row["drafter"], *cells])
    return format_table(
        ["target", "drafter", "tree of 16 nodes", "identical", "chain of 4", "identical"], rows
    )


def select_group(result: dict[str, Any], group: str) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["group"] == group]


def rules_table(result: dict[str, Any]) -> str:
    """Return what rules that change the output gain and cost, and what the rules for several
    drafts accept.
    """
    rows = []
    for row in select_group(result, "lossy"):
        drift = row["drift"]["drafted"]
        speed = row["speedup"]
        cells = [
            f"{drift['perplexity']:.2f}",
            f"{drift['most_likely']:.1%}",
            f"{speed['ratio']:.2f} {format_interval(speed['ci95'])}",
        ]
        rows.append([f"`{row['name']}`", format_length(row), *cells])
    own = select_group(result, "lossy")[0]["drift"]["autoregressive"]
    lossy = format_table(
        ["rule", "tokens per forward", "perplexity", "most likely token", "speedup"], rows
    )
    note = (
        f"The target's own samples have perplexity {own['perplexity']:.2f}, and "
        f"{own['most_likely']:.1%} of their tokens are its most likely ones."
    )
    parts = [lossy, note, "## Rules for several drafts of a node"]
    for row in select_group(result, "drafts"):
        optimum = row["optimum"]
        rates = [["any lossless rule, at most", format_rates(optimum["best_by_depth"])]]
        rates += [
            [f"`{rule}`", format_rates(values)] for rule, values in optimum["kept_by_depth"].items()
        ]
        positions = " ".join(map(str, optimum["places"]))
        parts += [
            (
                f"`tree.children=sampled`, {row['name'].partition(', ')[2]}; {positions} "
                "positions by depth:"
            ),
            format_table(["rule", "accepted by depth"], rates),
        ]
    return "\n\n".join(parts)


def drafters_table(result: dict[str, Any]) -> str:
    """Return tokens per forward of cascades, choosers and lengths that are decided while
    decoding.
    """
    rows = [
        [row["name"], f"`{short_command(row)}`", format_length(row)]
        for row in select_group(result, "several")
    ]
    return format_table(["name", "settings", "tokens per forward"], rows)


def short_command(row: dict[str, Any]) -> str:
    """Return the settings of a command that name its drafter, tree or training."""
    words = row["command"].split()
    return " ".join(
        word
        for word in words
        if word.startswith(("run=", "drafter", "tree", "acceptance", "eval.overlap"))
    )


def training_table(result: dict[str, Any]) -> str:
    """Return tokens per forward after the same training, and after training that goes on in
    several ways.
    """
    rows = [[f"`{row['name']}`", format_length(row)] for row in select_group(result, "trained")]
    first = format_table(["run and tree", "tokens per forward"], rows)
    runs = result["setting"]["runs"]
    rows = []
    for row in select_group(result, "beyond"):
        added = [word for word in runs[row["name"]] if word.startswith("source")]
        rows.append(
            [
                f"`{' '.join(added)}`"
                if added
                else ("data alone" if row["name"] != "gkd" else "before"),
                format_length(row),
            ]
        )
    second = format_table(["continued with", "tokens per forward, chain of 4"], rows)
    setting = " ".join(word.replace("WORK/", "runs/") for word in runs["more-data"])
    return (
        f"{first}\n\n## Training that continues\n\nEach run continues with `{setting}`.\n\n{second}"
    )


def overlap_table(result: dict[str, Any]) -> str:
    """Return the measured gain of drafting during verification and the gain that two idle
    devices would have.
    """
    names = {"post": "post_verify", "pearl": "pre_and_post_verify", "outcomes": "outcomes"}
    rows = []
    for row in select_group(result, "overlap"):
        overlap = row["overlap"]
        way = row["name"].partition(",")[0]
        ready = f"{overlap['drafts_ready']} of {overlap['drafts_ready'] + overlap['drafts_missed']}"
        rows.append(
            [
                row["name"],
                f"{overlap['measured']:.2f}",
                f"{overlap['simulated'][names[way]]:.2f}",
                ready,
            ]
        )
    return format_table(
        [
            "`eval.overlap`",
            "measured speed over the loop's",
            "expected on two idle devices",
            "drafts ready",
        ],
        rows,
    )


def adversary_table(result: dict[str, Any]) -> str:
    """Return what a search for slow prompts finds."""
    rows = []
    for row in select_group(result, "adversary"):
        search = row["adversary"]
        speeds = [
            f"{search['speedup'][kind]['ratio']:.2f} "
            f"{format_interval(search['speedup'][kind]['ci95'])}"
            for kind in ("drafter", "guarded")
        ]
        after = search["after"]["drafter"]["pooled"]
        ratio = f"{search['ratio']:.2f} {format_interval(search['ratio_ci95'])}"
        rows.append(
            [
                f"{search['same']:.0%}",
                f"{search['before']['pooled']:.2f}",
                f"{after:.2f}",
                ratio,
                *speeds,
            ]
        )
    titles = [
        "answer tokens that must stay",
        "tokens per forward before",
        "after",
        "ratio",
        "speedup after",
        "with `eval.guard`",
    ]
    return format_table(titles, rows)


def goals_table(_: Any) -> str:
    return render_goals(GOALS_PATH.parent)
