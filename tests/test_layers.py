"""The layers of the design: imports point downwards, and one package uses torch.distributed."""

import ast
import functools
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "metadist"

BELOW = {
    "distributed": {"kernels"},
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
    "inference": {"config", "training", "reports", "algorithms", "tasks"},
    "launchers": {
        *("config", "training", "reports", "distributed", "kernels", "loggers", "tasks"),
    },
    "cli": {
        *("launchers", "inference", "config", "training", "reports", "algorithms"),
        *("distributed", "loggers", "tasks"),
    },
    "__main__.py": {"cli"},
}
COMMON = ("deadlines", "errors", "files", "gradients", "metrics", "profile_ranges")
"""Modules that every layer imports."""
TEMPLATE = PACKAGE / "cli" / "project"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if TEMPLATE not in path.parents)


@functools.cache
def imported(path: Path, types: bool = True) -> set[str]:
    """Every module that a file imports, those inside functions too; and those that only a type
    checker imports, if `types`.
    """
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not types:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
                node.body = []
    for node in ast.walk(tree):
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


def test_no_module_imports_itself_by_way_of_others():
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in FILES
    }
    exported = {}  # where the names of packages are defined, which import them at their first use
    for stub in PACKAGE.rglob("__init__.pyi"):
        package = ".".join(stub.parent.relative_to(ROOT).parts)
        for node in ast.parse(stub.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                names = (alias.asname or alias.name for alias in node.names)
                exported |= {f"{package}.{name}": f"{package}.{node.module}" for name in names}
    graph = {}
    for module, path in modules.items():
        names = imported(path, types=False)
        found = {exported.get(name, name) for name in names}
        found = {name if name in modules else name.rpartition(".")[0] for name in found}
        graph[module] = (found & modules.keys()) - {module}
    assert len(graph["metadist.distributed.calls"]) > 5
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_torch_distributed_is_used_in_one_package(path):
    if "distributed" not in path.relative_to(PACKAGE).parts:
        used = [name for name in imported(path) if name.startswith("torch.distributed")]
        assert not used, f"{path} imports {used}"


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").glob("*.py")), ids=lambda p: p.name)
def test_entry_points_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60
