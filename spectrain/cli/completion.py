"""Tab completion: what may stand where the cursor is, and the scripts by which shells ask for it. No torch is imported."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from spectrain.errors import UserError, nearest
from spectrain.settings.schema import choice_files, conf_folders, schema, settings
from spectrain.settings.signatures import Key

from .help import COMMANDS

SPACE = " "  # behind a word that is finished
PATHS = (
    "path",
    "out",
    "init",
    "prompts",
    "calibration",
    "model",
    "assistant",
    "results",
)  # keys whose values are files or folders
SHELL_FLAGS = {"train": ("-m", "--cfg", "--config-dir"), "eval": ("-m",)}

SCRIPTS = {
    "bash": r"""_spectrain() {
    # bash breaks words at = and :, which join here again; what it is given back follows the last break
    local word="${COMP_WORDS[COMP_CWORD]}" start="" found part glue=""
    local -a words=()
    for part in "${COMP_WORDS[@]:1:COMP_CWORD}"; do
        if [[ ${#words[@]} -gt 0 && ( -n $glue || $part == [=:] || $part == =* ) ]]; then
            words[${#words[@]}-1]+="$part"
        else
            words+=("$part")
        fi
        [[ $part == [=:] ]] && glue=1 || glue=""
    done
    [[ $word == [=:] ]] && word=""
    [[ ${#words[@]} -gt 0 ]] && start="${words[${#words[@]}-1]}" && start="${start%"$word"}"
    COMPREPLY=()
    while IFS= read -r found; do
        found="${found#"$start"}" part="${found% }"
        COMPREPLY+=("${part// /\\ }${found:${#part}}")
    done < <("${COMP_WORDS[0]}" completion words -- "${words[@]}" 2>/dev/null)
}
complete -o nospace -F _spectrain spectrain
""",
    "zsh": """_spectrain() {
    local -a found
    found=("${(@f)$("$words[1]" completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    compadd -S '' -- ${(M)found:#*[^ ]}
    compadd -S ' ' -- ${${(M)found:#* }% }
}
compdef _spectrain spectrain
""",
    "fish": """function _spectrain
    set -l words (commandline -opc) (commandline -ct)
    $words[1] completion words -- $words[2..-1] 2>/dev/null | string trim --right
end
complete -c spectrain -f -a '(_spectrain)'
""",
}


def script(shell: str) -> str:
    """What a shell must read to complete the words of spectrain."""
    if shell not in SCRIPTS:
        raise UserError(f"completion {shell}: there is no such shell here; {nearest(shell, SCRIPTS)}")
    return SCRIPTS[shell]


def complete(words: list[str], commands: Mapping[str, str | None]) -> list[str]:
    """What the last of these words, which follow `spectrain`, may become; `commands` says which configuration each has."""
    *before, word = words or [""]
    found = sorted(set(candidates(before, word, commands)))
    return [one for one in found if one.startswith(word) and one.rstrip() != word] or [
        one for one in found if one.startswith(word)
    ]


def candidates(before: list[str], word: str, commands: Mapping[str, str | None]) -> Iterable[str]:
    name = " ".join(before[:2]) if " ".join(before[:2]) in commands else " ".join(before[:1])
    if name not in commands:
        depth = len(before)
        return [one.split()[depth] + SPACE for one in commands if one.split()[:depth] == before and len(one.split()) > depth]
    config, rest = commands[name], before[len(name.split()) :]
    flags = [flag.split()[0] + SPACE for flag in (*COMMANDS[name].flags, *SHELL_FLAGS.get(name, ()), "--help")]
    if word.startswith("-"):
        return flags
    if config is None or (name == "compare" and "=" not in word and "/" in word):
        return positional(name, rest, word)
    return overrides(config, rest, word)


def positional(name: str, rest: list[str], word: str) -> Iterable[str]:
    """What stands without a key: a shell, a recipe, a format, a folder."""
    previous = rest[-1] if rest else ""
    if name == "completion":
        return [shell + SPACE for shell in SCRIPTS] if not rest else []
    if name == "recipes":
        return [recipe + SPACE for recipe in choice_files("recipe", conf_folders(rest))]
    if previous == "--to":
        return [layout + SPACE for layout in ("vllm", "sglang", "hf", "medusa", "peft", "spectrain")]
    if previous == "--target":
        return [*(target + SPACE for target in ("tiny", "smollm2")), *files("", word)]
    return files("", word) if name in ("convert", "lint", "compare") else []


def overrides(config: str, rest: list[str], word: str) -> Iterable[str]:
    """Groups, their choices, the keys in them, and values."""
    asked, folders = schema(config), conf_folders(rest)
    key, equals, value = word.partition("=")
    if not equals and "." not in key:
        plain = [*asked.groups, *(one.name for one in asked.keys)]
        inside = {group for group, keys in settings(asked, rest).items() if keys}
        return [*(f"{name}=" for name in plain), *(f"{group}." for group in inside)]
    if not equals:
        group = key.partition(".")[0]
        return [f"{group}.{one.name}=" for one in settings(asked, rest).get(group, [])]
    earlier = value.rpartition(",")[0]  # of a sweep
    start = f"{key}={earlier}," if earlier else f"{key}="
    if key in asked.groups:
        return [f"{start}{choice}{SPACE}" for choice in choice_files(key, folders)]
    if key == "run":
        return runs(word)
    group, _, name = key.rpartition(".")
    known: list[Key] = settings(asked, rest).get(group, []) if group else asked.keys
    options = next((one.choices for one in known if one.name == name), ())
    if config == "export" and key == "format":
        options = ("vllm", "sglang", "hf", "medusa", "peft")
    if options:
        return [f"{start}{option}{SPACE}" for option in options]
    return files(f"{key}=", value) if name in PATHS else []


def runs(word: str) -> list[str]:
    """Run folders below runs/, and any other folder that is begun."""
    made = [path for path in sorted(Path("runs").glob("*")) if (path / "config.yaml").exists() or (path / "drafter").is_dir()]
    return [f"run={path.as_posix()}{SPACE}" for path in made] + files("run=", word.removeprefix("run="), folders=True)


def files(start: str, value: str, folders: bool = False) -> list[str]:
    """Files and folders whose path begins so."""
    head, _, tail = value.rpartition("/")
    place = Path(os.path.expanduser(head + "/" if head or value.startswith("/") else "."))
    shown = f"{head}/" if "/" in value else ""
    try:
        entries = [
            entry for entry in place.iterdir() if entry.name.startswith(tail) and (tail or not entry.name.startswith("."))
        ]
    except OSError:
        return []
    return [
        f"{start}{shown}{entry.name}{'/' if entry.is_dir() else SPACE}" for entry in entries if entry.is_dir() or not folders
    ]
