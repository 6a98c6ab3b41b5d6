"""Rules of the code base: imports point to lower levels, class names are unique, and functions
fit on a screen.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from spectrain.config.missing import read_package_names

ROOT = Path(__file__).parents[1]
CODE = ("spectrain", "eval", "kernels")
PACKAGES = tuple(
    path.parent.relative_to(ROOT).as_posix()
    for path in sorted(ROOT.glob("packages/*/spectrain_*/__init__.py"))
)
"""The folders of code of the packages beside the core, which import it and which it finds by
their entry points.
"""

ROOMS = (
    ("kernels", "copying"),
    ("output", "errors", "files", "randomness", "provenance"),
    ("config",),
    ("integrations",),
    ("trees",),
    ("data",),
    ("models",),
    ("servers",),
    ("features",),
    ("drafters",),
    ("decoding",),
    ("training",),
    ("export",),
    ("runs", "regeneration"),
    ("eval",),
    tuple(Path(package).name for package in PACKAGES),
    ("cli",),
    ("__init__", "__main__"),
)
"""The rooms, and the modules beside them, each of which imports from those of its line and the
lines before it.
"""
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
PLAIN = {
    "base",
    "capabilities",
    "context",
    "step_cost",
    "__init__",
}  # modules in drafters/ that are no family

SINGLE_PROGRAM = {
    "kernels/row_kl.py:_row_kl_kernel",
    "kernels/tree_attention.py:_split_kernel",
    "kernels/tree_recursive.py:_reject_kernel",
    "spectrain_cpu/copies.py:_merge_continuations_kernel",
}
"""Kernels of more than 45 statements: one program for the device is one function here."""
IMPOSED = {
    "models/attention.py:layer_attention",  # transformers calls it, by these names
    # an operation that torch traces takes no objects
    "models/cached_attention.py:_attend_compiled",
    "models/compiled_layers.py:_attend_with_cache",
    "models/compiled_layers.py:attend_layer",
    "spectrain_cpu/linear.py:_emit_tile",  # it emits the code of a kernel
}
CONFIGURED = {
    "drafters/causal.py:Causal",
    "drafters/eagle1.py:Eagle1",
    "drafters/eagle3.py:Eagle3",
    "drafters/early_exit.py:EarlyExit",
    "drafters/medusa.py:Medusa",
    "drafters/pard.py:Pard",
    "drafters/peagle.py:PEagle",
}
"""Classes whose constructors mirror a yaml of more than eight settings; packages name theirs
beside their tests.
"""


@cache
def list_sources(folder: str) -> list[Path]:
    return [
        path
        for path in (ROOT / folder).rglob("*.py")
        if not any(part.is_symlink() for part in path.parents)
    ]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def core_code() -> list[Path]:
    return [path for folder in CODE for path in list_sources(folder)]


def code() -> list[Path]:
    """Return the files of the core and of the packages."""
    return [*core_code(), *(path for folder in PACKAGES for path in list_sources(folder))]


def inside(path: Path) -> str:
    """Return a file's path in the core, such as models/target.py, or in the packages, such as
    spectrain_NAME/saved.py.
    """
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[{"spectrain": 1, "packages": 2}.get(parts[0], 0) :])


def room_of(path: Path) -> str:
    return inside(path).split("/")[0].removesuffix(".py")


@cache
def imports(path: Path) -> set[str]:
    """Return the modules of ours that a file imports, local and type-only imports too, without
    the `spectrain.`; `__init__` is what the package itself has.
    """
    folders = inside(path).split("/")[:-1]
    package = folders if path.is_relative_to(ROOT / "packages") else ["spectrain", *folders]
    return list_imported(tree(path), package)


def list_imported(module: ast.Module, package: list[str]) -> set[str]:
    """Return the modules of ours that a module in a package imports."""
    modules: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            modules |= {f"{name}.{alias.name}" for alias in node.names}
    names = tuple(f"{Path(folder).name}." for folder in PACKAGES)
    ours = {name for name in modules if name.startswith(("spectrain.", *names))}
    bare = {name for name in modules if name == "spectrain"}
    bare |= {name for name in ours if re.fullmatch(r"spectrain\.\w+", name) and is_attribute(name)}
    return {name.removeprefix("spectrain.") for name in ours - bare} | {"__init__" for _ in bare}


def is_attribute(name: str) -> bool:
    """Return whether `spectrain.NAME` is neither a module nor a folder."""
    path = ROOT / name.replace(".", "/")
    return not path.is_dir() and not path.with_suffix(".py").exists()


@pytest.mark.parametrize(
    ("statement", "module"),
    [
        ("def f():\n    import spectrain", "__init__"),
        ("from spectrain import Target", "__init__"),
        ("from .. import Target", "__init__"),
        ("from spectrain import errors", "errors"),
        ("from ..models.target import Target", "models.target.Target"),
    ],
)
def test_every_form_of_import_counts(statement: str, module: str) -> None:
    """An import of the package itself, inside a function too, is one of `spectrain/__init__.py`."""
    assert list_imported(ast.parse(statement), ["spectrain", "eval"]) == {module}


def list_edges() -> Iterator[tuple[Path, str]]:
    """Yield every file with each other room that it imports from."""
    for path in code():
        for name in sorted({name.split(".")[0] for name in imports(path)}):
            room = name if name in LEVEL else "__init__"
            if room != room_of(path) and room != "conf":
                yield path, room


def test_every_room_has_a_level() -> None:
    """A new room needs a line in ROOMS; few modules stand beside the rooms."""
    assert {room_of(path) for path in code()} <= LEVEL.keys()
    assert PACKAGES
    assert len([path for path in (ROOT / "spectrain").glob("*.py")]) <= 6


def test_imports_point_to_lower_levels() -> None:
    """Each file imports from rooms on its own line or on an earlier one."""
    wrong = {
        f"{inside(path)} -> {room}"
        for path, room in list_edges()
        if LEVEL[room] > LEVEL[room_of(path)]
    }
    assert not wrong, sorted(wrong)


def test_rooms_have_no_cycles() -> None:
    """Those on one line, too, may not import each other both ways."""
    rooms: dict[str, set[str]] = defaultdict(set)
    for path, room in list_edges():
        if LEVEL[room] >= 2:
            rooms[room_of(path)].add(room)
    try:
        TopologicalSorter(rooms).prepare()
    except CycleError as error:
        pytest.fail(f"rooms import each other: {error.args[1]}")


def test_the_core_imports_no_package() -> None:
    """The core finds packages by entry points, and a package imports another one only if it
    requires it.
    """
    names = {Path(folder).name for folder in PACKAGES}
    required = {name: {name, *list_required(name)} for name in names}
    for path in code():
        foreign = names - required.get(room_of(path), set())
        assert not {name.split(".")[0] for name in imports(path)} & foreign, inside(path)


def list_required(package: str) -> set[str]:
    """Return the packages of the repository that a package's pyproject.toml requires."""
    folder = package.removeprefix("spectrain_")
    text = (ROOT / "packages" / folder / "pyproject.toml").read_text()
    return {name.replace("-", "_") for name in re.findall(r'"(spectrain-\w+)==', text)}


