"""pyproject.toml, constraints.txt, CITATION.cff and README.md say what the tree says."""

from __future__ import annotations

import re
import tomllib

import ci_commands
import docs_figures
import pytest
import source_tree
from packaging.requirements import Requirement
from source_tree import ROOT

import xla_amp

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def test_no_folder_of_the_package_lacks_an_init():
    folders = {path.rpartition("/")[0] for path in source_tree.modules().values()}
    assert [folder for folder in sorted(folders) if not (ROOT / folder / "__init__.py").exists()] == []


def test_one_version():
    version = PROJECT["project"]["version"]
    assert xla_amp.__version__ == version
    released = re.search(r"^## \[(\d.*?)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[1] == version
    assert f"\nversion: {version}\ndate-released: {released[2]}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"dist/xla_amp-{version}-py3-none-any.whl" in (ROOT / "docs" / "install.md").read_text()


def test_a_wheel_has_every_file_that_the_package_reads():
    given = PROJECT["tool"]["setuptools"]["package-data"]
    patterns = [f"{package.replace('.', '/')}/{glob}" for package, globs in given.items() for glob in globs]
    files = [path.relative_to(ROOT) for path in (ROOT / "xla_amp").rglob("*") if path.is_file()]
    read = [path for path in files if path.suffix not in (".py", ".pyc", ".md") and path.name != "private_names.toml"]
    assert [str(path) for path in read if not any(path.match(pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(path.match(pattern) for path in read)] == []


def test_constraints_pin_every_requirement_and_torch_is_an_extra():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\d.]+", line)] == []
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    required = [*PROJECT["project"]["dependencies"], *EXTRAS["examples"], *EXTRAS["dev"], *EXTRAS["tests"]]
    names = {re.match(r"[\w-]+", requirement)[0].lower().replace("_", "-") for requirement in required}
    assert names - pinned == {"xla-amp"}
    assert not [each for each in PROJECT["project"]["dependencies"] if each.startswith("torch")]
    assert "xla-amp[torch]" in EXTRAS["examples"]  # README's first command trains with torch


def test_extras_name_extras_that_exist_and_the_install_page_has_all():
    named = {
        extra for lines in EXTRAS.values() for line in lines for extra in Requirement(line).extras if "xla-amp" in line
    }
    assert {"cli", "torch"} <= named <= EXTRAS.keys()
    page = (ROOT / "docs" / "install.md").read_text().partition("## Extras")[2].partition("## ")[0]
    listed = {
        name for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`([\w-]+)`", row)
    }
    assert listed == EXTRAS.keys()


@pytest.mark.parametrize("name", ["example", "tests"])
def test_readme_commands_make_an_environment_and_use_it(name):
    command = ci_commands.command(name)
    assert command.startswith("python3 -m venv .venv && .venv/bin/pip install")
    assert "-c constraints.txt" in command
    assert all((ROOT / path).exists() for path in re.findall(r"examples/\S+\.py|constraints\.txt", command))
    with pytest.raises(ValueError, match="expected one line, got 2"):
        ci_commands.command(name, f"```\n{command}\n{command}\n```")


@pytest.mark.full
def test_the_figure_is_that_of_its_script():
    assert docs_figures.STEP.read_text() == docs_figures.svg(), "run scripts/docs_figures.py step"


def test_readme_names_every_page():
    pages = [page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")]
    readme = (ROOT / "README.md").read_text()
    assert len(pages) > 15
    assert [page for page in pages if f"({page})" not in readme] == []
