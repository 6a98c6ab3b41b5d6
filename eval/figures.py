"""Figures of report pages, as SVG."""

import io
import re
from collections.abc import Callable
from typing import Any

from markupsafe import Markup

# Okabe and Ito's, for the color-blind
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
# The color of text and axes. A page shows it in the color of its own text.
INK = "#010203"
# Lighter colors for a dark page, by the style sheet's names.
DARK_COLORS = ("#6cb8ea", "#f0a06a", "#5fd0a8", "#dd9fcc", "#9ad4f5", "#f3c35c")
STYLE = {
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.facecolor": "none",
    "legend.edgecolor": "none",
}


def render_svg(
    draw: Callable[[Any], None], size: tuple[float, float], id: str, title: str
) -> Markup:
    """Render a figure as SVG for a page: the same data give the same bytes, and ids are unique
    to the figure.

    Its colors are those of `make_color_style`, so that one figure serves light and dark pages.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": id, **STYLE}):
        figure = Figure(figsize=size, layout="constrained")
        figure.patch.set_alpha(0)
        draw(figure)
        file = io.StringIO()
        figure.savefig(
            file,
            format="svg",
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    svg = file.getvalue()[file.getvalue().index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\1{id}-", svg)
    names = {INK: "currentColor"}
    names |= {color: f"var(--plot{number})" for number, color in enumerate(COLORS)}
    for color, name in names.items():
        svg = re.sub(color, name, svg, flags=re.IGNORECASE)
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None
    # Letters are too small to read below this width, and too large far above it.
    width = 72 * size[0]
    style = f"min-width:{width:.0f}px;max-width:{1.3 * width:.0f}px"
    svg = re.sub(
        r"<svg[^>]*>",
        f'<svg class="plot" style="{style}" role="img" aria-label="{title}" {box[0]}>',
        svg,
        count=1,
    )
    return Markup(svg)


def make_color_style(colors: tuple[str, ...]) -> str:
    """Return the declarations that give the figures of a style sheet these colors."""
    return " ".join(f"--plot{number}: {color};" for number, color in enumerate(colors))
