"""The models that make models downloads, as targets and as drafters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spectrain.models.published import MODELS
from spectrain.models.reference_model import generate, reference_model
from spectrain.models.target import Target

SMALL, LARGE = "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"
# Of the weights in the type that is computed in, by the issue of memory: the rest is a quarter.
MAX_MEMORY_RATIO = 1.3
LOAD = """
import resource, sys
from spectrain.models.target import Target
target = Target.from_pretrained(sys.argv[1])
size = sum(weight.nbytes for weight in target.parameters())
print(size, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""

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
        # What a process of torch and transformers takes without a model.
        assert peak < MAX_MEMORY_RATIO * size + 500e6


def test_the_small_one_drafts_for_the_large_one(tmp_path: Path) -> None:
    """Outputs are identical to those without a drafter, and most drafts are accepted."""
    words = [f"target={LARGE}", "drafter=causal", f"drafter.model={SMALL}", "tree=chain"]
    words += ["tree.depth=4", "eval.limit=1", "eval.max_new_tokens=24", f"run={tmp_path / 'run'}"]
    words += ["eval.baselines=[]", "eval.oracle=false", "eval.report=false", "eval.repeats=1"]
    command = [sys.executable, "-m", "spectrain", "eval", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 of 1" in done.stdout


def test_the_target_writes_a_program() -> None:
    target = Target.from_pretrained(SMALL)
    messages = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
    tokens = target.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    with reference_model(target) as model:
        output = generate(model, tokens, 40, target.stop_ids)
    assert "def " in target.tokenizer.decode(output)
