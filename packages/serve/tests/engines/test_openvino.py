"""OpenVINO GenAI serves what we export: the text that it gives without a drafter, and our own
rounds, in chains and in trees.

Our loop decodes every prompt in float32 with the drafter as it is loaded, not packed to 8 bits, one
prompt at a time; the server computes in float32 and decodes four prompts together. Prompts are
token ids. All complete rounds of an answer are compared; only the last one may be cut, by the limit
or by an end token.

`make openvino` installs the engine. The drafters are the shipped one and those of
runs/engines-tiny-dflash and -tiny-gkd, or of the folder that SPECTRAIN_ENGINES_RUNS names; `make
test-engines` trains them.
"""

import asyncio
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from packages.serve.tests.export.gguf_files import interleave
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
from spectrain.export.targets import TargetFiles
from spectrain.files import write_text
from spectrain.models.loading import load_smollm2, load_tiny
from spectrain.models.target import Target
from spectrain.provenance import collect_provenance
from spectrain.servers.commands import DrafterLaunch, EngineLaunch
from spectrain.servers.ports import find_free_port
from spectrain.trees import Chain, Eagle2
from spectrain.trees.base import TreeBuilder
from spectrain_serve.engines.launch import start_engine
from spectrain_serve.engines.openvino_command import OpenVinoSettings
from spectrain_serve.engines.openvino_ir import (
    IR_NAME,
    PYTHON,
    IrConverter,
    read_openvino_environment,
)
from spectrain_serve.engines.openvino_server import OpenVinoServer
from spectrain_serve.layouts.openvino import (
    HEAD_OPTIONS,
    LAYERS_KEY,
    add_ir,
    read_fused_layers,
    write_fused_layers,
)
from spectrain_serve.servers.base import Completion, CompletionRequest

from .faults import check_cause

ENGINE_PYTHON = os.environ.get("SPECTRAIN_OPENVINO_PYTHON", PYTHON)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path(ENGINE_PYTHON).exists(), reason="make openvino installs OpenVINO"),
]

RUNS = Path(os.environ.get("SPECTRAIN_ENGINES_RUNS", "runs"))
PROMPTS = 24
TOKENS = 64
ROWS = 4
LOADERS = {"smollm2": load_smollm2, "tiny": load_tiny}
RUN_FOLDERS = {
    "EAGLE-3": ("smollm2", "smollm2-eagle3"),
    "DFlash": ("tiny", str(RUNS / "engines-tiny-dflash")),
    "GKD draft": ("tiny", str(RUNS / "engines-tiny-gkd")),
}
# Drafter, the settings of OpenVINO's tree, and our tree; a chain has as many tokens as the launch
# says.
CASES: dict[str, tuple[str, dict[str, Any], Callable[[int], TreeBuilder]]] = {
    "EAGLE-3, a chain": ("EAGLE-3", {}, Chain),
    "EAGLE-3, a tree of 15": (
        "EAGLE-3",
        {"draft_tokens": 15, "tree_depth": 3, "branching_factor": 4},
        lambda count: Eagle2(3, 16, 4),
    ),
    "EAGLE-3, a tree of 4": (
        "EAGLE-3",
        {"draft_tokens": 4, "tree_depth": 2, "branching_factor": 2},
        lambda count: Eagle2(2, 5, 2),
    ),
    "DFlash, a chain": ("DFlash", {}, Chain),
    "GKD draft, a chain": ("GKD draft", {}, Chain),
}
Rounds = list[list[int]]


def remove_layers(folder: Path) -> None:
    """Remove the list of fused layers from an IR, so that OpenVINO takes its own."""
    path = folder / f"{IR_NAME}.xml"
    path.write_text(re.sub(rf"<{LAYERS_KEY} [^>]*/>\s*", "", path.read_text()))


