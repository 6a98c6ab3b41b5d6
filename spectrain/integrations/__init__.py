"""Drafters inside the trainings of other projects, as in `from spectrain.integrations.trl import
DrafterCallback`.

The code is in an installed package, whose entry point in the group `spectrain.integrations` has the
name of the other project and names a module.
"""

from importlib import import_module
from types import ModuleType

from spectrain.config.installed import list_entry_points
from spectrain.config.missing import explain_missing


def load_integration(project: str) -> ModuleType:
    """Import the module of an installed package for another project; raise an ImportError that
    says how to install it.
    """
    for entry in list_entry_points("integrations"):
        if entry.name == project:
            return import_module(entry.value)
    name = f"{__name__}.{project}"
    raise ImportError(explain_missing("group.", "integrations", name), name=name)
