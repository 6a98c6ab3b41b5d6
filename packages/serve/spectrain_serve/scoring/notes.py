"""The latency table of a server's score, and the sentences about it. All are made of
summary.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from spectrain.eval.columns import SERVING_COLUMNS, format_interval, list_serving_rows
from spectrain.eval.extensions import EvalExtension
from spectrain.eval.noise import is_possible
from spectrain.eval.notes import EXTENSION_NOTES

SOURCES = {
    "requests": "Rounds are those that the server counted for each answer.",
    "totals": (
        "Rounds are the server's counters before and after: cut rounds are not trimmed, and "
        "others' requests count too. A vLLM server gives them per answer with "
        "--enable-per-request-metrics --per-request-spec-decode-metrics detailed."
    ),
    "none": "The server counts no drafts, so tokens per forward are unknown.",
}
CAUSES = {
    "layer-ids-off-by-one": "layer numbering",
    "rope": "rotary embedding",
    "norm-before-residual-swapped": "norm flag",
    "norm-output-swapped": "norm flag",
    "norm_before_fc-dropped": "norm flag",
    "fc_norm-dropped": "norm flag",
    "norms-swapped": "input norms exchanged",
    "halves-swapped": "order of the inputs",
    "heads-permuted": "permuted queries and keys",
    "d2t-as-ids": "map of the draft vocabulary",
    "context-window": "context window",
    "transposed-tensor": "transposed tensor",
    "heads-shifted": "numbering of the heads",
    "heads-reversed": "numbering of the heads",
    "dtype": "number type",
}
"""What a cause is called, by the name of its finding."""


class ServingTable(EvalExtension):
    """Prints the times by concurrency below the table of systems."""

    def print_results(self, console: Console, summary: dict[str, Any]) -> None:
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("")
        for column in SERVING_COLUMNS:
            table.add_column(
                column.title.replace(" of ", "\nof ").replace("within ", "within\n"),
                justify="right",
                no_wrap=True,
            )
        for label, entry in list_serving_rows(summary):
            table.add_row(label, *(column.cell(entry) for column in SERVING_COLUMNS))
        console.print(table)


def describe_server(server: dict[str, Any]) -> Iterator[str]:
    """Say where the counts come from, where drafting pays, and whether the server drafts as our
    chain does.
    """
    yield SOURCES[server["counts"]]
    yield from _compare_counts(server)
    yield from _describe_speedups(server["speedups"])
    if own := server.get("own_chain"):
        yield from _describe_own_chain(own)
    if template := server.get("template"):
        yield from _describe_template(template)
    if failed := server["failed"]:
        name, reason = next(iter(failed.items()))
        yield f"{len(failed)} requests failed; {name}: {reason}."


EXTENSION_NOTES["server"] = describe_server


def _compare_counts(server: dict[str, Any]) -> Iterator[str]:
    """Say whether the counts of the answers add up to the server's counters."""
    counted = server["requests_counted"]
    totals = server["totals_counted"]
    if counted is None or totals is None:
        return
    if counted == totals:
        yield (
            f"They add up to the server's counters: {totals['num_rounds']} rounds, "
            f"{totals['num_drafted']} drafts."
        )
        return
    yield (
        f"They do not add up to the server's counters, which counted {totals['num_rounds']} "
        f"rounds where the answers have {counted['num_rounds']}: others use this server, or "
        "requests failed."
    )


def _describe_speedups(speedups: list[dict[str, Any]]) -> Iterator[str]:
    """Say at which concurrency drafting stops paying."""
    if not speedups:
        yield (
            "Without a server to compare with, the speedup is unknown; give "
            "server.baseline_url, or serve=true."
        )
        return
    entries = [
        entry
        for entry in sorted(speedups, key=lambda entry: int(entry["concurrency"]))
        if is_possible(entry)
    ]
    if not entries:
        yield "No speedup can be quoted: something else slowed the server without a drafter."
        return
    ends = [entry["ci95"] or [entry["ratio"]] * 2 for entry in entries]
    gaining = [entry for entry, (low, _) in zip(entries, ends) if low > 1]
    losing = [entry for entry, (_, high) in zip(entries, ends) if high < 1]
    undecided = [entry for entry in entries if entry not in (*gaining, *losing)]
    lost = next(
        (
            entry
            for entry in losing
            if all(entry["concurrency"] > other["concurrency"] for other in gaining)
        ),
        None,
    )
    parts = [
        f"pays at {_list_levels(gaining)}" if gaining else "",
        f"costs more than it gains at {_list_levels(losing)}" if losing else "",
        f"is undecided at {_list_levels(undecided)}, whose intervals include 1"
        if undecided
        else "",
    ]
    yield f"By the number of requests at once, drafting {'; it '.join(filter(None, parts))}."
    if gaining and lost:
        yield f"It stops paying at {lost['concurrency']} or before."


