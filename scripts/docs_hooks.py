"""MkDocs hooks: reference pages from the public names, and pages of the files outside docs/ that pages link to.

The Markdown of docs/ reads on its own; links there lead to files of the repository.  On the site each such file is a
page under ``source/``.  `Docstrings` is Griffe's extension: it reads docstrings for mkdocstrings.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from source_tree import ROOT

LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")

MOVED = {
    "command_line": "stablehlo.html#the-command",
    "concepts": "tutorial.html#the-ideas",
    "explain": "tools.html#explain",
    "float8": "limits.html#roadmap",
    "huggingface": "frameworks.html#hugging-face",
    "jax_training": "jax.html#loss-scale",
    "monitor": "tools.html#monitor",
    "reports": "tools.html#reports",
    "search": "tools.html#search",
    "device_tests": "lists/device_tests.html",
    "environment": "lists/environment.html",
    "jax_functions": "jax.html#what-stays-float32",
    "lightning": "frameworks.html#lightning",
    "lowering": "source/lowering/index.html",
    "models": "source/benchmarks/results/models.html",
    "one_rule": "policy.html#casts",
    "support": "lists/operations.html",
    "torch_xla": "frameworks.html#torch_xla",
}
"""Page that the site had -> address of what it says now; the old address leads there."""

STUB = """<!doctype html>
<meta charset="utf-8">
<title>Moved</title>
<link rel="canonical" href="{address}">
<meta http-equiv="refresh" content="0; url={address}">
<a href="{address}">This page has moved.</a>
"""

BUTTONS = re.compile(r"^(?:\[[^\]]+\]\([^)]+\) ?){2,}$", re.MULTILINE)
"""A paragraph of links only: on the first page each is a button."""

UNSEARCHED = ("lists/changelog_archive.md",)
"""Pages beside those of sources that the search leaves out."""

BOOSTS = {"Start": 10.0, "Guides": 10.0, "Help": 1.0, "Python API": 0.1, "Development": 0.001}
"""Part of the navigation -> the weight of its pages in the search."""

LISTED = {"lists/device_tests.md": 0.001}
"""Page outside of the navigation -> its weight.  Others have 0.05: their titles still outweigh text of guides."""

INCLUDED = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "lowering/README.md",
    "xla_amp/lazy/README.md",
    "benchmarks/results/models.md",
)
"""Files with a page that no page needs to link to; README.md is the first page."""

API = "Python API"
"""The reference's part of the navigation."""

OVERVIEW = "reference/index.md"
"""The reference's first page: names by task, each of which becomes a link."""

PACKAGES = ("xla_amp", "xla_amp.jax", "xla_amp.tools.search", "xla_amp.policy", "xla_amp.stablehlo")
"""Packages whose names are re-exported: each name has an entry."""

MODULES = (
    "xla_amp.syncfree",
    "xla_amp.xla_model",
    "xla_amp.checkpoint",
    "xla_amp.torch_xla",
    "xla_amp.lowering",
    "xla_amp.errors",
    "xla_amp.testing",
    "xla_amp.integrations",
    "xla_amp.integrations.huggingface",
    "xla_amp.integrations.lightning",
    "xla_amp.integrations.torchmetrics",
    "xla_amp.integrations.trainer_monitor",
    "xla_amp.tools.monitor.history",
)
"""Modules that are documented as a whole."""


def public_names(package: str) -> list[str]:
    """The names that ``package`` re-exports, without its modules, sorted.  Sources are read, not imported."""
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text())
    branches = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    statements = branches[0].body if branches else tree.body
    imported = [node for node in statements if isinstance(node, ast.ImportFrom)]
    return sorted(
        alias.name
        for node in imported
        for alias in node.names
        if alias.asname == alias.name and f"{package}.{alias.name}" not in (*PACKAGES, *MODULES)
    )


def version() -> str:
    """The package's version.  Sources are read, not imported."""
    return (ROOT / "xla_amp/__init__.py").read_text().partition('\n__version__ = "')[2].partition('"')[0]


def reference() -> dict[str, str]:
    """Path below docs/ -> Markdown of each reference page."""
    pages = {}
    for package in PACKAGES:
        entries = "\n\n".join(f"::: {package}.{name}" for name in public_names(package))
        pages[f"reference/{package}.md"] = f"# {package}\n\n{entries}\n"
    for module in MODULES:
        options = "    options: {show_root_heading: false, show_root_toc_entry: false}"
        pages[f"reference/{module}.md"] = f"# {module}\n\n::: {module}\n{options}\n"
    return pages


def _site_path(path: str) -> str:
    """Path on the site, below docs/, of a file or folder of the repository."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith((".md", ".png")) else f"source/{path}.md"


def _targets(text: str, path: str) -> Iterator[tuple[str, str]]:
    """The links of a page to files of the repository, as written and as paths from the root; `path` is the page's."""
    for link in LINK.findall(text):
        target = os.path.normpath(PurePosixPath(path).parent / link)
        if not target.startswith("..") and (ROOT / target).exists():
            yield link, target


