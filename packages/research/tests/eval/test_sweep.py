"""Sweeps and pruning: every cell is really decoded, the output stays the target's, and the table
repeats the entries.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from spectrain.decoding.acceptance import AcceptanceRule, Greedy, Match
from spectrain.decoding.acceptance.rejection import Block, RecursiveRejection, SpeculativeSampling
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.decoding.session import Session
from spectrain.drafters.base import Drafter
from spectrain.drafters.capabilities import DraftingCost
from spectrain.drafters.eagle3 import Eagle3
from spectrain.drafters.early_exit import EarlyExit
from spectrain.drafters.ngram import Ngram
from spectrain.errors import UserError
from spectrain.eval.columns import format_speedup
from spectrain.eval.noise import is_possible
from spectrain.eval.run import Evaluation
from spectrain.eval.systems import System
from spectrain.models.target import Target
from spectrain.output.verbosity import command_output
from spectrain.runs.candidate import Candidate
from spectrain.trees import Chain, Eagle2, Static, TreeBuilder
from spectrain_research.kangaroo.drafter import Kangaroo
from spectrain_research.layer_skip.drafter import LayerSkipping
from spectrain_research.pruning.evaluation import PruneSweep
from spectrain_research.pruning.pruning import Pruning
from spectrain_research.shared.grid import Grid
from spectrain_research.sweeps.evaluation import ExitSweep, LengthSweep
from tests.factories import build_evaluation

LIMIT = 8
SETTING = {"target": "tiny", "recipe": "none", "dtype": "float32", "device": "cpu"}
QUESTIONS = [
    ["Name a color.", "Name another color."],
    ["Count: one two three one two three one two"],
]
NUM_TURNS = 3
DRAWN = pytest.param(Match(temperature=0.7, seed=2), marks=pytest.mark.slow)
RULES = pytest.mark.parametrize("rule", [Greedy(), DRAWN], ids=lambda rule: rule.name)
EXIT = 5  # of the drafter that early exits are compared with
QUICK: dict[str, Any] = {"oracle": False, "report": False, "repeats": 1, "prune_rank": 0}
SWEEP_EXITS = (3, 7)
SWEEP_DEPTHS = (1, 3)


def make_evaluation(folder: Path, **options: Any) -> Evaluation:
    """An evaluation over two short prompts, one of two turns."""
    path = folder / "prompts.jsonl"
    rows = [
        {"id": str(number), "category": "talk", "turns": turns}
        for number, turns in enumerate(QUESTIONS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return build_evaluation(
        prompts=str(path), max_new_tokens=LIMIT, baselines=(), **{**QUICK, **options}
    )


def read_turns(folder: Path) -> list[tuple[list[int], int]]:
    """Return every turn's full context and the key of its random draws, as the scoring used
    them.
    """
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return [(line["prompt_tokens"], row) for row, line in enumerate(lines, 1)]


def rounds_of(folder: Path, system: str) -> list[tuple[int, ...]]:
    """Return tokens, depth and nodes of every round of a system, with its number in the answer."""
    rows = [
        row
        for row in pq.read_table(folder / "rounds.parquet").to_pylist()
        if row["system"] == system
    ]
    return [(row["round"], row["tokens"], row["depth"], row["nodes"]) for row in rows]


def decode_alone(
    target: Target,
    folder: Path,
    rule: AcceptanceRule,
    drafter: Drafter,
    builder: TreeBuilder,
    pruning: Pruning | None = None,
) -> list[Generation]:
    """Decode the same turns, each by itself and without an evaluation."""
    changes = () if pruning is None else (pruning,)
    session = Session(target, rule, drafter, builder, changes=changes)
    return [session.decode([prompt], LIMIT, [row])[0] for prompt, row in read_turns(folder)]


def list_rounds(generations: list[Generation]) -> list[tuple[int, ...]]:
    return [
        (number, *counts)
        for generation in generations
        for number, counts in enumerate(
            zip(generation.round_lengths, generation.depths, generation.node_counts)
        )
    ]


def mean_acceptance(generations: list[Generation]) -> float:
    complete = [count for generation in generations for count in generation.complete_round_lengths]
    return sum(complete) / len(complete)


def make_eagle3(target: Target) -> Eagle3:
    """An untrained drafter that runs no part of the target."""
    torch.manual_seed(1)
    drafter = Eagle3(target, vocab_size=512)
    drafter.prepare(target, torch.randint(0, 1000, (target.head.vocab_size,)))
    return drafter.eval()


# Exits


@pytest.mark.slow
@RULES
def test_every_cell_of_exits_is_decoded(
    tiny: Target, tmp_path: Path, rule: AcceptanceRule, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every (exit, depth) cell has the rounds of a direct `decode` with that exit and the target's
    own output; the table, in the summary and printed, repeats the entries."""
    evaluation = make_evaluation(tmp_path, sweep="exit", exits=SWEEP_EXITS, depths=SWEEP_DEPTHS)
    folder = tmp_path / "out"
    summary = evaluation.score(
        Candidate(tiny, EarlyExit(tiny, EXIT), Chain(2), rule, SETTING), folder
    )
    cells = {
        (exit, depth): f"exit-{exit}-{depth}" for exit in SWEEP_EXITS for depth in SWEEP_DEPTHS
    }
    assert summary["compared"].keys() == set(cells.values())
    plain = [
        decode(tiny, [prompt], rule, LIMIT, sequence_ids=[row])[0].output
        for prompt, row in read_turns(folder)
    ]
    for (exit, depth), name in cells.items():
        entry = summary["compared"][name]
        generations = decode_alone(tiny, folder, rule, EarlyExit(tiny, exit), Chain(depth))
        assert (
            rounds_of(folder, name) == list_rounds(generations)
            and [generation.output for generation in generations] == plain
        )
        assert entry["acceptance_length"]["pooled"] == pytest.approx(
            mean_acceptance(generations), abs=1e-4
        )
        assert entry["lossless"]["identical"] == entry["lossless"]["checked"] == NUM_TURNS
        assert entry["lossless"]["rule"] == rule.name and entry["tree"]["depth"] == depth
    own = decode_alone(tiny, folder, rule, EarlyExit(tiny, EXIT), Chain(2))
    assert rounds_of(folder, "drafter") == list_rounds(own) and summary["setting"]["drafter"] == {
        "exit_layer": EXIT
    }
    sweep = json.loads((folder / "summary.json").read_text())["sweep"]
    same_as_entries(sweep, summary["compared"], cells, "speedup")
    assert_printed(capsys.readouterr().out, sweep, summary["compared"], "speedup")


