"""Write the pages of docs/results/ that show eval/results/*.json, each with the command that measured it.

python -m scripts.make_results_pages

A test compares the committed pages with what this writes. Pages of docs/results/ that no JSON holds are written by hand.
"""

import json
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import render_goals
from benchmarks.scale import markdown_table as scale_table
from spectrain.eval.report import comparison_markdown
from spectrain.files import write_text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "eval" / "results"
FOLDER = ROOT / "docs" / "results"
WAYS = "python -m benchmarks.measure_ways"


@dataclass(frozen=True)
class ResultsPage:
    """A page: its title, what was compared, the files of results, the command that wrote them, and the tables."""

    title: str
    introduction: str
    files: tuple[str, ...]
    command: str
    tables: Callable[..., str]
    remarks: str = ""

    def render(self) -> str:
        """Return the markdown of the page."""
        results = [json.loads((RESULTS / name).read_text()) for name in self.files]
        sources = " and ".join(f"`eval/results/{name}`" for name in self.files)
        first = f"Generated from {sources} by `scripts/make_results_pages.py`. The command that measured it:"
        introduction, remarks = fill_paragraphs(self.introduction), fill_paragraphs(self.remarks)
        parts = [f"# {self.title}", introduction, first, f"```sh\n{self.command}\n```", describe_setting(results[0])]
        return "\n\n".join(filter(None, [*parts, self.tables(*results), remarks])) + "\n"


