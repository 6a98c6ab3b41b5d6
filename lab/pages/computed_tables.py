"""Tables and sentences of measured results that a declaration cannot compute.

`measurements.yaml` names each of them; rows of Markdown come from `render.format_table`.
"""

from typing import Any

from lab.pages.render import (
    format_interval,
    format_length,
    format_rates,
    format_speed,
    format_table,
)


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


def select_group(result: dict[str, Any], group: str) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["group"] == group]


def phrases_table(results: dict[str, Any]) -> str:
    """Return tokens per forward and speed of phrases on both targets."""
    rows = {(row["group"], row["name"]): row for row in results["rows"]}
    names = [name for group, name in rows if group == "phrases"]
    cells = [
        [
            name,
            *(
                cell
                for group in ("phrases", "phrases-smollm2")
                for cell in rate_cells(rows.get((group, name)))
            ),
        ]
        for name in names
    ]
    titles = (
        "drafter",
        "tiny: tokens per forward",
        "tiny: speed",
        "SmolLM2: tokens per forward",
        "SmolLM2: speed",
    )
    return format_table(titles, cells)


def rate_cells(row: dict[str, Any] | None) -> tuple[str, str]:
    """Return tokens per forward and speed with their intervals, empty for a row that was not
    measured.
    """
    return ("", "") if row is None else (format_length(row), format_speed(row))


def own_samples(result: dict[str, Any]) -> str:
    """Return what the target's own samples are like, beside those of rules that change them."""
    own = select_group(result, "lossy")[0]["drift"]["autoregressive"]
    return (
        f"The target's own samples have perplexity {own['perplexity']:.2f}, and "
        f"{own['most_likely']:.1%} of their tokens are its most likely ones."
    )


def drafts_tables(result: dict[str, Any]) -> str:
    """Return what the rules for several drafts of a node accept, by depth."""
    parts = []
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


def continued_table(result: dict[str, Any]) -> str:
    """Return tokens per forward after training that goes on in several ways."""
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
    return f"Each run continues with `{setting}`.\n\n{second}"


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


def large_command(large: dict[str, Any]) -> str:
    """Return the command of the first row."""
    shared = " ".join(large["shared"]).replace(" trainer.grad", " \\\n    trainer.grad")
    words = " ".join(large["rows"][0]["settings"])
    return f"```sh\nspectrain plan {shared} \\\n    {words}\n```"


def large_stores(large: dict[str, Any]) -> str:
    """Return the size of a store of each target's features."""
    stores = {row["settings"][0].rpartition("/")[2]: row["store_bytes"] for row in large["rows"]}
    sizes = ", ".join(f"{size / 1e12:.1f} TB ({name})" for name, size in stores.items())
    return f"A store of these features in fp8 takes {sizes}."


def adapters_table(results: dict[str, Any]) -> str:
    """Return tokens per forward on both domains, and what is trained, before and after each way
    to continue.
    """
    cells = []
    for row in results["rows"]:
        lengths = [
            format_spread(row[domain], [seed[domain] for seed in row["seeds"]])
            for domain in ("second", "first")
        ]
        cells.append(
            [row["name"], *lengths, f"{row['trained']:,}", f"{row['state_bytes'] / 1e6:.2f} MB"]
        )
    titles = [
        "training",
        "new domain",
        "first domain",
        "trained parameters",
        "gradients and optimiser state",
    ]
    return format_table(titles, cells)


def format_spread(numbers: dict[str, Any], seeds: list[float]) -> str:
    """Return a mean over seeds, and each seed's number where there are several."""
    single = (
        "" if numbers["deviation"] is None else f" ({', '.join(f'{value:.2f}' for value in seeds)})"
    )
    return f"{numbers['mean']:.2f}{single}"