def same_as_entries(
    sweep: dict[str, Any], compared: dict[str, Any], cells: dict[tuple[int, int], str], second: str
) -> None:
    """The table's cells are those of the entries, and the fastest is the one of the greatest
    measured speedup.
    """
    positions = {
        (row, column): (i, j)
        for i, row in enumerate(sweep["rows"])
        for j, column in enumerate(sweep["columns"])
    }
    assert positions.keys() == cells.keys()
    for cell, (i, j) in positions.items():
        entry = compared[cells[cell]]
        assert sweep["acceptance_length"][i][j] == entry["acceptance_length"]["pooled"]
        assert sweep["speedup"][i][j] == entry["speedup"]["ratio"]
        if second == "node_layers_saved":
            assert sweep[second][i][j] == entry["pruning"][second]
    fastest = (sweep["fastest"][sweep["row"]], sweep["fastest"][sweep["column"]])
    speeds = [compared[name]["speedup"] for name in cells.values()]
    speeds = [speed for speed in speeds if is_possible(speed)] or speeds
    assert compared[cells[fastest]]["speedup"]["ratio"] == max(speed["ratio"] for speed in speeds)


def assert_printed(out: str, sweep: dict[str, Any], compared: dict[str, Any], second: str) -> None:
    """Check that the output has the grid, row by row, and no cell a second time."""
    lines = [
        " ".join(line.replace("│", " ").replace("┃", " ").split()) for line in out.splitlines()
    ]
    assert f"{sweep['row']} \\ {sweep['column']} {' '.join(map(str, sweep['columns']))}" in lines
    for i, row in enumerate(sweep["rows"]):
        cells = [
            " ".join(
                [f"{sweep['acceptance_length'][i][j]:.2f}"]
                + ([f"{sweep[second][i][j]:.1%}"] if second != "speedup" else [])
                + [format_speedup(compared[f"{sweep['over']}-{row}-{column}"]["speedup"], "x")]
            )
            for j, column in enumerate(sweep["columns"])
        ]
        assert f"{row} {' '.join(cells)}" in lines, out
    number = len(sweep["rows"]) * len(sweep["columns"])
    answers = f"{number * NUM_TURNS} of {number * NUM_TURNS} answers"
    assert f"Identical in all {number} settings: {answers}." in lines
    best = sweep["fastest"]
    named = (
        f"Fastest on these prompts: {sweep['row']}={best[sweep['row']]} "
        f"{sweep['column']}={best[sweep['column']]}, "
    )
    assert any(
        line.startswith(f"{named}{format_speedup(sweep['fastest_speedup'], 'x')}") for line in lines
    )
    assert not any(entry["label"] in out for entry in compared.values())


