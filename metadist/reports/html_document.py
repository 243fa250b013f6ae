"""`report.html`: one self-contained file with plotly.js embedded, which needs no network."""

import base64
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from metadist.files import REDIRECT_REPORT, atomic_write
from metadist.plots import Figure

_TEMPLATES = Path(__file__).with_name("templates")

_COMPRESSION = 5  # zlib level: 2.0 MB in 0.1 s; 9 would take three times as long for 1% less


def write_html(
    path: Path, template: str, context: Mapping[str, Any], figures: Mapping[str, Figure]
) -> Path:
    """Render a template of `templates/` to a file; all texts are escaped. One process calls it.

    Args:
        path: the file to write.
        template: the name of the template.
        context: the template's variables.
        figures: the interactive figures by the id of their HTML element.

    Returns:
        `path`.

    Raises:
        UserError: the file cannot be written.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # takes time to import

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    html = environment.get_template(template).render(
        **context,
        figures=figures,
        library=_compressed_library() if figures else "",
        style=(_TEMPLATES / "report.css").read_text(encoding="utf-8"),
        script=(_TEMPLATES / "report.js").read_text(encoding="utf-8"),
    )
    # File names may not be UTF-8.
    atomic_write(path, html.encode(errors="replace"), REDIRECT_REPORT)
    return path


@cache
def _compressed_library() -> str:
    """plotly.js, compressed by zlib and encoded in base64: 2 MB instead of 4.8 MB."""
    from plotly.offline import get_plotlyjs  # takes time to import

    return base64.b64encode(zlib.compress(get_plotlyjs().encode(), _COMPRESSION)).decode()
