"""pyproject.toml, constraints.txt and README.md say what the tree says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib

import ci_commands
import docs_figures
import pytest
import source_tree
from source_tree import ROOT

import xla_amp

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_no_folder_of_the_package_lacks_an_init():
    folders = {path.rpartition("/")[0] for path in source_tree.modules().values()}
    assert [folder for folder in sorted(folders) if not (ROOT / folder / "__init__.py").exists()] == []


def test_one_version():
    version = PROJECT["project"]["version"]
    assert xla_amp.__version__ == version
    assert re.search(rf"^## \[({re.escape(version)}|Unreleased)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_version_to_cite():
    assert f"\nversion: {PROJECT['project']['version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_a_source_distribution_has_everything():
    listed = re.findall(r"^graft (\S+)", (ROOT / "MANIFEST.in").read_text(), re.MULTILINE)
    assert set(listed) >= {*source_tree.FOLDERS, ".ci", "docs"} - {"xla_amp"}  # the package is there anyway
    assert [folder for folder in listed if not (ROOT / folder).is_dir()] == []


def test_a_wheel_has_every_file_that_the_package_reads():
    given = PROJECT["tool"]["setuptools"]["package-data"]
    patterns = [f"{package.replace('.', '/')}/{glob}" for package, globs in given.items() for glob in globs]
    files = [path.relative_to(ROOT) for path in (ROOT / "xla_amp").rglob("*") if path.is_file()]
    read = [path for path in files if path.suffix not in (".py", ".pyc", ".md") and path.name != "private_names.toml"]
    assert [str(path) for path in read if not any(path.match(pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(path.match(pattern) for path in read)] == []


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").iterdir()), ids=lambda path: path.name)
def test_workflows_run_what_is_there(path):
    text = path.read_text()
    assert [name for name in re.findall(r"run: ((?:scripts|\.ci)/[\w.]+)", text) if not (ROOT / name).exists()] == []
    extras = re.findall(r"-e '\.\[(\w+)\]'", text)
    assert set(extras) <= set(PROJECT["project"]["optional-dependencies"])
    marks = {mark.partition(":")[0] for mark in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    assert set(re.findall(r"pytest .*-m (\w+)", text)) <= marks


def test_constraints_pin_every_requirement():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\d.]+", line)] == []
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    extras = PROJECT["project"]["optional-dependencies"]
    required = [*PROJECT["project"]["dependencies"], *extras["examples"], *extras["dev"], *extras["tests"]]
    names = {re.match(r"[\w-]+", requirement)[0].lower().replace("_", "-") for requirement in required}
    assert names - pinned == {"xla-amp"}


@pytest.mark.parametrize("name", ["example", "tests"])
def test_readme_commands_make_an_environment_and_use_it(name):
    command = ci_commands.command(name)
    assert command.startswith("python3 -m venv .venv && .venv/bin/pip install")
    assert "-c constraints.txt" in command
    assert all(os.path.exists(ROOT / path) for path in re.findall(r"examples/\S+\.py|constraints\.txt", command))


@pytest.mark.parametrize("text", ["", "```\npython3 -m venv .venv && .venv/bin/python -m pytest\n```\n" * 2])
def test_a_missing_or_double_command_is_an_error(text):
    with pytest.raises(ValueError, match="expected one line, got"):
        ci_commands.command("tests", text)


SNIPPETS = source_tree.python_blocks("README.md")


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["torch", "jax"])
def test_readme_python_runs_as_printed(snippet):
    """README's training snippets are whole programs."""
    run = subprocess.run([sys.executable, "-W", "error", "-c", snippet], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert ("print(" in snippet) == bool(run.stdout)


def test_the_figure_is_that_of_its_script():
    assert docs_figures.STEP.read_text() == docs_figures.svg(), "run scripts/docs_figures.py step"


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")),
]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s#:]+)[)#]", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_readme_names_every_page():
    readme = (ROOT / "README.md").read_text()
    assert len(PAGES) > 15
    assert [page for page in PAGES[1:] if f"({page})" not in readme] == []
