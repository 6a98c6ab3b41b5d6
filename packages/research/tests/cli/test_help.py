"""The help lists the choices of ideas apart."""

from spectrain.cli import help


def test_experimental_choices_are_listed_apart() -> None:
    """Drafters, rules, trees and recipes that only spectrain's own engine decodes follow the
    others under a heading.
    """
    lines = help.explain_command("train", [], "all").splitlines()
    for group, core, experimental in (
        ("drafter", "eagle3", "universal"),
        ("acceptance", "greedy", "kseq"),
        ("tree", "chain", "policy"),
        ("recipe", "medusa1", "kangaroo"),
    ):
        start = next(number for number, line in enumerate(lines) if line.startswith(f"  {group}="))
        names = [
            line.split()[0] for line in lines[start:] if line.startswith("    ") and line[4] != " "
        ]
        assert names.index(core) < names.index("experimental:") < names.index(experimental)
