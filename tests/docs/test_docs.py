"""README, CONTRIBUTING and docs/: commands are real, links lead somewhere, and the pages build."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from lab.pages.make_pages import FOLDER, render_result_pages
from lab.pages.make_picture import NUMBERS, PICTURE, draw_picture
from lab.pages.render import BLOCK, load_measurements
from scripts.make_reference import INTERFACE_PAGE, SETTINGS_PAGE, render_pages
from spectrain.cli import help, main
from spectrain.config.choices import (
    choice_files,
    conf_folders,
    find_owners,
    load_schema,
    select_choices,
    settings_by_group,
)
from spectrain.config.grouped import drop_part
from spectrain.errors import UserError
from spectrain.export import engine_support
from spectrain.export.layouts import LAYOUTS

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
DOCUMENTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in FILES}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Pages that the site writes while it is built.
GENERATED = {SETTINGS_PAGE, INTERFACE_PAGE}
REFERENCE = render_pages()
# Settings of all drafters that no constructor has.
EVERY_DRAFTER = {"init"}
ENDS_COMMAND = {"&&", "||", ";", "|", "&"}
REPOSITORY_PATH = re.compile(
    r"(?:conf|docs|eval|examples|kernels|lab|packages|recipes|scripts|spectrain|tests)/[a-z0-9_./-]*"
)


def own_folders() -> list[Path]:
    """Return the folders of choices in this repository, without those of other packages that are
    installed.
    """
    return [folder for folder in conf_folders() if folder.resolve().is_relative_to(ROOT)]


def shell_lines(text: str) -> Iterator[list[str]]:
    """Yield the words of every shell line of a document: fenced lines, and commands within
    sentences.
    """
    fenced = "".join(body for language, body in FENCE.findall(text) if language == "sh")
    for line in fenced.replace("\\\n", " ").splitlines():
        yield shlex.split(line, comments=True)
    for span in re.findall(r"`(spectrain [^`\n]+)`", FENCE.sub("", text)):
        yield shlex.split(span)


def list_commands(text: str) -> list[str]:
    """Return what follows the word spectrain: the program, a module that a launcher runs, or a
    container.
    """
    result = []
    for words in (part for line in shell_lines(text) for part in split_line(line)):
        if "spectrain" in words and words[:2] != ["docker", "build"] and "COMMAND" not in words:
            result.append(shlex.join(words[words.index("spectrain") + 1 :]))
    return list(dict.fromkeys(result))


def split_line(words: list[str]) -> Iterator[list[str]]:
    """Yield the words of each command of a line."""
    while words:
        end = next((at for at, word in enumerate(words) if word in ENDS_COMMAND), len(words))
        yield words[:end]
        words = words[end + 1 :]


DOCUMENTED = [
    (name, command) for name, text in DOCUMENTS.items() for command in list_commands(text)
]


def check_command(command: str, patch: pytest.MonkeyPatch) -> None:
    """Check everything that happens before hydra composes: the command, its flags, groups,
    choices and keys.
    """
    words = shlex.split(command)
    name = " ".join(words[: 2 if words[0] in ("data", "bench") else 1])
    patch.chdir(ROOT)
    if name in help.COMMANDS and help.COMMANDS[name].config is None:
        flags = {flag.split()[0] for flag in help.COMMANDS[name].flags} | set(help.HELP_WORDS)
        unknown = [word for word in words if word.startswith("-") and word not in flags]
        assert not unknown, f"{name} has no {unknown}"
        return
    composed: list[Any] = []
    # A reader makes the run first.
    patch.setattr(main, "check_drafters", lambda *_: None)
    patch.setattr(main, "compose_and_call", lambda *arguments: composed.append(arguments))
    main.dispatch_command(words)
    for config, _, arguments in composed:
        check_keys(config, arguments)


def check_keys(config: str, arguments: list[str]) -> None:
    """Check that a dotted key is a setting of its group's choice, or of one that it may have."""
    schema = load_schema(config)
    settings = settings_by_group(schema, arguments)
    choices = select_choices(schema, arguments)
    for argument in arguments:
        group, dot, name = drop_part(argument.partition("=")[0]).partition(".")
        if dot and group in schema.groups | schema.nodes:
            is_chosen = group in choices or group in schema.nodes
            exists = (
                name in {key.name for key in settings.get(group, ())}
                if is_chosen
                else find_owners(group, name)
            )
            assert exists or (group == "drafter" and name in EVERY_DRAFTER), (
                f"{argument}: {group} has no such key"
            )