def rule_table(result: dict[str, Any]) -> str:
    """Return, for each recipe that was trained at several multiples of the rates of
    `trainer.lr=auto`, tokens per forward at each of them, and how far the rule is from the best.
    """
    ends: dict[str, dict[float, float]] = {}
    for row in result["rows"]:
        rule, _, factor = row["rate"].partition("*")
        if rule == "auto":
            ends.setdefault(row["recipe"], {})[float(factor or 1)] = row["end"]
    ends = {recipe: by_factor for recipe, by_factor in ends.items() if len(by_factor) > 1}
    factors = sorted({factor for by_factor in ends.values() for factor in by_factor})
    titles = ["recipe", *(f"x {factor:g}" for factor in factors), "rule against the best"]
    rows = [
        [
            f"`{recipe}`",
            *(f"{by_factor[factor]:.3f}" if factor in by_factor else "" for factor in factors),
            f"{by_factor[1.0] / max(by_factor.values()) - 1:+.1%}",
        ]
        for recipe, by_factor in ends.items()
    ]
    return format_table(titles, rows)


def named_rates_table(result: dict[str, Any]) -> str:
    """Return tokens per forward after the same trainings with a rate that was named as a number and
    with the recipe's own, which is that of `trainer.lr=auto`: means over the seeds that have both.
    """
    ends: dict[tuple[str, int], dict[str, dict[int, float]]] = {}
    for row in result["trainings"]:
        if "error" not in row:
            rates = ends.setdefault((row["recipe"], row["steps"]), {})
            rates.setdefault(row["rate"], {})[row["seed"]] = row["end"]
    rows = []
    for (recipe, steps), rates in sorted(ends.items()):
        rule = rates.get("recipe", {})
        for rate in rates:
            shared = rule.keys() & rates[rate].keys()
            if not shared or not rate[0].isdigit():
                continue
            named, auto = (
                sum(seeds[seed] for seed in shared) / len(shared) for seeds in (rates[rate], rule)
            )
            rows.append(
                [
                    f"`{recipe}`",
                    f"{steps}",
                    f"{len(shared)}",
                    rate,
                    f"{named:.3f}",
                    f"{auto:.3f}",
                    f"{auto / named - 1:+.1%}",
                ]
            )
    titles = ["recipe", "steps", "seeds", "rate", "with it", "`auto`", "difference"]
    return format_table(titles, rows)


def training_needs_table(results: dict[str, Any]) -> str:
    """Return what each recipe needs in training, grouped by what it trains, the quickest first."""
    rows = [row for row in results["rows"] if "refused" not in row]
    order = sorted({row["trains"] for row in rows}, key=lambda kind: _median_size(rows, kind))
    rows.sort(key=lambda row: (order.index(row["trains"]), row["minutes"]))
    cells = [["`drafter=ngram`, `retrieval` and other copiers", "nothing", "", "0", "0", "0", ""]]
    for row in rows:
        size = row["trained"]
        cells.append(
            [
                f"`{row['recipe']}`",
                row["trains"],
                row["learns_from"],
                f"{size / 1e6:,.0f} M" if size >= 5e5 else f"{size / 1e3:,.0f} k",
                f"{row['minutes']:.0f}",
                f"{row['peak_bytes'] / 1e9:.0f} GB",
                "yes" if row["fits"] else "no",
            ]
        )
    titles = [
        "recipe",
        "trains",
        "learns from",
        "trained parameters",
        "minutes",
        "memory",
        "fits 80 GB",
    ]
    return format_table(titles, cells)


def refused_recipes(results: dict[str, Any]) -> str:
    """Return the recipes that cannot be planned for this target, with the reasons."""
    refused = [row for row in results["rows"] if "refused" in row]
    return "\n".join(f"- `{row['recipe']}`: {row['refused']}" for row in refused)


def _median_size(rows: list[dict[str, Any]], kind: str) -> float:
    sizes = sorted(row["trained"] for row in rows if row["trains"] == kind)
    return float(sizes[len(sizes) // 2])
