"""Facts about the code itself, read from its syntax trees: who imports whom, sizes, docstrings."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tuner"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 400

CORE = {"errors", "config", "data", "batching"}
MAY_IMPORT = {
    "errors": set(),
    "config": {"errors"},
    "data": {"errors", "config"},
    "batching": {"errors", "config", "data.lengths"},
    "simulate": CORE,
    "train": CORE,
    "trial": {*CORE, "simulate"},
    "study": {*CORE, "simulate", "trial"},
    "report": {*CORE, "simulate", "trial", "study"},
    "diagnose": {*CORE, "simulate", "trial", "train"},
    "cli": {*CORE, "simulate", "train", "trial", "study", "report", "diagnose"},
}
"""Folder or file of tuner/ -> what it may import, itself aside; function bodies count too."""

ALSO_MAY_IMPORT = {
    # They run in the trial's own process, which trains.
    "trial/worker.py": {"train"},
    "trial/measure.py": {"train"},
    "trial/deviation_worker.py": {"train"},
}

ONLY_IN = {
    "mindspore": ["train/*.py", "diagnose/*.py", "data/mindrecord.py"],
    "optuna": ["study/optuna_*.py"],
    "subprocess": ["trial/runner.py", "train/launch.py"],
    "yaml": ["config/codec.py"],
    "tensorboardX": ["train/event_file.py"],
}

OTHER_WAYS_IN = {
    # They would start processes or import packages past the tables above.
    "multiprocessing",
    "importlib.import_module",
    "os.popen",
    "os.system",
    "os.fork",
    "os.posix_spawn",
    "runpy",
}

MAY_IMPORT_BY_NAME = {
    # The user's own module, named in the config.
    "train/factory.py",
}

TOP_LEVEL = {
    ".ci",
    ".editorconfig",
    ".gitignore",
    "LICENSE",
    "Makefile",
    "README.md",
    "pyproject.toml",
    "results",
    "search_spaces",
    "tests",
    "tuner",
}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_by(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Dotted names of all modules that these statements import, `from` names included."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def run_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """Statements that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) or is_type_checking(child):
            continue
        yield child
        yield from run_on_import(child)


def part_of(dotted: str) -> str | None:
    """`tuner.data.lengths.Lengths` -> `data.lengths`; None outside of tuner."""
    package, *rest = dotted.split(".")
    return ".".join(rest[:2]) if package == "tuner" and rest else None


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_one_way(path):
    home = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if home == "__init__":
        return
    assert home in MAY_IMPORT, f"{home} has no line in the table of imports"
    allowed = {home, *MAY_IMPORT[home], *ALSO_MAY_IMPORT.get(name_of(path), set())}
    for dotted in imported_by(ast.walk(tree_of(path))):
        part = part_of(dotted)
        if part is None or part == "__version__":
            continue
        assert {part, part.split(".")[0]} & allowed, f"{name_of(path)} imports {dotted}"


def test_exceptions_to_the_table_are_still_there():
    for name in ALSO_MAY_IMPORT:
        assert (PACKAGE / name).is_file()


@pytest.mark.parametrize("package", ONLY_IN)
def test_package_is_imported_only_where_it_belongs(package):
    importers = {
        name_of(path)
        for path in MODULES
        for dotted in imported_by(ast.walk(tree_of(path)))
        if dotted.split(".")[0] == package
    }
    allowed = {name_of(path) for pattern in ONLY_IN[package] for path in PACKAGE.glob(pattern)}
    assert importers <= allowed
    assert importers


def attributes_used(tree: ast.Module) -> Iterator[str]:
    """`os.system` and the like, as far as they are written out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Name) and node.id == "__import__":
            yield node.id


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_goes_past_the_tables_of_imports(path):
    tree = tree_of(path)
    used = {*imported_by(ast.walk(tree)), *attributes_used(tree)}
    roots = {dotted.split(".")[0] for dotted in used}
    found = (used | roots) & {*OTHER_WAYS_IN, "__import__"}
    assert found == ({"importlib.import_module"} if name_of(path) in MAY_IMPORT_BY_NAME else set())


def test_table_of_imports_has_a_line_for_what_is_there_and_no_other():
    there = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in MODULES}
    assert there - {"__init__"} == set(MAY_IMPORT)


def test_packages_import_each_other_in_no_circle():
    imports: dict[str, set[str]] = {}
    for path in MODULES:
        home = path.relative_to(PACKAGE).with_suffix("").parts[0]
        parts = map(part_of, imported_by(run_on_import(tree_of(path))))
        found = {part.split(".")[0] for part in parts if part}
        imports.setdefault(home, set()).update(found - {home})
    while imports:
        leaves = {home for home, needed in imports.items() if not needed & set(imports)}
        assert leaves, f"in a circle: {imports}"
        imports = {home: needed for home, needed in imports.items() if home not in leaves}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_file_and_its_functions_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


def public_definitions(node: ast.Module | ast.ClassDef) -> Iterator[ast.AST]:
    """Public functions and classes, and those inside public classes."""
    for child in node.body:
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if child.name.startswith("_"):
            continue
        yield child
        if isinstance(child, ast.ClassDef):
            yield from public_definitions(child)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_and_all_that_is_public_has_a_docstring(path):
    tree = tree_of(path)
    assert ast.get_docstring(tree), "the module has no docstring"
    for node in public_definitions(tree):
        assert ast.get_docstring(node), f"{node.name} has no docstring"


@pytest.mark.parametrize("package", ["batching", "simulate"])
def test_values_of_the_pure_core_are_frozen_and_built_by_name(package):
    decorators = [
        (f"{name_of(path)}: {node.name}", ast.unparse(decorator))
        for path in sorted((PACKAGE / package).glob("*.py"))
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
        for decorator in node.decorator_list
    ]
    assert decorators
    assert {text for _, text in decorators} == {"dataclass(frozen=True, kw_only=True)"}


FORBIDDEN = [
    "/" + "root/",
    "/" + "work/",
    "/" + "home/",
    "Not" + "ImplementedError",
    "TO" + "DO",
    "FIX" + "ME",
]
"""In two parts, so that this file holds none of them."""


def tracked_names() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip(f"git cannot list the files: {listed.stderr.strip()}")
    return [name for name in listed.stdout.split("\0") if name]


def tracked_texts() -> Iterator[tuple[str, str]]:
    for name in tracked_names():
        path = ROOT / name
        if path.is_file() and b"\0" not in (content := path.read_bytes()):
            yield name, content.decode("utf-8")


def test_no_tracked_text_has_a_path_of_one_machine_or_unfinished_work():
    found = [
        f"{name}:{number}: {word}"
        for name, text in tracked_texts()
        for number, line in enumerate(text.splitlines(), start=1)
        for word in FORBIDDEN
        if word in line
    ]
    assert found == []


def test_top_level_holds_what_belongs_there():
    assert {name.split("/")[0] for name in tracked_names()} == TOP_LEVEL


def test_pure_packages_load_nothing_heavy():
    code = (
        "import sys\n"
        "import tuner.batching.plan, tuner.simulate.estimate, tuner.simulate.stats\n"
        "import tuner.config.override, tuner.cli.entry\n"
        "print([name for name in ('mindspore', 'optuna', 'matplotlib') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