def fill_paragraphs(text: str) -> str:
    """Wrap each paragraph of a text at 128 characters."""
    fill = partial(textwrap.fill, width=128, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join(fill(paragraph) for paragraph in text.split("\n\n"))


def describe_setting(result: Any) -> str:
    """Return one line with the machine, the versions, the commit and the day of a measurement; empty where none is recorded."""
    setting = result.get("provenance", result.get("setting", {})) if isinstance(result, dict) else {}
    versions = ", ".join(f"{name} {setting['versions'][name]}" for name in ("torch", "transformers")) if setting else ""
    hardware = setting.get("hardware", setting)
    cores = f", {hardware['cores']} core{'s' * (hardware['cores'] > 1)}" if "cores" in hardware else ""
    machine = f"{hardware['processor']}{cores}" if "processor" in hardware else ""
    commit = f"commit {setting['commit'][:12]}" if setting.get("commit") else ""
    day = setting.get("date", "")[:10]
    facts = "; ".join(filter(None, [machine, versions, commit, day]))
    return f"Setting: {facts}." if facts else ""


def format_table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a markdown table."""
    titles = list(titles)
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])


def format_interval(interval: list[float]) -> str:
    return f"[{interval[0]:.2f}, {interval[1]:.2f}]"


def format_length(system: dict[str, Any]) -> str:
    """Return tokens per forward with their interval; `system` holds them flat or below acceptance_length."""
    length = system["acceptance_length"]
    value, interval = (length["pooled"], length["ci95"]) if isinstance(length, dict) else (length, system["ci95"])
    return f"{value:.2f} {format_interval(interval)}"


def format_rates(rates: Iterable[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)


def comparison_table(comparison: dict[str, Any]) -> str:
    """Return the table of `spectrain compare`, with the labels of today."""
    return comparison_markdown(comparison)


def comparison_by_tree(comparison: dict[str, Any]) -> str:
    """Return the tree, the chain and the training of each recipe, the best tree first."""
    rows = []
    for row in comparison["rows"]:
        systems = {system["label"].split(",")[0].split(" of")[0]: system for system in row["systems"]}
        tree, chain, speed = systems["static"], systems["chain"], systems["static"]["speedup"]
        ratio = f"{speed['ratio']:.2f} {format_interval(speed['ci95'])}"
        cells = [f"`{row['name']}`", f"{row['training_tokens'] / 1e3:.0f} k", format_length(tree), format_length(chain)]
        cells += [format_rates(chain["acceptance_by_depth"]), f"{tree['time_share']['draft']:.0%}", ratio]
        rows.append((tree["acceptance_length"]["pooled"], cells))
    titles = ["recipe", "tokens trained", "`static`, 16 nodes", "chain of 3", "accepted by depth (chain)",
              "drafting, of the tree's round", "speedup of the tree"]  # fmt: skip
    return format_table(titles, [cells for _, cells in sorted(rows, key=lambda row: -row[0])])


def tiny_comparison(comparison: dict[str, Any]) -> str:
    return f"{comparison_by_tree(comparison)}\n\n## The whole table\n\n{comparison_table(comparison)}"


def heads_table(result: dict[str, Any]) -> str:
    """Return tokens per forward of every family after the same training."""
    rows = []
    for row in result["rows"]:
        name = ", ".join(f"`{part}`" for part in row["name"].split("+"))
        lengths = [format_length(row[kind]) for kind in ("chain", "tree")]
        rows.append([name, *lengths, format_rates(row["chain"]["acceptance_by_depth"])])
    return format_table(["recipe", "chain of 4", "16 nodes of `eagle2`, 4 deep", "accepted by depth (chain)"], rows)


def cache_table(result: dict[str, Any]) -> str:
    """Return tokens per round and relative bytes per token of every reduced cache, by length of the text."""
    names = list(result["rows"][0]["drafters"])
    rows = []
    for row in result["rows"]:
        cells = [f"{row['drafters'][name]['acceptance_length']:.2f}, {row['drafters'][name]['ratio']:.2f}" for name in names]
        rows.append([f"{row['length']:,}", f"{row['perplexity']:.0f}", *cells])
    return format_table(["tokens of text", "perplexity of the text", *names], rows)


def engines_table(result: dict[str, Any]) -> str:
    """Return the accepted drafts by position of vLLM and of this project's chain."""
    rows = []
    for name, case in result["cases"].items():
        same = f"{case['identical_to_ours']} of {case['answers']}"
        rates = [" ".join(f"{rate:.3f}" for rate in case[engine]["by_position"]) for engine in ("offline", "server", "ours")]
        rows.append([name, case.get("target", result["setting"]["target"]), f"{case['ours']['drafted']:,}", *rates, same])
    return format_table(["drafter", "target", "drafted tokens", "vLLM, class", "vLLM, server", "our chain", "same text"], rows)


def plan_table(plan: dict[str, Any]) -> str:
    """Return the parts of a device's memory, and hours."""
    memory = plan["memory"]
    rows = [[part, f"{size / 1e9:.1f} GB"] for part, size in memory["parts"].items()]
    rows.append(["**peak of a device**", f"**{memory['peak_bytes'] / 1e9:.1f} GB**"])
    rows += [[f"peak, sharded over {memory['devices']}: {what}", f"{size / 1e9:.1f} GB"]
             for what, size in memory["sharded"].items()]  # fmt: skip
    hours = plan["hours"]
    return f"{format_table(['memory of a device', 'size'], rows)}\n\nHours: {hours['value']:.1f} ({hours['basis']})."


def store_table(result: dict[str, Any]) -> str:
    """Return bytes, error and acceptance length of every type of a feature store."""
    supervised = {store["features"]: store for store in result["stores"] if store.get("supervised_only")}
    rows = []
    for store in result["stores"]:
        if store.get("supervised_only"):
            continue
        name = store["features"]
        bytes_per_token = [f"{entry['bytes_per_token']:,.0f}" if entry else "" for entry in (store, supervised.get(name))] \
            if "bytes_per_token" in store else ["", ""]  # fmt: skip
        error = f"{max(store['relative_error'].values()):.1%}" if "relative_error" in store else "none"
        lengths = ", ".join(f"{training['acceptance_length']:.2f}" for training in store["trainings"])
        rows.append([name, *bytes_per_token, error, lengths or "not trained"])
    titles = [
        "features",
        "bytes per token",
        "supervised positions only",
        "largest relative error",
        "tokens per forward, seeds 0 and 1",
    ]
    return format_table(titles, rows)


def speculators_tables(result: dict[str, Any], pace: dict[str, Any]) -> str:
    """Return the results of the same training by spectrain and by the speculators library, and the pace of both."""
    rows = []
    for label, by in (("spectrain", "train_ours"), ("speculators", "train_theirs")):
        runs = [row for row in result["rows"] if row["by"] == by]
        cells = [", ".join(f"{run[tree]:.2f}" for run in runs) for tree in ("chain", "tree")]
        rows.append([label, *cells, f"{sum(run['tokens_a_second'] for run in runs) / len(runs):,.0f}"])
    rows.append(["ratio of means", *(f"{result[key]['ratio']:.2f}" for key in ("chain", "tree", "tokens_a_second"))])
    table = format_table(["trained by", "chain of 3", "16 nodes, 5 deep", "tokens per second of one thread"], rows)
    seconds, speed = pace["seconds_a_step"], pace["tokens_a_second_from_features"]
    paces = [
        [label, f"{seconds[key]:.2f}", f"{speed[key]:,.0f}"]
        for label, key in (("spectrain", "ours"), ("speculators", "theirs"))
    ]
    paces.append(
        ["ratio", f"{pace['ratio_from_features']:.2f}", f"{pace['ratio_with_the_target']:.2f} with the target's forward"]
    )
    second = format_table(["trained by", "seconds per step from given features", "tokens per second"], paces)
    target = f"The target's forward takes {seconds['target']:.2f} seconds in both."
    heading = "## Pace at SmolLM2's size\n\n```sh\npython -m benchmarks.against_speculators --pace 10\n```"
    return f"{table}\n\n{heading}\n\n{describe_setting(pace)}\n\n{second}\n\n{target}"


def targets_table(result: dict[str, Any]) -> str:
    """Return acceptance lengths of three families on targets of unlike kinds."""
    rows = []
    for row in result["rows"]:
        cells = [
            cell for kind in ("tree", "chain")
            for cell in (f"{row[kind]['acceptance_length']:.2f}", f"{row[kind]['identical']} of {row[kind]['checked']}")
        ]  # fmt: skip
        rows.append([row["target"], row["drafter"], *cells])
    return format_table(["target", "drafter", "tree of 16 nodes", "identical", "chain of 4", "identical"], rows)


def select_group(result: dict[str, Any], group: str) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["group"] == group]


