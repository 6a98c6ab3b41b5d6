"""A property that is computed once, also in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")


class cached_value(Generic[Value]):
    """What `functools.cached_property` does, without its lock.

    In Python 3.10 and 3.11 that property holds a lock, which torch's compiler cannot enter: a
    captured round that reads one breaks in two. A tree belongs to one thread, so it needs none.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self.compute = compute
        self.name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> cached_value[Value]: ...

    @overload
    def __get__(self, owner: object, kind: type) -> Value: ...

    def __get__(self, owner: object | None, kind: type) -> cached_value[Value] | Value:
        if owner is None:
            return self
        value = self.compute(owner)
        # The instance's own entry is found before this descriptor from now on.
        owner.__dict__[self.name] = value
        return value