def change_layers(folder: Path, shift: int) -> None:
    layers = read_fused_layers(folder)
    assert layers is not None
    remove_layers(folder)
    write_fused_layers(folder, [layer + shift for layer in layers])


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the drafter's tensors and convert them again."""
    path = folder / "model.safetensors"
    layers = read_fused_layers(folder)
    tensors = load_file(path)
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        path,
        metadata={"format": "pt"},
    )
    add_ir(IrConverter(ENGINE_PYTHON), folder, layers, HEAD_OPTIONS)


def permute_heads(tensors: dict[str, torch.Tensor]) -> None:
    """Put the rows of queries and keys in llama.cpp's order."""
    for name in tensors:
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensors[name] = interleave(tensors[name], 64)


def subtract_draft_ids(tensors: dict[str, torch.Tensor]) -> None:
    """Change the map so that OpenVINO reads what would be the right offsets as ids."""
    tensors["d2t"] -= torch.arange(len(tensors["d2t"]))


# Fault -> the cause that `spectrain eval` must name, and the change of the exported folder.
FAULTS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "OpenVINO's own layers": ("layer-ids-off-by-one", remove_layers),
    "layers one lower": ("layer-ids-off-by-one", partial(change_layers, shift=-1)),
    "queries and keys in llama.cpp's order": (
        "heads-permuted",
        partial(change_tensors, change=permute_heads),
    ),
    "offsets read as ids": ("d2t-as-ids", partial(change_tensors, change=subtract_draft_ids)),
}


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
        return [
            decode(self.target, [prompt], Greedy(), TOKENS, module, builder)[0]
            for prompt in self.prompts
        ]

    def serve(self, drafter: DrafterLaunch | None, **settings: Any) -> list[Completion]:
        """Return the answers of a server that is started for this."""
        return answer_prompts(self.files, self.prompts, drafter, **settings)


def answer_prompts(
    files: TargetFiles, prompts: list[list[int]], drafter: DrafterLaunch | None, **settings: Any
) -> list[Completion]:
    config = OpenVinoSettings(
        python=ENGINE_PYTHON,
        port=find_free_port(),
        dtype="float32",
        threads=1,
        concurrency=ROWS,
        **settings,
    )

    async def request(server: Any) -> list[Completion]:
        gate = asyncio.Semaphore(ROWS)

        async def complete(prompt: list[int]) -> Completion:
            async with gate:
                completion: Completion = await server.complete(CompletionRequest(prompt, TOKENS))
                return completion

        async with server:
            server.check_ready()
            return await asyncio.gather(*map(complete, prompts))

    with start_engine(
        OpenVinoServer(config), EngineLaunch(files.engine_path, "target", drafter=drafter)
    ) as engine:
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
        target = LOADERS[name](dtype="float32")
        files = TargetFiles(name)
        target.pack_weights()
        prompts = [
            tokenize_prompt(target.template, row.opening_conversation)
            for row in read_prompts(None, PROMPTS).prompts
        ]
        return Prompts(target, files, prompts, answer_prompts(files, prompts, None))

    return load


