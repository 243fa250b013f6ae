"""Hooks of `mkdocs build` (mkdocs.yml): formulas, and source code that is shown unfolded.

Formulas in LaTeX become MathML at build, so that no script is needed. GitHub renders the same
syntax.
"""

import re

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor
from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add `$formula$` and blocks of the language `math` to the site's Markdown."""
    config.markdown_extensions.append(InlineMath())  # type: ignore[arg-type]
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences.setdefault("custom_fences", []).append(
        {"name": "math", "class": "math", "format": math_block}
    )
    return config


def math_block(source: str, *_: object, **__: object) -> str:
    """The formula of a block."""
    return f'<div class="math">{convert(source, display="block")}</div>'


def on_page_content(html: str, **_: object) -> str:
    """Unfold the source code that mkdocstrings embeds."""
    return html.replace(
        '<details class="mkdocstrings-source"', '<details open class="mkdocstrings-source"'
    )


class InlineMath(Extension):
    """Formulas between dollar signs within a paragraph."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Below code spans, above escapes."""
        md.inlinePatterns.register(InlineFormula(r"\$(?!\s)([^$\n]+?)(?<!\s)\$", md), "math", 185)


class InlineFormula(InlineProcessor):
    """Converts a formula."""

    def handleMatch(  # type: ignore[override]
        self, m: re.Match[str], data: str
    ) -> tuple[str, int, int]:
        """The formula, and where it begins and ends."""
        return self.md.htmlStash.store(convert(m.group(1))), m.start(0), m.end(0)