def test_a_grid_by_hand() -> None:
    """Rows and columns are those of the entries' names, and the fastest is the greatest ratio."""
    lengths = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    ratios = [[0.5, 0.7, 0.6], [0.4, 0.3, 0.2]]
    systems: dict[str, Any] = {
        f"prune-{row}-{column}": SimpleNamespace(
            acceptance_length=SimpleNamespace(pooled=lengths[i][j]),
            speedup=SimpleNamespace(ratio=ratios[i][j]),
            pruning={
                "node_layers_saved": 0.25 if (row, column) == (5, 1) else 0.0,
                "work_saved": 0.125,
            },
        )
        for i, row in enumerate((2, 5))
        for j, column in enumerate((1, 4, 8))
    }
    table = Grid("prune", "prune_layer", "prune_top", (2, 5), (1, 4, 8)).summary(systems)
    assert table == {
        "over": "prune",
        "row": "prune_layer",
        "column": "prune_top",
        "rows": [2, 5],
        "columns": [1, 4, 8],
        "acceptance_length": lengths,
        "speedup": ratios,
        "node_layers_saved": [[0.0, 0.0, 0.0], [0.25, 0.0, 0.0]],
        "work_saved": [[0.125] * 3] * 2,
        "fastest": {"prune_layer": 2, "prune_top": 4},
        "fastest_speedup": {"ratio": 0.7},
    }


def test_settings_are_sorted_and_named_once(tiny: Target) -> None:
    """However exits and depths are listed, every cell is there once, and its drafter leaves at
    its row's exit.
    """
    drafter = EarlyExit(tiny, EXIT)
    sweep = ExitSweep((6, 2, 6), (4, 1, 4))
    candidate = Candidate(tiny, drafter, Chain(2), Greedy(), SETTING)
    systems = sweep.systems(candidate, System("drafter", "", drafter, Chain(2), Greedy()))
    grid = sweep.grid
    assert (grid.rows, grid.columns) == ((2, 6), (1, 4))
    assert [system.name for system in systems] == [
        grid.cell_name(row, column) for row in (2, 6) for column in (1, 4)
    ]
    assert [system.drafter.saved.settings["exit_layer"] for system in systems] == [2, 2, 6, 6]
    assert [system.builder.depth for system in systems] == [
        1,
        4,
        1,
        4,
    ] and drafter.exit_layer == EXIT


@pytest.mark.slow
@pytest.mark.sweep(1, free=("rule",))
@pytest.mark.parametrize("rule", [SpeculativeSampling(), Block(0.8)], ids=lambda rule: rule.name)
def test_drawn_chains_are_swept_too(tiny: Target, tmp_path: Path, rule: AcceptanceRule) -> None:
    """With a rule that weighs p against q and tree.children=sampled, every cell's chain is drawn
    like the drafter's own, so a cell of the same exit and depth has the drafter's own rounds."""
    evaluation = make_evaluation(tmp_path, sweep="exit", exits=(2, EXIT), depths=(2, 3))
    builder = Chain(2, "sampled", temperature=0.9, seed=4)
    summary = evaluation.score(
        Candidate(tiny, EarlyExit(tiny, EXIT), builder, rule, SETTING), tmp_path / "out"
    )
    assert {entry["tree"]["children"] for entry in summary["compared"].values()} == {"sampled"}
    assert rounds_of(tmp_path / "out", f"exit-{EXIT}-2") == rounds_of(tmp_path / "out", "drafter")


