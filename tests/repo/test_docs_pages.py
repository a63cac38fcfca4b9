"""What pages and sources say of each other: figures, variables, messages, files, pages."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

import pytest
import source_tree
from source_tree import ROOT

from xla_amp import errors

ROW = re.compile(r"^\| `(.+?)` (?:\((.*?)\) )?\|", re.MULTILINE)
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()


def test_readme_quotes_the_benchmarks():
    rows = re.findall(r"^\| (?:GPT-2|BERT|ResNet-50).*\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    measured = (ROOT / "docs" / "benchmarks.md").read_text()
    assert len(rows) == 3
    for row in rows:
        name, *figures = [cell.strip() for cell in row.strip("|").split("|")]
        (theirs,) = re.findall(rf"^\| {name}, [^|]*\| (0\.[^|]*)\|(.*)\|$", measured, re.MULTILINE)
        flax, _, torch_xla, _, native = [cell.strip() for cell in theirs[1].split("|")]
        (with_amx,) = re.findall(rf"^\| {name}(?:, 2 layers)? \| (\d{{3}} .*)\|$", measured, re.MULTILINE)
        float32, low, _, torchs, _, flaxs = map(int, with_amx.split("|"))
        ratios = [f"{low / other:.2f}" for other in (float32, flaxs, torchs)]
        assert figures == [theirs[0].split()[0], flax, torch_xla, native, *ratios]


def test_the_error_of_gradients_in_bfloat16_is_that_of_the_tables():
    """tools.md quotes the least and the greatest of the transformers in policy.md and jax.md."""
    levels = re.findall(r"^\| (?:GPT-2|BERT) \|.*\| (\S+) \|$", (ROOT / "docs" / "policy.md").read_text(), re.MULTILINE)
    forms = re.findall(
        r"^\| (?:GPT|Llama), .*?\| (0\.0\d+) \| (0\.0\d+) \|", (ROOT / "docs" / "jax.md").read_text(), re.MULTILINE
    )
    errors = [100 * float(number) for number in (*levels, *(each for row in forms for each in row))]
    assert len(errors) == 8
    said = re.search(r"an error of (\S+) to (\S+) % in bfloat16", (ROOT / "docs" / "tools.md").read_text())
    assert (float(said[1]), float(said[2])) == (round(min(errors), 1), round(max(errors)))


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
        nodes = source_tree.nodes((ROOT / path).read_text("utf-8"))
        found |= {text: found.get(text, set()) for text in _strings(nodes[0])}
        for node in nodes:
            if isinstance(node, ast.Call):
                called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                for text in (text for argument in node.args for text in _strings(argument)):
                    found.setdefault(text, set()).add(called)
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


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_every_file_and_function_that_a_page_names_exists(page: str):
    files = r"`((?:xla_amp|lowering|tests|scripts|docs|examples|benchmarks)/[\w/.]*)(?::(\w+))?`"
    named = re.findall(files, (ROOT / page).read_text())
    assert len(named) > 5
    assert [path for path, _ in named if not (ROOT / path).exists()] == []
    defined = {(path, name): rf"^\s*(def|class) {name}\b" for path, name in named if name}
    assert [key for key, line in defined.items() if not re.search(line, (ROOT / key[0]).read_text(), re.M)] == []
