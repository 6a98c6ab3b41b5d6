"""Make the picture of README from a run: what training added, as the run's report shows it.

    python -m lab.pages.make_picture runs/eagle3-tiny

The command writes the numbers of the run to lab/results/readme-run.json and draws docs/gain.svg
from them; without a run it draws the picture again. A test compares the two files.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from lab.pages.render import ROOT
from spectrain.eval.charts import (
    FIGURE_SIZE,
    HeldOutPoint,
    draw_gain,
    draw_learning_curve,
    held_out_points,
    list_gain_bars,
)
from spectrain.eval.figures import COLORS, DARK_COLORS, make_color_style, render_svg
from spectrain.eval.page import read_lines
from spectrain.files import write_text

NUMBERS = ROOT / "lab" / "results" / "readme-run.json"
PICTURE = ROOT / "docs" / "gain.svg"
MARGIN = 10  # points around the picture
TITLE = "What training added: tokens per forward before and after, and by training step"
# Of the setting in summary.json: what the numbers depend on, without versions and folders.
SETTING = ("recipe", "target", "dtype", "device", "threads", "prompts", "max_new_tokens", "commit")
# The picture has a ground of its own, because a page may be dark where the reader's system is not.
STYLE = (
    ".plot {{ color: #1a1c1f; background: #fff; {light} }} "
    "@media (prefers-color-scheme: dark) {{ "
    ".plot {{ color: #e6e8eb; background: #15181b; {dark} }} }}"
)


def read_numbers(run: Path) -> dict[str, Any]:
    """Read what the picture shows of a run that was scored."""
    summary = json.loads((run / "eval" / "heldout" / "summary.json").read_text())
    setting = {key: summary["setting"].get(key) for key in SETTING}
    return {
        "setting": setting,
        "acceptance": summary["acceptance"],
        "held_out": held_out_points(read_lines(run / "metrics.jsonl")),
    }


def draw_picture(numbers: dict[str, Any]) -> str:
    """Return the picture as an SVG file of its own, for light and dark pages."""
    points = [HeldOutPoint(step, value, tuple(ends)) for step, value, ends in numbers["held_out"]]

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        draw_gain(left, list_gain_bars(numbers["acceptance"]))
        draw_learning_curve(right, points)

    svg = str(render_svg(draw, (2 * FIGURE_SIZE[0], FIGURE_SIZE[1]), "gain", TITLE))
    style = STYLE.format(light=make_color_style(COLORS), dark=make_color_style(DARK_COLORS))
    head, end, rest = svg.partition(">")
    head = re.sub(r'viewBox="[^"]*"', f'viewBox="{widen_box(head)}"', head)
    head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    head = head.replace(" role=", ' xmlns:xlink="http://www.w3.org/1999/xlink" role=', 1)
    return f"{head}{end}\n <style>{style}</style>{rest}"


def widen_box(head: str) -> str:
    """Return the view box of an SVG with a margin of `MARGIN` around it."""
    _, _, width, height = (float(part) for part in re.findall(r"[\d.]+", head.split("viewBox")[1]))
    return f"{-MARGIN} {-MARGIN} {width + 2 * MARGIN:g} {height + 2 * MARGIN:g}"


def main() -> None:
    if len(sys.argv) > 1:
        numbers = read_numbers(Path(sys.argv[1]))
        write_text(NUMBERS, json.dumps(numbers, indent=1) + "\n")
    write_text(PICTURE, draw_picture(json.loads(NUMBERS.read_text())))


if __name__ == "__main__":
    main()
