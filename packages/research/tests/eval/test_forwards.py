"""A round of masks in a forward of their own takes two forwards of the target, and a report says
so.
"""

from itertools import islice
from typing import Any

import pytest

from spectrain.data.chat import tokenize_prompt
from spectrain.decoding.acceptance import Greedy
from spectrain.decoding.loop import decode
from spectrain.drafters.base import drafting_cost
from spectrain.eval import summary as summaries
from spectrain.eval.metrics import SystemNumbers, Turn, measure_system
from spectrain.eval.notes import explain_numbers
from spectrain.models.target import Target
from spectrain.trees import Chain
from spectrain_research.uno.drafter import Uno, UnoConfig
from tests.eval.test_self_speculation import LIMIT, PROMPTS


@pytest.mark.parametrize("strategy, forwards", [("apart", 2), ("quadratic", 1), ("linear", 1)])
def test_forwards_of_the_target_are_counted(tiny: Target, strategy: Any, forwards: int) -> None:
    """As many as really ran, one for the prompt and these a round; where drafting is one the
    report says what each gives.
    """
    drafter = Uno(tiny, UnoConfig(num_masks=3, rank=0, strategy=strategy)).eval()
    text = tokenize_prompt(tiny.template, [{"role": "user", "content": PROMPTS[0]}])
    ran = []
    handle = tiny.decoder.register_forward_hook(lambda *args: ran.append(1))
    (drafted,) = decode(tiny, [text], Greedy(), LIMIT, drafter, Chain(3))
    handle.remove()
    assert (
        len(ran)
        == 1 + forwards * len(drafted.round_lengths)
        == 1 + (1 + drafting_cost(drafter).num_target_forwards()) * len(drafted.round_lengths)
    )
    (plain,) = decode(tiny, [text], Greedy(), LIMIT)
    turns = [Turn("id", 0, "any", plain, drafted)]
    numbers = SystemNumbers(**measure_system(turns, True)).to_json()
    summary = {
        **numbers,
        "bounds": summaries.speedup_limits(tiny, drafter, turns, []),
        "setting": {"batch_size": 1, "device": "cpu", "dtype": "float32"},
    }
    assert summary["bounds"].get("forwards_per_round", 1) == forwards
    sentences = [
        line
        for line in islice(explain_numbers(summary), 3)
        if line.startswith("A round takes 2 forwards of the target")
    ]
    acceptance_length = sum(drafted.complete_round_lengths) / len(drafted.complete_round_lengths)
    assert sentences == (
        [
            f"A round takes 2 forwards of the target, so each gives {acceptance_length / 2:.2f} "
            "tokens."
        ]
        if forwards == 2
        else []
    )
