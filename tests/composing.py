"""Configurations that tests compose again and again: hydra takes a tenth of a second for each."""

import copy
from collections.abc import Callable, Sequence
from functools import wraps

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

Compose = Callable[..., DictConfig]


def compose_once(compose: Compose) -> Compose:
    """Return hydra's `compose` with a cache: for the same words from the package alone it gives
    a copy of the first result.
    """
    composed: dict[tuple[str, ...], DictConfig] = {}

    @wraps(compose)
    def compose_or_copy(config_name: str, overrides: Sequence[str] = ()) -> DictConfig:
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None, "compose stands inside initialize_config_module"
        paths = [path.path for path in hydra.config_loader.get_search_path().get_path()]
        if not all(path is None or path.startswith(("pkg://", "structured://")) for path in paths):
            return compose(config_name, overrides=list(overrides))  # a folder's files may change
        key = config_name, *overrides
        if key not in composed:
            composed[key] = compose(config_name, overrides=list(overrides))
        return copy.deepcopy(composed[key])

    return compose_or_copy
