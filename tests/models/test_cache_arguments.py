"""The name of a model's argument for its cache, in the forms that releases of transformers have."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from spectrain.models.cache_arguments import cache_argument, drop_cache, read_cache


def accept_old_name(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a forward as transformers 5.24 does: it also takes an older name, which its
    signature does not show.
    """

    @functools.wraps(forward)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        if "past_key_values" in kwargs:
            raise AssertionError("the older name warns, and later releases refuse it")
        return forward(*args, **kwargs)

    return renamed


class Newer(nn.Module):
    @accept_old_name
    def forward(self, input_ids: Any, cache: Any = None, **kwargs: Any) -> dict[str, Any]:
        return {"logits": input_ids, "cache": cache}


class Older(nn.Module):
    @functools.lru_cache  # noqa: B019
    def forward(
        self, input_ids: Any, past_key_values: Any = None, use_cache: bool = False
    ) -> dict[str, Any]:
        return {"logits": input_ids, "past_key_values": past_key_values}


class Recurrent(nn.Module):
    def forward(self, input_ids: Any, cache_params: Any = None) -> dict[str, Any]:
        return {"logits": input_ids, "cache_params": cache_params}


@pytest.mark.parametrize(
    ("module", "name"),
    [(Newer(), "cache"), (Older(), "past_key_values"), (Recurrent(), "cache_params")],
    ids=lambda x: str(x),
)
def test_the_cache_goes_in_and_comes_out_by_the_name_that_a_module_has(
    module: nn.Module, name: str
) -> None:
    assert cache_argument(module) == name
    output = module(1, **{cache_argument(module): "the cache"})
    assert read_cache(output) == "the cache"
    assert drop_cache(output) == {"logits": 1}
