"""The models that make models downloads, as targets and as drafters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.models.loading import load_hf
from spectrain.models.published import MODELS
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target

SMALL, LARGE = "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"
# Of the weights in the type that is computed in, by the issue of memory: the rest is a quarter.
MAX_MEMORY_RATIO = 1.3
# Code that is loaded or compiled for a first model, in bytes.
CODE_MEMORY = 50e6
MEMORY = """
import sys
from spectrain.models.loading import build_meta_network, load_hf
from spectrain.models.target import Target

# Unlike ru_maxrss these leave out what the process had been before it became another program.
def read_bytes(key):
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return 1024 * int(status[key].split()[0])

name = sys.argv[1]
# What the program and the tokenizer take.
load_hf(name, network=build_meta_network)
before = read_bytes("VmRSS")
"""
PRINT_MEMORY = """
size = sum(weight.nbytes for weight in target.model.parameters())
print(size, read_bytes("VmHWM") - before)
"""
LOAD = f"{MEMORY}target = Target.from_pretrained(name){PRINT_MEMORY}"

pytestmark = pytest.mark.models


@pytest.fixture(autouse=True)
def downloaded() -> None:
    missing = [name for name, model in MODELS.items() if not model.is_here]
    if missing:
        explain = pytest.fail if "SPECTRAIN_TEST_MODELS" in os.environ else pytest.skip
        explain(f"{', '.join(missing)} not downloaded: make models")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_loads_in_little_more_memory_than_it_takes(name: str) -> None:
    command = [sys.executable, "-c", LOAD, name]
    # The first process may convert the file, and both keep within the bound.
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        size, peak = map(int, done.stdout.split()[-2:])
        assert peak < MAX_MEMORY_RATIO * size + CODE_MEMORY


def test_the_small_one_drafts_for_the_large_one(tmp_path: Path) -> None:
    """Outputs are identical to those without a drafter, and most drafts are accepted."""
    words = [f"target={LARGE}", "drafter=causal", f"drafter.model={SMALL}", "tree=chain"]
    words += ["tree.depth=4", "eval.limit=1", "eval.max_new_tokens=24", f"run={tmp_path / 'run'}"]
    words += ["eval.baselines=[]", "eval.oracle=false", "eval.report=false", "eval.repeats=1"]
    command = [sys.executable, "-m", "spectrain", "eval", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 of 1" in done.stdout


BLOCKS = f"""{MEMORY}target = load_hf(name, quantization="gguf")
assert {{type(w).__name__ for w in target.model.parameters() if w.dim() > 1}} == {{"BlockWeight"}}
{PRINT_MEMORY}"""
PROMPTS = [
    f"Write a Python {kind} that {task}."
    for kind in ("function", "class", "script")
    for task in (
        "reverses a string",
        "counts words in a file",
        "merges two sorted lists",
        "parses a date",
        "finds the shortest path in a graph",
        "removes duplicates from a list",
        "computes the standard deviation",
        "validates an e-mail address",
    )
]
NUM_TOKENS = 24
# Logits of float32 after rounded inputs; those of bfloat16 layers are a tenth apart.
NEAR_TIES = {"float32": 0.02, "bfloat16": 0.5}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_its_blocks_takes_the_memory_of_its_file(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS, name], capture_output=True, text=True, check=True
    )
    size, peak = map(int, done.stdout.split()[-2:])
    assert size < 1.03 * MODELS[name].num_bytes
    assert peak < MAX_MEMORY_RATIO * size + CODE_MEMORY


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_of_blocks_are_those_of_the_dequantised_weights(dtype: str) -> None:
    """Every token that is decoded with blocks is the best one of the dequantised weights in
    float32, or nearly tied with it; those are shown.
    """
    blocks = load_hf(SMALL, dtype=dtype, quantization="gguf")
    blocks.pack_weights()
    dense = load_hf(SMALL, dtype="float32")
    dense.pack_weights()
    num_tied = 0
    for number, text in enumerate(PROMPTS):
        prompt = blocks.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        output = decode(blocks, [list(prompt)], Greedy(), NUM_TOKENS)[0].output
        tokens = torch.tensor([[*prompt, *output]])
        with torch.inference_mode():
            logits = dense.model(tokens).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None]).flatten()
        gaps = logits.max(dim=1).values - chosen
        num_tied += int((gaps > 0).any())
        for position in gaps.nonzero().flatten().tolist():
            print(
                f"{dtype}, prompt {number}, token {position}: {gaps[position]:.4f} below the best"
            )
        assert gaps.max() < NEAR_TIES[dtype]
    print(f"{dtype}: {len(PROMPTS) - num_tied} of {len(PROMPTS)} texts have no other token")


def test_the_target_writes_a_program() -> None:
    target = Target.from_pretrained(SMALL)
    messages = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
    tokens = target.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    with reference_model(target) as model:
        output = generate(model, tokens, 40, target.stop_ids)
    assert "def " in target.tokenizer.decode(output)
