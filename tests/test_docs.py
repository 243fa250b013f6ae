"""README.md and docs/: links, blocks, commands, options, tutorials and the list of pages."""

import functools
import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import tiny
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omniglot_tree import REAL, write_whole
from PIL import Image
from worlds import run_world

from metadist.cli.command import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOTEBOOKS = sorted(DOCS.glob("tutorials/*.ipynb"))
NOT_RUN = ("not run", "not checked", "slow")
"""What the comment before a block begins with that `make test` does not run, with the reason.

`make test-slow` runs the "slow" ones. "not checked": the commands are checked for syntax only.
"""
RUN = "outputs/run1"
"""The run that pages use."""
PROGRAMS = ("torchrun", "python", "python3", "pip", "pre-commit", "sbatch", "ray")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_pages", DOCS / "generate_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(text: str, language: str) -> list[tuple[str, str]]:
    """The comment before each block of a language, and its text."""
    return [(comment, body) for comment, each, body in FENCE.findall(text) if each == language]


def anchors(text: str) -> set[str]:
    """The anchors of headings, as GitHub and MkDocs make them for plain words."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {re.sub(r" ", "-", each.strip()) for each in words}


def notebook_cells(path: Path, kind: str) -> list[str]:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def broken_links(page: Path, text: str) -> list[str]:
    generated = generator().generated_pages()
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        if re.match(r"\w+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        inside = str(path.relative_to(DOCS)) if path.is_relative_to(DOCS) else ""
        if path == page:
            content = text
        elif path.with_suffix(".ipynb") in NOTEBOOKS:
            content = "\n".join(notebook_cells(path.with_suffix(".ipynb"), "markdown"))
        elif inside in generated:
            content = generated[inside]
        elif path.is_file():
            content = path.read_text("utf-8") if path.suffix == ".md" else ""
        else:
            found.append(link)
            continue
        if anchor and anchor not in anchors(content):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_have_a_target(page):
    assert broken_links(page, page.read_text("utf-8")) == []


def test_links_without_a_target_are_found():
    good = (
        "# One two\n[a](sweeps.md) [b](#one-two) [c](strategies.md#determinism) [d](api/tasks.md)"
    )
    bad = ["no_such.md", "#three", "sweeps.md#no_such", "api/no_such.md"]
    text = good + "".join(f" [e]({link})" for link in bad)
    assert broken_links(DOCS / "index.md", text) == bad


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 200


def test_the_list_of_pages_is_complete():
    text = (ROOT / "mkdocs.yml").read_text("utf-8").replace("!!python/name:", "")
    listed = re.findall(r"[\w/]+\.md", json.dumps(yaml.safe_load(text)["nav"]))
    pages = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")]
    notebooks = [f"tutorials/{path.stem}.md" for path in NOTEBOOKS]
    assert sorted(listed) == sorted([*pages, *notebooks, *generator().generated_pages()])


def test_the_reference_names_every_option_of_the_configuration():
    text = generator().configuration_page()
    for path in (ROOT / "conf").rglob("*.yaml"):
        group = path.relative_to(ROOT / "conf").parent
        name = path.name if group == Path() else f"{group}={path.stem}"
        listed = f"| `{path.stem}` |" if str(group) == "experiment" else f"## {name}\n"
        assert listed in text, path
    assert "rendezvous_timeout_seconds: 300" in text


GROUPS = "|".join(path.name for path in (ROOT / "conf").iterdir() if path.is_dir())
OPTION = re.compile(rf"`'?\+?((?:{GROUPS})\.[a-z_.]+)(?:=[^`]*)?`")
PRESET = re.compile(r"`(\w+_(?:omniglot|mini_imagenet|sinusoid)(?:_\w+)?)`")


def paths(node: object, prefix: str = "") -> set[str]:
    """The dotted paths of all keys of a configuration."""
    if not isinstance(node, dict):
        return {prefix}
    return {prefix}.union(*(paths(value, f"{prefix}.{key}") for key, value in node.items()))


@functools.cache
def configured() -> tuple[set[str], set[str]]:
    """Every option of conf/, and the names of the presets."""
    found = set()
    for path in (ROOT / "conf").glob("*/*.yaml"):
        group = path.parent.name
        content = yaml.safe_load(path.read_text("utf-8"))
        if group != "experiment":
            for base in content.pop("defaults", []):
                if base == "_self_" or isinstance(base, dict):
                    continue
                content = (
                    yaml.safe_load(path.with_name(f"{base}.yaml").read_text("utf-8")) | content
                )
        if group == "experiment":
            found |= {each.removeprefix(".") for each in paths(content)}
        else:
            found |= paths(content, f"{group}.{path.stem}") | paths(content, group)
    return found, {path.stem for path in (ROOT / "conf/experiment").glob("*.yaml")}


def unknown_options(text: str) -> list[str]:
    """Options and presets named in the text (not in its blocks) that do not exist."""
    text = FENCE.sub("", text)
    options, presets = configured()
    found = [each for each in OPTION.findall(text) if each not in options]
    return found + [each for each in PRESET.findall(text) if each not in presets]


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CONTRIBUTING.md"], ids=name)
def test_options_and_presets_in_the_text_exist(page):
    assert unknown_options(page.read_text("utf-8")) == []


def test_options_and_presets_that_do_not_exist_are_found():
    text = "`trainer.iterations=3` `algorithm.no_such` `maml_sinusoid` `maml_omniglot_3w1s`"
    assert unknown_options(text) == ["algorithm.no_such", "maml_omniglot_3w1s"]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_of_yaml_and_bash_parse(page):
    """Files that the page embeds exist; comments exempt a block from more than syntax."""
    text = page.read_text("utf-8")
    for _, body in blocks(text, "yaml"):
        for path in re.findall(r'--8<-- "(.*)"', body):
            assert (ROOT / path).is_file(), path
        yaml.safe_load(re.sub(r"^--8<--.*", "", body, flags=re.MULTILINE))
    script = "\n".join(body for _, body in blocks(text, "bash"))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def python_blocks(page: Path) -> list[tuple[str, str]]:
    return blocks(page.read_text("utf-8"), "python")


WITH_PYTHON = [page for page in PAGES if python_blocks(page)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory with a finished run in `RUN`, and images in class folders and beside them."""
    directory = tmp_path_factory.mktemp("docs")
    tiny.train(str(directory / RUN), "strategy=local")
    configuration = OmegaConf.to_yaml(tiny.compose(*tiny.SMALL, "strategy=local"))
    (directory / RUN / ".hydra").mkdir()
    (directory / RUN / ".hydra/config.yaml").write_text(configuration)
    image = Image.effect_noise((12, 12), 64)
    names = [f"my_images/class{label}/{number}.png" for label in range(15) for number in range(3)]
    for each in [*names, "a1.png", "b1.png", "new.png"]:
        (directory / each).parent.mkdir(parents=True, exist_ok=True)
        image.save(directory / each)
    return directory


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_python_blocks_run(page, trained, monkeypatch, capsys):
    """In order, as one module, so that classes can be pickled and named by their import path."""
    monkeypatch.chdir(trained)
    monkeypatch.setattr(sys, "path", [str(trained), *sys.path])
    own = []
    for comment, code in python_blocks(page):
        compile(code, str(page), "exec")
        if comment.startswith("run with 2 workers"):
            script = trained / "script.py"
            script.write_text(code)
            run_world(run_script, 2, str(script))
        elif not comment.startswith(NOT_RUN):
            own.append(code)
    module = trained / f"page_{page.stem}.py"
    module.write_text("\n".join(own))
    runpy.run_path(str(module), run_name=module.stem)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_text_and_commands_of_notebooks(path):
    """Links, options in the text and overrides of the commands; `make test-slow` executes them."""
    text = "\n\n".join(notebook_cells(path, "markdown"))
    assert broken_links(path, text) == [] and unknown_options(text) == []
    lines = "\n".join(notebook_cells(path, "code")).replace("\\\n", " ").splitlines()
    found = [line.removeprefix("!{metadist} ") for line in lines if line.startswith("!{metadist}")]
    assert found
    for line in found:
        if "inner_lrr" not in line:  # shows the error
            check_command(["metadist", *shlex.split(line.removesuffix("| cat"))])


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebooks_run(path, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    if "omniglot" in path.read_text("utf-8"):
        (tmp_path / "data").mkdir()
        if (REAL / "images_background.zip").exists():
            (tmp_path / "data/omniglot").symlink_to(REAL)
        else:
            write_whole(tmp_path / "data/omniglot", examples=20)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("METADIST_CACHE", str(tmp_path / "cache"))
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=900, resources=resources).execute()


