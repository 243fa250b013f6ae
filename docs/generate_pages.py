"""Pages of the site that are generated at build: tutorials, configuration and API references.

`mkdocs build` runs this file (mkdocs-gen-files); tests import `generated_pages`.
"""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parent
CONF = DOCS.parent / "conf"

PACKAGES = (
    "distributed",
    "algorithms",
    "tasks",
    "models",
    "training",
    "config",
    "inference",
    "reports",
    "loggers",
    "plots",
    "launchers",
    "cli",
)
"""Packages with a page in the API reference."""

RAY = (
    "metadist.launchers.ray.pytorch_trainer.PyTorchTrainer",
    "metadist.launchers.ray.pytorch_trainer.PyTorchTrainable",
    "metadist.launchers.ray.tune.tune_experiment",
)
"""Public names that need Ray, which need not be installed here."""


BELOW_OTHERS = ("---", "search:", "  boost: 0.5", "---", "")
"""Front matter of references: search lists other pages first."""

LINK_TO_NOTEBOOK = re.compile(r"\]\(([\w/.]+)\.ipynb")
"""Tutorials link to each other as notebooks; the site has pages of them."""


def generated_pages() -> dict[str, str]:
    """The text of each generated page by its path below docs/."""
    pages = {"configuration_reference.md": configuration_page()}
    pages |= {f"api/{package}.md": api_page(package) for package in PACKAGES}
    return pages


def configuration_page() -> str:
    """Every file of conf/: its command, its comments, its keys and defaults."""
    lines = [
        *BELOW_OTHERS,
        "# Configuration reference",
        "",
        "Generated from `conf/`. Values are the defaults.",
    ]
    for path in sorted(CONF.glob("*.yaml")):
        if path.stem != "run_directory":
            lines += ["", f"## {path.stem}.yaml", "", *option(path)]
    for group in sorted(each for each in CONF.iterdir() if each.is_dir()):
        files = sorted(group.glob("*.yaml"))
        if group.name == "experiment":
            lines += ["", "## experiment", "", "Presets of published settings: `+experiment=NAME`."]
            lines += ["", "| NAME | |", "| --- | --- |"]
            lines += [f"| `{path.stem}` | {' '.join(head(path)[1])} |" for path in files]
        elif files:
            lines += ["", f"## {group.name}"]
            for path in files:
                lines += ["", f"### {group.name}={path.stem}", "", *option(path)]
    lines += ["", "## run_directory.yaml", "", *option(CONF / "run_directory.yaml")]
    return "\n".join(lines) + "\n"


def head(path: Path) -> tuple[str, list[str], list[str]]:
    """The command at the head of a configuration file, its description, and its content."""
    lines = path.read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if not line.startswith("# @package")]
    comments = 0
    while comments < len(lines) and lines[comments].startswith("#"):
        comments += 1
    command, *description = (line.removeprefix("#").strip() for line in lines[:comments])
    return command, description, lines[comments:]


def option(path: Path) -> Iterator[str]:
    """The lines that describe one configuration file."""
    command, description, content = head(path)
    yield from [" ".join(description), "", "```bash", command, "```", ""]
    yield from ["```yaml", *content, "```"]


def api_page(package: str) -> str:
    """The public names of a package, for mkdocstrings."""
    module = importlib.import_module(f"metadist.{package}")
    names = [f"{module.__name__}.{name}" for name in getattr(module, "__all__", ())]
    if package == "launchers":
        names += RAY
    lines = [*BELOW_OTHERS, f"# metadist.{package}", "", module.__doc__ or ""]
    for name in names:
        lines += ["", f"::: {name}"]
    return "\n".join(lines) + "\n"


def tutorials() -> dict[str, dict[str, bytes]]:
    """The files of each tutorial by their path below docs/: its page and the images of its outputs.

    The keys are the paths of the pages.
    """
    from nbconvert import MarkdownExporter

    found = {}
    for path in sorted(DOCS.glob("tutorials/*.ipynb")):
        text, resources = MarkdownExporter().from_filename(
            str(path), {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
        )
        page = f"tutorials/{path.stem}.md"
        notice = f"[Download this page as a notebook]({path.name})\n\n"
        title, newline, rest = text.lstrip().partition("\n\n")
        body = LINK_TO_NOTEBOOK.sub(r"](\1.md", rest)
        found[page] = {page: (title + newline + notice + body).encode()}
        for name, data in resources["outputs"].items():
            found[page][f"tutorials/{name}"] = data
    return found


if __name__ == "<run_path>":  # how mkdocs-gen-files runs it
    import mkdocs_gen_files

    files = {name: text.encode() for name, text in generated_pages().items()}
    for each in tutorials().values():
        files |= each
    for name, content in files.items():
        with mkdocs_gen_files.open(name, "wb") as file:
            file.write(content)
