"""OpenVINO GenAI serves what we export: the text that it gives without a drafter, and our own rounds, in chains and in trees.

Our loop decodes every prompt in float32 with the drafter as it is loaded, not packed to 8 bits, one prompt at a time; the
server computes in float32 and decodes four prompts together. Prompts are token ids. All complete rounds of an answer are
compared; only the last one may be cut, by the limit or by an end token.

`make openvino` installs the engine. The drafters are the shipped one and those of runs/engines-tiny-dflash and -tiny-gkd, or of
the folder that SPECTRAIN_ENGINES_RUNS names; a missing run skips its case.
"""

import asyncio
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from spectrain.cli.export import export_command
from spectrain.data.chat import tokenize_prompt
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import decode
from spectrain.eval.prompts import read_prompts
from spectrain.export.converter import read_drafter
from spectrain.export.layouts import detect_layout, read_files
from spectrain.export.linter import check_files
from spectrain.export.measure import load_drafter
from spectrain.export.openvino import LAYERS_KEY, write_fused_layers
from spectrain.export.targets import TargetFiles
from spectrain.files import write_text
from spectrain.models.loading import load_smollm2, load_tiny
from spectrain.models.target import Target
from spectrain.provenance import collect_provenance
from spectrain.servers.base import Completion, CompletionRequest
from spectrain.servers.commands import DrafterLaunch, EngineLaunch
from spectrain.servers.launch import start_engine
from spectrain.servers.openvino import OpenVinoServer
from spectrain.servers.openvino_command import OpenVinoSettings
from spectrain.servers.openvino_ir import IR_NAME, PYTHON, read_openvino_environment
from spectrain.trees import Chain, Eagle2
from spectrain.trees.base import TreeBuilder
from tests.servers.engines import free_port

ENGINE_PYTHON = os.environ.get("SPECTRAIN_OPENVINO_PYTHON", PYTHON)
pytestmark = pytest.mark.skipif(not Path(ENGINE_PYTHON).exists(), reason="make openvino installs OpenVINO")

RUNS = Path(os.environ.get("SPECTRAIN_ENGINES_RUNS", "runs"))
PROMPTS, TOKENS, ROWS = 24, 64, 4
LOADERS = {"smollm2": load_smollm2, "tiny": load_tiny}
RUN_FOLDERS = {
    "EAGLE-3": ("smollm2", "smollm2-eagle3"),
    "DFlash": ("tiny", str(RUNS / "engines-tiny-dflash")),
    "GKD draft": ("tiny", str(RUNS / "engines-tiny-gkd")),
}
# Drafter, the settings of OpenVINO's tree, and our tree; a chain has as many tokens as the launch says.
CASES: dict[str, tuple[str, dict[str, Any], Callable[[int], TreeBuilder]]] = {
    "EAGLE-3, a chain": ("EAGLE-3", {}, Chain),
    "EAGLE-3, a tree of 15": (
        "EAGLE-3", {"draft_tokens": 15, "tree_depth": 3, "branching_factor": 4}, lambda count: Eagle2(3, 16, 4)),
    "EAGLE-3, a tree of 4": (
        "EAGLE-3", {"draft_tokens": 4, "tree_depth": 2, "branching_factor": 2}, lambda count: Eagle2(2, 5, 2)),
    "DFlash, a chain": ("DFlash", {}, Chain),
    "GKD draft, a chain": ("GKD draft", {}, Chain),
}  # fmt: skip
Rounds = list[list[int]]


@dataclass(frozen=True)
class Prompts:
    """A target, prompts, and OpenVINO's answers without a drafter."""

    target: Target
    files: TargetFiles
    prompts: list[list[int]]
    plain: list[Completion]

    def decode(self, folder: Path, builder: TreeBuilder) -> list[Generation]:
        """Decode with the exported drafter, read back."""
        module = load_drafter(read_drafter(folder, self.files), self.target)
        return [decode(self.target, [prompt], Greedy(), TOKENS, module, builder)[0] for prompt in self.prompts]

    def serve(self, drafter: DrafterLaunch | None, **settings: Any) -> list[Completion]:
        """Return the answers of a server that is started for this."""
        return answer(self.files, self.prompts, drafter, **settings)


def answer(files: TargetFiles, prompts: list[list[int]], drafter: DrafterLaunch | None, **settings: Any) -> list[Completion]:
    config = OpenVinoSettings(python=ENGINE_PYTHON, port=free_port(), dtype="float32", threads=1, concurrency=ROWS, **settings)

    async def request(server: Any) -> list[Completion]:
        gate = asyncio.Semaphore(ROWS)

        async def complete(prompt: list[int]) -> Completion:
            async with gate:
                completion: Completion = await server.complete(CompletionRequest(prompt, TOKENS))
                return completion

        async with server:
            server.check_ready()
            return await asyncio.gather(*map(complete, prompts))

    with start_engine(OpenVinoServer(config), EngineLaunch(files.engine_path, "target", drafter=drafter)) as engine:
        return asyncio.run(request(engine.server))


def complete_rounds(completions: Sequence[Completion], generations: Sequence[Generation]) -> Rounds:
    """Return the tokens of the rounds of each answer, as many as our decoding has complete ones."""
    counted = [completion.rounds for completion in completions]
    assert all(rounds is not None for rounds in counted)
    return [
        [accepted + 1 for accepted in rounds.accepted[: len(generation.complete_round_lengths)]]
        for rounds, generation in zip(counted, generations)
        if rounds is not None
    ]


