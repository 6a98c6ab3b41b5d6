"""Figures of report pages, as SVG."""

import io
import re
from collections.abc import Callable
from typing import Any

from markupsafe import Markup

# Okabe and Ito's, for the color-blind
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


def render_svg(
    draw: Callable[[Any], None], size: tuple[float, float], id: str, title: str
) -> Markup:
    """Render a figure as SVG for a page: the same data give the same bytes, and ids are unique
    to the figure.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rc = {
        "svg.hashsalt": id,
        "svg.fonttype": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 9,
    }
    with matplotlib.rc_context(rc):
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
