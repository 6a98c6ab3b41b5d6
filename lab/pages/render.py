"""The renderer of measured results: `measurements.yaml` declares what each section of a page shows
of lab/results/*.json.

A measurement has `files`, the `command` that wrote them, and `parts`, which are rendered in order:

- `text`: a paragraph or a heading, filled from the first file;
- `table`: `rows` is the path of a list of rows or of a mapping, whose rows get its keys as `key`;
  `where` selects rows; `columns` maps titles to templates. A title `*PATH` is a column for each key
  of the mapping PATH of a row, whose template is filled from the key's value;
- `each`: the path of a mapping; its `parts` are rendered for every key;
- `setting`: the path of what has a setting, which is shown in one line;
- `call`: a function that computes what no declaration can, by its import path, of all files.

A part with `file: N` reads the N-th file alone instead of the first, or of all. A template is text
with fields {PATH:FORMAT}: names and indices joined by dots, from the row, or with a slash in front
from the file. `A|B` is the first of two that exists, and {PATH?TEXT} is TEXT where there is none.
FORMAT is one of FORMATS or one of Python's.
"""

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from string import Formatter
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab" / "results"
MEASUREMENTS = Path(__file__).with_name("measurements.yaml")
BLOCK = re.compile(r"(<!-- measured: (\S+) -->\n).*?(<!-- /measured -->)", re.DOTALL)
ABSENT = object()


def load_results(name: str) -> Any:
    """Return a file of lab/results."""
    return json.loads((RESULTS / name).read_text())


def load_measurements() -> dict[str, dict[str, Any]]:
    """Return the declared measurements by name."""
    measurements: dict[str, dict[str, Any]] = yaml.safe_load(MEASUREMENTS.read_text())
    return measurements


def fill_page(text: str, measurements: Mapping[str, dict[str, Any]]) -> str:
    """Return a page with what lies between its marks of measurements rendered anew."""

    def render(match: re.Match[str]) -> str:
        return f"{match[1]}{render_measurement(measurements[match[2]])}\n{match[3]}"

    return BLOCK.sub(render, text)


def render_measurement(measurement: dict[str, Any]) -> str:
    """Return the source, the command, the setting and the parts of a measurement."""
    documents = [load_results(name) for name in measurement["files"]]
    sources = " and ".join(f"`lab/results/{name}`" for name in measurement["files"])
    parts = [
        f"Generated from {sources} by `lab/pages/make_pages.py`. The command that measured it:",
        f"```sh\n{measurement['command'].rstrip()}\n```",
        describe_setting(documents[0]),
        *render_parts(measurement["parts"], documents),
    ]
    return "\n\n".join(filter(None, parts))


def render_parts(parts: Iterable[dict[str, Any]], documents: list[Any]) -> Iterator[str]:
    """Yield the markdown of each part, headings one level below the section's."""
    for part in parts:
        document = documents[part.get("file", 0)]
        if "each" in part:
            for key, value in read_path(document, part["each"]).items():
                yield from render_parts(part["parts"], [{"key": key, "value": value}])
        elif "call" in part:
            module, _, name = part["call"].rpartition(".")
            compute = getattr(import_module(module), name)
            text = compute(*([document] if "file" in part else documents))
            yield re.sub(r"^(?=##+ )", "#", text, flags=re.MULTILINE)
        elif "text" in part:
            yield fill_paragraphs(fill_template(part["text"], document, document).rstrip())
        elif "setting" in part:
            yield describe_setting(read_path(document, part["setting"]))
        else:
            yield render_table(part["table"], document)


def render_table(table: dict[str, Any], document: Any) -> str:
    """Return a declared table, filled from a file."""
    rows = read_path(document, table["rows"])
    if isinstance(rows, Mapping):
        rows = [{"key": key, **row} for key, row in rows.items()]
    where = table.get("where", {})
    rows = [row for row in rows if all(row[key] == value for key, value in where.items())]
    columns = list(expand_columns(table["columns"], rows[0]))
    cells = (
        [fill_template(template, read_path(row, path), document) for _, path, template in columns]
        for row in rows
    )
    return format_table((title for title, _, _ in columns), cells)