def accepted_by_position(rounds: Rounds) -> list[int]:
    lengths = [length for each in rounds for length in each]
    return [sum(length > position for length in lengths) for position in range(1, max(lengths))]


@pytest.fixture(scope="module")
def load_prompts() -> Callable[[str], Prompts]:
    @cache
    def load(name: str) -> Prompts:
        target, files = LOADERS[name](dtype="float32"), TargetFiles(name)
        target.pack_weights()
        prompts = [tokenize_prompt(target.template, row.opening_conversation) for row in read_prompts(None, PROMPTS).prompts]
        return Prompts(target, files, prompts, answer(files, prompts, None))

    return load


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Export a drafter by its name in RUN_FOLDERS."""

    @cache
    def write(name: str) -> Path:
        run = RUN_FOLDERS[name][1]
        if run.startswith(str(RUNS)) and not Path(run).exists():
            pytest.skip(f"{run}: there is no such run")
        return export_command(run, "openvino", str(tmp_path_factory.mktemp("ir") / "out"), engine_python=ENGINE_PYTHON)

    return write


@pytest.fixture(scope="module")
def record() -> Iterator[dict[str, Any]]:
    """What was measured, written in the end to openvino.json in the folder of the runs."""
    cases: dict[str, Any] = {}
    yield cases
    versions = dict(read_openvino_environment(ENGINE_PYTHON, "SPECTRAIN_OPENVINO_PYTHON").versions)
    setting = {"prompts": PROMPTS, "max_new_tokens": TOKENS, "dtype": "float32", "rule": "greedy", "engine_batch_size": ROWS}
    RUNS.mkdir(exist_ok=True)
    setting |= {"engines": versions, **collect_provenance(), "command": "make test-engines"}
    write_text(RUNS / "openvino.json", json.dumps({"setting": setting, "cases": cases}, indent=1) + "\n")


def launch_of(folder: Path, prompts: Prompts) -> DrafterLaunch:
    layout, checkpoint = detect_layout(read_files(folder)), read_drafter(folder, prompts.files)
    return layout.drafter_launches(checkpoint, prompts.files, str(folder))["openvino"]


@pytest.mark.parametrize("case", CASES)
def test_openvino_has_our_rounds(
    case: str, load_prompts: Callable[[str], Prompts], export: Callable[[str], Path], record: dict[str, Any]
) -> None:
    """Every complete round of every prompt has as many tokens as ours, and the text is the one without a drafter."""
    name, settings, make_builder = CASES[case]
    folder, prompts = export(name), load_prompts(RUN_FOLDERS[name][0])
    launch = launch_of(folder, prompts)
    served = prompts.serve(launch, **settings)
    own = prompts.decode(folder, make_builder(launch.num_tokens))
    rounds, own_rounds = complete_rounds(served, own), [generation.complete_round_lengths for generation in own]
    record[case] = {
        "rounds": sum(map(len, own_rounds)),
        "accepted_by_position": accepted_by_position(rounds),
        "own_accepted_by_position": accepted_by_position(own_rounds),
        "prompts_with_equal_rounds": sum(one == two for one, two in zip(rounds, own_rounds)),
        "outputs_equal_to_plain": sum(one.token_ids == two.token_ids for one, two in zip(served, prompts.plain)),
        "outputs_equal_to_ours": sum(one.token_ids == two.output for one, two in zip(served, own)),
    }
    assert [completion.token_ids for completion in served] == [completion.token_ids for completion in prompts.plain]
    assert [completion.token_ids for completion in served] == [generation.output for generation in own]
    assert rounds == own_rounds


def test_the_layer_trap_is_found_and_cured(
    load_prompts: Callable[[str], Prompts], export: Callable[[str], Path], tmp_path: Path, record: dict[str, Any]
) -> None:
    """Without the list of layers OpenVINO reads one layer later: the linter says so, and the rounds show it."""
    folder, prompts = export("EAGLE-3"), load_prompts("smollm2")
    trapped = tmp_path / "trapped"
    trapped.mkdir()
    for path in folder.iterdir():
        (trapped / path.name).symlink_to(path)
    text = (folder / f"{IR_NAME}.xml").read_text()
    (trapped / f"{IR_NAME}.xml").unlink()
    (trapped / f"{IR_NAME}.xml").write_text(re.sub(rf"<{LAYERS_KEY} [^>]*/>", "", text))
    files = read_files(trapped)
    findings = [finding.name for finding in check_files(files, detect_layout(files), prompts.files)]
    assert "openvino-layers" in findings
    own = prompts.decode(folder, Chain(3))
    own_rounds = [generation.complete_round_lengths for generation in own]
    served = prompts.serve(launch_of(trapped, prompts))
    rounds = [[accepted + 1 for accepted in completion.rounds.accepted] for completion in served if completion.rounds]
    num_equal = sum(one[: len(two)] == two for one, two in zip(rounds, own_rounds))
    assert [completion.token_ids for completion in served] == [generation.output for generation in own]
    assert num_equal <= PROMPTS // 4 and sum(map(len, rounds)) > sum(map(len, own_rounds))
    record["EAGLE-3, a chain, OpenVINO's own layers"] = {
        "rounds": sum(map(len, rounds)),
        "accepted_by_position": accepted_by_position(rounds),
        "prompts_with_equal_rounds": num_equal,
    }
    # Its own layers are ours plus one: naming ours cures it.
    write_fused_layers(trapped, read_drafter(folder, prompts.files).drafter["layers"])
    cured = complete_rounds(prompts.serve(launch_of(trapped, prompts)), own)
    assert cured == own_rounds