def _named(found: re.Match[str]) -> str:
    """A name in backticks, as a link to its entry or to its module's page."""
    name = found[1]
    return f"[`{name}`]({name}.md)" if name in (*PACKAGES, *MODULES) else f"[`{name}`][{name}]"


def _relinked(text: str, path: str) -> str:
    """The text of the page at `path` with links for the site."""
    here = PurePosixPath(_site_path(path)).parent
    changed = {link: os.path.relpath(_site_path(target), here) for link, target in _targets(text, path)}
    return LINK.sub(lambda match: changed.get(match[1], match[1]), text)


def _source_page(path: str) -> str:
    """Markdown that shows a file of the repository, or the files of a folder."""
    found = ROOT / path
    if path.endswith(".md"):
        return _relinked(found.read_text(), path)
    if path.endswith(".ipynb"):
        return "\n\n".join(part for cell in json.loads(found.read_text())["cells"] for part in _cell(cell, path))
    files = sorted(file for file in found.iterdir() if file.is_file()) if found.is_dir() else [found]
    parts = [f"# {path}\n"]
    for file in files:
        heading = f"\n## {file.name}\n" if found.is_dir() else ""
        parts.append(f"{heading}\n````{file.suffix[1:]}\n{file.read_text()}````\n")
    return "".join(parts)


def _cell(cell: dict[str, Any], path: str) -> Iterator[str]:
    """A cell of a notebook in Markdown, with what it printed and drew."""
    text = "".join(cell["source"])
    if cell["cell_type"] != "code":
        yield _relinked(text, path)
        return
    yield f"```python\n{text}\n```"
    for output in cell["outputs"]:
        picture = output.get("data", {}).get("image/png")
        if picture:
            yield f"![what the cell draws](data:image/png;base64,{''.join(picture.split())})"
        elif "text" in output:
            yield f"```text\n{''.join(output['text'])}\n```"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fills in the version and the reference's part of the navigation."""
    config.site_name += f" {version()}"
    for entry in config.nav or ():
        if API in entry:
            pages = [{page.removeprefix("reference/").removesuffix(".md"): page} for page in reference()]
            entry[API] = [OVERVIEW, *pages]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the reference, and a page for each file outside docs/ that a page links to."""
    for path, text in reference().items():
        files.append(File.generated(config, path, content=text))
    waiting = list(INCLUDED)
    for page in files.documentation_pages():
        if page.generated_by is None:
            path = f"docs/{page.src_uri}"
            waiting += [target for _, target in _targets(page.content_string, path)]
    while waiting:
        path = waiting.pop()
        if path.startswith("docs/") or files.get_file_from_path(_site_path(path)):
            continue
        if path.endswith(".png"):
            files.append(File.generated(config, _site_path(path), abs_src_path=str(ROOT / path)))
            continue
        files.append(File.generated(config, _site_path(path), content=_source_page(path)))
        if path.endswith(".md"):
            waiting += [target for _, target in _targets((ROOT / path).read_text(), path)]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links that leave docs/ to the pages of `on_files`; the search shows pages for readers first."""
    address = page.file.src_uri
    if address == "index.md":
        markdown = BUTTONS.sub(lambda found: found[0].replace(")", "){ .md-button }"), markdown)
    if address in UNSEARCHED or (address.startswith("source/") and address != "source/CONTRIBUTING.md"):
        page.meta["search"] = {"exclude": True}
    else:
        part = page.parent.title if page.parent else ""
        page.meta["search"] = {"boost": BOOSTS.get(part) or LISTED.get(address, 0.05)}
    if address == OVERVIEW:
        markdown = re.sub(r"`(xla_amp\.[\w.]+)`", _named, markdown)
    return markdown if page.file.generated_by else _relinked(markdown, f"docs/{page.file.src_uri}")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Gives each cell of a table the heading of its column, which narrow screens show (stylesheets/tables.css)."""
    return re.sub(r"<table>\n<thead>.*?</table>", lambda table: _labelled(table[0]), html, flags=re.DOTALL)


def _labelled(table: str) -> str:
    """A table whose rows may be stacked."""
    headings = [
        re.sub(r"<[^>]+>", "", cell).replace('"', "&quot;")
        for cell in re.findall(r"<th[^>]*>(.*?)</th>", table, re.DOTALL)
    ]
    number = itertools.count()
    return re.sub(r"<td", lambda _: f'<td data-label="{headings[next(number) % len(headings)]}"', table).replace(
        "<table>", "<table data-stacked>", 1
    )


def on_post_build(config: MkDocsConfig) -> None:
    """Writes a stub at the address of each page that has moved."""
    for page, address in MOVED.items():
        (Path(config.site_dir) / f"{page}.html").write_text(STUB.format(address=address))


class Docstrings(griffe.Extension):
    """A section ``Example:`` is one of the kind that holds doctests, which Griffe knows as ``Examples:``."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
