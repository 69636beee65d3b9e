"""Imports go down only; DeepSpeed and flash-attention each have one place."""

import ast
import itertools
from pathlib import Path

import pytest

import ds_stochdpo

ROOT = Path(__file__).parents[2]
PACKAGE = Path(ds_stochdpo.__file__).parent
FLOORS = ("config", "pruning", "data", "packing", "model", "engine", "job", "train", "planning", "launch")
"""Lowest first; `config` stands for config.py, checks.py and errors.py."""
SOURCES = sorted(PACKAGE.rglob("*.py"))
LAUNCH = sorted((ROOT / "launch").rglob("*.py"))


def floor_of(parts):
    """Floor of a module, by its dotted parts; the package itself is on top, for it re-exports."""
    if parts == ("ds_stochdpo",):
        return FLOORS.index("launch")
    name = "config" if parts[1] in ("config", "checks", "errors") else parts[1]
    return FLOORS.index(name)


def module_of(path):
    parts = ("ds_stochdpo", *path.relative_to(PACKAGE).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path):
    """(dotted name, line) of everything a file imports, at any depth; relative imports are not used here."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the full name of the module"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def own_module(dotted):
    """Parts of the package's module that a dotted name belongs to; None for other packages."""
    parts = tuple(dotted.split("."))
    if parts[0] != "ds_stochdpo":
        return None
    for length in range(len(parts), 0, -1):
        path = PACKAGE.joinpath(*parts[1:length])
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            return parts[:length]
    raise AssertionError(f"{dotted} is no module of the package")


def top_of(dotted):
    return dotted.split(".")[0]


def short(path):
    return str(path.relative_to(ROOT))


def test_every_folder_of_the_package_is_a_floor():
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.glob("*.py"))}
    assert folders == set(FLOORS) - {"config", "launch"}
    assert {p.name for p in PACKAGE.glob("*.py")} == {"__init__.py", "checks.py", "config.py", "errors.py"}


@pytest.mark.parametrize("path", [p for p in SOURCES if p != PACKAGE / "__init__.py"], ids=short)
def test_imports_go_down_only(path):
    own = floor_of(module_of(path))
    for dotted, line in imports(path):
        target = own_module(dotted)
        # The version number lives in the package itself.
        if target is None or dotted == "ds_stochdpo.__version__":
            continue
        assert floor_of(target) <= own, f"{short(path)}:{line} imports {dotted}, which lies above it"


@pytest.mark.parametrize(
    ("package", "folder"), [("deepspeed", PACKAGE / "engine"), ("flash_attn", PACKAGE / "model" / "attention.py")]
)
def test_a_library_is_imported_in_one_place_only(package, folder):
    users = [p for p in SOURCES + LAUNCH if any(top_of(d) == package for d, _ in imports(p))]
    assert users, f"nothing imports {package}: the test looks for the wrong name"
    for path in users:
        assert path.is_relative_to(folder), f"{short(path)} imports {package}; only {short(folder)} may"


@pytest.mark.parametrize(
    "path",
    [p for p in SOURCES if "pruning" in p.parts or p.name in ("config.py", "checks.py", "errors.py")],
    ids=short,
)
def test_the_estimators_import_no_io_and_no_processes(path):
    banned = {"transformers", "deepspeed", "datasets", "json", "os", "pathlib", "torch.distributed", "subprocess"}
    for dotted, line in imports(path):
        prefixes = itertools.accumulate(dotted.split("."), lambda a, b: f"{a}.{b}")
        assert not banned & set(prefixes), f"{short(path)}:{line} imports {dotted}"


def module_imports(path):
    """Modules of the package that run when this one is imported: those of its top level, with their packages."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{a.name}" for a in node.names]
        for name in names:
            if (target := own_module(name)) is not None:
                yield target


def test_no_import_cycle():
    graph = {module_of(p): set(module_imports(p)) - {module_of(p)} for p in SOURCES}
    # An __init__ re-exports its files; a file that imports its own package would close a circle.
    done, path = set(), []

    def visit(module):
        if module in path:
            pytest.fail("import cycle: " + " -> ".join(".".join(m) for m in [*path[path.index(module) :], module]))
        if module in done:
            return
        path.append(module)
        for target in sorted(graph[module]):
            visit(target)
        done.add(path.pop())

    for module in graph:
        visit(module)


def test_modules_are_found():
    assert own_module("ds_stochdpo.packing.lanes.Lane") == ("ds_stochdpo", "packing", "lanes")
    assert own_module("torch.nn") is None
    assert floor_of(("ds_stochdpo", "errors")) < floor_of(("ds_stochdpo", "model", "scoring"))
    assert len(SOURCES) > 30