def rules_table(result: dict[str, Any]) -> str:
    """Return what rules that change the output gain and cost, and what the rules for several drafts accept."""
    rows = []
    for row in select_group(result, "lossy"):
        drift, speed = row["drift"]["drafted"], row["speedup"]
        cells = [
            f"{drift['perplexity']:.2f}",
            f"{drift['most_likely']:.1%}",
            f"{speed['ratio']:.2f} {format_interval(speed['ci95'])}",
        ]
        rows.append([f"`{row['name']}`", format_length(row), *cells])
    own = select_group(result, "lossy")[0]["drift"]["autoregressive"]
    lossy = format_table(["rule", "tokens per forward", "perplexity", "most likely token", "speedup"], rows)
    note = (
        f"The target's own samples have perplexity {own['perplexity']:.2f}, and {own['most_likely']:.1%} of their tokens are "
        "its most likely ones."
    )
    parts = [lossy, note, "## Rules for several drafts of a node"]
    for row in select_group(result, "drafts"):
        optimum = row["optimum"]
        rates = [["any lossless rule, at most", format_rates(optimum["best_by_depth"])]]
        rates += [[f"`{rule}`", format_rates(values)] for rule, values in optimum["kept_by_depth"].items()]
        positions = " ".join(map(str, optimum["places"]))
        parts += [f"`tree.children=sampled`, {row['name'].partition(', ')[2]}; {positions} positions by depth:",
                  format_table(["rule", "accepted by depth"], rates)]  # fmt: skip
    return "\n\n".join(parts)


def drafters_table(result: dict[str, Any]) -> str:
    """Return tokens per forward of cascades, choosers and lengths that are decided while decoding."""
    rows = [[row["name"], f"`{short_command(row)}`", format_length(row)] for row in select_group(result, "several")]
    return format_table(["name", "settings", "tokens per forward"], rows)


def short_command(row: dict[str, Any]) -> str:
    """Return the settings of a command that name its drafter, tree or training."""
    words = row["command"].split()
    return " ".join(word for word in words if word.startswith(("run=", "drafter", "tree", "acceptance", "eval.overlap")))


