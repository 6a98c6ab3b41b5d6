"""The drafter that ships for Qwen2.5-Coder-1.5B: its files, its name, and what it drafts."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from spectrain.config.plain_files import read_json_object
from spectrain.data.chat import tokenize_question
from spectrain.data.messages import Conversation
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.decoding.session import prepare_for_decoding
from spectrain.errors import UserError
from spectrain.models.loading import load_hf
from spectrain.models.published import MODELS
from spectrain.models.target import Target
from spectrain.runs.drafters import load_shipped_drafter
from spectrain.runs.folder import find_drafter_directory, find_shipped
from spectrain.trees import Chain
from spectrain_coder import DRAFTER

MAX_BYTES = 60e6


def test_its_files_are_small_and_say_where_they_come_from() -> None:
    """Weights are in 8 bits, and what was trained, on what and by which command stands beside
    them.
    """
    names = {file.name for file in DRAFTER.folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "provenance.json", "spectrain.json"}
    assert sum(file.stat().st_size for file in DRAFTER.folder.iterdir()) < MAX_BYTES
    tensors = load_file(DRAFTER.folder / "model.safetensors")
    matrices = [tensor for tensor in tensors.values() if min(tensor.shape) > 1 and tensor.ndim == 2]
    assert len(matrices) == 9 and all(tensor.dtype == torch.int8 for tensor in matrices)
    origin = read_json_object(DRAFTER.folder / "provenance.json")
    assert origin["data"]["fingerprint"] and origin["versions"] and "=/" not in json.dumps(origin)


def test_its_name_is_a_choice_and_a_run() -> None:
    assert find_shipped(DRAFTER.name) == DRAFTER
    assert find_drafter_directory(DRAFTER.folder) == DRAFTER.folder


def test_another_target_is_refused(tiny: Target) -> None:
    with pytest.raises(UserError, match="it is for target=qwen2.5-coder-1.5b, and tiny is another"):
        load_shipped_drafter(DRAFTER.name, tiny)


@pytest.mark.models
def test_its_output_is_the_targets() -> None:
    """With weights in the file's blocks, a chain of two gives greedy decoding's answer to an unseen
    question in at most three quarters of its forwards.
    """
    if not MODELS[DRAFTER.target].is_here:
        explain = pytest.fail if "SPECTRAIN_TEST_MODELS" in os.environ else pytest.skip
        explain(f"{DRAFTER.target} not downloaded: make models")
    target = load_hf(DRAFTER.target, quantization="gguf_int8")
    drafter = load_shipped_drafter(DRAFTER.name, target)
    target.pack_weights()
    prepare_for_decoding(drafter, target)
    question = "Write a Python function that returns the second largest number of a list."
    prompt = tokenize_question(
        target.template, Conversation([{"role": "user", "content": question}])
    )
    (plain,) = decode(target, [prompt], Greedy(), 48)
    (drafted,) = decode(target, [prompt], Greedy(), 48, drafter, Chain(2))
    assert drafted.output == plain.output
    assert len(drafted.round_lengths) <= 0.75 * len(plain.round_lengths)
