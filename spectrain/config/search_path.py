"""Hydra's search path with the folders of choices of installed packages, behind this package's
own.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from .installed import list_conf_modules


class InstalledSearchPath(SearchPathPlugin):
    """Adds the folders that entry points name."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for module in list_conf_modules():
            search_path.append(provider=module, path=f"pkg://{module}")


def register_search_path() -> None:
    """Let hydra find the choices of installed packages."""
    Plugins.instance().register(InstalledSearchPath)