def test_what_ships_imports_nothing_beside_it() -> None:
    """The laboratory, scripts, tests and examples are in no wheel."""
    pattern = re.compile(r"^\s*(?:from|import) (?:lab|scripts|tests|examples)\b", re.MULTILINE)
    assert not [inside(path) for path in code() if pattern.search(path.read_text())]


def test_the_tests_of_the_core_import_no_package() -> None:
    """They pass without the packages, whose tests may import them."""
    pattern = re.compile(
        rf"^\s*(?:from|import) (?:packages|{'|'.join(Path(folder).name for folder in PACKAGES)})\b",
        re.MULTILINE,
    )
    assert not [path for path in (ROOT / "tests").rglob("*.py") if pattern.search(path.read_text())]


HOMONYMS = {
    "adaptive", "beam", "beams", "bounded", "cast", "chosen", "codes", "controllers", "default",
    "devices",
    "diffusion", "entropy", "exits", "expected_length", "falcon", "generated", "graph",
    "guidance", "hydra", "importance",
    "int4", "joint", "judge", "loose", "mixture", "near", "nearby", "on_policy", "online", "opt",
    "other_device",
    "overlap", "pipelines", "policy", "pruning", "qwen2.5-coder-1.5b", "rank", "router", "self",
    "shared", "sigmoid",
    "sinks", "space",
    "spectrain", "sweeps", "transport", "traversal", "union", "universal",
}  # fmt: skip
"""Names of ideas that are other things too: words, terms (on-policy), a library (hydra), a model
(falcon), a type (int4), a target (qwen2.5-coder-1.5b), this project (spectrain).
"""


def list_idea_names() -> dict[str, set[str]]:
    """Return group -> names: the choices that packages add, and under "" the folders of their
    ideas, which have a README each.
    """
    groups: dict[str, set[str]] = defaultdict(set)
    for package in read_package_names().values():
        for group, names in package.items():
            # Formats and servers are named after other projects, a source after what computes.
            if "." not in group and group not in ("format", "server", "source"):
                groups[group] |= {*names}
    groups[""] = {
        path.parent.name for folder in PACKAGES for path in (ROOT / folder).glob("*/README.md")
    }
    return groups


def core_texts() -> list[Path]:
    """Return the files of the core with code or configuration."""
    return [
        *core_code(),
        *(ROOT / "conf").rglob("*.yaml"),
        *(ROOT / "recipes").glob("*.yaml"),
        *(ROOT / "spectrain").rglob("*.yaml"),
    ]


def test_no_package_is_named_in_the_core() -> None:
    """Entry points lead to packages; packages.json alone names them."""
    names = {Path(folder).name for folder in PACKAGES}
    names |= {name.replace("_", "-") for name in names}
    pattern = re.compile(rf"\b(?:{'|'.join(sorted(names))})\b(?!-)")
    assert not {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in core_texts()
        for match in pattern.finditer(path.read_text())
    }