@pytest.fixture(scope="module")
def export_drafter(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Export a drafter by its name in RUN_FOLDERS."""

    @cache
    def write(name: str) -> Path:
        run = RUN_FOLDERS[name][1]
        if run != "smollm2-eagle3" and not Path(run).exists():
            pytest.skip(f"{run}: there is no such run")
        return export_command(
            run, "openvino", str(tmp_path_factory.mktemp("ir") / "out"), engine_python=ENGINE_PYTHON
        )

    return write


@pytest.fixture(scope="module")
def records() -> Iterator[dict[str, Any]]:
    """Collect what is measured, and write it in the end to openvino.json in the folder of the
    runs.
    """
    cases: dict[str, Any] = {}
    yield cases
    versions = dict(read_openvino_environment(ENGINE_PYTHON, "SPECTRAIN_OPENVINO_PYTHON").versions)
    setting = {
        "prompts": PROMPTS,
        "max_new_tokens": TOKENS,
        "dtype": "float32",
        "rule": "greedy",
        "engine_batch_size": ROWS,
    }
    RUNS.mkdir(exist_ok=True)
    setting |= {"engines": versions, **collect_provenance(), "command": "make test-engines"}
    write_text(
        RUNS / "openvino.json", json.dumps({"setting": setting, "cases": cases}, indent=1) + "\n"
    )


def read_launch(folder: Path, files: TargetFiles) -> DrafterLaunch:
    layout = detect_layout(read_files(folder))
    checkpoint = read_drafter(folder, files)
    return layout.drafter_launches(checkpoint, files, str(folder))["openvino"]


@pytest.mark.parametrize("case", CASES)
def test_openvino_has_our_rounds(
    case: str,
    load_prompts: Callable[[str], Prompts],
    export_drafter: Callable[[str], Path],
    records: dict[str, Any],
) -> None:
    """Every complete round of every prompt has as many tokens as ours, and the text is the one
    without a drafter.
    """
    name, settings, make_builder = CASES[case]
    folder = export_drafter(name)
    prompts = load_prompts(RUN_FOLDERS[name][0])
    launch = read_launch(folder, prompts.files)
    served = prompts.serve(launch, **settings)
    own = prompts.decode(folder, make_builder(launch.num_tokens))
    rounds = complete_rounds(served, own)
    own_rounds = [generation.complete_round_lengths for generation in own]
    records[case] = {
        "rounds": sum(map(len, own_rounds)),
        "accepted_by_position": accepted_by_position(rounds),
        "own_accepted_by_position": accepted_by_position(own_rounds),
        "prompts_with_equal_rounds": sum(left == right for left, right in zip(rounds, own_rounds)),
        "outputs_equal_to_plain": sum(
            completion.token_ids == plain.token_ids
            for completion, plain in zip(served, prompts.plain)
        ),
        "outputs_equal_to_ours": sum(
            completion.token_ids == generation.output for completion, generation in zip(served, own)
        ),
    }
    assert [completion.token_ids for completion in served] == [
        completion.token_ids for completion in prompts.plain
    ]
    assert [completion.token_ids for completion in served] == [
        generation.output for generation in own
    ]
    assert rounds == own_rounds


@pytest.mark.parametrize("fault", FAULTS)
def test_seeded_faults_are_named(
    fault: str,
    export_drafter: Callable[[str], Path],
    records: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`spectrain eval` compares the rounds of a running server with our chain's, and names the
    fault of its drafter.
    """
    name, change = FAULTS[fault]
    folder = tmp_path / "faulty"
    files = TargetFiles("smollm2")
    shutil.copytree(export_drafter("EAGLE-3"), folder)
    launch = EngineLaunch(files.engine_path, "target", drafter=read_launch(folder, files))
    change(folder)
    server = OpenVinoServer(
        OpenVinoSettings(python=ENGINE_PYTHON, port=find_free_port(), dtype="float32", threads=1)
    )
    with start_engine(server, launch) as engine:
        # The score of a shipped drafter is written below the current folder.
        monkeypatch.chdir(tmp_path)
        records[f"EAGLE-3, a chain, {fault}"] = check_cause("openvino", engine.url, fault, name)


def test_the_layer_trap_is_reported_and_cured(
    export_drafter: Callable[[str], Path], tmp_path: Path
) -> None:
    """The linter reports an IR that leaves the choice of layers to OpenVINO; naming ours
    restores the exported file.
    """
    folder = export_drafter("EAGLE-3")
    files = TargetFiles("smollm2")
    trapped = tmp_path / "trapped"
    shutil.copytree(folder, trapped)
    remove_layers(trapped)
    findings = check_files(read_files(trapped), detect_layout(read_files(trapped)), files)
    assert "openvino-layers" in [finding.name for finding in findings]
    layers = read_drafter(folder, files).drafter["layers"]
    write_fused_layers(trapped, layers)
    assert read_fused_layers(trapped) == read_fused_layers(folder) == layers
