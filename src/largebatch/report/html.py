"""How does a template become one self-contained page with pictures that can be drawn offline?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from largebatch.errors import MissingExtraError
from largebatch.records.files import plain, write_atomic
from largebatch.report.description import Figure
from largebatch.report.palette import DARK, LIGHT
from largebatch.report.plotly_page import markup, plotly_figure
from largebatch.report.png import png_bytes


def render(template: str, figures: Sequence[Figure], **context: Any) -> str:
    """Render a template of this room.

    Args:
        template: Its file name.
        figures: The pictures that it plots, by name.
        context: What else it shows.
    Returns:
        The HTML, with plotly.js, styles and data inside.
    Raises:
        MissingExtraError: jinja2 or plotly is not installed.
    """
    try:
        from jinja2 import Environment, FunctionLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise MissingExtraError("jinja2", "study", "the report page") from error
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingExtraError("plotly", "study", "the report page") from error

    def symbols(text: str) -> Markup:
        """Text that goes to the page escaped, with its subscripts."""
        return Markup(markup(text))

    def unbroken(text: str) -> Markup:
        """The same for a headline, where no line may end at a hyphen."""
        return Markup(re.sub(r"\w+(?:-\w+)+", r'<span class="word">\g<0></span>', markup(text)))

    environment = Environment(
        loader=FunctionLoader(_asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["symbols"] = symbols
    environment.filters["unbroken"] = unbroken
    return environment.get_template(template).render(
        figures={figure.name: figure for figure in figures},
        drawings=plain({figure.name: plotly_figure(figure) for figure in figures}),
        palettes={"light": LIGHT, "dark": DARK},
        style=Markup(_asset("style.css")),
        script=Markup(_asset("draw.js")),
        plotly_js=Markup(get_plotlyjs()),
        **context,
    )


def write_page(html: str, figures: Sequence[Figure], page: Path, prefix: str = "") -> Path:
    """Write figures/PREFIXname.png and, last, the page beside them.

    Returns:
        The page's path.
    Raises:
        MissingExtraError: matplotlib is not installed.
        StorageError: The disk refused a file.
    """
    for figure in figures:
        image = png_bytes(figure)
        write_atomic(
            page.parent / "figures" / f"{prefix}{figure.name}.png", lambda file, image=image: file.write(image)
        )
    write_atomic(page, lambda file: file.write(html.encode()))
    return page


def _asset(name: str) -> str:
    return resources.files("largebatch.report").joinpath(name).read_text(encoding="utf-8")