@pytest.mark.slow
@pytest.mark.parametrize("page", ["ray.md"])
def test_slow_python_blocks_run(page, tmp_path):
    pytest.importorskip("ray")
    blocks = [code for comment, code in python_blocks(DOCS / page) if comment.startswith("slow")]
    assert blocks
    for number, code in enumerate(blocks):
        script = tmp_path / f"block{number}.py"
        script.write_text(code)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, check=True)


def test_pages_with_slow_blocks_have_a_test():
    marked = [p.name for p in PAGES if any(c.startswith("slow") for c, _ in python_blocks(p))]
    assert marked == ["ray.md"]


def run_script(path: str) -> None:
    sys.argv = [path]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def commands(page: Path) -> list[list[str]]:
    """The arguments of each command in the Bash blocks of a page."""
    found = []
    for comment, body in blocks(page.read_text("utf-8"), "bash"):
        if comment.startswith(NOT_RUN):
            continue
        for line in body.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] != "export":
                found.append(words)
    text = FENCE.sub("", page.read_text("utf-8"))
    inline = re.findall(r"`((?:torchrun|python|metadist|make) [^`…]+)`", text)
    return found + [shlex.split(each) for each in inline]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def experiment_command(words: list[str]) -> tuple[str, list[str]] | None:
    """Configuration and arguments of a command that runs an experiment."""
    for index, word in enumerate(words):
        if re.fullmatch(r"experiments/(maml|ddp)\.py", word):
            return Path(word).stem, words[index + 1 :]
        if word in ("maml", "ddp") and words[index - 1] == "metadist":
            return word, words[index + 1 :]
    return None