@pytest.mark.parametrize(("document", "command"), DOCUMENTED)
def test_documented_commands_exist(
    document: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_command(command, monkeypatch)


def test_commands_are_recognised_in_every_kind_of_line() -> None:
    """What a launcher or a comment adds is left out."""
    assert len(DOCUMENTED) > 80
    fenced = "```sh\nA=1 torchrun -m spectrain train \\\n    recipe=gkd  # so\nmake test\n```\n"
    text = f"{fenced}Say `spectrain doctor --json`, or\n```\nspectrain no\n```"
    assert list_commands(text) == ["train recipe=gkd", "doctor --json"]
    lines = "```sh\nspectrain runs | spectrain doctor && make test\n```\n"
    assert list_commands(lines) == ["runs", "doctor"]


@pytest.mark.parametrize(
    "command",
    [
        "tran recipe=gkd",
        "train recipe=gdk",
        "train recipe=gkd trainr.lr=1",
        "train target=tiny trainer.rl=1",
        "eval run=DIR tree=chain tree.widht=2",
        "eval run=DIR source.path=DIR",
        "lint DIR --goal tiny",
    ],
)
def test_the_check_refuses_mistakes(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((UserError, AssertionError)):
        check_command(command, monkeypatch)


# What such a program does first.
ACTIONS = {
    "docker": {"build", "run"},
    "kubectl": {"apply", "logs"},
    "pip": {"install"},
    "pipx": {"install"},
    "uv": {"tool"},
}
# Programs that a line of a shell block may begin with, besides spectrain, make and python.
PROGRAMS = {
    "curl",
    "echo",
    ".",
    "accelerate",
    "bash",
    "docker",
    "export",
    "kubectl",
    "pip",
    "sbatch",
    "pipx",
    "torchrun",
    "uv",
    "vllm",
}


def find_line_fault(line: str) -> str | None:
    """Say what is wrong with a line of a shell block; None for a line of commands that exist,
    one after another.
    """
    comment = " ".join(line.partition(" # ")[2].split())
    hidden = re.search(r"\bspectrain (\S+)|\bpython -m \S+", comment)
    if hidden and (hidden[1] is None or hidden[1] in {name.split()[0] for name in help.COMMANDS}):
        return f"a command behind #: {hidden[0]}"
    faults = map(find_command_fault, split_line(shlex.split(line, comments=True)))
    return next((fault for fault in faults if fault is not None), None)


def find_command_fault(words: list[str]) -> str | None:
    """Say what is wrong with the words of one command."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if not words:
        return None
    first = words[0].removeprefix(".venv/bin/")
    rest = words[1:]
    if first not in {"spectrain", "make", "python", *PROGRAMS}:
        return f"no known command: {first}"
    if "spectrain" in rest and "-m" not in rest and first != "docker":
        return f"two commands in a line: {shlex.join(words)}"
    if first == "." and len(rest) != 1:
        return f"one file is read: {shlex.join(words)}"
    if first == "make":
        missing = [word for word in rest if "=" not in word and word not in list_make_targets()]
        return f"make has no {missing}" if missing else None
    if first in ACTIONS and rest[0] not in ACTIONS[first]:
        return f"{first} has no {rest[0]}"
    if (
        first == "python"
        and rest[:1] == ["-m"]
        and rest[1].split(".")[0] in {"examples", "lab", "packages", "scripts", "tests"}
    ):
        return find_module_fault(rest[1], rest[2:])
    return None


def find_module_fault(name: str, words: list[str]) -> str | None:
    """Say what is wrong with a module of the repository that a command runs, and with its flags."""
    path = ROOT.joinpath(*name.split("."))
    files = [path.with_suffix(".py"), path / "__main__.py"]
    source = next((file.read_text() for file in files if file.is_file()), None)
    if source is None:
        return f"no module: {name}"
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    # A module may add them in a loop over their names.
    unknown = [
        flag for flag in flags if f'"{flag}"' not in source and f'"{flag[2:]}"' not in source
    ]
    return f"{name} has no {unknown}" if unknown else None


def list_make_targets() -> set[str]:
    """Return the targets of the Makefile."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_line_of_a_shell_block_is_a_command(document: str) -> None:
    """A block that was wrapped as prose begins lines with what is no command, and hides commands
    behind a #.
    """
    fenced = "".join(
        body for language, body in FENCE.findall(DOCUMENTS[document]) if language == "sh"
    )
    lines = fenced.replace("\\\n", " ").splitlines()
    assert not [(line, fault) for line in lines if (fault := find_line_fault(line)) is not None]


@pytest.mark.parametrize(
    "line",
    [
        ". .venv/bin/activate spectrain doctor",
        "spectrain doctor   # checks this machine spectrain plan",
        "recipe=eagle3    # memory and disk",
        "scores a drafter that needs no training",
        "spectrain bench decode spectrain chat",
        "python -m lab.benchmarks.nothing",
        "spectrain doctor && spectrum plan",
        "make models demo-nothing",
        "pipx instal spectrain",
        "python -m lab.benchmarks.context --nothing",
    ],
)
def test_wrapped_lines_are_found(line: str) -> None:
    assert find_line_fault(line) is not None


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_has_the_targets(document: str) -> None:
    """Every target of make that a sentence names exists."""
    named = set(re.findall(r"`make ([a-z-]+)", DOCUMENTS[document]))
    assert named <= list_make_targets()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_in_sentences_are_commands(document: str) -> None:
    """A program of the repository that a sentence names, as `python -m lab.pages.make_pages`."""
    spans = re.findall(r"`(python -m [^`]+)`", FENCE.sub("", DOCUMENTS[document]))
    faults = [find_line_fault(" ".join(span.split())) for span in spans]
    assert not [fault for fault in faults if fault is not None]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_paths_exist(document: str) -> None:
    """A path of the repository in a command or between backticks exists; one with a NAME in it
    is any such path.
    """
    text = DOCUMENTS[document]
    named = [word for words in shell_lines(text) for word in words] + re.findall(
        r"`([^`\n]+)`", FENCE.sub("", text)
    )
    paths = [
        part
        for word in named
        for part in (word, word.partition("=")[2])
        if REPOSITORY_PATH.fullmatch(part)
    ]
    assert not [
        path
        for path in paths
        if not (ROOT / path).exists() and not (ROOT / "spectrain" / path).exists()
    ]


def list_anchors(text: str) -> set[str]:
    """Return the anchors of a page, as forges and mkdocs derive them from its headings."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    """Every relative link names a file, and every anchor one of its headings."""
    folder = (ROOT / document).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", DOCUMENTS[document])):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (folder / name).resolve() if name else ROOT / document
        assert path.exists(), target
        assert not anchor or anchor in list_anchors(path.read_text()), target


def test_the_readme_is_short() -> None:
    """A recipe of the core adds a row to the table of families, which is not counted."""
    lines = DOCUMENTS["README.md"].splitlines()
    assert len([line for line in lines if not line.startswith("| `")]) <= 100


def list_claims() -> list[str]:
    """Return the items of README's list of what is shown, each as one line."""
    part = DOCUMENTS["README.md"].partition("## What is shown, and by what\n")[2]
    return [
        " ".join(item.split())
        for item in re.split(r"^- ", part.partition("\n## ")[0], flags=re.M)[1:]
    ]


def test_each_claim_of_the_readme_names_its_proof() -> None:
    """A claim links to a test or to a result; that the links lead somewhere is tested above."""
    claims = list_claims()
    assert len(claims) >= 6
    for claim in claims:
        targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", claim)]
        tests = [target for target in targets if re.fullmatch(r"tests/.*test_\w+\.py", target)]
        for target in tests:
            assert "def test_" in (ROOT / target).read_text(), target
        assert tests or [target for target in targets if target.startswith("docs/results/")], claim


def test_the_picture_shows_the_numbers_of_its_run() -> None:
    """`python -m lab.pages.make_picture` draws it from the committed numbers of a run."""
    numbers = json.loads(NUMBERS.read_text())
    drawn = draw_picture(numbers)
    committed = PICTURE.read_text()
    for entry in numbers["acceptance"].values():
        values = [f"{length['pooled']:.2f}" for length in entry["drafters"].values()]
        for text in (entry["label"], *values):
            assert f">{text}<" in committed and f">{text}<" in drawn
    start, *_, end = numbers["held_out"]
    assert start[0] == 0 and f">start {start[1]:.2f}<" in committed
    assert f">{end[1]:.2f}<" in committed
    assert ElementTree.fromstring(committed).tag.endswith("svg")
    # It follows the reader's scheme, and loads nothing.
    assert "prefers-color-scheme: dark" in committed and 'href="http' not in committed


@pytest.mark.parametrize("document", DOCUMENTS)
def test_settings_in_sentences_exist(document: str) -> None:
    """A setting between backticks is a row of the reference, or a setting of another command."""
    pattern = r"`((?:trainer|data|eval|compare)\.[a-z][a-z_]*)[=`]"
    named = set(re.findall(pattern, FENCE.sub("", DOCUMENTS[document])))
    rows = re.findall(r"^\| `([\w.]+)`", REFERENCE[SETTINGS_PAGE], re.MULTILINE)
    # A setting may be written without the group that it stands in, as eval.prompts.
    known = {*rows, *(f"{row.split('.')[0]}.{row.split('.')[-1]}" for row in rows)}
    assert named <= known, sorted(named - known)


@pytest.mark.parametrize(
    ("document", "folders"),
    [("README.md", [ROOT / "conf"]), ("docs/families/index.md", own_folders())],
)
def test_every_recipe_is_in_the_table(document: str, folders: list[Path]) -> None:
    """The first column of the tables of families names each; README has those of the core."""
    lines = [line for line in DOCUMENTS[document].splitlines() if line.startswith("| `")]
    table = {name for line in lines for name in re.findall("`([^`]+)`", line.split("|")[1])}
    assert {*choice_files("recipe", folders)} <= table


def test_engines_of_the_readme_read_what_it_says() -> None:
    """Every engine beside a recipe reads a layout of its family, in the versions that are named."""
    part = DOCUMENTS["README.md"].partition("## Families that engines serve\n")[2]
    rows = re.findall(r"^\| (`[a-z].*?) \| .*? \| (.*?) \|$", part, re.MULTILINE)
    assert len(rows) >= 10
    for recipes, engines in rows:
        names = [name for name in re.findall("`([^`]+)`", recipes) if "=" not in name]
        families = {
            re.findall(r"override /drafter: (\w+)", (ROOT / f"recipes/{name}.yaml").read_text())[0]
            for name in names
        }
        layouts = [row.path for row in LAYOUTS if families & {*row.families}]
        readers = [
            support for support in engine_support.list_support() if support.layout in layouts
        ]
        programs = engine_support.PROGRAMS
        named = {program for program, title in programs.items() if title in engines}
        assert named <= {support.program for support in readers}, recipes
        assert named or not names, recipes
        for program in named:
            bounds = {support.until for support in readers if support.program == program}
            assert "" in bounds or any(f"up to {bound}" in engines for bound in bounds), recipes


FAMILIES = sorted(
    name
    for name in DOCUMENTS
    if name.startswith("docs/families/") and not name.endswith("index.md")
)


@pytest.mark.parametrize("document", FAMILIES)
def test_a_family_page_has_four_parts(document: str) -> None:
    """What it is, when to use it, settings, how to serve it; further parts may follow."""
    titles = re.findall(r"^## (.*)$", FENCE.sub("", DOCUMENTS[document]), re.MULTILINE)
    singular = [title.replace("they are", "it is").replace("them", "it") for title in titles]
    assert singular[:4] == ["What it is", "When to use it", "Settings", "How to serve it"]


@pytest.mark.parametrize("document", FAMILIES)
def test_settings_of_a_family_page_exist(document: str) -> None:
    """Every drafter.KEY that the page names is a setting of some drafter, and every choice is a
    file of conf/.
    """
    keys = {name for name in re.findall(r"`drafter\.(\w+)", DOCUMENTS[document])} - EVERY_DRAFTER
    assert not [key for key in keys if not find_owners("drafter", key)]
    for group, choice in re.findall(
        r"\b(drafter|recipe|acceptance|tree)=([a-z](?:[a-z0-9_.-]*[a-z0-9])?)\b",
        DOCUMENTS[document],
    ):
        assert choice in choice_files(group, conf_folders()), f"{group}={choice}"


def test_generated_pages_of_results_are_the_committed_ones() -> None:
    """Every number of a measured section comes from lab/results/; `python -m
    lab.pages.make_pages` writes them. Each measurement has one section.
    """
    for path, text in render_result_pages().items():
        assert path.read_text() == text, path.name
    text = "".join(path.read_text() for path in FOLDER.glob("*.md"))
    assert sorted(name for _, name, _ in BLOCK.findall(text)) == sorted(load_measurements())


def test_the_reference_describes_every_setting() -> None:
    """Each key that a command accepts has its row, with a description."""
    settings = render_pages()[SETTINGS_PAGE]
    rows = [
        re.split(r"(?<!\\)\|", line)[1:-1]
        for line in settings.splitlines()
        if line.startswith("| `")
    ]
    names = {name.strip(" `") for name, *_ in rows}
    for config in ("train", "eval", "compare"):
        for group, keys in settings_by_group(load_schema(config), []).items():
            assert {f"{group}.{key.full_name}" for key in keys} <= names
    assert all(f"recipe={name}" in settings for name in choice_files("recipe", own_folders()))


def load_site() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    return loaded


def flatten_navigation(entries: list[Any]) -> list[str]:
    """Return the pages of a navigation, in order."""
    names = []
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            names += [value] if isinstance(value, str) else flatten_navigation(value)
    return names


@pytest.mark.parametrize("group", ["tree", "acceptance"])
def test_every_tree_and_rule_is_in_a_table(group: str) -> None:
    """The first column of a table of their page names each."""
    columns = [
        line.split("|")[1]
        for line in (ROOT / "docs" / "trees.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    named = {name for column in columns for name in re.findall(r"`([a-z0-9_]+)`", column)}
    assert {*choice_files(group, own_folders())} <= named


def test_every_page_is_in_the_site() -> None:
    """The navigation lists up to 50 pages, and the first page of each folder links to every page
    of the folder, those outside of the navigation too.
    """
    site = load_site()
    navigation = flatten_navigation(site["nav"])
    listed = navigation + [name.lstrip("/") for name in site["not_in_nav"].split()]
    assert len(navigation) <= 50
    names = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES]
    assert sorted(listed) == sorted([*names, *GENERATED])
    for folder in ("", "families/", "results/"):
        inside = [
            name.removeprefix(folder)
            for name in names
            if name.rpartition("/")[0] == folder.rstrip("/")
        ]
        first = DOCUMENTS[f"docs/{folder}index.md"]
        assert not [name for name in inside if name != "index.md" and f"]({name})" not in first]


def test_the_site_has_four_parts() -> None:
    """The site has tutorials, how-to guides, reference, explanation with results, and search."""
    parts = [name for entry in load_site()["nav"] for name in entry]
    assert parts == ["Start", "Tutorials", "How-to guides", "Reference", "Explanation and results"]
    assert "search" in load_site()["plugins"]


def build_site(config: Path, out: Path) -> "subprocess.CompletedProcess[str]":
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(config),
        "--site-dir",
        str(out),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    """The build is strict, and no page loads a script, a style or a font from elsewhere."""
    pytest.importorskip("mkdocs", reason="pip install spectrain[docs]")
    done = build_site(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    names = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in PAGES}
    generated = {name.removesuffix(".md") for name in GENERATED}
    assert {
        page.relative_to(tmp_path / "site").with_suffix("").as_posix() for page in pages
    } == names | generated | {"404"}
    fetched = (
        r"<(?:script|img|iframe)[^>]*src=.?https?:"
        r"|<link[^>]*rel=.?stylesheet[^>]*href=.?https?:|fonts\.g"
    )
    assert not [page.name for page in pages if re.search(fetched, page.read_text())]


@pytest.mark.parametrize(
    "link", ["[x](nowhere.md)", "[x](data.md#nowhere)", "[x](#nowhere)", "[x](data.md#data)"]
)
def test_a_broken_link_ends_the_build(tmp_path: Path, link: str) -> None:
    """The site's settings hold for two pages too; the last link leads somewhere."""
    pytest.importorskip("mkdocs", reason="pip install spectrain[docs]")
    settings = {
        key: value
        for key, value in load_site().items()
        if key not in ("hooks", "nav", "theme", "plugins")
    }
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "data.md").write_text("# Data\n")
    (tmp_path / "docs" / "index.md").write_text(f"# Start\n\n{link}\n")
    done = build_site(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert (done.returncode != 0) == ("nowhere" in done.stderr) == ("nowhere" in link), done.stderr
