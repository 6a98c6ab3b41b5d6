"""Numbers out of bounds are refused by the types of settings, before anything is constructed."""

from typing import Any

import pytest

from spectrain.config.check import check_settings
from spectrain.errors import UserError


@pytest.mark.parametrize(
    ("group", "choice", "settings", "sentence"),
    [
        ("drafter", "causal", {"vocab_size": 0}, "drafter.vocab_size=0: use 1 or more"),
        ("drafter", "pard", {"keep": 1.5}, "drafter.keep=1.5: use 1 or less"),
        ("drafter", "medusa", {"heads_first": 1.0}, "drafter.heads_first=1.0: use less than 1"),
        ("drafter", "mtp", {"num_steps": 0}, "drafter.num_steps=0: use 1 or more"),
        ("source", "store", {"path": "x", "max_gb": 0.0}, "source.max_gb=0.0: use more than 0"),
        ("source", "store", {"path": "x", "shard_mb": 0.0}, "source.shard_mb=0.0: use more than 0"),
        ("data", "stream", {"path": "x", "shards": 0}, "data.shards=0: use 1 or more"),
        ("data", "stream", {"path": "x", "window": 0}, "data.window=0: use 1 or more"),
        ("data", "stream", {"path": "x", "sample": 0}, "data.sample=0: use 1 or more"),
        ("regenerate", "regenerate", {"shard_size": 0}, "regenerate.shard_size=0: use 1 or more"),
        ("regenerate", "regenerate", {"stop_after": 0}, "regenerate.stop_after=0: use 1 or more"),
        (
            "regenerate",
            "regenerate",
            {"max_failed": 1.1},
            "regenerate.max_failed=1.1: use 1 or less",
        ),
        ("sampling", "regenerate", {"top_p": 0.0}, "sampling.top_p=0.0: use more than 0"),
        (
            "sampling",
            "regenerate",
            {"max_new_tokens": 0},
            "sampling.max_new_tokens=0: use 1 or more",
        ),
        ("writer", "engine", {"batch_tokens": 0}, "writer.batch_tokens=0: use 1 or more"),
        ("quantize", "int8", {"tolerance": 1.0}, "quantize.tolerance=1.0: use less than 1"),
    ],
)
def test_a_number_out_of_bounds_is_refused(
    group: str, choice: str, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError) as refused:
        check_settings(group, choice, settings)
    assert str(refused.value) == sentence
