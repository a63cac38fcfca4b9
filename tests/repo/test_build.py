"""BUILD says the same as the tree: every file in one target, and the dependencies that the imports need."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import source_tree
from source_tree import ROOT

RULES = ("genrule", "py_binary", "py_library", "py_test")
TEST_MAIN = "tests/run_pytest.py"  # every py_test starts it, so it stands in many


def value(node: ast.expr) -> Any:
    """A field of a target; ``glob([...])`` becomes the paths that it matches."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "glob":
        patterns = ast.literal_eval(node.args[0])
        return sorted(path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern))
    return ast.literal_eval(node)


def parse(text: str) -> list[dict[str, Any]]:
    """The targets of a BUILD file: their fields, and their rule under "rule"."""
    calls = [item.value for item in ast.parse(text).body if isinstance(item, ast.Expr)]
    return [
        {"rule": call.func.id, **{str(field.arg): value(field.value) for field in call.keywords}}
        for call in calls
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in RULES
    ]


def python_sources(target: dict[str, Any], by_name: dict[str, dict[str, Any]]) -> list[str]:
    """The .py files of a target, those that a genrule copies for it included."""
    copied = [path for label in target.get("srcs", []) if label[0] == ":" for path in by_name[label[1:]]["srcs"]]
    direct = [path for path in target.get("srcs", []) if path[0] != ":"]
    return [path for path in copied + direct if target["rule"] != "py_test" or path != TEST_MAIN]


def problems(text: str) -> Iterator[str]:
    """What is wrong with a BUILD file, one line each."""
    targets = parse(text)
    by_name = {target["name"]: target for target in targets}
    for name, count in Counter(target["name"] for target in targets).items():
        if count > 1:
            yield f"{name}: defined {count} times"

    owners: Counter[str] = Counter()
    for target in targets:
        name = target["name"]
        if target["rule"] == "genrule":
            if target["outs"] != [f"xla_amp/{path}" for path in target["srcs"]]:
                yield f"{name}: its outputs are not its sources under xla_amp/"
            continue
        paths = python_sources(target, by_name)
        owners.update(paths)
        for path in [*paths, *target.get("data", [])]:
            if not (ROOT / path).is_file():
                yield f"{name}: {path} does not exist"
        if target["rule"] in ("py_binary", "py_test") and target.get("main") not in target["srcs"]:
            yield f"{name}: its main file is {target.get('main')}, which is not among its sources"
        deps = {label.removeprefix(":") for label in target.get("deps", [])}
        for dep in sorted(deps - by_name.keys()):
            yield f"{name}: depends on {dep}, which no target defines"
        present = [path for path in paths if (ROOT / path).is_file()]
        if name == "xla_amp":
            needed = {source_tree.target(path) for path in source_tree.modules().values()}
        else:
            needed = source_tree.dependencies(name, present) if present else set()
        for dep in sorted(needed - deps):
            yield f"{name}: imports from {dep} without depending on it"
        for dep in sorted(deps - needed):
            yield f"{name}: depends on {dep} without importing from it"

    for path in source_tree.python_files():
        if owners[path] != 1:
            yield f"{path}: in {owners[path]} targets"
    policy = {path.relative_to(ROOT).as_posix() for path in (ROOT / "xla_amp/policy").rglob("*.toml")}
    for path in sorted(policy - set(by_name.get("policy", {}).get("data", []))):
        yield f"{path}: a policy table that no data field names"
    yield from cycles({name: target.get("deps", []) for name, target in by_name.items()})


def cycles(deps: dict[str, list[str]]) -> Iterator[str]:
    """The targets from which a chain of dependencies leads back to themselves."""
    for start in deps:
        seen: set[str] = set()
        reach = list(deps[start])
        while reach:
            name = reach.pop().removeprefix(":")
            if name == start:
                yield f"{start}: depends on itself"
                break
            if name not in seen:
                seen.add(name)
                reach += deps.get(name, [])


def test_build_and_tree_agree():
    found = list(problems((ROOT / "BUILD").read_text()))
    assert found == [], "run scripts/update_build.py"


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("config", "srcs = [", "srcs = [],#", "xla_amp/config.py: in 0 targets"),
        ("scale", "srcs = [", 'srcs = ["xla_amp/config.py", ', "xla_amp/config.py: in 2 targets"),
        ("vocab", "srcs = [", 'srcs = ["xla_amp/gone.py", ', "vocab: xla_amp/gone.py does not exist"),
        ("lowering_sources", '"lowering/amp.py",', "", "lowering/amp.py: in 0 targets"),
        ("lowering_sources", "xla_amp/lowering/amp.py", "amp.py", "outputs are not its sources"),
        ("mnist", "srcs = [", "srcs = [],#", "examples/mnist.py: in 0 targets"),
        ("mnist", "deps = [", "deps = [],#", "mnist: imports from xla_amp without depending on it"),
        ("scale", "deps = [", 'deps = [":vocab", ', "scale: depends on vocab without importing from it"),
        ("vocab", '"vocab"', '"scale"', "scale: defined 2 times"),
        ("vocab", '"vocab"', '"words"', "config: depends on vocab, which no target defines"),
        ("package", "srcs = ", 'deps = [":vocab"], srcs = ', "package: depends on itself"),
        ("mnist", 'main = "', 'main = "examples/gone/', "which is not among its sources"),
        ("policy", "tables/*.toml", "tables/t*.toml", "a policy table that no data field names"),
    ],
)
def test_the_check_can_fail(name, old, new, message):
    text = (ROOT / "BUILD").read_text()
    start = text.index(f'name = "{name}"')
    end = text.index("\n)\n", start)
    assert old in text[start:end]
    found = list(problems(text[:start] + text[start:end].replace(old, new, 1) + text[end:]))
    assert any(message in line for line in found), found
