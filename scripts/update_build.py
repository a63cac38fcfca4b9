"""Write BUILD from the sources: `python scripts/update_build.py`. The targets are described in source_tree.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from source_tree import LAYERS, ROOT, dependencies, targets

HEADER = '''\
"""The package, its tests and its programs as Bazel targets; the libraries stand in the order of their layers.

Written by scripts/update_build.py and checked by tests/repo/test_build.py.  Third-party packages come from the Python
environment that MODULE.bazel points to: the one that README.md creates, when it is active.
"""

load("@rules_python//python:defs.bzl", "py_binary", "py_library", "py_test")

package(default_visibility = ["//visibility:public"])
'''
ORDER = ["package", *(prefix.partition(".")[2] for row in LAYERS for prefix in row)]
TEST_MAIN = "tests/run_pytest.py"
DATA = {
    "package": '"xla_amp/py.typed"',
    "diagnose": '"xla_amp/diagnose/templates/*.j2"',
    "engines": '"xla_amp/engines/jax/*.toml"',
    "policy": '"xla_amp/policy/tables/*.toml"',
    "stablehlo": '"xla_amp/stablehlo/*.toml"',
    "tests_support": '"docs/*.md", "pyproject.toml"',
}

Fields = Mapping[str, str | list[str]]


def render(rule: str, fields: Fields) -> str:
    """One target in buildifier's layout: strings are expressions, lists hold labels, empty lists are left out."""
    lines = [f"{rule}("]
    for key, value in fields.items():
        if isinstance(value, str):
            lines.append(f"    {key} = {value},")
        elif len(value) == 1:
            lines.append(f'    {key} = ["{value[0]}"],')
        elif value:
            lines += [f"    {key} = [", *(f'        "{item}",' for item in value), "    ],"]
    return "\n".join([*lines, ")"]) + "\n"


def data(name: str, paths: list[str]) -> str | list[str]:
    """What the target's files read at run time besides Python."""
    if name in DATA:
        return f"glob([{DATA[name]}])"
    if not name.startswith("tests_"):
        return []
    files = (file for file in (ROOT / paths[0]).parent.iterdir() if file.is_file() and file.suffix != ".py")
    return sorted(file.relative_to(ROOT).as_posix() for file in files)


def lowering(fields: Fields) -> Iterator[str]:
    """The folder `lowering` under the name by which it is imported, xla_amp.lowering."""
    paths = list(fields["srcs"])
    outs = [f"xla_amp/{path}" for path in paths]
    copy = '"cp $(SRCS) $(RULEDIR)/xla_amp/lowering/"'
    yield render("genrule", {"name": '"lowering_sources"', "srcs": paths, "outs": outs, "cmd": copy})
    yield render("py_library", {**fields, "srcs": [":lowering_sources"]})


def test(fields: Fields) -> str:
    """One pytest run over a folder; the tests of the repository look at the whole tree, so no sandbox for them."""
    folder = fields["srcs"][0].rpartition("/")[0]
    files = [path for path in fields["srcs"] if "/test_" in path]
    merged: dict[str, str | list[str]] = {"name": fields["name"], "size": '"large"'}
    merged["srcs"] = [TEST_MAIN, *fields["srcs"]]
    # Without the __init__.py files that Bazel would make up: they change what pytest takes a test's neighbours for.
    merged |= {"args": files, "data": fields["data"], "legacy_create_init": "0", "main": f'"{TEST_MAIN}"'}
    merged |= {"tags": ["local"] if folder in ("tests/repo", "tests/examples") else [], "deps": fields["deps"]}
    return render("py_test", merged)


def blocks() -> Iterator[str]:
    """The targets of the file, one text each."""
    found = targets()
    libraries = {name for name, paths in found.items() if paths[0].startswith(("xla_amp/", "lowering/"))}
    inside = sorted(libraries, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    for name in [*inside, *sorted(found.keys() - libraries)]:
        paths = found[name]
        deps = sorted(f":{other}" for other in dependencies(name, paths))
        own: Fields = {"name": f'"{name}"', "srcs": paths, "data": data(name, paths)}
        fields: Fields = {**own, "deps": deps}
        if name == "lowering":
            yield from lowering(fields)
        elif any("/test_" in path for path in paths):
            yield test(fields)
        elif name not in libraries and "__main__" in (ROOT / paths[0]).read_text():
            yield render("py_binary", {**own, "main": f'"{paths[0]}"', "deps": deps})
        else:
            yield render("py_library", fields)
        if name == inside[-1]:
            yield render("py_library", {"name": '"xla_amp"', "deps": sorted(f":{library}" for library in libraries)})


if __name__ == "__main__":
    (ROOT / "BUILD").write_text("\n".join([HEADER, *blocks()]))
