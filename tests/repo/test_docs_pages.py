"""What pages and sources say of each other: figures, variables, messages, files, pages; and the site of them."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import source_tree
from source_tree import ROOT

import xla_amp
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


# ---- statements of others documentation ------------------------------------------------------------------------------

ARGUMENTS, REGIONS, RULES, LISTS = (
    f"tests/pytorch/autocast/test_{name}.py"
    for name in ("autocast_arguments", "autocast_regions", "rules_in_regions", "torch_lists")
)
FUNCTIONS, SCALER, TABLES = (
    "tests/pytorch/autocast/test_custom_function.py",
    "tests/pytorch/optim/test_grad_scaler.py",
    "tests/policy/test_tables.py",
)

STATEMENTS = {
    "torch.amp": {
        "CUDA's and the CPU's lists of operations, by cast": f"{LISTS}::test_torchs_lists",
        "operations that are not listed run in the dtypes of their operands": f"{RULES}::test_dtype_of_a_result",
        "float64 and integers are not eligible": f"{RULES}::test_dtype_of_a_result",
        "in-place variants and out= are not eligible": f"{RULES}::test_dtype_of_a_result",
        "an explicit dtype= is respected": f"{RULES}::test_dtype_of_a_result",
        "cat, stack, index_copy: the widest dtype of the operands": f"{RULES}::test_dtype_of_a_result",
        "binary_cross_entropy is an error under CUDA's rules": f"{LISTS}::test_torchs_banned_operations",
        "functions, methods and operators go through autocast": "tests/pytorch/autocast/test_table_rows.py::test_row",
        "a context manager and a decorator": f"{REGIONS}::test_function",
        "enabled=False inside, and a region inside that": f"{REGIONS}::test_sequences",
        "the state belongs to a thread": f"{REGIONS}::test_threads_start_outside_and_share_an_object",
        "cache_enabled": f"{REGIONS}::test_the_cache_flag",
        "another dtype disables, with a warning": f"{ARGUMENTS}::test_float32_disables_with_a_warning_as_in_torch",
        "is_autocast_available": f"{FUNCTIONS}::test_is_autocast_available",
        "custom_fwd, custom_bwd and cast_inputs": f"{FUNCTIONS}::test_cast_inputs_reaches_every_container",
        "a backward pass runs in the dtypes of its forward pass": f"{FUNCTIONS}::test_backward_runs_as_forward_did",
        "gradients have the dtype of their parameter": f"{RULES}::test_gradients_have_the_dtype_of_their_parameter",
        "autocast and GradScaler are of use without each other": f"{SCALER}::test_disabled",
        "scale, unscale, skip, update, several losses and optimizers": (
            "tests/pytorch/optim/test_torch_scaling.py::test_loops"
        ),
        "the scale grows, shrinks, may be below 1": (
            "tests/test_loss_scaling.py::test_random_schedules_equal_torch_bit_for_bit"
        ),
    },
    "Intel Gaudi": {
        "the three lists of operations": f"{TABLES}::test_every_documented_operation_has_a_row",
        "files with lists of one's own replace them": f"{RULES}::test_gaudis_example_with_lists_of_its_own",
        "a wrong name in a file": "tests/policy/test_resolve.py::test_a_mistake_in_gaudis_lists_names_file_and_line",
        "float16 is not supported": f"{ARGUMENTS}::test_what_is_refused",
        "a custom operation has no rule, until the user writes one": f"{RULES}::test_a_custom_operator",
    },
    "torch_xla": {
        "the TPU's lists of operations": f"{TABLES}::test_every_documented_operation_has_a_row",
        "GPUs have CUDA's rules": f"{TABLES}::test_gpu_is_cuda_and_more",
        "autocast(xla_device()), and torch.autocast('xla')": f"{ARGUMENTS}::test_devices",
        "XLA_USE_BF16 has no place beside it: it is warned about": (
            "tests/pytorch/distributed/test_torch_xla_names.py::test_importing_the_device_registers_its_name"
        ),
        "bfloat16 needs no scaler; float16 trains with one": (
            "tests/examples/test_mnist.py::test_one_executable_and_no_host_sync_per_step"
        ),
        "syncfree optimizers read nothing": f"{SCALER}::test_nothing_waits_for_the_device",
        "syncfree optimizers do what torch's do": "tests/pytorch/optim/test_optimizer_options.py::test_options",
        "xm.optimizer_step, _fetch_gradients and all_reduce with a scale": (
            "tests/pytorch/distributed/test_torch_xla_names.py::test_optimizer_step"
        ),
        "the MNIST and ImageNet scripts": "tests/examples/test_imagenet.py::test_fake_data_measures_speed",
    },
}


@pytest.mark.parametrize("page", STATEMENTS)
def test_each_statement_has_a_test(page: str):
    for statement, where in STATEMENTS[page].items():
        file, _, name = where.partition("::")
        body = ast.parse((ROOT / file).read_text()).body
        assert name in {node.name for node in body if isinstance(node, ast.FunctionDef)}, statement


@pytest.mark.full
def test_the_site_builds_and_works_without_a_server_and_at_old_addresses(tmp_path):
    """Without a warning, and it loads nothing from elsewhere."""
    docs_hooks = pytest.importorskip("docs_hooks", reason="needs the extra docs")
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
