"""What the repository consists of: its Python modules, their imports, their layer and their Bazel target.

Read by scripts/update_build.py, which writes BUILD, and by tests/repo, which holds the tree against these tables.
Nothing here imports the package: sources are parsed, never executed.

A Bazel target is a folder of the package (or a single file beside those folders), an example, a script, a benchmark,
or a folder of tests.  `package` is `xla_amp/__init__.py` alone: it loads the public names on first use, so every module
needs it and it needs none; `xla_amp` is what users depend on, the package with everything it can load.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# A module belongs to the layer of its longest matching prefix, and imports its own folder and the layers below.
# The root module is last because users enter there: it names everything and is imported by nobody inside.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("xla_amp.vocab", "xla_amp.errors"),
    ("xla_amp.config", "xla_amp.record", "xla_amp.scale"),
    ("xla_amp.policy",),
    ("xla_amp.lowering",),
    ("xla_amp.engines",),
    ("xla_amp.pytorch", "xla_amp.jax", "xla_amp.stablehlo"),
    ("xla_amp", "xla_amp.cli", "xla_amp.diagnose"),
)

# Third-party packages that a layer may load; layers not named here may load every dependency of the package.
THIRD_PARTY: Mapping[int, frozenset[str]] = {
    0: frozenset(),
    1: frozenset(),
    2: frozenset(),
    3: frozenset({"jax", "ml_dtypes", "numpy"}),
}

MODULE = re.compile(r"xla_amp(\.[a-z_]+)+")
FOLDERS = ("xla_amp", "lowering", "examples", "benchmarks", "scripts", "tests")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import:
    """One imported module name, as far as the file says."""

    name: str
    line: int
    runtime: bool
    """False under ``if TYPE_CHECKING``: a dependency for the reader, not for the running program."""


@functools.cache
def python_files(root: Path = ROOT) -> list[str]:
    """Every source file of the repository, as sorted paths relative to `root`."""
    found = (path.relative_to(root) for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    return sorted(path.as_posix() for path in found if "__pycache__" not in path.parts)


def module_name(path: str) -> str:
    """The name by which `path` is imported; files outside the package are their path with dots."""
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(["xla_amp", *parts] if parts[0] == "lowering" else parts)


@functools.cache
def modules(root: Path = ROOT) -> dict[str, str]:
    """Module name -> path for the files that install as part of the package."""
    return {module_name(path): path for path in python_files(root) if path.startswith(("xla_amp/", "lowering/"))}


def imports(source: str, package: str) -> Iterator[Import]:
    """The modules that `source` imports at the top, inside functions or by name; `package` resolves relative imports.

    ``from a import b`` yields ``a.b``: `resolve` decides whether ``b`` is a module or a name in ``a``.
    """
    tree = ast.parse(source)
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            names = [prefix if alias.name == "*" else f"{prefix}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE.fullmatch(node.value):
            names = [node.value]  # an entry of a table of modules that are loaded by name
        for name in names:
            yield Import(name=name, line=getattr(node, "lineno", 0), runtime=id(node) not in typing_only)


@functools.cache
def file_imports(path: str, root: Path = ROOT) -> list[Import]:
    """`imports` of one file of the repository."""
    name = module_name(path)
    package = name if path.endswith("/__init__.py") else name.rpartition(".")[0]
    return list(imports((root / path).read_text(), package))


def resolve(name: str, known: Mapping[str, str]) -> str | None:
    """The longest module of `known` that `name` is or lies in, or None for a third-party name."""
    while name:
        if name in known:
            return name
        name = name.rpartition(".")[0]
    return None


def layer(module: str) -> tuple[int, str] | None:
    """The layer of a module and the prefix that put it there; None when no row of `LAYERS` names it."""
    rows = [(level, prefix) for level, prefixes in enumerate(LAYERS) for prefix in prefixes]
    exact = [(level, prefix) for level, prefix in rows if module == prefix]
    inside = [(level, prefix) for level, prefix in rows if prefix != "xla_amp" and module.startswith(f"{prefix}.")]
    return next(iter(exact + inside), None)


def target(path: str) -> str:
    """The name of the Bazel target that `path` belongs to."""
    folder, *inside, last = path.split("/")
    stem = last.removesuffix(".py")
    if folder == "xla_amp":
        first = inside[0] if inside else stem
        return {"__init__": "package", "errors": "vocab"}.get(first, first)
    if folder == "tests":
        if last in ("conftest.py", "run_pytest.py"):
            return "tests_support"
        return "_".join([folder, *(inside or ["top"])])
    return {"lowering": "lowering", "examples": stem}.get(folder, f"{folder}_{stem}")


def targets(root: Path = ROOT) -> dict[str, list[str]]:
    """Target name -> its Python files."""
    found: dict[str, list[str]] = {}
    for path in python_files(root):
        found.setdefault(target(path), []).append(path)
    return found


def dependencies(name: str, paths: list[str], root: Path = ROOT) -> set[str]:
    """The targets whose modules the files `paths` of target `name` load, `name` itself left out."""
    if name == "package":
        return set()
    known = modules(root)
    # Examples, scripts and tests import their neighbours by bare name; tests have scripts/ on their path as well.
    beside = {path.rpartition("/")[2].removesuffix(".py"): path for path in python_files(root) if "/test_" not in path}
    found = {"package"} if paths[0] in known.values() else set()
    if paths[0].startswith("tests/"):
        found.add("tests_support")
    for item in (item for path in paths for item in file_imports(path, root) if item.runtime):
        module = resolve(item.name, known)
        if module == "xla_amp":
            found.add("xla_amp")
        elif module is not None:
            found.add(target(known[module]))
        elif item.name.partition(".")[0] in beside and not paths[0].startswith(("xla_amp/", "lowering/")):
            neighbour = beside[item.name.partition(".")[0]]
            if neighbour.startswith(("scripts/", paths[0].partition("/")[0])):
                found.add(target(neighbour))
    return found - {name}
