"""Pages of the site that are generated at build: the configuration and API references.

`mkdocs build` runs this file (mkdocs-gen-files); tests import `generated_pages`.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path

CONF = Path(__file__).resolve().parent.parent / "conf"

PACKAGES = (
    "distributed",
    "algorithms",
    "tasks",
    "models",
    "training",
    "config",
    "inference",
    "loggers",
    "plots",
    "launchers",
)
"""Packages with a page in the API reference."""

RAY = (
    "metadist.launchers.ray.pytorch_trainer.PyTorchTrainer",
    "metadist.launchers.ray.pytorch_trainer.PyTorchTrainable",
    "metadist.launchers.ray.tune.tune_experiment",
)
"""Public names that need Ray, which need not be installed here."""


def generated_pages() -> dict[str, str]:
    """The text of each generated page by its path below docs/."""
    pages = {"configuration_reference.md": configuration_page()}
    pages |= {f"api/{package}.md": api_page(package) for package in PACKAGES}
    return pages


def configuration_page() -> str:
    """Every file of conf/: its command, its comments, its keys and defaults."""
    lines = ["# Configuration reference", "", "Generated from `conf/`. Values are the defaults."]
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
    lines = [f"# metadist.{package}", "", module.__doc__ or ""]
    for name in names:
        lines += ["", f"::: {name}"]
    return "\n".join(lines) + "\n"


if __name__ == "<run_path>":  # how mkdocs-gen-files runs it
    import mkdocs_gen_files

    for name, text in generated_pages().items():
        with mkdocs_gen_files.open(name, "w") as file:
            file.write(text)