def one_value(override: Override) -> str:
    """The override, with the first value of a sweep."""
    if not override.is_sweep_override():
        return str(override.input_line)
    if override.is_interval_sweep():
        return f"{override.input_line.partition('=')[0]}={override.value().start}"
    return f"{override.input_line.partition('=')[0]}={next(iter(override.sweep_string_iterator()))}"


def check_overrides(config_name: str, overrides: tuple[str, ...]) -> None:
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    own = [one_value(each) for each in parsed if not each.key_or_group.startswith("hydra")]
    tiny.compose(*own, name=config_name)


def check_command(words: list[str]) -> None:
    """Fail if the program, script, subcommand or an override does not exist."""
    while re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    if words[:3] == ["srun", "bash", "-c"]:
        return check_command(shlex.split(words[3]))
    program = words[0].removeprefix(".venv/bin/")
    if program == "make":
        assert all(word in make_targets() for word in words[1:] if "=" not in word), words
    elif program == "metadist":
        assert words[1] in COMMANDS or words[1].startswith("-"), words
    else:
        assert program in PROGRAMS, words
    for word in words:
        if re.match(r"(experiments|docs)/.*\.\w+$", word):
            assert (ROOT / word).is_file(), word
    found = experiment_command(words)
    if found is not None:
        config_name, arguments = found
        overrides = [word for word in arguments if not word.startswith("-")]
        check_overrides(config_name, tuple(word for word in overrides if "=" in word))


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name)
def test_commands_exist_and_their_overrides_compose(page):
    for words in commands(page):
        check_command(words)


@pytest.mark.parametrize(
    "command",
    [
        "torchrun experiments/mamml.py",
        "python experiments/maml.py algoritm=maml",
        "python experiments/maml.py trainer.iteration=3",
        "metadist evaluat RUN",
        "make runn",
        "pyton experiments/maml.py",
    ],
)
def test_wrong_commands_are_found(command):
    with pytest.raises((AssertionError, HydraException)):
        check_command(shlex.split(command))
