"""The refusal to start an engine of a version that does not read a drafter's layout."""

from __future__ import annotations

from collections.abc import Callable

from packaging.version import Version

from spectrain.errors import UserError
from spectrain.export.engine_support import list_readers, name_program
from spectrain.export.layout import Layout
from spectrain.export.table import EngineSupport
from spectrain.servers.engines import ENGINES


def refuse_version(
    layout: Layout, engine: str, read_version: Callable[[], str | None], setting: str
) -> None:
    """Raise a UserError if the installed version of an engine does not read a layout.

    `read_version` returns it, or None where it is unknown; it is called only for a layout that
    some versions do not read. `setting` is where the user chose the engine, as in
    server.python=ENV/bin/python.
    """
    for support in list_readers(layout):
        if support.program != engine or not (support.since or support.until):
            continue
        version = read_version()
        if version is not None and not reads(support, version):
            raise UserError(
                f"{setting}: {ENGINES[engine].title} {version} is installed there, and only "
                f"{name_program(support)} reads this drafter's layout ({layout.title}); install "
                "such a version, or serve another family (docs/serving.md lists which)"
            )


def reads(support: EngineSupport, version: str) -> bool:
    """Tell whether a version of the row's program reads the layout; 0.32.1 is a version of
    0.32."""
    installed = Version(version).release
    since = Version(support.since or "0").release
    until = Version(support.until).release if support.until else None
    return installed >= since and (until is None or installed[: len(until)] <= until)