def training_table(result: dict[str, Any]) -> str:
    """Return tokens per forward after the same training, and after training that goes on in several ways."""
    rows = [[f"`{row['name']}`", format_length(row)] for row in select_group(result, "trained")]
    first = format_table(["run and tree", "tokens per forward"], rows)
    runs = result["setting"]["runs"]
    rows = []
    for row in select_group(result, "beyond"):
        added = [word for word in runs[row["name"]] if word.startswith("source")]
        rows.append(
            [f"`{' '.join(added)}`" if added else ("data alone" if row["name"] != "gkd" else "before"), format_length(row)]
        )
    second = format_table(["continued with", "tokens per forward, chain of 4"], rows)
    setting = " ".join(word.replace("WORK/", "runs/") for word in runs["more-data"])
    return f"{first}\n\n## Training that continues\n\nEach run continues with `{setting}`.\n\n{second}"


def overlap_table(result: dict[str, Any]) -> str:
    """Return the measured gain of drafting during verification and the gain that two idle devices would have."""
    names = {"post": "post_verify", "pearl": "pre_and_post_verify", "outcomes": "outcomes"}
    rows = []
    for row in select_group(result, "overlap"):
        overlap, way = row["overlap"], row["name"].partition(",")[0]
        ready = f"{overlap['drafts_ready']} of {overlap['drafts_ready'] + overlap['drafts_missed']}"
        rows.append([row["name"], f"{overlap['measured']:.2f}", f"{overlap['simulated'][names[way]]:.2f}", ready])
    return format_table(
        ["`eval.overlap`", "measured speed over the loop's", "expected on two idle devices", "drafts ready"], rows
    )


def adversary_table(result: dict[str, Any]) -> str:
    """Return what a search for slow prompts finds."""
    rows = []
    for row in select_group(result, "adversary"):
        search = row["adversary"]
        speeds = [
            f"{search['speedup'][kind]['ratio']:.2f} {format_interval(search['speedup'][kind]['ci95'])}"
            for kind in ("drafter", "guarded")
        ]
        after = search["after"]["drafter"]["pooled"]
        ratio = f"{search['ratio']:.2f} {format_interval(search['ratio_ci95'])}"
        rows.append([f"{search['same']:.0%}", f"{search['before']['pooled']:.2f}", f"{after:.2f}", ratio, *speeds])
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
    return render_goals(RESULTS)


