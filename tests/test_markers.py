"""Tests of optional dependencies are slow ones: only `make test-slow` installs what they need."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent


def needs_optional_package(node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.Call) and ast.unparse(each.func) == "pytest.importorskip"
        for each in ast.walk(node)
    )


def is_slow(statements: list[ast.stmt] | list[ast.expr]) -> bool:
    return any("pytest.mark.slow" in ast.unparse(each) for each in statements)


def never_run(path: Path) -> Iterator[str]:
    """The tests of a file that `make test` skips and `make test-slow` leaves out."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    functions = [each for each in body if isinstance(each, ast.FunctionDef)]
    others = [each for each in body if each not in functions]
    marks = [each for each in others if ast.unparse(each).startswith("pytestmark")]
    if is_slow(marks):
        return
    whole_file = any(needs_optional_package(each) for each in others)
    for each in functions:
        optional = whole_file or needs_optional_package(each)
        if each.name.startswith("test_") and optional and not is_slow(each.decorator_list):
            yield f"{path.name}: {each.name}"


def test_what_needs_an_optional_package_is_marked_slow():
    files = list(TESTS.rglob("test_*.py"))
    assert len(files) > 50
    assert [name for path in files for name in never_run(path)] == []


def test_a_test_that_would_never_run_is_found(tmp_path):
    path = tmp_path / "test_a.py"
    path.write_text(
        "def test_one():\n    pytest.importorskip('ray')\n"
        "@pytest.mark.slow\ndef test_two():\n    pytest.importorskip('ray')\n"
        "def test_three(): ...\n"
    )
    assert list(never_run(path)) == ["test_a.py: test_one"]
