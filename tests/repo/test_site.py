"""The documentation site: it builds without a warning, loads nothing from elsewhere, and keeps old addresses."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from source_tree import ROOT

import xla_amp

docs_hooks = pytest.importorskip("docs_hooks", reason="needs the extra docs")


@pytest.mark.full
def test_the_site_builds_and_works_without_a_server_and_at_old_addresses(tmp_path):
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

    # Guides come before the reference, and lists last; each page names the version.
    boosts = dict(re.findall(r'"location":"(\w+(?:/[\w.]+)?\.html)".*?"boost":([\d.]+)', index))
    listed = {page: float(boost) for page, boost in boosts.items() if page.startswith(("lists/", "reference/"))}
    assert max(listed.values()) < float(boosts["limits.html"]) < float(boosts["jax.html"])
    assert listed["lists/names.html"] < listed["reference/xla_amp.html"]
    assert f"xla_amp {xla_amp.__version__}" in texts[tmp_path / "install.html"]

    for page, address in docs_hooks.MOVED.items():
        path, _, anchor = address.partition("#")
        assert f'url={address}"' in texts[tmp_path / f"{page}.html"]
        assert not anchor or f'id="{anchor}"' in texts[tmp_path / path], address
        assert (tmp_path / path).exists(), address