def expand_columns(columns: Mapping[str, str], row: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the title of each column, the path in a row that it is filled from, and its
    template.
    """
    for title, template in columns.items():
        if title.startswith("*"):
            path = title[1:]
            yield from ((key, f"{path}.{key}", template) for key in read_path(row, path))
        else:
            yield title, "", template


def read_path(value: Any, path: str) -> Any:
    """Return what a path of keys and indices leads to; ABSENT where it ends before."""
    for name in filter(None, path.split(".")):
        if isinstance(value, list):
            value = value[int(name)]
        elif isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            return ABSENT
    return value


class Substitute(str):
    """What stands where a result has no entry."""


class Template(Formatter):
    """Fills templates from a row and from the file that it is of."""

    def __init__(self, row: Any, document: Any) -> None:
        self.row = row
        self.document = document

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        paths, is_optional, substitute = field_name.partition("?")
        for path in paths.split("|"):
            source = self.document if path.startswith("/") else self.row
            value = read_path(source, path.removeprefix("/"))
            if value is not ABSENT and value is not None:
                return value, path
        if not is_optional:
            raise KeyError(f"{field_name}: the result has no such entry")
        return Substitute(substitute), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, Substitute):
            return value
        write = FORMATS.get(format_spec)
        return format(value, format_spec) if write is None else write(value)


def fill_template(template: str, row: Any, document: Any) -> str:
    """Return a template with its fields filled from a row, or from the file."""
    return Template(row, document).format(template)


def format_table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a markdown table."""
    titles = list(titles)
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])


def format_interval(interval: list[float]) -> str:
    return f"[{interval[0]:.2f}, {interval[1]:.2f}]"


def format_length(system: dict[str, Any]) -> str:
    """Return tokens per forward with their interval; `system` holds them flat or below
    acceptance_length.
    """
    length = system["acceptance_length"]
    if isinstance(length, dict):
        return f"{length['pooled']:.2f} {format_interval(length['ci95'])}"
    return f"{length:.2f} {format_interval(system['ci95'])}"


def format_ratio(ratio: dict[str, Any]) -> str:
    """Return a ratio with its interval."""
    return f"{ratio['ratio']:.2f} {format_interval(ratio['ci95'])}"


def format_speed(system: dict[str, Any]) -> str:
    """Return the speedup of a system with its interval."""
    speed = system["speedup"]
    return f"{speed['ratio']:.2f}x {format_interval(speed['ci95'])}"


def format_difference(ratio: dict[str, Any]) -> str:
    """Return a ratio to a base, in bold where it excludes 1 for all prompts and lies on one side
    of it for every seed.
    """
    return f"**{format_ratio(ratio)}**" if ratio["differs"] else format_ratio(ratio)


def format_rates(rates: Iterable[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)


def format_gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


def format_names(name: str) -> str:
    """Return the parts of a name that pluses join, each as code."""
    return ", ".join(f"`{part}`" for part in name.split("+"))


def shorten_command(command: str) -> str:
    """Return the settings of a command that name its drafter, tree or training."""
    named = ("run=", "drafter", "tree", "acceptance", "eval.overlap")
    return " ".join(word for word in command.split() if word.startswith(named))


FORMATS: dict[str, Callable[[Any], str]] = {
    "length": format_length,
    "ratio": format_ratio,
    "difference": format_difference,
    "speed": format_speed,
    "interval": format_interval,
    "rates": format_rates,
    "thousandths": lambda rates: " ".join(f"{rate:.3f}" for rate in rates),
    "list": lambda values: ", ".join(f"{value:.2f}" for value in values),
    "names": format_names,
    "words": " ".join,
    "command": shorten_command,
    "gigabytes": format_gigabytes,
    "giga": lambda value: f"{value / 1e9:.0f}",
    "gigas": lambda value: f"{value / 1e9:.1f}",
    "teras": lambda value: f"{value / 1e12:.2f}",
    "megabytes": lambda size: f"{size / 1e6:.2f} MB",
    "percent": lambda value: f"{100 * value:.0f}",
    "capitalized": lambda text: text[0].upper() + text[1:],
    "if not fitting": lambda fits: "" if fits else " (does not fit)",
}
"""What a template may write after the colon of a field, besides Python's formats."""


def fill_paragraphs(text: str) -> str:
    """Wrap each paragraph of a text at 128 characters; headings and blocks of code stay."""
    fill = partial(textwrap.fill, width=128, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join(
        part if part.startswith(("#", "```")) else fill(part) for part in text.split("\n\n")
    )


def describe_setting(result: Any) -> str:
    """Return one line with the machine, the versions, the commit and the day of a measurement;
    empty where none is recorded.
    """
    known = isinstance(result, dict)
    facts = list_facts(result.get("provenance", result.get("setting", {}))) if known else ""
    return f"Setting: {facts}." if facts else ""


def list_facts(setting: dict[str, Any]) -> str:
    """Return the machine, the versions, the commit and the day of a measurement, as far as they
    are recorded.
    """
    packages = ("torch", "transformers") if "versions" in setting else ()
    versions = ", ".join(f"{name} {setting['versions'][name]}" for name in packages)
    hardware = setting.get("hardware", setting)
    cores = (
        f", {hardware['cores']} core{'s' * (hardware['cores'] > 1)}" if "cores" in hardware else ""
    )
    machine = f"{hardware['processor']}{cores}" if "processor" in hardware else ""
    commit = f"commit {setting['commit'][:12]}" if setting.get("commit") else ""
    day = setting.get("date", "")[:10]
    return "; ".join(filter(None, [machine, versions, commit, day]))