def _list_levels(entries: list[dict[str, Any]]) -> str:
    """List levels of concurrency with their speedups."""
    texts = []
    for entry in entries:
        ends = format_interval(entry["ci95"])
        texts.append(
            f"{entry['concurrency']} ({entry['ratio']:.2f} times{f', {ends}' if ends else ''})"
        )
    return ", ".join(texts)


def _describe_own_chain(own: dict[str, Any]) -> Iterator[str]:
    """Say whether the rounds are those of our own chain, and the likely cause where they are
    not.
    """
    if not own["checked"]:
        yield "The server drafted nothing, so nothing is compared with our own chain."
        return
    precision = f" in {own['drafter_dtype']}, as it was loaded" if own.get("drafter_dtype") else ""
    yield (
        f"Our own chain of {own['depth']} with the run's drafter{precision}: "
        f"{own['acceptance_length']:.2f} tokens per forward; all rounds equal in {own['equal']} "
        f"of {own['checked']} prompts ({own['share']:.1%} of the rounds), outputs in "
        f"{own['same_outputs']}."
    )
    if own["equal"] == own["checked"]:
        return
    if own["server_dtype"] not in (None, own["dtype"]):
        yield (
            f"The server's weights are {own['server_dtype']} and our chain's {own['dtype']}. "
            "Rounding alone changes rounds, so no other cause was searched for; "
            "server.dtype=float32 target.dtype=float32 compares equal types."
        )
        return
    yield from map(_describe_tie, own.get("ties", []))
    if "search" not in own:
        return
    if cause := own.get("cause"):
        agreement = cause["agreement"]
        yield (
            f"LIKELY CAUSE, {CAUSES.get(cause['name'], cause['name'])}: the server drafts like "
            f"our chain with {cause['description'].rstrip(',')} ({agreement['share']:.1%} of the "
            f"rounds equal, in {agreement['equal']} of {agreement['checked']} tested prompts in "
            f"full); {cause['remedy']}."
        )
        return
    tested = ", ".join(
        dict.fromkeys(CAUSES.get(entry["name"], entry["name"]) for entry in own["tested"])
    )
    yield (
        f"No tested cause explains the difference ({tested or 'none is known for this family'}); "
        f"the first round that differs is at position {own['first_difference']}."
    )
    if own["dtype"] != "float32":
        yield (
            f"Both compute in {own['dtype']}, where rounding changes rounds; server.dtype=float32 "
            "target.dtype=float32 tells whether it is that alone."
        )
    if own["search"]["is_cut"]:
        yield (
            f"The search ended after {own['search']['seconds']:.0f} seconds, before every "
            "cause was tested."
        )


def _describe_tie(tie: dict[str, Any]) -> str:
    """Say that rounding explains a round that differs."""
    return (
        f"Rounding explains the round at position {tie['position']}: the server's has "
        f"{tie['served_length']} tokens and ours {tie['own_length']}, and the drafter's two best "
        f"logits for draft token {tie['draft']} are {tie['gap']:.2g} apart."
    )


def _describe_template(template: dict[str, Any]) -> Iterator[str]:
    """Say whether clients that send messages reach the drafter with the tokens that it was
    trained on.
    """
    if template["equal"] == template["checked"]:
        return
    if template["server_arguments"] is None:
        found = "give the server the run's template (--chat-template)"
    else:
        found = (
            f"the server renders with the arguments {template['server_arguments']} and the run "
            f"with {template['run_arguments']}: give the server the run's "
            "(--default-chat-template-kwargs)"
        )
    yield (
        f"LIKELY CAUSE for clients that send messages, chat template: of {template['checked']} "
        f"prompts the server renders {template['equal']} to the run's token ids, the first "
        f"difference is at token {template['first_difference']}; {found}."
    )
