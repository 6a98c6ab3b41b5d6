"""The stand-ins of tests/export."""

from tests.export.conftest import replace_converters

__all__ = ["replace_converters"]
