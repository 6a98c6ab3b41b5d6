"""A server with a seeded fault is scored as users score it; the score must name the fault by
comparing rounds.
"""

import json
from typing import Any

import spectrain

NUM_PROMPTS = 12
NUM_TOKENS = 32


def check_cause(
    server: str, url: str, fault: str, cause: str | None, **settings: Any
) -> dict[str, Any]:
    """Score a running server with the shipped drafter, print what was measured, and return the
    agreement with our own chain.
    """
    summary = spectrain.evaluate_server(
        server,
        url,
        run="smollm2-eagle3",
        **{
            "target.dtype": "float32",
            "eval.limit": NUM_PROMPTS,
            "eval.max_new_tokens": NUM_TOKENS,
            "eval.name": "fault",
            "eval.report": False,
            **settings,
        },
    )
    own: dict[str, Any] = summary["server"]["own_chain"]
    counted = summary["server"]["requests_counted"]
    print(
        json.dumps(
            {
                "fault": fault,
                "rounds": counted["num_rounds"],
                "accepted": counted["accepted_by_position"],
                "prompts_with_equal_rounds": f"{own['equal']} of {own['checked']}",
                "outputs": own["same_outputs"],
                "cause": own.get("cause"),
                "search": own.get("search"),
            }
        )
    )
    if cause is None:
        assert own["checked"] == own["same_outputs"] == NUM_PROMPTS
        # An engine adds in another order, which may decide a near tie of two draft logits.
        assert own["equal"] >= NUM_PROMPTS - 1 and own.get("cause") is None
    else:
        assert own["equal"] <= NUM_PROMPTS // 2 and own["cause"]["name"] == cause
        assert own["cause"]["agreement"]["share"] > 0.95
    return own
