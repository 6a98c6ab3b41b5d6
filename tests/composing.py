"""Configurations that tests compose again and again: hydra takes a tenth of a second for each."""

import copy
from collections.abc import Callable, Sequence
from functools import wraps

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

Compose = Callable[..., DictConfig]


def composed_once(compose: Compose) -> Compose:
    """hydra's `compose`, which for the same words from the package alone gives a copy of what it gave before."""
    known: dict[tuple[str, ...], DictConfig] = {}

    @wraps(compose)
    def found(config_name: str, overrides: Sequence[str] = ()) -> DictConfig:
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None, "compose stands inside initialize_config_module"
        places = [place.path for place in hydra.config_loader.get_search_path().get_path()]
        if not all(place is None or place.startswith(("pkg://", "structured://")) for place in places):
            return compose(config_name, overrides=list(overrides))  # a folder's files may change
        key = config_name, *overrides
        if key not in known:
            known[key] = compose(config_name, overrides=list(overrides))
        return copy.deepcopy(known[key])

    return found
