"""The documentation site: it builds without a warning, loads nothing from elsewhere, and names all that is public."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import docs_hooks
import pytest
from source_tree import ROOT

OLD = {
    "architecture", "benchmarks", "command_line", "compile", "concepts", "device_tests", "distributed",
    "environment", "explain", "float8", "frameworks", "huggingface", "index", "install", "jax", "jax_functions",
    "jax_training", "lightning", "limits", "loss_scaling", "lowering", "migration", "models", "monitor", "one_rule",
    "policy", "reports", "search", "stablehlo", "support", "torch_xla", "troubleshooting", "tutorial",
}  # fmt: skip
"""Pages of the site of version 0.1.0."""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHON": sys.executable}
    command = [str(ROOT / "scripts" / "build_docs.sh"), "--site-dir", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    said = run.stdout + run.stderr
    assert run.returncode == 0, said
    assert "WARNING" not in said
    return folder


@pytest.mark.full
def test_pages_load_nothing_from_elsewhere(site: Path):
    loaded = re.compile(r"<(?:script|img|iframe)[^>]* src=\"?https?://|<link[^>]* href=\"?https?://")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    assert [page.name for page in pages if loaded.search(page.read_text())] == []


@pytest.mark.full
def test_the_search_needs_no_server(site: Path):
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = {")
    assert '<script src="../javascripts/iframe-worker.js">' in (site / "reference" / "xla_amp.html").read_text()
    assert (site / "javascripts" / "iframe-worker.js").exists()


@pytest.mark.full
def test_old_addresses_lead_to_what_the_pages_say_now(site: Path):
    for page, address in docs_hooks.MOVED.items():
        assert f'url={address}"' in (site / f"{page}.html").read_text()
        path, _, anchor = address.partition("#")
        assert not anchor or f'id="{anchor}"' in (site / path).read_text(), address
        assert (site / path).exists(), address


def test_every_page_of_the_old_site_has_a_place():
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"index"}
    assert pages & set(docs_hooks.MOVED) == set()
    assert pages | set(docs_hooks.MOVED) >= OLD
    assert len(OLD) == 33


def test_no_page_is_twice_in_the_navigation():
    found = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert sorted(found) == sorted({*pages, "index.md", "source/CONTRIBUTING.md", "source/CHANGELOG.md"})
    assert len(found) <= 20  # the first page, and 19 that answer one question each


@pytest.mark.full
def test_the_search_finds_no_sources(site: Path):
    index = (site / "search" / "search_index.js").read_text()
    pages = set(re.findall(r'"location":"([^"#]+)', index))
    assert {"install.html", "limits.html", "source/CONTRIBUTING.html"} <= pages
    assert [page for page in pages if page.startswith("source/")] == ["source/CONTRIBUTING.html"]
    assert "lists/changelog_archive.html" not in pages


@pytest.mark.full
@pytest.mark.parametrize("package", docs_hooks.PACKAGES)
def test_the_reference_has_every_public_name(package: str, site: Path):
    module = importlib.import_module(package)
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    public = {name for name in names if not isinstance(getattr(module, name), types.ModuleType)} - {"__version__"}
    page = (site / "reference" / f"{package}.html").read_text()
    assert public
    assert {name for name in public if f'id="{package}.{name}"' not in page} == set()


def test_the_reference_has_every_public_module():
    import xla_amp

    documented = {*docs_hooks.PACKAGES, *docs_hooks.MODULES}
    modules = {name for name in xla_amp.__all__ if isinstance(getattr(xla_amp, name), types.ModuleType)}
    assert {f"xla_amp.{name}" for name in modules} <= documented
    integrations = {f"xla_amp.integrations.{path.stem}" for path in (ROOT / "xla_amp/integrations").glob("[a-z]*.py")}
    parts = {"xla_amp.integrations.patches", "xla_amp.integrations.trainer_steps"}  # what the others share
    assert integrations - parts <= documented
