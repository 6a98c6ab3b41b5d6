"""Triton's interpreter without work that it repeats.

Whenever a kernel calls a function of its own, the interpreter goes through all of triton.language
and puts its stand-ins in place of builtins, where they stand already: more than half the time of a
test whose kernels sort. Here it does so once a launch.
"""

from collections.abc import Callable
from typing import Any

Names = frozenset[int]


def patch_triton_interpreter() -> None:
    """Patch the interpreter for later kernels; where Triton has no such inner parts any more,
    nothing is changed.
    """
    import triton.language as tl
    from triton.language import core
    from triton.runtime import interpreter

    parts = ("_patch_lang", "GridExecutor", "InterpretedFunction", "InterpreterError")
    if not all(hasattr(interpreter, part) for part in parts):
        return
    # which modules of Triton's language a function sees, of those that this launch has patched
    patched: set[Names] = set()
    launch: Callable[..., Any] = interpreter.GridExecutor.__call__

    def list_visible_modules(function: Any) -> Names:
        return frozenset(
            id(value) for value in function.__globals__.values() if value is tl or value is core
        )

    def launch_grid(executor: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        patched.add(list_visible_modules(executor.fn))
        return launch(executor, *args, **kwargs)

    def call_function(function: Any, *args: Any, **kwargs: Any) -> Any:
        if (names := list_visible_modules(function.fn)) not in patched:
            interpreter._patch_lang(function.fn)
            patched.add(names)
        try:
            return function.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = launch_grid
    interpreter.InterpretedFunction.__call__ = call_function
