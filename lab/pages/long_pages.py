"""Pages of docs/results/ about long texts."""

from lab.pages.long_tables import long_tables, times_table
from lab.pages.results_page import ResultsPage

LONG_PAGES = {
    "long-drafters": ResultsPage(
        "Drafters of short texts in long ones",
        """Drafters of five families, trained on texts of 512 tokens and of 4,096 tokens, decode
texts of up to 8,192 tokens, the former with remedies too. The tables hold tokens per forward of
greedy chains of 4 by position, over answers of 48 tokens, with 95 % intervals over prompts. The
first tables are on a synthetic target, and the last one on SmolLM2.""",
        ("long-families.json", "long-target.json", "long-drafters.json"),
        "python -m lab.benchmarks.long_target\n"
        "python -m lab.benchmarks.long_families steps=400\n"
        "python -m lab.benchmarks.long_drafters",
        long_tables,
        """The synthetic target is a Llama of three layers with 512 words, made for this page. Its
documents return to their own passages and facts at any distance. It uses its whole context: the
last 256 tokens of a text have a perplexity of 9.2 behind 512 tokens, 4.3 behind 2,048 and 3.0
behind all. The numbers show how length acts on a drafter, not the level of acceptance in natural
text.

EAGLE-3 and P-EAGLE of short texts lose nearly all drafts beyond the trained length, and training at
length prevents that up to its own length. MTP and GKD do not lose any. A window of the trained
length repairs EAGLE-3 completely and costs nothing; sinks and more training add nothing to it. More
training on short texts alone makes it worse at length.

DFlash of short texts falls too, from 1.47 to 1.17 at 4k to 8k, and a window repairs it likewise.
Trained on 4,096 tokens it keeps 1.34 and 1.35 up to that length and falls to 1.22 beyond.

Each family was trained for 400 steps of 4,096 tokens with one seed, and 100 more where training
continues. DFlash was trained for 1,600 steps (`families=["dflash"] steps=1600`), because after 400
its drafts were accepted hardly ever; its training was not continued. No family was trained on
SmolLM2, where a text of 4,096 tokens takes about 20 CPU seconds. CPU times are of a busy machine.

For SmolLM2 the first 11 prompts of the command were scored, too few for levels by position; changes
are compared on the same prompts. Every answer in all tables equals the target's own.""",
    ),
    "long-times": ResultsPage(
        "Time of a training step by length",
        """CPU milliseconds per token of one text, of a step of EAGLE-3 with three draft steps on
tiny, one thread, float32: of the target's forward, and of the drafter's forward and backward with
loss on all tokens or on a window of 2,048 tokens at a random place (the mean of four windows).""",
        ("long-times.json",),
        "python -m lab.benchmarks.long_times out=lab/results/long-times.json",
        times_table,
        """From 4,096 tokens on attention takes most of the time, and its time per token grows with
the length. With windows the drafter's share falls instead, because only the window carries loss and
draft steps; the target still reads the complete text. The code before windows took as long with
loss on all tokens: 0.20 ms per token at 1,024 and 0.31 ms at 4,096 tokens. Other processes ran on
the machine, so compare the numbers with each other only.""",
    ),
}
