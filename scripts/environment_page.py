"""Write docs/environment.md from xla_amp/config.py: ``python scripts/environment_page.py [--check]``."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys

from source_tree import ROOT

PAGE = ROOT / "docs" / "environment.md"
HEAD = """# Environment variables

All variables that the package reads. An invalid value is an error that names the variable and what was expected.
`xla_amp/config.py` is the only file that reads them, and `scripts/environment_page.py` writes this page from it; do not
edit it.

| variable | meaning |
|---|---|
"""
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|RANK")


def _variables(node: ast.AST, constants: dict[str, ast.expr]) -> list[str]:
    """Names of variables in the code of `node`, as strings or through the module's constants."""
    found: list[str] = []
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and VARIABLE.fullmatch(part.value):
            found.append(part.value)
        elif isinstance(part, ast.Name) and part.id in constants:
            found += _variables(constants[part.id], constants)
    return found


def rows() -> list[tuple[list[str], str]]:
    """Variables that one function of config.py reads, and what its docstring says of them."""
    tree = ast.parse((ROOT / "xla_amp" / "config.py").read_text())
    constants = {
        node.target.id: node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
    }
    seen: set[str] = set()
    table = []
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name == "place_process":  # which writes what `process` reads
            continue
        found = [name for name in dict.fromkeys(_variables(node, constants)) if name not in seen]
        if found:
            seen.update(found)
            text = inspect.cleandoc(ast.get_docstring(node) or "").partition("\nRaises:")[0]
            table.append((found, " ".join(text.replace("``", "`").split())))
    return table


def page() -> str:
    """The page."""
    lines = [f"| {', '.join(f'`{name}`' for name in names)} | {text} |\n" for names, text in rows()]
    return HEAD + "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page differs; write nothing")
    if not parser.parse_args().check:
        PAGE.write_text(page())
    return int(PAGE.read_text() != page())


if __name__ == "__main__":
    sys.exit(main())
