"""Chat templates rendered within limits of work and size, because a template comes with a model
that somebody else made.

The sandbox of `transformers` keeps a template from running code. It does not keep it from looping
without end, or from asking for a text of 20 GB. Here every loop step, call, filter and operator of
a template takes from a budget, which depends on the conversation alone and not on a clock, and
everything that makes a large value is checked before the value is made.

What a template prints is the same in every process, because data, stores and resumed trainings
have the same tokens: it draws nothing at random, and prints no address of an object.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, wraps
from types import BuiltinMethodType
from typing import Any, cast

from jinja2 import Environment, Template, nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from transformers.utils import chat_template_utils

from spectrain.errors import UserError

# Characters; the longest template of a known model has 30,000.
MAX_SOURCE = 1_000_000
# Steps of any template, and more per object and per character of the conversation.
BASE_STEPS = 1_000_000
STEPS_PER_OBJECT = 1_000
STEPS_PER_CHARACTER = 16
# Steps of a call and of a filter, which take as long as this many iterations.
STEPS_PER_CALL = 20
STEPS_PER_FILTER = 5
# Characters or elements of any value of a template, and more per character of the conversation.
BASE_SIZE = 1_000_000
SIZE_PER_CHARACTER = 16
# Characters that are read or written in one step.
CHARACTERS_PER_STEP = 16
# Largest width, indent or count that a filter or a method takes.
MAX_WIDTH = 10_000
MAX_BITS = 10_000
ADVICE = "use another model, or give a template that you trust with target.chat_template=FILE"

WIDENING = {"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes", "indent", "batch",
    "slice", "tojson",
            "generate_lorem_ipsum", "wordwrap", "round"}  # fmt: skip
"""Filters, functions and methods that make as much as a number says."""
SLOW = {"urlize", "striptags", "xmlattr", "pprint", "wordwrap", "wordcount", "sum", "title"}
"""Filters that may read a text as often as it has characters."""
CHECKED_NAMES = WIDENING | SLOW | {"replace", "join", "translate", "format"}
"""Filters, functions and methods that may make more than they are given."""
SHALLOW = {"length", "count", "first", "last", "default", "d", "reverse", "items", "defined",
    "undefined", "none", "string",
           "mapping", "sequence", "iterable", "number", "integer", "float", "boolean", "true",
           "false", "callable", "test",
           "filter", "odd", "even", "divisibleby", "escaped", "sameas"}  # fmt: skip
"""Filters and tests that take no longer for a long text or a deep list, and that make none."""
WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*?(\*|\d{5,})")
RANDOM_FUNCTIONS = ("random", "lipsum", "generate_lorem_ipsum")
"""Filters and functions of jinja that draw at random."""
OBJECT_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")
"""How Python ends the text of an object that has no text of its own."""


class TemplateLimitError(UserError):
    """A chat template that needs more than the limits, or whose text differs in every process."""


class _Budget:
    """What is left to the rendering in progress; one template is rendered at a time."""

    __slots__ = ("size", "steps")

    def __init__(self) -> None:
        self.steps = BASE_STEPS
        self.size = BASE_SIZE

    def begin(self, content: Any = None) -> None:
        """Set the budget for a rendering of this content."""
        num_objects, num_characters = count_content(content)
        self.steps = (
            BASE_STEPS + STEPS_PER_OBJECT * num_objects + STEPS_PER_CHARACTER * num_characters
        )
        self.size = BASE_SIZE + SIZE_PER_CHARACTER * num_characters

    def take(self, steps: int = 1) -> None:
        """Take steps from the budget; raise an error if none are left."""
        self.steps -= steps
        if self.steps < 0:
            raise TemplateLimitError(
                f"target: its chat template takes too many steps for one conversation; {ADVICE}"
            )

    def check_size(self, size: int) -> None:
        """Raise an error if a value of this size is too large; take the steps that it needs."""
        if size > self.size:
            raise TemplateLimitError(
                "target: its chat template makes a text that is too long for one conversation; "
                f"{ADVICE}"
            )
        self.steps -= 1 + size // CHARACTERS_PER_STEP
        if self.steps < 0:
            self.take(0)


_budget = _Budget()
_lock = threading.RLock()


def count_content(content: Any) -> tuple[int, int]:
    """Return the objects and the characters of what a template is given."""
    num_objects = 0
    num_characters = 0
    waiting = [content]
    while waiting:
        value = waiting.pop()
        num_objects += 1
        if isinstance(value, str):
            num_characters += len(value)
        elif isinstance(value, Mapping):
            waiting += value.values()
            num_characters += sum(len(key) for key in value if isinstance(key, str))
        elif isinstance(value, (list, tuple)):
            waiting += value
    return num_objects, num_characters


def measure(value: Any) -> int:
    """Return the size of a value with everything in it, or more than the limit as soon as it is
    larger.
    """
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 8 + 1
    size = 0
    limit = _budget.size
    waiting = [value]
    while waiting and size <= limit:
        entry = waiting.pop()
        size += 1
        if isinstance(entry, (str, bytes, range)):
            size += len(entry)
        elif isinstance(entry, dict):
            waiting += entry.keys()
            waiting += entry.values()
        elif isinstance(entry, (list, tuple, set, frozenset)):
            # A list that holds itself would fill the memory before the count ends.
            size += len(entry)
            waiting += entry if size <= limit else ()
        elif isinstance(entry, Namespace):
            waiting += entry._Namespace__attrs.values()
    return size


def check_value(value: Any) -> Any:
    """Return a value of a template unchanged, after a check of its size."""
    kind = type(value)
    if kind is str:
        _budget.check_size(len(value))
    elif kind is not bool and value is not None:
        _budget.check_size(measure(value))
    return value


def check_printed(value: Any) -> Any:
    """Return a value that a template prints unchanged, after a check of its size; raise an error
    for an object whose text is its address, as of a filter's result that is not made a list.
    """
    check_value(value)
    is_plain = value is None or isinstance(value, (str, int, float))
    if not is_plain and (address := OBJECT_ADDRESS.search(text := str(value))) is not None:
        raise TemplateLimitError(
            f"target: its chat template prints {text[: address.start()][-60:]}{address[0]}, whose "
            f"address differs in every process; {ADVICE}"
        )
    return value


def check_arguments(name: str, arguments: Iterable[Any], options: Mapping[str, Any]) -> None:
    """Check the arguments of a filter, a function or a method before it runs."""
    if name in RANDOM_FUNCTIONS:
        raise TemplateLimitError(
            f"target: its chat template calls {name}, which draws at random, so its texts differ "
            f"in every process; {ADVICE}"
        )
    values = [*arguments, *options.values()]
    for value in values:
        check_printed(value) if name == "format" else check_value(value)
    if name in CHECKED_NAMES:
        check_result(name, values)


def check_result(name: str, values: list[Any]) -> None:
    """Check the size of what a filter, a function or a method would make of these arguments."""
    sizes = [measure(value) for value in values]
    if name in WIDENING and any(
        isinstance(value, int) and abs(value) > MAX_WIDTH for value in values
    ):
        raise TemplateLimitError(
            f"target: its chat template calls {name} with a number above {MAX_WIDTH}; {ADVICE}"
        )
    if name in SLOW:
        _budget.take(sum(sizes) ** 2 // 1000)
    texts = [value for value in values if isinstance(value, str)]
    if name == "replace" and len(texts) >= 3:
        text, old, new = texts[:3]
        _budget.check_size(len(text) + text.count(old) * len(new))
    elif name == "indent" and texts:
        width = max(
            (value if isinstance(value, int) else measure(value) for value in values[1:]), default=4
        )
        _budget.check_size(len(texts[0]) + width * (1 + texts[0].count("\n")))
    elif name == "join":
        separator = max(map(len, texts), default=0)
        count = max(
            (len(value) for value in values if isinstance(value, (list, tuple, dict, range, str))),
            default=0,
        )
        _budget.check_size(separator * count + sum(sizes))
    elif name == "translate":
        _budget.check_size(sum(sizes) * max(sizes, default=0))
    elif name == "format" and texts:
        check_format(texts[0])


def check_format(text: str) -> None:
    """Refuse a printf format with a width that is too large, or that is given as an argument."""
    if WIDE_FORMAT.search(text):
        raise TemplateLimitError(
            f"target: its chat template pads a text to more than {MAX_WIDTH} characters; {ADVICE}"
        )


def _with_limits(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or a test that takes steps, and checks its arguments and its result."""

    @wraps(function)
    def run_shallow(*arguments: Any, **options: Any) -> Any:
        _budget.take(STEPS_PER_FILTER)
        return function(*arguments, **options)

    @wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        _budget.take(STEPS_PER_FILTER)
        check_arguments(name, arguments, options)
        return check_value(function(*arguments, **options))

    return run_shallow if name in SHALLOW else run