@pytest.mark.parametrize("family", [Ngram, Kangaroo, LayerSkipping])
def test_a_fixed_exit_is_not_swept(tiny: Target, tmp_path: Path, family: Any) -> None:
    """A drafter that can't change its exit is refused before anything is decoded."""
    with pytest.raises(
        UserError, match=r"eval\.sweep=exit: this drafter has no exits to choose from"
    ):
        make_evaluation(tmp_path, sweep="exit").score(
            Candidate(tiny, family(tiny), Chain(2), Greedy(), SETTING), tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("sweep", ["exit", "prune"])
@pytest.mark.parametrize("exits", [(8,), (1, 9)])
def test_exits_that_are_none_are_refused(
    tiny: Target, tmp_path: Path, sweep: Any, exits: tuple[int, ...]
) -> None:
    """The last layer and later ones are no exits, and pruning needs a layer that drafting has not
    run; the message names the first."""
    evaluation = make_evaluation(tmp_path, sweep=sweep, exits=exits)
    with pytest.raises(
        UserError,
        match=(
            rf"eval\.exits=\[.* {exits[-1] if sweep == 'exit' else exits[0]} is no exit here; "
            rf"tiny has those from"
        ),
    ):
        evaluation.score(
            Candidate(tiny, EarlyExit(tiny, EXIT), Chain(2), Greedy(), SETTING), tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("num_layers", [2, 3, 7, 8, 9, 12, 16, 28, 33, 80])
def test_default_exits(num_layers: int) -> None:
    """Up to seven exits from 1 to L - 1, both among them, whose gaps differ by at most one
    layer.
    """
    target: Any = SimpleNamespace(name="model", num_layers=num_layers)
    capabilities = SimpleNamespace(cost=lambda drafter: DraftingCost(None))
    drafter: Any = SimpleNamespace(capabilities=capabilities)
    sweep = PruneSweep(None, (4,), 0)
    candidate = Candidate(target, drafter, Chain(2), Greedy(), SETTING)
    sweep.systems(candidate, System("drafter", "", drafter, Chain(2), Greedy()))
    grid = sweep.grid
    assert (
        grid.rows[0] == 1
        and grid.rows[-1] == num_layers - 1
        and len(grid.rows) == min(7, num_layers - 1)
    )
    gaps = [after - before for before, after in zip(grid.rows, grid.rows[1:])]
    assert not gaps or (min(gaps) >= 1 and max(gaps) - min(gaps) <= 1)


# Pruning


def node_layers(session: Session, prompt: list[int], row: int) -> tuple[Generation, int]:
    """A generation, and how often a node was run through a layer after the prefill, counted in
    the layers themselves.
    """
    counted = [0]
    target = session.target

    def count_rows(module: Any, inputs: Any, output: Any) -> None:
        counted[0] += inputs[0].shape[0] * inputs[0].shape[1]

    hooks = [layer.mlp.register_forward_hook(count_rows) for layer in target.layers]  # type: ignore[union-attr, operator]
    try:
        (generation,) = session.decode([prompt], LIMIT, [row])
    finally:
        for hook in hooks:
            hook.remove()
    return generation, counted[0] - target.num_layers * len(prompt)


def count_alone(
    target: Target,
    folder: Path,
    rule: AcceptanceRule,
    drafter: Drafter,
    builder: TreeBuilder,
    pruning: Pruning,
) -> tuple[list[Generation], float]:
    """Return `decode_alone`, and the share of node-layers that the layers themselves did not run,
    of all proposed nodes through all layers. The drafter must draft in none of the target's layers,
    or propose all that it drafts."""
    session = Session(target, rule, drafter, builder, changes=(pruning,))
    runs = [node_layers(session, prompt, row) for prompt, row in read_turns(folder)]
    every = target.num_layers * sum(
        sum(generation.node_counts) + sum(generation.pruned_counts) for generation, _ in runs
    )
    return [generation for generation, _ in runs], 1 - sum(counted for _, counted in runs) / every


@pytest.mark.slow
@RULES
def test_every_cell_of_prunings_is_decoded(
    shallow: Target, tmp_path: Path, rule: AcceptanceRule, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every (layer, top) cell has the rounds of a direct `decode` with that pruning, says how many
    nodes and node-layers that left out, by a count of what the layers ran, and has the target's own
    output."""
    layers = (1, 2)
    tops = (2, 300)
    drafter = make_eagle3(shallow)
    builder = Eagle2(3, 8, 3)
    folder = tmp_path / "out"
    evaluation = make_evaluation(tmp_path, sweep="prune", exits=layers, tops=tops)
    summary = evaluation.score(Candidate(shallow, drafter, builder, rule, SETTING), folder)
    cells = {(layer, top): f"prune-{layer}-{top}" for layer in layers for top in tops}
    assert summary["compared"].keys() == set(cells.values()) and "pruning" not in summary
    for (layer, top), name in cells.items():
        entry = summary["compared"][name]
        pruning = Pruning(layer, top)
        generations, saved = count_alone(shallow, folder, rule, drafter, builder, pruning)
        verified = sum(sum(generation.node_counts) for generation in generations)
        pruned = sum(sum(generation.pruned_counts) for generation in generations)
        assert rounds_of(folder, name) == list_rounds(generations) and pruned > 0
        assert entry["lossless"]["identical"] == entry["lossless"]["checked"] == NUM_TURNS
        assert entry["pruning"].keys() == {
            "layer",
            "top_k",
            "rank",
            "nodes_pruned",
            "node_layers_saved",
            "work_saved",
        }
        assert (entry["pruning"]["layer"], entry["pruning"]["top_k"]) == (layer, top)
        assert entry["pruning"]["nodes_pruned"] == pytest.approx(
            pruned / (pruned + verified), abs=1e-4
        )
        assert entry["pruning"]["node_layers_saved"] == pytest.approx(saved, abs=1e-4)
        size = sum(p.numel() for p in shallow.layers[0].parameters())
        head = shallow.head.output.weight.numel()
        judged = sum(sum(generation.judged_counts) for generation in generations)
        work = pruned * ((3 - layer) * size + head) - judged * head
        assert entry["pruning"]["work_saved"] == pytest.approx(
            work / ((pruned + verified) * (3 * size + head)), abs=1e-4
        )
    same_as_entries(summary["sweep"], summary["compared"], cells, "node_layers_saved")
    assert_printed(
        capsys.readouterr().out, summary["sweep"], summary["compared"], "node_layers_saved"
    )


@pytest.mark.sweep(1, free=("layer", "exit_layer"))
@pytest.mark.parametrize("layer, exit_layer", [(5, 1), (1, 1), (3, 3), (4, 3)])
def test_what_is_saved_where_the_target_drafts(
    tiny: Target, tmp_path: Path, layer: int, exit_layer: int
) -> None:
    """With an early exit, of which every drafted node is proposed, node_layers_saved is what the
    layers did not run; before the exit there is nothing to save, and pruning there is refused."""
    with pytest.raises(UserError, match=f"eval.prune_layer=1.*{exit_layer + 1} or more"):
        early = make_evaluation(tmp_path, prune_layer=1)
        early.score(
            Candidate(tiny, EarlyExit(tiny, exit_layer + 1), Chain(2), Greedy(), SETTING),
            tmp_path / "early",
        )
    drafter = EarlyExit(tiny, exit_layer)
    builder = Static(1, 4, [[0], [1], [2]])
    folder = tmp_path / "out"
    evaluation = make_evaluation(tmp_path, prune_layer=layer, prune_top=2)
    summary = evaluation.score(Candidate(tiny, drafter, builder, Greedy(), SETTING), folder)
    assert summary["lossless"]["identical"] == NUM_TURNS and summary["pruning"]["nodes_pruned"] > 0
    _, saved = count_alone(tiny, folder, Greedy(), drafter, builder, Pruning(layer, 2))
    assert summary["pruning"]["node_layers_saved"] == pytest.approx(saved, abs=1e-4)


@RULES
@pytest.mark.slow
def test_pruned_and_unpruned_rounds(
    tiny: Target, tmp_path: Path, rule: AcceptanceRule, capsys: pytest.CaptureFixture[str]
) -> None:
    """eval.prune_layer adds the unpruned rounds to the pruned ones: those of a score without it.
    From the same text, in an answer's first round, pruning never accepts more tokens."""
    drafter = EarlyExit(tiny, 6)
    builder = Eagle2(3, 8, 3)
    plain = make_evaluation(tmp_path).score(
        Candidate(tiny, drafter, builder, rule, SETTING), tmp_path / "plain"
    )
    capsys.readouterr()
    folder = tmp_path / "pruned"
    with command_output("notes"):
        summary = make_evaluation(tmp_path, prune_layer=7, prune_top=1).score(
            Candidate(tiny, drafter, builder, rule, SETTING), folder
        )
    assert plain["compared"] == {} and summary["compared"].keys() == {"unpruned"}
    assert "pruning" not in plain and "pruning" not in summary["compared"]["unpruned"]
    assert (summary["pruning"]["layer"], summary["pruning"]["top_k"]) == (7, 1)
    assert rounds_of(folder, "unpruned") == rounds_of(tmp_path / "plain", "drafter")
    assert rounds_of(folder, "drafter") == list_rounds(
        decode_alone(tiny, folder, rule, drafter, builder, Pruning(7, 1))
    )
    assert summary["compared"]["unpruned"]["acceptance_length"] == plain["acceptance_length"]
    for entry in (summary, summary["compared"]["unpruned"]):
        assert entry["lossless"]["identical"] == entry["lossless"]["checked"] == NUM_TURNS
    first = [
        [record for record in rounds_of(folder, name) if record[0] == 0]
        for name in ("drafter", "unpruned")
    ]
    assert len(first[0]) == NUM_TURNS
    assert all(
        pruned[1] <= unpruned[1] and pruned[3] <= unpruned[3]
        for pruned, unpruned in zip(*first, strict=True)
    )
    assert sum(pruned[3] for pruned in first[0]) < sum(unpruned[3] for unpruned in first[1])
    assert "Pruned after 7 layers by their top 1" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_the_full_vocabulary_prunes_nothing(tiny: Target, tmp_path: Path) -> None:
    """Where every token counts as likely, the pruned rounds are the unpruned ones and nothing is
    saved.
    """
    evaluation = make_evaluation(tmp_path, prune_layer=1, prune_top=10 * tiny.head.vocab_size)
    summary = evaluation.score(
        Candidate(tiny, make_eagle3(tiny), Eagle2(3, 8, 3), Greedy(), SETTING), tmp_path / "out"
    )
    assert summary["pruning"]["nodes_pruned"] == summary["pruning"]["node_layers_saved"] == 0
    assert rounds_of(tmp_path / "out", "drafter") == rounds_of(tmp_path / "out", "unpruned")


def test_the_head_is_fitted_before_decoding(shallow: Target, tmp_path: Path) -> None:
    """With a rank, the head that prunes is read off fewer numbers and counted so; the output is
    the target's.
    """
    evaluation = make_evaluation(tmp_path, prune_layer=2, prune_top=4, prune_rank=64)
    candidate = Candidate(
        shallow, make_eagle3(shallow), Static(1, 4, [[0], [1], [2]]), Greedy(), SETTING
    )
    summary = evaluation.score(candidate, tmp_path / "out")
    assert summary["pruning"]["rank"] == 64 and summary["lossless"]["identical"] == NUM_TURNS


@pytest.mark.parametrize("options", [{"sweep": "prune"}, {"prune_layer": 2}], ids=["sweep", "one"])
@pytest.mark.parametrize(
    "rule", [SpeculativeSampling(), Block(), RecursiveRejection()], ids=lambda rule: rule.name
)
def test_rules_that_pruning_would_bias_are_refused(
    tiny: Target, tmp_path: Path, rule: AcceptanceRule, options: dict[str, Any]
) -> None:
    """Rules that weigh p against q are refused with the rules to use, and nothing is written."""
    with pytest.raises(
        UserError,
        match=rf"acceptance={rule.name}: it is not valid for pruned trees; use .*greedy or match",
    ):
        make_evaluation(tmp_path, **options).score(
            Candidate(tiny, EarlyExit(tiny, 2), Chain(2, "sampled"), rule, SETTING),
            tmp_path / "out",
        )
    assert not (tmp_path / "out").exists()


def test_pruning_after_the_last_layer_is_refused(tiny: Target, tmp_path: Path) -> None:
    """A layer to prune after that leaves no layer to save is refused."""
    with pytest.raises(UserError, match=r"eval\.prune_layer=8: tiny has 8 layers; use fewer"):
        make_evaluation(tmp_path, prune_layer=8).score(
            Candidate(tiny, make_eagle3(tiny), Chain(2), Greedy(), SETTING), tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "children, rule", [("deterministic", Greedy()), ("sampled", SpeculativeSampling())]
)
def test_lengths_are_compared_with_what_decides_them(children: Any, rule: AcceptanceRule) -> None:
    """Chains of every length up to the candidate's depth, and those that decide it, drawn as the
    candidate's is.
    """
    candidate: Any = SimpleNamespace(
        builder=Chain(3, children, 0.7, seed=4), rule=rule, drafter=None
    )
    systems = LengthSweep().systems(candidate, None)  # type: ignore[arg-type]
    names = [f"length-chain-{depth}" for depth in (1, 2, 3)] + [
        "length-thompson-3",
        "length-policy-3",
    ]
    assert [system.name for system in systems] == names and len(
        {system.label for system in systems}
    ) == len(systems)
    assert {
        (system.builder.children, system.builder.temperature, system.builder.seed)
        for system in systems
    } == {(children, 0.7, 4)}
    with pytest.raises(UserError, match="weighs p against the q"):
        LengthSweep().systems(
            SimpleNamespace(builder=Chain(3), rule=SpeculativeSampling(), drafter=None), None
        )  # type: ignore
