"""Copying drafters for vLLM: the exported package drafts what our decoding drafts, without this
project."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spectrain.cli.export import export_weightless, run_export
from spectrain.config.build import GroupSpec
from spectrain.data.chat import tokenize_prompt
from spectrain.data.datastore import hash_vocabulary, write_store
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.errors import UserError
from spectrain.eval.prompts import read_prompts
from spectrain.models.target import Target
from spectrain.trees import Chain
from spectrain_serve.copying.engine_drafter import CopyingDrafter

DEPTH = 5
MAX_LENGTH = 1024
CASES = {
    "ngram": GroupSpec("drafter", "ngram"),
    "ngram, long": GroupSpec("drafter", "ngram", {"longest": 5, "shortest": 2, "matches": 3}),
    "retrieval": GroupSpec("drafter", "retrieval", {"longest": 4}),
}


def vllm_config(depth: int = DEPTH) -> Any:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=depth),
        model_config=SimpleNamespace(max_model_len=MAX_LENGTH),
    )


@pytest.fixture(scope="module")
def prompts(tiny: Target) -> list[list[int]]:
    return [
        tokenize_prompt(tiny.template, prompt.opening_conversation)
        for prompt in read_prompts(None, 3).prompts
    ]


@pytest.fixture(scope="module")
def store(tiny: Target, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two of the answers, and of one that differs after its half."""
    answers = [generation.output for generation in decode(tiny, prompts, Greedy(), 24)]
    texts = [*answers[:2], answers[0][:12] + answers[1][:12]]
    folder = tmp_path_factory.mktemp("stores") / "store"
    write_store(folder, texts, ["q"], ["a"], {"tokenizer": hash_vocabulary(tiny.tokenizer)})
    return folder


def make_rows(texts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths and the matrix of tokens as vLLM gives them."""
    token_ids = np.zeros((len(texts), MAX_LENGTH), dtype=np.int32)
    for row, text in enumerate(texts):
        token_ids[row, : len(text)] = text
    return np.asarray([len(text) for text in texts]), token_ids


@pytest.mark.parametrize("case", [*CASES, "retrieval with a store"])
def test_the_package_drafts_as_our_decoding(
    case: str, tiny: Target, prompts: list[list[int]], store: Path, tmp_path: Path
) -> None:
    """Shown the tokens of every round, it proposes as many as our chain drafted, and the target
    accepts as many of them, round by round."""
    spec = CASES.get(case) or GroupSpec("drafter", "retrieval", {"store": str(store)})
    out = export_weightless(spec, "vllm", str(tmp_path / "out"), GroupSpec("target", "tiny"))
    drafter = CopyingDrafter(vllm_config(), out / "spectrain_copying")
    own = spec.build(target=tiny)
    accepted = 0
    for prompt in prompts:
        generation = decode(tiny, [prompt], Greedy(), 40, own, Chain(DEPTH))[0]
        answer = generation.output
        end = 1
        for length, depth in zip(generation.complete_round_lengths, generation.depths):
            text = prompt + answer[:end]
            draft = drafter.propose([[text[-1]]], *make_rows([text]), slot_mappings=None)[0]
            following = answer[end : end + length - 1]
            assert len(draft) == depth and draft[: length - 1] == following
            assert length - 1 == depth or draft[length - 1] != answer[end + length - 1]
            end += length
            accepted += length - 1
    assert accepted > 10


def test_rows_move_and_prompts_come_in_parts(prompts: list[list[int]], tmp_path: Path) -> None:
    """A text is recognized wherever it stands in the batch, nothing is drafted before its first
    token, and the order of the rows changes no draft."""
    texts = [prompt + prompt[:9] for prompt in prompts[:2]]
    out = export_weightless(
        CASES["retrieval"], "vllm", str(tmp_path / "out"), GroupSpec("target", "tiny")
    )
    moving, steady = (CopyingDrafter(vllm_config(), out / "spectrain_copying") for _ in range(2))
    assert moving.propose([[]], *make_rows(texts[:1])) == [[]]
    for step in range(4):
        order = [0, 1] if step % 2 else [1, 0]
        sampled = [[text[-1]] for text in texts]
        drafts = steady.propose(sampled, *make_rows(texts))
        moved = moving.propose(
            [sampled[row] for row in order], *make_rows([texts[row] for row in order])
        )
        assert [moved[order.index(row)] for row in (0, 1)] == drafts
        texts = [text + draft[:2] for text, draft in zip(texts, drafts)]
        assert all(drafts) and len(moving.texts) == 2
    assert np.array_equal(moving.estimator.hits, steady.estimator.hits)


def test_the_package_needs_numpy_alone(tmp_path: Path) -> None:
    """A process that can import neither torch nor this project loads the class by the path in the
    command of the card."""
    out = export_weightless(
        CASES["ngram"], "vllm", str(tmp_path / "out"), GroupSpec("target", "tiny")
    )
    command = (out / "README.md").read_text().split("--speculative-config '")[1].split("'")[0]
    module, name = json.loads(command)["model"].rsplit(".", 1)
    source = f"""
import sys
sys.path[:] = [{str(out)!r}] + [path for path in sys.path if path]
for refused in ("torch", "spectrain", "transformers"):
    sys.modules[refused] = None
from importlib import import_module
from types import SimpleNamespace as S
import numpy as np
drafter = getattr(import_module({module!r}), {name!r})(
    S(speculative_config=S(num_speculative_tokens=3), model_config=S(max_model_len=64))
)
text = [5, 6, 7, 8, 5, 6]
ids = np.zeros((1, 64), dtype=np.int32)
ids[0, : len(text)] = text
print(drafter.propose([[6]], np.array([len(text)]), ids))
"""
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=out)
    assert ran.stdout.strip() == "[[7, 8, 5]]", ran.stderr


def test_other_drafters_and_formats_are_refused(store: Path, tmp_path: Path) -> None:
    """A family with weights, another engine, a run beside it, and a store of another tokenizer."""
    keys: dict[str, Any] = dict.fromkeys(
        ("run", "format", "out", "push", "target", "dtype", "engine_python", "quantize")
    )
    keys |= {"private": True, "out": str(tmp_path / "out"), "format": "vllm"}
    keys |= {"target": GroupSpec("target", "tiny"), "drafter": CASES["ngram"]}
    for changes, match in (
        ({"drafter": GroupSpec("drafter", "eagle3")}, "name the run of another drafter"),
        ({"format": "sglang"}, "use format=vllm"),
        ({"run": "runs/x"}, "the drafter is that of run=runs/x"),
        ({"dtype": "float32"}, "dtype: drafter=ngram has no weights"),
        ({"target": None}, "target: it must be given"),
        (
            {"drafter": GroupSpec("drafter", "retrieval", {"store": str(tmp_path)})},
            "there is no store",
        ),
    ):
        with pytest.raises(UserError, match=match):
            run_export(**{**keys, **changes})
    assert not (tmp_path / "out").exists()
