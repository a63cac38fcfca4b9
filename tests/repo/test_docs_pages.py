"""The pages for new users: their Python runs, their messages are those of the source, their tables are complete."""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Iterator

import docs_figures
import forked
import pytest
import source_tree
from source_tree import ROOT, python_blocks

from xla_amp import errors

ROW = re.compile(r"^\| `(.+?)` (?:\((.*?)\) )?\|", re.MULTILINE)
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()


def _run(program: str, **environment: str) -> str:
    run = forked.run(program=program, environment={**os.environ, **environment}, warnings="error")
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.full
def test_blocks_run_and_print_what_their_comments_say():
    program = "".join(block for page in ("install", "pytorch") for block in python_blocks(f"docs/{page}.md"))
    expected = re.findall(r"^ *print\(.*\)  # ([\w.]+)", program, re.MULTILINE)
    printed = _run(program).splitlines()
    assert len(expected) == 5
    assert all(line.startswith(start) for line, start in zip(printed, expected, strict=True))


@pytest.mark.full
def test_the_tutorial_trains_in_every_step():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    printed = _run("\n".join(python_blocks("docs/tutorial.md")), XLA_FLAGS=flags)
    assert printed.splitlines()[:2] == ["fp32", "low"]
    losses = {
        name: (float(first), float(last))
        for name, first, last in re.findall(r"^(.+): (\d.+) to ([\d.]+)", printed, re.M)
    }
    assert list(losses) == ["float32", "bfloat16", "float16", "captured", "2 devices"]
    first, last = losses["float32"]
    for start, end in losses.values():
        assert start == pytest.approx(first, rel=0.01)
        assert end == pytest.approx(last, rel=0.1)
        assert end < start
    assert losses["captured"] == pytest.approx(losses["bfloat16"], rel=1e-3)
    assert int(re.search(r"(\d+) replays", printed)[1]) > 0


def test_every_step_of_the_tutorial_has_a_figure():
    figures = docs_figures.TUTORIAL.read_text().partition("<!-- figures")[2]
    assert re.findall(r"^\| (.+?) \| [\d.]+ \| [\d.]+ \|$", figures, re.MULTILINE) == list(docs_figures.TUTORIAL_STEPS)


def test_readme_quotes_the_benchmarks():
    rows = re.findall(r"^\| (?:GPT-2|BERT|ResNet-50).*\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    measured = (ROOT / "docs" / "benchmarks.md").read_text()
    assert len(rows) == 3
    for row in rows:
        name, *figures = [cell.strip() for cell in row.strip("|").split("|")]
        (theirs,) = re.findall(rf"^\| {name}, [^|]*\| (0\.[^|]*)\|(.*)\|$", measured, re.MULTILINE)
        flax, _, torch_xla, _, native = [cell.strip() for cell in theirs[1].split("|")]
        assert figures == [theirs[0].split()[0], flax, torch_xla, native]


def test_the_environment_page_has_every_variable_that_the_package_names():
    page = (ROOT / "docs" / "lists" / "environment.md").read_text()
    rows = re.findall(r"^\| (`.+?`) \|", page, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    sources = [(ROOT / path).read_text() for path in source_tree.modules().values()]
    named = {name for text in sources for name in re.findall(r"\bXLA_AMP_[A-Z_]*[A-Z]\b", text)}
    constants = {
        node.value
        for node in ast.walk(ast.parse((ROOT / "xla_amp" / "common" / "config.py").read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    read = {text for text in constants if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|RANK", text)}
    assert len(read) > 20
    assert listed == named | read


def _text(node: ast.expr) -> str | None:
    """A string of the source, with a zero for each part that is computed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
    return None


def _strings(node: ast.AST) -> Iterator[str]:
    """The strings inside a node, each as a whole."""
    if isinstance(node, ast.expr) and (text := _text(node)) is not None:
        yield text
    else:
        for child in ast.iter_child_nodes(node):
            yield from _strings(child)


@functools.cache
def _texts() -> dict[str, set[str]]:
    """Every string of the package -> names of the functions or classes that are called with it."""
    found: dict[str, set[str]] = {}
    for path in source_tree.modules().values():
        tree = ast.parse((ROOT / path).read_text())
        found |= {text: found.get(text, set()) for text in _strings(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                for text in (text for argument in node.args for text in _strings(argument)):
                    found.setdefault(text, set()).add(ast.unparse(node.func).rpartition(".")[2])
    return found


def _matches(message: str) -> list[str]:
    pieces = [piece for piece in message.split("...") if piece.strip(". ")]
    pattern = re.compile(".*".join(re.escape(piece) for piece in pieces), re.DOTALL)
    return [text for text in _texts() if pattern.search(text)]


MESSAGES = [(message, note) for message, note in ROW.findall(TROUBLES) if " " in message]


@pytest.mark.parametrize(("message", "note"), MESSAGES, ids=[message[:40] for message, _ in MESSAGES])
def test_a_message_of_the_page_is_in_the_source(message: str, note: str):
    texts = _matches(message)
    assert texts, message
    raised = {name for text in texts for name in _texts()[text] if name.endswith("Error")}
    named = set(re.findall(r"\w+Error", note))
    assert not raised or raised & named, f"raised as {raised}"


def test_every_warning_and_every_error_class_is_on_the_page():
    warned = [
        text
        for text, callers in _texts().items()
        if callers & {"warn", "warn_explicit"} and " " in text and text[0] != "<"
    ]
    covered = {text for message, _ in MESSAGES for text in _matches(message)}
    assert len(warned) > 5
    assert [text for text in warned if text not in covered and "{text}" not in text] == []
    classes = {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)
    } - {"XlaAmpError"}
    assert {name for name in classes if f"`{name}`" not in TROUBLES} == set()


def _anchors(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_pages_that_sources_name_exist():
    paths = [
        *source_tree.python_files(),
        *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("xla_amp/**/*.toml")),
    ]
    named = {
        (page, anchor)
        for path in paths
        for page, anchor in re.findall(r"\b(docs/[a-z_/]+\.md)(?:#([\w-]+))?", (ROOT / path).read_text())
    }
    assert len(named) > 5
    assert [page for page, _ in named if not (ROOT / page).exists()] == []
    assert [f"{page}#{anchor}" for page, anchor in named if anchor and anchor not in _anchors(page)] == []


GIVEN = """
import os
import torch
import xla_amp

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

device = xla_amp.xla_device()
model, loss_fn, x = torch.nn.Linear(8, 4).to(device), torch.nn.functional.cross_entropy, torch.randn(2, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(x, torch.tensor([1, 3]))]
__name__ = "docs"  # only defines what processes would run
"""


@pytest.mark.full
def test_what_the_migration_page_says_to_write_runs():
    page = (ROOT / "docs" / "migration.md").read_text()
    after = re.findall(r'^```python title="after"\n(.*?)^```', page, re.DOTALL | re.MULTILINE)
    assert len(after) == page.count('title="before"') == 8
    lines = _run(GIVEN + "\n".join(after) + "print(y.dtype, weights.dtype, loss.item() > 0)").splitlines()
    assert lines[-1] == "torch.bfloat16 float32 True"
    assert "float32" in lines