def test_no_idea_is_named_in_the_core() -> None:
    """Neither code nor configuration has a name of an idea, as a word or as GROUP=NAME;
    packages.json alone lists them.
    """
    groups = list_idea_names()
    plain = {name for names in groups.values() for name in names} - HOMONYMS
    patterns = [rf"(?<![\w.-])(?:{'|'.join(sorted(plain))})(?![\w-])"]
    patterns += [
        rf"\b{group}=(?:{'|'.join(sorted(names))})(?![\w-]|\.\w)"
        for group, names in groups.items()
        if group
    ]
    pattern = re.compile("|".join(patterns))
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in core_texts()
        for match in pattern.finditer(path.read_text())
    }
    assert not found, sorted(found)


def test_kernels_stand_alone() -> None:
    for path in list_sources("kernels"):
        assert all(name.startswith("kernels.") for name in imports(path)), path


def list_families() -> set[str]:
    return {path.stem for path in (ROOT / "spectrain" / "drafters").glob("*.py")} - PLAIN


def test_families_are_apart() -> None:
    """No family imports another one, nor does what they share, or their contract, import any."""
    for path in list_sources("spectrain/drafters"):
        others = {f"drafters.{family}" for family in list_families() - {path.stem}}
        modules = {".".join(name.split(".")[:2]) for name in imports(path)}
        assert not others & modules, path


@pytest.mark.parametrize("room", ["training", "data", "features", "decoding"])
def test_no_family_is_named(room: str) -> None:
    """What trains, feeds and runs drafters neither imports a family nor asks for one by its
    name.
    """
    for path in list_sources(f"spectrain/{room}"):
        modules = {".".join(name.split(".")[:2]) for name in imports(path)}
        assert not {f"drafters.{family}" for family in list_families()} & modules, path
        strings = {
            node.value
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not list_families() & strings, path


def list_functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield every function of ours, as path:Class.name."""

    def walk_functions(
        node: ast.AST, name: str
    ) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{name}{child.name}", child
            inner = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            yield from walk_functions(child, f"{name}{child.name}." if inner else name)  # type: ignore[attr-defined]

    for path in code():
        yield from walk_functions(tree(path), f"{inside(path)}:")


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def is_compiled(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is compiled by Numba, so a kernel or a part of one."""
    names = [ast.unparse(decorator).lstrip("_") for decorator in node.decorator_list]
    return any(name.startswith(("compile_", "intrinsic")) for name in names)


def test_functions_take_few_parameters() -> None:
    """Eight at most, outside of kernels: past that, a type is missing."""
    long = set()
    for name, node in list_functions():
        if name.startswith("kernels/") or is_compiled(node):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if sum(argument.arg not in ("self", "cls") for argument in arguments) > 8:
            long.add(name)
    lists = [ROOT / folder / ".." / "tests" / "configured.txt" for folder in PACKAGES]
    configured = CONFIGURED.union(*map(read_lines, lists))
    allowed = IMPOSED | {"models/loading.py:load_hf"} | {f"{name}.__init__" for name in configured}
    assert long == allowed, sorted(long ^ allowed)


def test_functions_hold_few_statements() -> None:
    """None has more than 45 statements, and one in a hundred at most more than 30: what fits on a
    screen, however its lines are broken.
    """
    sizes = {
        name: sum(isinstance(inner, ast.stmt) for inner in ast.walk(node)) - 1
        for name, node in list_functions()
    }
    large = {name for name, size in sizes.items() if size > 45}
    assert large == SINGLE_PROGRAM, sorted(large ^ SINGLE_PROGRAM)
    many = {name for name, size in sizes.items() if size > 30}
    assert len(many - SINGLE_PROGRAM) <= 0.01 * len(sizes), sorted(many)


def is_packed(node: ast.Assign) -> bool:
    """Return whether an assignment gives several values to several names that differ from the
    values' own, as `rows, total = [], 0`; `self.q, self.p = q, p` is one thought.
    """
    targets = node.targets[0]
    if not (isinstance(targets, ast.Tuple) and isinstance(node.value, ast.Tuple)):
        return False
    if len(targets.elts) != len(node.value.elts):
        return False
    pairs = zip(targets.elts, node.value.elts, strict=True)
    return any(
        ast.unparse(target).rpartition(".")[2] != ast.unparse(value).rpartition(".")[2]
        for target, value in pairs
    )


def test_an_assignment_holds_one_thought() -> None:
    """Of all assignments, at most five in a thousand pack several values into a tuple: those that
    swap names, or set a few entries of one array.
    """
    assignments = [
        (f"{inside(path)}:{node.lineno}", node)
        for path in code()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Assign)
    ]
    packed = [place for place, node in assignments if is_packed(node)]
    assert len(packed) <= 0.005 * len(assignments), packed


def test_few_statements_keep_a_form_of_their_own() -> None:
    """The formatter is told to leave tables alone, and nothing else: two in a hundred files."""
    skips = sum(path.read_text().count("# fmt:") for path in code())
    assert skips <= 0.02 * len(list(code())), skips


def test_class_names_are_unique() -> None:
    counts = Counter(
        node.name
        for path in code()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    )
    repeated = {name for name, count in counts.items() if count > 1}
    assert not repeated, sorted(repeated)
