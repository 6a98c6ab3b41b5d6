"""Pages of docs/results/ that `python -m lab.benchmarks.measure_ways` measured."""

from typing import Any

from lab.pages import results_tables as tables
from lab.pages.results_page import ResultsPage
from lab.pages.speculators_tables import methods_tables

WAYS = "python -m lab.benchmarks.measure_ways"


def phrases_tables(results: dict[str, Any]) -> str:
    """Return tokens per forward and speed of phrases on both targets, and of reduced caches on
    SmolLM2.
    """
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
    caches = [
        [f"`{name}`", *rate_cells(row)]
        for (group, name), row in rows.items()
        if group == "codecs-smollm2"
    ]
    return "\n\n".join(
        [
            tables.format_table(titles, cells),
            "## Reduced caches on SmolLM2",
            tables.format_table(("`drafter.cache`", "tokens per forward", "speed"), caches),
        ]
    )


def rate_cells(row: dict[str, Any] | None) -> tuple[str, str]:
    """Return tokens per forward and speed with their intervals, empty for a row that was not
    measured.
    """
    return ("", "") if row is None else (tables.format_length(row), tables.format_speed(row))


WAYS_PAGES = {
    "phrases": ResultsPage(
        "Phrases, copies and reduced caches",
        """Drafters that look tokens up, lengthen drafts by phrases, or share drafts between
branches, each after its base, and self-drafting with less of the cache behind 1,024 tokens of text.
Greedy; 24 prompts of 48 tokens on tiny, 8 on SmolLM2, and 6 of 32 tokens for caches. Rows named
chain decode chains of 4 tokens, as do caches; all others decode trees of 16 nodes. All answers
equal those of `generate`.""",
        ("phrases.json",),
        f"{WAYS} --out lab/results/phrases.json phrases phrases-smollm2 codecs-smollm2",
        phrases_tables,
        """The model and `eagle3` of SmolLM2 are the shipped drafter. Those of tiny were trained for
512 and 300 steps. Selections have 256 tokens. One other measurement ran on the second core.""",
    ),
    "acceptance-rules": ResultsPage(
        "Acceptance rules",
        """Rules that draw, on tiny at temperature 1: a chain of 4 drawn children of a `gkd` drafter
(512 steps), 24 held-out prompts of 32 tokens. `chain` is lossless; the others change the output,
which perplexity by the target shows.""",
        ("ways-tiny.json",),
        f"{WAYS} lossy tasks drafts",
        tables.rules_table,
        """Rates of the second part are those of a tree with nodes of 4, 2 and 1 children
(`tree=cartesian tree.widths=[4,2,1]`), 24 prompts of 48 tokens; all rules are judged at the same
positions. tiny answers none of the 24 arithmetic questions, so the task's score is 0 under every
rule.""",
    ),
    "several-drafters": ResultsPage(
        "Cascades and choices",
        """Several drafters on tiny, 24 prompts of 48 tokens, greedy, chain of 4. A cascade drafts
exactly what its inner drafter drafts alone. All answers equal those of decoding without a drafter.
The machine was busy, so speeds are left out.""",
        ("ways-tiny.json",),
        f"{WAYS} several",
        tables.drafters_table,
    ),
    "training-methods": ResultsPage(
        "Forerunners, CLLM and training that continues",
        """EAGLE, HASS, EAGLE-3 and CLLM on tiny after the same 300 steps, and a `gkd` drafter of
512 steps whose training continues in several ways; 40 held-out prompts of 64 tokens, greedy. The
intervals of the second table overlap. The last table holds changes of EAGLE-3's training.""",
        ("ways-tiny.json", "eagle3-trials.json"),
        f"{WAYS} trained beyond",
        methods_tables,
    ),
    "overlap": ResultsPage(
        "Drafting while the target verifies",
        """`eval.overlap` on tiny with two processes of one thread each on two idle cores, 24
prompts of 48 tokens. Only `pearl` gains there. All outputs equal those of the loop.""",
        ("ways-tiny.json",),
        f"{WAYS} overlap",
        tables.overlap_table,
    ),
    "adversary": ResultsPage(
        "Prompts that slow a drafter down",
        """A search of 32 edits per prompt for wordings that lower acceptance, for a `gkd` drafter
on tiny, chain of 4, 24 prompts of 48 tokens, greedy. All outputs equal those of `generate`. The
guard limits the loss to a few percent.""",
        ("ways-tiny.json",),
        f"{WAYS} adversary",
        tables.adversary_table,
    ),
}