PAGES = {
    "comparison-smollm2": ResultsPage(
        "One comparison on SmolLM2",
        """Four recipes were trained for two minutes each on SmolLM2-135M and scored with the same prompts, next to two
drafters without training. It shows what `spectrain compare` prints; two minutes are too short to rank the
families.""",
        ("compare-smollm2.json",),
        "spectrain compare recipes=eagle3,mtp,peagle,medusa1 compare.seconds=120 "
        "compare.training_free=[ngram,retrieval] data.limit=null eval.limit=10 eval.max_new_tokens=48 "
        "eval.repeats=1",
        comparison_table,
        """[Comparing drafters](../comparing.md) explains every column. Retrieval copies from the prompt and from the
answers that the run was trained on; the row `retrieval` copies from the prompt alone.""",
    ),
    "comparison-tiny": ResultsPage(
        "Seven families for equal seconds",
        """Seven recipes were trained on the tiny target for 90 seconds each and scored with the same prompts. Heads
learn most in this time because they see the most tokens; block drafters need longer trainings.""",
        ("compare-tiny.json",),
        "spectrain compare target=tiny recipes=eagle3,dflash,dspark,dflash2,peagle,medusa1,hydra "
        "compare.seconds=90 data.limit=null eval.limit=16 eval.max_new_tokens=64 eval.repeats=1 "
        "compare.training_free=[] compare.batch=null",
        tiny_comparison,
        """On a target of 1.7 million parameters drafting costs as much as verifying, so families that draft in one pass
or by heads lose the least time. Nothing was measured on a GPU or after trainings as long as the papers'.""",
    ),
    "families-tiny": ResultsPage(
        "All families after the same tokens",
        """Every recipe was trained on the same 111 thousand tokens of tiny's embedded data (300 steps of at most 512
tokens, the recipe's rate, one seed) and scored on 40 held-out prompts of 64 tokens, greedy. All answers equal
those of `generate`.""",
        ("heads-tiny.json",),
        "python -m benchmarks.compare_heads",
        heads_table,
        """Equal tokens are not equal work: `pard` is a model of its own, `gated_lora` runs the target over a tree and
its masks, and the others run a layer or some heads. `uno` takes two forwards of the target per round and its
first draft is certain, so it emits half of these tokens per forward. Block drafters reach little after so few
steps.""",
    ),
    "less-cache": ResultsPage(
        "Self-drafting with less of the cache",
        """`drafter=self` on tiny, float32, greedy chains of 4, selections of 256 tokens, 4 prompts of each length (3 of
the longest). Each cell holds tokens per round and bytes read per token relative to autoregressive decoding.
Quantised caches keep nearly every draft and save the most for long texts. All answers equal those of
autoregressive decoding.""",
        ("context-tiny.json",),
        "python -m benchmarks.context",
        cache_table,
        """![Tokens per round, and bytes per token, by length of the text](../context.svg)

tiny was trained on 1,024
positions; the perplexity shows that longer texts mean little to it, so its attention is spread out and
selections of few tokens accept less than they would with a model for such texts. Bytes are counted from the
shapes of what the forwards read; no time was measured.""",
    ),
    "engines": ResultsPage(
        "The same drafters in vLLM",
        """The exported drafters decode in vLLM, by its class and by its server, and in this project's own chain. Each
cell holds the share of drafts accepted at each position, over all rounds. vLLM and spectrain accept the same
drafts in every round.""",
        ("engines.json",),
        "make test-engines",
        engines_table,
        """24 held-out prompts of at most 80 tokens, float32, greedy; vLLM 0.32.0 for CPUs with four prompts at once,
spectrain one by one. Medusa and GKD were trained on about a hundred conversations and DFlash for six minutes:
the table compares engines, not drafters. SGLang's layout was read by vLLM; SGLang itself was not run.""",
    ),
    "planning": ResultsPage(
        "The plan of an 8B target",
        """What `spectrain plan` expects for EAGLE-3 with seven draft steps on Llama-3.1-8B's geometry: a step of 8,192
tokens on an H100, with a target in bfloat16 and a drafter in float32 under autocast. It was not compared with
a GPU.""",
        ("plan_llama8b.json",),
        "spectrain plan recipe=eagle3 target=hf target.model=data/llama-3.1-8b data=hub data.path=NAME "
        "data.max_length=2048 \\\n    trainer.batch_tokens=8192 trainer.epochs=1 plan.device=cuda "
        "plan.devices=8 plan.device_gb=80 plan.tokens=450000000",
        plan_table,
    ),
    "sharding": ResultsPage(
        "Ways to share a training between processes",
        """EAGLE-3 on tiny, 20 steps, float32, one thread per process, trained in every way on one or two processes. All
ways have the same losses to rounding. The machine was busy, so the speeds only show that no way is out of
line.""",
        ("scale-cpu.json",),
        "TARGET=DIR OUT=eval/results bash scripts/gpu_check.sh scale toy",
        scale_table,
    ),
    "feature-store": ResultsPage(
        "Types of a feature store",
        """EAGLE-3 on tiny (160 conversations, 38,721 tokens, 2 epochs), trained from live features and from stores of
each type, and scored on 20 held-out prompts of 64 tokens, greedy, chain of 4. No type loses acceptance here.
All answers equal those of `generate`.""",
        ("store.json",),
        "python -m benchmarks.measure_store",
        store_table,
        """On 8 conversations of SmolLM2 (layers 2, 15, 27 and the last) the relative error of a token's features is 0.2
% for bfloat16, 2.2 % for fp8 and 2.9 % for int8, because outliers stretch int8's scale.""",
    ),
    "speculators": ResultsPage(
        "EAGLE-3 by spectrain and by the speculators library",
        """Both trained EAGLE-3 for tiny on the same 320 conversations in the same batches of 512 packed tokens (81
thousand tokens, three unrolled steps, three seeds); the library (0.9.0) used its own loss and defaults. Both
were scored here on 16 held-out prompts of 64 tokens. The library was not tuned for trainings this short.""",
        ("speculators.json", "speculators-pace.json"),
        "python -m benchmarks.against_speculators",
        speculators_tables,
    ),
    "unlike-targets": ResultsPage(
        "Targets of unlike kinds",
        """Three families on a hybrid target, one with attention sinks, one with latent attention and one of text and
images (four layers of width 128). It shows that training and decoding work and that all output is
`generate`'s; it does not show what a drafter gains on a real model, because the targets were trained for
minutes and repeat themselves.""",
        ("unlike-targets.json",),
        "python -m scripts.train_tiny_targets --work DIR --steps 300 --drafter-steps 150 --prompts 12 --new-tokens 48",
        targets_table,
        """The answers of the target with images follow one pattern, which explains its lengths.""",
    ),
    "acceptance-rules": ResultsPage(
        "Acceptance rules",
        """Rules that draw, on tiny at temperature 1: a chain of 4 drawn children of a `gkd` drafter (512 steps), 24
held-out prompts of 32 tokens. `chain` is lossless; the others change the output, which perplexity by the
target shows.""",
        ("ways-tiny.json",),
        f"{WAYS} lossy tasks drafts",
        rules_table,
        """Rates of the second part are those of a tree with nodes of 4, 2 and 1 children (`tree=cartesian
tree.widths=[4,2,1]`), 24 prompts of 48 tokens; all rules are judged at the same positions. tiny answers none
of the 24 arithmetic questions, so the task's score is 0 under every rule.""",
    ),
    "several-drafters": ResultsPage(
        "Cascades and choices",
        """Several drafters on tiny, 24 prompts of 48 tokens, greedy, chain of 4. A cascade drafts exactly what its inner
drafter drafts alone. All answers equal those of decoding without a drafter. The machine was busy, so speeds
are left out.""",
        ("ways-tiny.json",),
        f"{WAYS} several",
        drafters_table,
    ),
    "training-methods": ResultsPage(
        "Forerunners, CLLM and training that continues",
        """EAGLE, HASS, EAGLE-3 and CLLM on tiny after the same 300 steps, and a `gkd` drafter of 512 steps whose
training continues in several ways; 40 held-out prompts of 64 tokens, greedy. The intervals of the second
table overlap.""",
        ("ways-tiny.json",),
        f"{WAYS} trained beyond",
        training_table,
    ),
    "overlap": ResultsPage(
        "Drafting while the target verifies",
        """`eval.overlap` on tiny with two processes of one thread each on two idle cores, 24 prompts of 48 tokens. Only
`pearl` gains there. All outputs equal those of the loop.""",
        ("ways-tiny.json",),
        f"{WAYS} overlap",
        overlap_table,
    ),
    "adversary": ResultsPage(
        "Prompts that slow a drafter down",
        """A search of 32 edits per prompt for wordings that lower acceptance, for a `gkd` drafter on tiny, chain of 4,
24 prompts of 48 tokens, greedy. All outputs equal those of `generate`. The guard limits the loss to a few
percent.""",
        ("ways-tiny.json",),
        f"{WAYS} adversary",
        adversary_table,
    ),
    "gpu-goals": ResultsPage(
        "Goals on a GPU",
        """The goals of kernels, engine and training on a GPU. A line without a measurement says so; no number of a GPU
appears here that was not measured on one.""",
        ("goals.json",),
        "OUT=eval/results bash scripts/gpu_check.sh kernels\nOUT=eval/results bash scripts/gpu_check.sh engine"
        " single\npython -m benchmarks.report",
        goals_table,
        """The floor of tree attention is the longer of all its bytes at the rate of a copy and all its operations at
that of a large product. Its goal is 5 microseconds more than the longer of its bytes at that rate and its
operations at 0.60 of the product's rate. Until a card is measured the rates are 4.3 TB/s and 790 TFLOP/s
(H200).""",
    ),
}


def main() -> None:
    for name, page in PAGES.items():
        write_text(FOLDER / f"{name}.md", page.render())


if __name__ == "__main__":
    main()