class _CountedLoop:
    """What a loop of a template iterates over; each iteration takes a step."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)  # type: ignore[arg-type]  # the TypeError of values without a length is what jinja expects

    def __iter__(self) -> Iterator[Any]:
        return self._count(iter(self.values))

    @staticmethod
    def _count(values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            _budget.take()
            yield value


class LimitedFormatter(SandboxedFormatter):
    """str.format of a template, without wide paddings."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        if re.search(r"\d{5,}", format_spec):
            check_format(f"%{MAX_WIDTH * 10}s")
        return check_value(super().format_field(value, format_spec))


class LimitedCodeGenerator(CodeGenerator):
    """Generates the code of a template, with checks where values are made, compared or iterated
    over.
    """

    def _visit_checked(self, visit: Callable[..., None], *arguments: Any) -> None:
        self.write("environment.check_value(")
        visit(*arguments)
        self.write(")")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        counter = nodes.EnvironmentAttribute("count_steps", lineno=node.lineno)
        node.iter = nodes.Call(counter, [node.iter], [], None, None, lineno=node.lineno)
        super().visit_For(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._visit_checked(super().visit_List, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._visit_checked(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Pair(self, node: nodes.Pair, frame: Frame) -> None:
        # A key is hashed, which reads all of it.
        self._visit_checked(self.visit, node.key, frame)
        self.write(": ")
        self.visit(node.value, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("environment.check_value({")
        for index, item in enumerate(node.items):
            self.write(", " * (index > 0))
            self.visit_Pair(item, frame)
        self.write("})")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self.write("environment.check_slice(")
            super().visit_Getitem(node, frame)
            self.write(")")
        else:
            super().visit_Getitem(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        escapes = frame.eval_ctx.volatile or frame.eval_ctx.autoescape
        join = (
            "(markup_join if context.eval_ctx.autoescape else str_join)" if escapes else "str_join"
        )
        self.write(f"{join}(environment.check_parts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(")
        self._visit_operand(node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        self.write(f" {operators[node.op]} ")
        self._visit_operand(node.expr, frame)

    def _visit_operand(self, node: nodes.Expr, frame: Frame) -> None:
        if isinstance(node, nodes.Const):
            self.visit(node, frame)
        else:
            self._visit_checked(self.visit, node, frame)


class LimitedTemplate(Template):
    """A template whose renderings each have a budget of their own."""

    def render(self, *arguments: Any, **variables: Any) -> str:
        with _lock:
            _budget.begin([arguments, variables])
            return super().render(*arguments, **variables)

    def generate(self, *arguments: Any, **variables: Any) -> Iterator[str]:
        with _lock:
            _budget.begin([arguments, variables])
            size = 0
            for part in super().generate(*arguments, **variables):
                size += len(part)
                _budget.check_size(size)
                yield part


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of `transformers` with limits."""

    code_generator_class = LimitedCodeGenerator
    template_class = LimitedTemplate
    # Operations on constants are then left to the rendering, too.
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self, sandbox: Environment) -> None:
        super().__init__(
            trim_blocks=sandbox.trim_blocks,
            lstrip_blocks=sandbox.lstrip_blocks,
            extensions=[type(extension) for extension in sandbox.extensions.values()],
            finalize=check_printed,
        )
        self.globals.update(sandbox.globals)
        self.filters = {
            name: _with_limits(name, function) for name, function in sandbox.filters.items()
        }
        self.tests = {
            name: _with_limits(name, cast(Callable[..., Any], function))
            for name, function in sandbox.tests.items()
        }

    check_value = staticmethod(check_value)
    # What a loop iterates over, with a step for each iteration.
    count_steps = _CountedLoop

    @staticmethod
    def check_slice(value: Any) -> Any:
        """Return a part of a value unchanged, with the steps that copying it takes."""
        _budget.check_size(len(value))
        return value

    @staticmethod
    def check_parts(parts: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the parts of a text unchanged, after a check of their size together."""
        for part in parts:
            check_printed(part)
        _budget.check_size(sum(map(measure, parts)))
        return parts

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the parts of an output; the error comes before they fill the memory."""
        size = 0
        kept = list[str]()
        for part in parts:
            size += len(part)
            if size > _budget.size:
                break
            kept.append(part)
        _budget.check_size(size)
        return "".join(kept)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(
            obj, check_value(argument) if isinstance(argument, tuple) else argument
        )

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:
            _budget.check_size(len(left) + len(right))
            return left + right
        sizes = measure(left), measure(right)
        _budget.check_size(sum(sizes))
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(count, int) and not isinstance(value, (int, float)):
                    _budget.check_size(measure(value) * max(0, count))
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            num_bits = (
                left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length()
            )
            if num_bits > MAX_BITS:
                raise TemplateLimitError(
                    f"target: its chat template computes a number that is too large; {ADVICE}"
                )
        if operator == "%" and isinstance(left, str):
            check_format(left)
            check_printed(right)
        return check_value(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *arguments: Any, **options: Any) -> Any:
        _budget.take(STEPS_PER_CALL)
        if isinstance(__obj, (Macro, LoopContext)):
            # A recursive loop is called with what it iterates over.
            values = map(_CountedLoop, arguments) if isinstance(__obj, LoopContext) else arguments
            return super().call(__context, __obj, *values, **options)
        owner = getattr(__obj, "__self__", None)
        if owner is not __self:
            name = getattr(__obj, "__name__", "")
            values = arguments
            check_arguments(
                name, (owner, *values) if isinstance(__obj, BuiltinMethodType) else values, options
            )
        return check_value(super().call(__context, __obj, *arguments, **options))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapper = super().wrap_str_format(value)
        if wrapper is None:
            return None
        text = value.__self__
        is_map = value.__name__ == "format_map"

        def format_text(*arguments: Any, **options: Any) -> str:
            options, arguments = (arguments[0], ()) if is_map else (options, arguments)
            return type(text)(LimitedFormatter(self).vformat(text, arguments, options))

        return format_text


_compile_unlimited = chat_template_utils._compile_jinja_template


@lru_cache
def compile_limited(source: str) -> Template:
    """Compile a chat template as `transformers` does, with limits."""
    if len(source) > MAX_SOURCE:
        raise TemplateLimitError(
            f"target: its chat template has more than {MAX_SOURCE} characters; {ADVICE}"
        )
    with _lock:
        # What is constant is computed while compiling.
        _budget.begin(source)
        return LimitedEnvironment(_compile_unlimited("").environment).from_string(source)


# All renderings of `transformers` in this process compile by this name.
chat_template_utils._compile_jinja_template = compile_limited
