"""The layers of the design: imports point downwards, and one package uses torch.distributed."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "metadist"

BELOW = {
    "distributed": set(),
    "tasks": {"kernels"},
    "kernels": set(),
    "models": {"kernels"},
    "loggers": set(),
    "plots": set(),
    "reports": {"loggers", "plots"},
    "algorithms": {"tasks"},
    "training": {
        *("algorithms", "distributed", "kernels", "tasks", "reports", "loggers", "plots"),
    },
    "config": {
        *("training", "reports", "algorithms", "distributed", "kernels", "tasks", "models"),
        "loggers",
    },
    "inference": {"config", "training", "algorithms", "tasks"},
    "launchers": {
        *("config", "training", "reports", "distributed", "kernels", "loggers", "tasks"),
    },
    "cli": {
        *("launchers", "inference", "config", "training", "reports"),
        *("distributed", "loggers", "tasks"),
    },
    "__main__.py": {"cli"},
}
COMMON = ("errors", "files", "gradients")
"""Modules that every layer imports."""
TEMPLATE = PACKAGE / "cli" / "project"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if TEMPLATE not in path.parents)


def imported(path: Path) -> set[str]:
    """Every module that a file imports, those inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_package_has_a_layer():
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages == set(BELOW) - {"__main__.py"} | {"conf"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path):
    layer = path.relative_to(PACKAGE).parts[0]
    if layer == "__init__.py":
        return  # it exports names of the distributed layer
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != "metadist" or parts[1] in ("__version__", *COMMON, layer):
            continue
        assert layer in BELOW and parts[1] in BELOW[layer], f"{path} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_torch_distributed_is_used_in_one_package(path):
    if "distributed" not in path.relative_to(PACKAGE).parts:
        used = [name for name in imported(path) if name.startswith("torch.distributed")]
        assert not used, f"{path} imports {used}"


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").glob("*.py")), ids=lambda p: p.name)
def test_entry_points_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60
