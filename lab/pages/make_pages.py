"""Write the pages of docs/results/ that show lab/results/*.json, each with the command that
measured it.

python -m lab.pages.make_pages

A test compares the committed pages with what this writes. Pages of docs/results/ that no JSON holds
are written by hand.
"""

from pathlib import Path

from lab.benchmarks.rehearse_cluster import markdown_table as rehearsal_table
from lab.benchmarks.scale import markdown_table as scale_table
from lab.pages import results_tables as tables
from lab.pages.axes_tables import axes_tables
from lab.pages.engine_tables import engine_times_tables
from lab.pages.equal_tables import equal_tables
from lab.pages.follow_tables import follow_tables
from lab.pages.long_pages import LONG_PAGES
from lab.pages.long_tables import adapters_table
from lab.pages.neighbours_tables import neighbours_table
from lab.pages.results_page import ResultsPage
from lab.pages.speculators_tables import speculators_tables
from lab.pages.systems_page import render_systems_page
from lab.pages.ways_pages import WAYS_PAGES
from spectrain.files import write_text

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "results"

PAGES = {
    **WAYS_PAGES,
    **LONG_PAGES,
    "axes": ResultsPage(
        "Drafters over batch size, context and temperature",
        """Six drafters on the tiny target and six on SmolLM2-135M were swept over the number of
prompts at once, the length of the prompt and the temperature, and two of them again with
`tree=auto`. The tables show where each stops to pay. The drafters of tiny were trained for 400
steps, which is minutes; those of SmolLM2 need no training or ship with the package.""",
        ("axes.json",),
        "python -m lab.benchmarks.axes",
        axes_tables,
        """One thread for each process; one other measurement ran on the second core. Plain and
drafted rounds alternate, so ratios are of the same moments. At 16 and 32 prompts at once, and at 8
of tiny's `tree=auto`, batches share prompts, so those intervals are too narrow or missing. The
lengths of prompts of SmolLM2's retrieval, lookahead, sparse cache and layer skipping were measured
beside several busy processes: their tokens per second are a quarter of those of an idle machine,
and six prompts leave wide intervals.

Batches of `tree=auto`, and its lengths of prompts on SmolLM2, were measured last, on another
processor than the other rows, idle, with answers of 64 tokens, on 60 prompts of tiny and 32 of
SmolLM2. With several prompts at once it counts the tokens of the text that is behind, because a
batch takes as long as its slowest text. On SmolLM2 both drafters are at 0.98 of plain decoding or
above at every size. The EAGLE-3 drafter of tiny never pays there, and three of the twelve sizes of
tiny are at 0.973 to 0.976: trials took 2 % of a run over one prompt at a time, and the choice takes
0.07 of the 1.5 milliseconds of a step. All answers equal those of `generate`, in batches too. In
the older rows some answers of SmolLM2 in batches differ from those of each text alone, without a
drafter too: the forward over the padded prompts of a batch rounded otherwise in bfloat16 then, and
kernels run prompts one after the other now.

On the same processor, commit 5c7f3d7d2 gave 1.33, 0.87, 0.89 and 0.99 with the shipped drafter at
one, two, four and eight prompts of SmolLM2. Trees were timed within rounds, which took a second;
kernels for several texts were compiled in the first drafted round; and numbers of threads were
compared by rounds of unlike kinds.""",
    ),
    "comparison-smollm2": ResultsPage(
        "One comparison on SmolLM2",
        """Four recipes were trained for two minutes each on SmolLM2-135M and scored with the same
prompts, next to two drafters without training. It shows what `spectrain compare` prints; two
minutes are too short to rank the families.""",
        ("compare-smollm2.json",),
        "spectrain compare recipes=eagle3,mtp,peagle,medusa1 compare.seconds=120 "
        "compare.training_free=[ngram,retrieval] data.limit=null eval.limit=10 "
        "eval.max_new_tokens=48 eval.repeats=1",
        tables.comparison_table,
        """[Comparing drafters](../comparing.md) explains every column. Retrieval copies from the
prompt and from the answers that the run was trained on; the row `retrieval` copies from the prompt
alone.""",
    ),
    "comparison-tiny": ResultsPage(
        "Seven families for equal seconds",
        """Seven recipes were trained on the tiny target for 90 seconds each and scored with the
same prompts. Hydra accepts most. Medusa saw the most tokens and accepts less than EAGLE-3 and
P-EAGLE; block drafters need longer trainings.""",
        ("compare-tiny.json",),
        "spectrain compare target=tiny recipes=eagle3,dflash,dspark,dflash2,peagle,medusa1,hydra "
        "compare.seconds=90 data.limit=null eval.limit=16 eval.max_new_tokens=64 eval.repeats=1 "
        "compare.training_free=[] compare.batch=null",
        tables.tiny_comparison,
        """On a target of 1.7 million parameters drafting often takes longer than verifying, so
families that draft in one pass or by heads lose the least time. Nothing was measured on a GPU or
after trainings as long as the papers'.""",
    ),
    "families-tiny": ResultsPage(
        "Eighteen recipes after the same tokens",
        """Eighteen recipes, three of them with a low-rank variant, were trained on the same 111
thousand tokens of tiny's embedded data (300 steps of at most 512 tokens, the recipe's rate, one
seed) and scored on 40 held-out prompts of 64 tokens, greedy. All answers equal those of
`generate`.""",
        ("heads-tiny.json",),
        "python -m lab.benchmarks.compare_heads",
        tables.heads_table,
        """Equal tokens are not equal work: `pard` is a model of its own, `gated_lora` runs the
target over a tree and its masks, and the others run a layer or some heads. `uno` takes two forwards
of the target per round and its first draft is certain, so it emits half of these tokens per
forward. Block drafters reach little after so few steps.""",
    ),
    "equal-data": ResultsPage(
        "Drafters beside their bases, after the same tokens",
        """Each table has a base in its first row, and drafters that differ from it in one part: how
they draft, what they learn from, or what they copy. What trains was trained on as many tokens of
tiny's embedded conversations as its base, and all rows of a table were scored on the same held-out
prompts of 48 tokens, greedy: 32, or 64 where drafters learn while decoding. Intervals of 95 % are
over prompts, with the sums of both seeds. The interval of a ratio in bold excludes 1, and both
seeds are on the same side of it.""",
        ("equal-data.json",),
        "python -m lab.benchmarks.equal_data",
        equal_tables,
        """In the tables of trainings that continue, `eagle3` and `dflash` are where the other rows
start, with fewer tokens. In the three tables by length the base is the same drafter behind 512
tokens: OWL keeps its tokens behind 4,096, EAGLE-3 loses a quarter. Raw text before answers gained
nothing at equal steps. Speeds are those of a target of 1.7 million parameters, for which drafting
often takes longer than verifying; one or more other processes ran on the machine.""",
    ),
    "less-cache": ResultsPage(
        "Self-drafting with less of the cache",
        """`drafter=self` on tiny, float32, greedy chains of 4, selections of 256 tokens, 4 prompts
of each length (3 of the longest). Each cell holds tokens per round and bytes read per token
relative to autoregressive decoding. Quantised caches keep nearly every draft and save the most for
long texts. All answers equal those of autoregressive decoding.""",
        ("context-tiny.json",),
        "python -m lab.benchmarks.context",
        tables.cache_table,
        """![Tokens per round, and bytes per token, by length of the text](../context.svg)

tiny was trained on 1,024
positions; the perplexity shows that longer texts mean little to it, so its attention is spread out
and selections of few tokens accept less than they would with a model for such texts. Bytes are
counted from the shapes of what the forwards read; no time was measured.""",
    ),
    "engines": ResultsPage(
        "The same drafters in vLLM",
        """The exported drafters decode in vLLM, by its class and by its server, and in this
project's own chain. Each cell holds the share of drafts accepted at each position, over all rounds.
vLLM and spectrain accept the same drafts in every round.""",
        ("engines.json",),
        "make test-engines",
        tables.engines_table,
        """24 held-out prompts of at most 80 tokens, float32, greedy; vLLM 0.32.0 for CPUs with four
prompts at once, spectrain one by one. Medusa and GKD were trained on about a hundred conversations
and DFlash for six minutes: the table compares engines, not drafters. SGLang's layout was read by
vLLM; SGLang itself was not run.""",
    ),
    "planning": ResultsPage(
        "Plans of large targets",
        """What `spectrain plan` expects for EAGLE-3 with seven draft steps, first on Llama-3.1-8B's
geometry: a step of 8,192 tokens on an H100, with a target in bfloat16 and a drafter in float32
under autocast. It was not compared with a GPU.""",
        ("plan_llama8b.json", "large-targets.json"),
        "spectrain plan recipe=eagle3 target=hf target.model=lab/target_configs/llama-3.1-8b "
        "data=hub data.path=NAME data.max_length=2048 \\\n    trainer.batch_tokens=8192 "
        "trainer.epochs=1 plan.device=cuda plan.devices=8 plan.device_gb=80 plan.tokens=450000000",
        tables.plan_tables,
        """Weights are bfloat16, or as the checkpoint stores them: 4.25 bits for the experts of
gpt-oss (MXFP4), 8 bits and block scales for DeepSeek-V3 (FP8); kernels for these types must be
there. With `target.parts=head` the server holds the layers, and its memory, its arithmetic and its
hours are not in these rows: the target's GFLOP say what it computes for every token. `sharded over
8` is `trainer.sharding=fsdp2 target.sharding=fsdp2`, which takes dense weights only. The arithmetic
of attention counts every pair of positions, or those within a layer's sliding window. A causal
kernel computes only half of the pairs, so the numbers of long contexts are upper bounds. DeepSeek's
queries and keys are counted with the width of its values, which are narrower. Hours assume 40 % of
an H100's peak and were not compared with a GPU.""",
    ),
    "sharding": ResultsPage(
        "Ways to share a training between processes",
        """EAGLE-3 on tiny, 20 steps, float32, one thread per process, trained in every way on one
or two processes. All ways have the same losses to rounding. The machine was busy, so the speeds
only show that no way is out of line.""",
        ("scale-cpu.json",),
        "TARGET=DIR OUT=lab/results bash scripts/gpu_check.sh scale toy",
        scale_table,
    ),
    "cluster": ResultsPage(
        "Faults of a cluster, rehearsed",
        """EAGLE-3 on tiny was trained for 40 steps on four machines, which are network namespaces
of one computer with gloo between them, and disturbed after step 7 or later. No run lost a step, and
a step that ran again gave the same loss. On four processes the losses are those of the undisturbed
run bit by bit.""",
        ("cluster.json",),
        "python -m lab.benchmarks.rehearse_cluster out=lab/results/cluster.json",
        rehearsal_table,
        """Every machine gives its launcher's exit status; a minus stands for a launcher that was
killed with its machine or cut off. `elastic` is torchrun with `--nnodes 3:4 --max-restarts 3`.
Times count from the fault. `named after` is the time to the first message that matches the case,
among the messages after the fault. `longest pause` is the longest time between two logged steps,
with the start of the launch that continues the training; such a start takes about 30 s of CPU time
on four processes. The machine was busy, so the times are upper bounds. A checkpoint was saved every
five steps, and `steps repeated` is the number of steps that ran a second time.

`losses` is the largest relative difference of a step's loss to the undisturbed run. It is 0 on four
processes, because DDP keeps its buckets from the first step on. It used to arrange them anew after
the first step of every launch; gloo adds the processes up in an order that depends on the position
in a bucket, so resumed runs differed by 1e-07. On three processes the sums over processes have
other terms, and the limit is 1e-05.

A case passes only if every step is logged once, the drafter is saved, no incomplete file is left,
the launchers end with status 0 where the training continues by itself and with another status
elsewhere, and the message appears after the fault, within 10 s for a frozen process, 240 s for the
second launch, which waits for the first one, and 60 s for others. Most rows are of one commit. The
full disk and the second launch were measured one commit later, which changes how the rehearsal
fills the disk; the first killed process and the restart on four were measured last, after the
training's progress got a file of its own, on two processors that another measurement shared. The
machines set `net.ipv4.tcp_retries2` to 8: launchers whose rendezvous is cut off without a word wait
until the system gives the connection up, which takes a quarter of an hour by its default of 15.""",
    ),
    "adapters": ResultsPage(
        "Adapters and full fine-tuning of a drafter",
        """One EAGLE-3 drafter on tiny, trained on conversations without code, continues its
training on code: all of its weights, or adapters in 8 of its layers (`adapter=lora`), with the same
80 conversations and 19,742 tokens. The table holds tokens per forward of greedy chains of 4 on 24
prompts of each domain, the mean over three seeds and each seed.""",
        ("adapters-tiny.json",),
        "python -m lab.benchmarks.measure_adapters",
        adapters_table,
        """After these few tokens adapters gain about two thirds of what all weights gain on the new
domain. They have a twentieth of the gradients and optimiser state. Both lose on the first domain;
the difference there is within the spread of the seeds. One rate was used for each, 1e-3 for all
weights and 4e-3 for adapters; other rates, ranks and larger domains were not measured.""",
    ),
    "feature-store": ResultsPage(
        "Types of a feature store",
        """EAGLE-3 on tiny (160 conversations, 38,721 tokens, 2 epochs), trained from live features
and from stores of each type, and scored on 20 held-out prompts of 64 tokens, greedy, chain of 4. No
type loses acceptance here. All answers equal those of `generate`.""",
        ("store.json",),
        "python -m lab.benchmarks.measure_store",
        tables.store_table,
        """On 8 conversations of SmolLM2 (layers 2, 15, 27 and the last) the relative error of a
token's features is 0.2 % for bfloat16, 2.2 % for fp8 and 2.9 % for int8, because outliers stretch
int8's scale.""",
    ),
    "speculators": ResultsPage(
        "EAGLE-3 by spectrain and by the speculators library",
        """Both trained EAGLE-3 on the same 320 conversations in the same batches of 512 packed
tokens, with three unrolled steps, the same fused layers and the same features. Both were scored
here on 24 held-out prompts of 64 tokens. Numbers are tokens per forward; intervals are over seeds
and prompts, and single seeds are in parentheses.

With [fitted initial weights](../families/eagle3.md#fitted-initial-weights) spectrain is ahead on
tiny: by 16 % (chain) and 24 % (tree) at the small budget, and by 7 % and 9 % at the large one,
which is the same text twelve times. On SmolLM2-135M it is ahead by 5 % at the small budget; at the
large one, with one seed, by 3 % and by nothing (0 %). These are three seeds of both but for the
last. From other starts it is behind on SmolLM2. A lead of 10 % was the goal. It shrinks as more
tokens are seen, so most of it seems to come from a better start, not from learning more from each
token.

Rows of the fitted start with AdamW have the recipe's settings; those with Muon have the library's
three norms, `drafter.step_decay=1`, `schedule=linear` and `trainer.clip=1`. A frozen output layer
is `drafter.freeze_output=true`; it changes little on SmolLM2 and costs 3 % on tiny. The fit reads
up to 65,536 of the tokens that the training then sees.

On SmolLM2 most rates were run with one seed, and the large budget with two rates of the library and
one of spectrain; the library was better at the lower one. An earlier version of the page compared
with the defaults of the library (0.9.0: Muon, 1e-3), which are made for long trainings; the leads
of 1.19 and 1.28 that it reported did not hold against tuned rates.

SmolLM2 was run on 2026-11-28 on one thread for each side (AMD EPYC, family 25, model 17; commit
32f5516d9602), and so was the fitted start (commit ffd34fc001df). The library's seeds 1 and 2 on
SmolLM2, the large budget there, the frozen output layer, and seeds 1 and 2 of the fitted start on
tiny's large budget were run on another processor (family 26, model 2; commits eb027f2d4c36 and
83c07a24). Both runs that were repeated there gave the same tokens per forward, prompt by
prompt.""",
        (
            "speculators.json",
            "speculators-fitted.json",
            "speculators-trials.json",
            "speculators-pace.json",
        ),
        "python -m lab.benchmarks.against_speculators",
        speculators_tables,
    ),
    "unlike-targets": ResultsPage(
        "Targets of unlike kinds",
        """Three families on a hybrid target, one with attention sinks, one with latent attention
and one of text and images (four layers of width 128). It shows that training and decoding work and
that all output is `generate`'s; it does not show what a drafter gains on a real model, because the
targets were trained for minutes and repeat themselves.""",
        ("unlike-targets.json",),
        "python -m lab.small_targets.train_tiny_targets --work DIR --steps 300 --drafter-steps 150 "
        "--prompts 12 --new-tokens 48",
        tables.targets_table,
        """The answers of the target with images follow one pattern, which explains its lengths.""",
    ),
    "engine-times": ResultsPage(
        "What a drafter needs in an engine",
        """Forwards of several rows of SmolLM2-135M in bfloat16, timed in the engines themselves on
two cores. The table shows the tokens per forward that a drafter needs to break even and to reach
1.3x, and in brackets the share of drafted tokens that has to be accepted for it, each after
accepted ones; the drafter's own time is not counted.""",
        ("engine-times.json",),
        "spectrain bench engine server=llamacpp run=smollm2-eagle3 target=smollm2 "
        "target.dtype=bfloat16 server.threads=1 bench.passes=1 bench.rows=[1,2,3] "
        "bench.lengths=[64,512] out=FILE",
        engine_times_tables,
        """In llama.cpp a second row adds half of the time of a forward. The shipped drafter, whose
drafts are accepted in 0.40, 0.15 and 0.06 of the rounds by position, is slower there than decoding
without it. In OpenVINO a forward of 16 rows takes less than two forwards of one row, so a drafter
that takes little time gains from few accepted tokens; the shipped drafter's rounds take longer than
that mostly because of its own forwards.

The shipped EAGLE-3 drafter was served and scored in the same minutes on 12 held-out prompts of 48
greedy tokens against the target alone, with `server.url` and `server.baseline_url`. Predicted is
the tokens per forward of that score over the time of the drafter's round, which `spectrain bench
engine run=smollm2-eagle3` had timed. Both predictions are within 5 %.

An earlier measurement, beside which another process may have run, gave ratios of 1.65, 1.82, 1.85,
3.81 and 4.47 in llama.cpp for 1, 2, 3, 7 and 15 drafted tokens. It gave speedups of 0.88x and 0.87x
for 1 and 2 drafted tokens, where 0.80x and 0.78x were predicted. vLLM was only timed on a busy
machine, with ratios of 1.60 and 1.94 for 1 and 3 drafted tokens. llama.cpp with two threads was not
measured.""",
    ),
    "neighbours": ResultsPage(
        "Threads and neighbours",
        """The shipped drafter beside other processes that compute without a pause, on two virtual
cores, greedy, bfloat16, answers of 64 tokens to 6, 12 or 20 prompts of the demo and to 60 questions
of Spec-Bench (90 turns). A cell of a drafter holds the speedup over plain decoding with its 95 %
interval, and the tokens per forward. Beside a process that takes a core all the time, plain
decoding keeps 0.65 to 0.80 of its idle pace, and drafting with retrieval gains about as much as on
an idle machine, or more.""",
        ("neighbours.json",),
        "python -m lab.benchmarks.neighbours",
        neighbours_table,
        """All outputs equal those of `generate`. Spinning threads are torch's default
(`GOMP_SPINCOUNT=300000`), sleeping ones this project's. Two threads that spin are what torch does
by itself; beside a busy process they are not in the table, because an earlier case had not ended
after twice the time of the others. Each case ran once, with all cores of the machine for it and its
neighbours. Few prompts make wide intervals: all of the idle cases of one processor agree with each
other.

The rows of 6 prompts are of the drafter after 6.9 million tokens, the others after 10 million.
Those of Spec-Bench have the later changes that [its page](shipped-drafter.md#spec-bench) lists
(`run=RUN 'settings=["tree=auto", "eval.prompts=FILE", ..]'`), and their store holds the text of the
last training. The rows of 12 prompts (`policy=sleep 'questions=12 of the demo'
'settings=["eval.limit=12"]'`) are of a slower processor and of later code. In an earlier run the
observed times of rounds with and without the drafter were averaged, where medians count now:
drafting with retrieval then gave 1.57, 1.66 and 1.56 idle, beside one process and beside a changing
load, and 1.22 with 1.29 tokens beside two processes, because a few rounds that were interrupted
kept the drafter out. Decoding on one thread, as it is chosen beside busy processes, a node of a
tree costs more relative to a step, so trees are smaller there.

The rows of 20 prompts (`policy=sleep 'questions=20 of the demo' 'settings=["eval.limit=20"]'`) are
of code that compares rounds on one thread by processor time. The code before it was run on the same
machine an hour earlier; beside two processes it gave 1.10 with 1.29 tokens once and 1.78 with 2.23
tokens another time, and the drafter alone 1.21 (1.48 tokens) and 1.27 (1.38 tokens). Three more
runs of the new code gave 1.43, 1.68 and 1.62 with 2.28 to 2.36 tokens there, and 1.31, 1.47 and
1.30 alone with 2.00 to 2.04 tokens. So the tokens per forward no longer depend on interruptions.
What remains of the difference between runs is time.

Idle, two more runs of that machine, the first with the code before, gave plain decoding 115.8 and
124.8 tokens per second, and drafting with retrieval 1.62 [1.47, 1.77] and 1.51 [1.37, 1.65], which
are 188 and 189 tokens per second. In the table it is 147.9, 1.45 and 215. The virtual machine reads
memory faster at some times than at others. A plain step only reads the weights, so it gains most
from that (8.1, 7.8 and 6.2 ms on two threads). A tree also computes, so it gains less.""",
    ),
    "follow": ResultsPage(
        "Following traffic",
        """What `spectrain follow` does when traffic changes, how often it is wrong when nothing
changes, what its proxy costs, and which faults it survives. The tiny target, an EAGLE-3 drafter
with a chain of three tokens, greedy answers of 32 tokens. The first kind of traffic is English
chat, on whose answers the drafter was trained for 0.6 minutes; the second kind is questions in
Spanish in another prompt template.""",
        (
            "follow-vllm.json",
            "follow-quiet.json",
            "follow-alarms.json",
            "follow-faults.json",
            "follow-overhead.json",
        ),
        "python -m lab.benchmarks.follow_day seeds=0,1,2 server=vllm server.python=ENV/bin/python "
        "server.dtype=float32 out=lab/results/follow-vllm.json\n"
        "python -m lab.benchmarks.follow_day quiet=1000 out=lab/results/follow-quiet.json\n"
        "python -m lab.benchmarks.follow_alarms out=lab/results/follow-alarms.json\n"
        "python -m lab.benchmarks.follow_faults out=lab/results/follow-faults.json\n"
        "python -m lab.benchmarks.follow_overhead out=lab/results/follow-overhead.json",
        follow_tables,
        """During the days up to ten other processes computed on the machine's two cores, so seconds
are upper bounds; tokens per forward are counts. The overhead was measured on the quiet machine. The
days were measured in two runs. A stream of which the server has sent a part cannot be saved when
the server is killed: the client sees a broken answer, as it does without the proxy.""",
    ),
    "gpu-goals": ResultsPage(
        "Goals on a GPU",
        """The goals of kernels, engine and training on a GPU. A line without a measurement says so;
no number of a GPU appears here that was not measured on one.""",
        ("goals.json",),
        "OUT=lab/results bash scripts/gpu_check.sh kernels\nOUT=lab/results bash "
        "scripts/gpu_check.sh engine single\npython -m lab.benchmarks.report",
        tables.goals_table,
        """The floor of tree attention is the longer of all its bytes at the rate of a copy and all
its operations at that of a large product. Its goal is 5 microseconds more than the longer of its
bytes at that rate and its operations at 0.60 of the product's rate. Until a card is measured the
rates are 4.3 TB/s and 790 TFLOP/s (H200).""",
    ),
}


def main() -> None:
    for name, page in PAGES.items():
        write_text(FOLDER / f"{name}.md", page.render())
    write_text(ROOT / "docs" / "systems.md", render_systems_page())


if __name__ == "__main__":
    main()
