"""How large the house is and how far a value walks in it, counted from the source.

    python -m scripts.measure_house          # of this repository
    python -m scripts.measure_house DIR      # of another checkout

Lines and characters count files of code without tests. The members of a class are the names that
its body and its bases in the repository define. A walk follows one argument of a function: each
call that receives it, or is a method of it, is a stay, and the function there is read once. What a
call returns is followed if it has a type of the walk.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOMS = {
    "spectrain": ("spectrain", "spectrain"),
    "eval": ("eval", "spectrain.eval"),
    "kernels": ("kernels", "spectrain.kernels"),
    "packages/coder": ("packages/coder/spectrain_coder", "spectrain_coder"),
    "packages/cpu": ("packages/cpu/spectrain_cpu", "spectrain_cpu"),
    "packages/research": ("packages/research/spectrain_research", "spectrain_research"),
    "packages/serve": ("packages/serve/spectrain_serve", "spectrain_serve"),
    "packages/studies": ("packages/studies/spectrain_studies", "spectrain_studies"),
}
"""Room -> its folder, and the name that its modules are imported by."""
WALKS = (
    ("spectrain.runs.train", "train_and_score", "spec"),
    ("spectrain.runs.score", "evaluate", "spec"),
    ("spectrain_serve.scoring.command", "score_server", "config"),
    ("spectrain.decoding.loop", "run_round", "context"),
)
FOLLOWED_TYPES = ("RunSpec", "GroupSpec", "Context", "Mapping", "dict")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Module:
    """A file of code."""

    name: str
    path: Path
    text: str
    is_package: bool

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def definitions(self) -> dict[str, ast.stmt]:
        """The functions and classes of the module by name, methods as Class.method."""
        result: dict[str, ast.stmt] = {}
        for node in self.tree.body:
            if isinstance(node, (ast.ClassDef, Function)):
                result[node.name] = node
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, Function):
                    result[f"{node.name}.{method.name}"] = method
        return result

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """Name -> module and name that it is imported from, inside of functions too."""
        result = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                parts = self.name.split(".")
                above = parts[: len(parts) - node.level + self.is_package] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                result |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
        return result


@dataclass
class House:
    """The modules of a checkout."""

    modules: dict[str, Module] = field(default_factory=dict)
    rooms: dict[str, list[Module]] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path) -> "House":
        house = cls()
        for room, (folder, name) in ROOMS.items():
            base = root / folder
            for path in sorted(base.rglob("*.py")):
                inner = path.relative_to(base)
                # The links of the package lead to other rooms.
                if room == "spectrain" and inner.parts[0] in ("eval", "kernels", "conf"):
                    continue
                parts = [name, *inner.with_suffix("").parts]
                is_package = parts[-1] == "__init__"
                module_name = ".".join(parts[:-1] if is_package else parts)
                module = Module(module_name, path, path.read_text(), is_package)
                house.modules[module_name] = module
                house.rooms.setdefault(room, []).append(module)
        return house

    def find(self, module: Module, name: str) -> tuple[Module, str] | None:
        """Return where a name of a module is defined, followed through imports."""
        if name in module.definitions:
            return module, name
        source, own = module.imports.get(name, ("", ""))
        other = self.modules.get(source)
        return None if other is None else self.find(other, own)

    def list_classes(self, module: Module, name: str) -> Iterator[tuple[Module, ast.ClassDef]]:
        """Yield a class and its bases in the repository."""
        result = self.find(module, name)
        node = None if result is None else result[0].definitions[result[1]]
        if result is None or not isinstance(node, ast.ClassDef):
            return
        yield result[0], node
        for base in node.bases:
            if isinstance(base, ast.Name):
                yield from self.list_classes(result[0], base.id)

    def count_members(self, module: Module, name: str) -> int:
        members = set()
        for _, node in self.list_classes(module, name):
            for item in node.body:
                if isinstance(item, Function):
                    members.add(item.name)
                elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    members.add(item.target.id)
        return len(members)


@dataclass
class Walk:
    """The way of one argument."""

    house: House
    stays: int = 0
    files: set[Path] = field(default_factory=set)
    read: set[tuple[str, str]] = field(default_factory=set)

    def enter(self, module: Module, name: str, followed: dict[str, str]) -> None:
        """Read a function in which these variables, with their types, are followed."""
        self.stays += 1
        self.files.add(module.path)
        if (module.name, name) in self.read:
            return
        self.read.add((module.name, name))
        node = module.definitions[name]
        for inner in sorted(ast.walk(node), key=position):
            if isinstance(inner, ast.Assign) and len(inner.targets) == 1:
                followed |= self.find_assigned(module, inner.targets[0], inner.value, followed)
            elif isinstance(inner, ast.Call):
                self.follow_call(module, inner, followed)

    def find_assigned(
        self, module: Module, target: ast.expr, value: ast.expr, followed: dict[str, str]
    ) -> dict[str, str]:
        """Return the followed variables that an assignment makes, with their types."""
        if isinstance(target, ast.Name):
            kinds = [self.find_type(module, value, followed)]
            names = [target]
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Call):
            callee = self.find_callee(module, value.func, followed)
            node = None if callee is None else callee[0].definitions[callee[1]]
            returns = node.returns if isinstance(node, Function) else None
            inner = returns.slice if isinstance(returns, ast.Subscript) else None
            kinds = [simple_type(part) for part in getattr(inner, "elts", ())]
            names = [each for each in target.elts if isinstance(each, ast.Name)]
        else:
            return {}
        return {name.id: kind for name, kind in zip(names, kinds) if kind in FOLLOWED_TYPES}

    def follow_call(self, module: Module, call: ast.Call, followed: dict[str, str]) -> None:
        """Enter the function that is called, if it receives what is followed or is a method of
        it.
        """
        target = self.find_callee(module, call.func, followed)
        if target is None:
            return
        owner, name, own = target
        node = owner.definitions[name]
        if isinstance(node, ast.ClassDef):
            name = f"{name}.__init__"
            if name not in owner.definitions:
                return
            node = owner.definitions[name]
        assert isinstance(node, Function)
        names = [argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]]
        passed = {names[0]: own} if own and names[:1] == ["self"] else {}
        rest = names[1:] if names[:1] in (["self"], ["cls"]) else names
        given = [*zip(rest, call.args), *((key.arg or "", key.value) for key in call.keywords)]
        for parameter, value in given:
            if kind := self.find_type(module, value, followed):
                passed[parameter] = kind
        if passed:
            self.enter(owner, name, passed)

    def find_callee(
        self, module: Module, function: ast.expr, followed: dict[str, str]
    ) -> tuple[Module, str, str] | None:
        """Return the module and the name of a called function, and the followed type that it is a
        method of.
        """
        if isinstance(function, ast.Name):
            result = self.house.find(module, function.id)
            return None if result is None else (*result, "")
        if not isinstance(function, ast.Attribute):
            return None
        kind = self.find_type(module, function.value, followed)
        classes = [kind] if kind else []
        if not kind and isinstance(function.value, ast.Name):
            classes = [function.value.id]
        for name in classes:
            for owner, node in self.house.list_classes(self.home_of(module, name), name):
                method = f"{node.name}.{function.attr}"
                if method in owner.definitions:
                    return owner, method, kind
        return None

    def home_of(self, module: Module, name: str) -> Module:
        """Return a module that knows a class, this one if it does."""
        if self.house.find(module, name) is not None:
            return module
        candidates = (each for each in self.house.modules.values() if name in each.definitions)
        return next(candidates, module)

    def find_type(self, module: Module, value: ast.expr, followed: dict[str, str]) -> str:
        """Return the type of what is followed in an expression, "" of anything else."""
        if isinstance(value, ast.Name):
            return followed.get(value.id, "")
        if isinstance(value, ast.Attribute):
            kind = self.find_type(module, value.value, followed)
            home = self.home_of(module, kind)
            for _, node in self.house.list_classes(home, kind) if kind else ():
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and ast.unparse(item.target) == value.attr:
                        return simple_type(item.annotation)
            return ""
        if isinstance(value, ast.Call):
            target = self.find_callee(module, value.func, followed)
            node = None if target is None else target[0].definitions[target[1]]
            kind = simple_type(node.returns) if isinstance(node, Function) else ""
            if kind == "Any" and any(self.find_type(module, each, followed) for each in value.args):
                kind = "dict"
            return kind if kind in FOLLOWED_TYPES else ""
        return ""


def position(node: ast.AST) -> tuple[int, int]:
    """Return where a node ends, which is the order in which calls are made."""
    return getattr(node, "end_lineno", 0) or 0, getattr(node, "end_col_offset", 0) or 0


def simple_type(annotation: ast.expr | None) -> str:
    """Return the class that an annotation names, without its parameters and None."""
    text = "" if annotation is None else ast.unparse(annotation).strip("'\"")
    return text.split("|")[0].split("[")[0].strip()


def measure_walk(house: House, module: str, name: str, parameter: str) -> Walk:
    """Follow an argument through the house."""
    walk = Walk(house)
    home = house.modules[module]
    node = home.definitions[name]
    assert isinstance(node, Function)
    kinds = {argument.arg: simple_type(argument.annotation) for argument in node.args.args}
    walk.enter(home, name, {parameter: kinds[parameter]})
    # The function itself is where the value begins.
    walk.stays -= 1
    return walk


def describe_house(house: House) -> Iterator[str]:
    """Yield the lines of the tables."""
    yield "| room | files | lines | characters a line | lines over 100 columns |"
    yield "|---|---:|---:|---:|---:|"
    for room, modules in house.rooms.items():
        lines = [line for module in modules for line in module.text.splitlines()]
        full = [line for line in lines if line.strip()]
        width = sum(map(len, full)) / max(1, len(full))
        long = sum(len(line) > 100 for line in lines)
        yield f"| {room} | {len(modules)} | {len(lines):,} | {width:.1f} | {long} |"
    sizes = [
        (house.count_members(module, node.name), f"{module.name}.{node.name}")
        for module in house.modules.values()
        for node in module.tree.body
        if isinstance(node, ast.ClassDef)
    ]
    yield "\n| largest classes | members |\n|---|---:|"
    for count, name in sorted(sizes, reverse=True)[:8]:
        yield f"| {name} | {count} |"
    yield "\n| walk | stays | files |\n|---|---:|---:|"
    for module, name, parameter in WALKS:
        if name in house.modules[module].definitions:
            walk = measure_walk(house, module, name, parameter)
            yield f"| {module}:{name}:{parameter} | {walk.stays} | {len(walk.files)} |"


def main(arguments: Sequence[str]) -> None:
    root = Path(arguments[0]) if arguments else Path(__file__).parents[1]
    print("\n".join(describe_house(House.read(root))))


if __name__ == "__main__":
    main(sys.argv[1:])
