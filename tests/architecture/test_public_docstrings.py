"""Every public name says what it is; files and functions stay short enough to read; text is ASCII."""

import ast
from pathlib import Path

import pytest

import ds_stochdpo

ROOT = Path(__file__).parents[2]
PACKAGE = Path(ds_stochdpo.__file__).parent
SOURCES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "launch").rglob("*.py")])
MAX_FILE_LINES = 350
MAX_CODE_LINES = 60
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def short(path):
    return str(path.relative_to(ROOT))


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def public_nodes(node, prefix=""):
    """(dotted name, node) of the public functions, classes and methods below a module or class."""
    for child in node.body:
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef)) or child.name.startswith("_"):
            continue
        yield prefix + child.name, child
        if isinstance(child, ast.ClassDef):
            yield from public_nodes(child, f"{prefix}{child.name}.")


def code_lines(node):
    """Lines of a function that hold code: neither docstring, nor blank, nor comment."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body:
        return 0
    lines = set()
    for child in body:
        for part in ast.walk(child):
            if hasattr(part, "lineno"):
                lines |= {part.lineno, part.end_lineno}
    return len(lines) + (body[0].lineno > node.lineno)


@pytest.mark.parametrize("path", SOURCES, ids=short)
def test_public_names_have_a_docstring(path):
    tree = tree_of(path)
    assert ast.get_docstring(tree), f"{short(path)} has no module docstring"
    for name, node in public_nodes(tree):
        assert ast.get_docstring(node), f"{short(path)}:{node.lineno} {name} has no docstring"


@pytest.mark.parametrize("path", SOURCES, ids=short)
def test_files_are_short(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{short(path)} has {lines} lines; the limit is {MAX_FILE_LINES}"


@pytest.mark.parametrize("path", SOURCES, ids=short)
def test_functions_are_short(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, FUNCTIONS):
            lines = code_lines(node)
            assert lines <= MAX_CODE_LINES, f"{short(path)}:{node.lineno} {node.name} has {lines} code lines"


@pytest.mark.parametrize("path", [*SOURCES, *sorted(PACKAGE.rglob("*.md"))], ids=short)
def test_text_is_ascii(path):
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        assert line.isascii(), f"{short(path)}:{number}: {line!r}"


def test_what_is_counted_as_code():
    head = 'def f(\n    x,\n):\n    """One.\n\n    Two.\n    """\n'
    source = head + "    # why\n\n    a = [\n        x,\n    ]\n    return a\n"
    assert code_lines(ast.parse(source).body[0]) == 5
    assert [n for n, _ in public_nodes(ast.parse("class A:\n    def b(self): ...\n    def _c(self): ..."))] == [
        "A",
        "A.b",
    ]


def test_all_exported_names_exist():
    for name in ds_stochdpo.__all__:
        assert getattr(ds_stochdpo, name).__doc__, name
