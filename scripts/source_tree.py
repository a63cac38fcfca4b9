"""The Python modules of the repository, their imports and their layers.

tests/repo checks the tree against these tables.  Nothing here imports the package: sources are parsed, not executed.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Modules beside `xla_amp/__init__.py` that give a name to import to what is elsewhere.
ENTRIES = frozenset({"autoload", "checkpoint", "device", "metrics", "syncfree", "testing", "torch_xla", "xla_model"})

# A module belongs to the layer of its longest matching prefix, and imports its own folder and the layers below.
# The root module is last because users enter there: it names everything, and no module inside imports it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("xla_amp.errors", "xla_amp.common.files", "xla_amp.public_names", "xla_amp.common.types"),
    ("xla_amp.common", "xla_amp.hardware"),
    ("xla_amp.policy",),
    ("xla_amp.analysis",),
    ("xla_amp.pages",),
    ("xla_amp.planning",),
    ("xla_amp.lowering",),
    ("xla_amp.torch_common",),
    ("xla_amp.engines",),
    ("xla_amp.training",),
    ("xla_amp.lazy",),
    ("xla_amp.engine_choice",),
    ("xla_amp.pytorch", "xla_amp.jax", "xla_amp.stablehlo"),
    ("xla_amp.tools",),
    ("xla_amp.integrations",),
    ("xla_amp", "xla_amp.cli", "xla_amp.__main__", *(f"xla_amp.{name}" for name in ENTRIES)),
)

# The only modules of the package that `xla_amp.lowering` imports.
LOWERING_IMPORTS = frozenset({"xla_amp.common.events", "xla_amp.common.loss_scaling", "xla_amp.hardware"})

# Third-party packages that a layer may load; layers not named here may load every dependency of the package.
THIRD_PARTY: Mapping[int, frozenset[str]] = {
    0: frozenset(),
    2: frozenset(),
    3: frozenset(),
    4: frozenset({"pandas"}),
    5: frozenset(),
    6: frozenset({"jax", "ml_dtypes", "numpy"}),
}

_CHANGES = frozenset({"add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault", "update"})
_CALLBACKS = re.compile(r"((list|set|tuple|deque|collections\.deque)\[)?Callable\b")
FOLDERS = ("xla_amp", "lowering", "examples", "benchmarks", "scripts", "tests")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import:
    """One imported module name, as far as the file says."""

    name: str
    line: int
    runtime: bool
    """False under ``if TYPE_CHECKING``: a dependency for the reader, not for the running program."""


def commit() -> str:
    """The commit of this tree, or "unknown" in a copy without git."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    return done.stdout.strip() or "unknown"


@functools.cache
def python_files() -> list[str]:
    """Every source file of the repository, as sorted paths relative to the root."""
    found = (path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return sorted(path.as_posix() for path in found if "__pycache__" not in path.parts)


def python_blocks(page: str) -> list[str]:
    """The Python programs in the Markdown of `page`, a path relative to the root."""
    return re.findall(r"^```python[^\n]*\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def module_name(path: str) -> str:
    """The name by which `path` is imported; files outside the package are their path with dots."""
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(["xla_amp", *parts] if parts[0] == "lowering" else parts)


@functools.cache
def modules() -> dict[str, str]:
    """Module name -> path for the files that install as part of the package."""
    return {module_name(path): path for path in python_files() if path.startswith(("xla_amp/", "lowering/"))}


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    """The nodes of a source's tree, each once, the module first."""
    return list(ast.walk(ast.parse(source)))


def cycles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """The sets of modules that import each other, directly or through others, each sorted."""
    reached: dict[str, set[str]] = {}
    for start in edges:
        found: set[str] = set()
        waiting = list(edges[start])
        while waiting:
            module = waiting.pop()
            if module not in found:
                found.add(module)
                waiting.extend(edges.get(module, ()))
        reached[start] = found
    groups = {tuple(sorted({a, *(b for b in reached[a] if a in reached.get(b, ()))})) for a in edges if a in reached[a]}
    return [list(group) for group in sorted(groups)]


def package_of(module: str) -> str:
    """The package that relative imports of a module are in."""
    return module if modules().get(module, "").endswith("/__init__.py") else module.rpartition(".")[0]


def imports(source: str, package: str) -> Iterator[Import]:
    """The modules that `source` imports at the top, inside functions or by name; `package` resolves relative imports.

    ``from a import b`` yields ``a.b``: `resolve` decides whether ``b`` is a module or a name in ``a``.
    """
    typing_only = {
        id(node)
        for branch in nodes(source)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in nodes(source):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = _prefix(node, package)
            names = [prefix if alias.name == "*" else f"{prefix}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and node.value in modules() and node.value != "xla_amp":
            names = [str(node.value)]  # an entry of a table of modules that are loaded by name
        for name in names:
            yield Import(name=name, line=getattr(node, "lineno", 0), runtime=id(node) not in typing_only)


def changed(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each attribute of an imported name that `source` assigns, deletes or changes in place."""
    imported = dict(_bound(source, package))
    for node in nodes(source):
        targets: list[ast.AST] = []
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            targets = [node]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            targets = [node.func.value]
        for target in targets:
            while isinstance(target, ast.Subscript):
                target = target.value
            if isinstance(target, ast.Attribute):
                first, *rest = ast.unparse(target).split(".")
                if first in imported:
                    yield getattr(node, "lineno", 0), ".".join([imported[first], *rest])


def _bound(source: str, package: str) -> Iterator[tuple[str, str]]:
    """The names that imports of `source` bind, each with the dotted name that it stands for."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from ((each.asname, each.name) for each in node.names if each.asname)
            yield from ((top, top) for each in node.names if not each.asname for top in [each.name.partition(".")[0]])
        elif isinstance(node, ast.ImportFrom):
            prefix = _prefix(node, package)
            yield from ((each.asname or each.name, f"{prefix}.{each.name}") for each in node.names)


def _prefix(node: ast.ImportFrom, package: str) -> str:
    base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def callbacks(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each public variable of the module that others could fill with functions."""
    for node in ast.iter_child_nodes(nodes(source)[0]):
        if isinstance(node, ast.AnnAssign) and _CALLBACKS.match(ast.unparse(node.annotation)):
            name = ast.unparse(node.target)
            if name[0] != "_":
                yield node.lineno, name


def resolve(name: str, known: Mapping[str, str]) -> str | None:
    """The longest module of `known` that `name` is or belongs to, or None for a third-party name."""
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
