"""The documentation site: it builds without a warning, loads nothing from elsewhere, and keeps old addresses."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import docs_hooks
import pytest
from source_tree import ROOT


@pytest.mark.full
def test_the_site(tmp_path):
    command = [str(ROOT / "scripts" / "build_docs.sh"), "--site-dir", str(tmp_path)]
    environment = {**os.environ, "PYTHON": sys.executable}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    said = run.stdout + run.stderr
    assert run.returncode == 0, said
    assert "WARNING" not in said

    loaded = re.compile(r"<(?:script|img|iframe)[^>]* src=\"?https?://|<link[^>]* href=\"?https?://")
    texts = {page: page.read_text() for page in tmp_path.rglob("*.html")}
    assert len(texts) > 30
    assert [page.name for page, text in texts.items() if loaded.search(text)] == []

    # The search needs no server, and finds no sources.
    index = (tmp_path / "search" / "search_index.js").read_text()
    found = set(re.findall(r'"location":"([^"#]+)', index))
    assert index.startswith("var __index = {")
    assert '<script src="../javascripts/iframe-worker.js">' in texts[tmp_path / "reference" / "xla_amp.html"]
    assert (tmp_path / "javascripts" / "iframe-worker.js").exists()
    assert {"install.html", "limits.html", "source/CONTRIBUTING.html"} <= found
    assert [page for page in found if page.startswith("source/")] == ["source/CONTRIBUTING.html"]

    for page, address in docs_hooks.MOVED.items():
        path, _, anchor = address.partition("#")
        assert f'url={address}"' in texts[tmp_path / f"{page}.html"]
        assert not anchor or f'id="{anchor}"' in texts[tmp_path / path], address
        assert (tmp_path / path).exists(), address


def test_every_page_of_the_first_site_has_a_place():
    first = (
        "architecture benchmarks command_line compile concepts device_tests distributed environment explain float8 "
        "frameworks huggingface index install jax jax_functions jax_training lightning limits loss_scaling lowering "
        "migration models monitor one_rule policy reports search stablehlo support torch_xla troubleshooting tutorial"
    )
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"index"}
    assert pages & set(docs_hooks.MOVED) == set()
    assert pages | set(docs_hooks.MOVED) >= set(first.split())
