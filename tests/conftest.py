"""Settings of every test: the CPU unless the caller chose otherwise, and none of the user's own xla_amp settings."""

from __future__ import annotations

import collections
import gc
import itertools
import os
import sys
import unittest
from collections.abc import Callable, Generator, Hashable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import open_regions
import pytest

# Before anything imports JAX: a test must mean the same on a machine with an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of a test's time is LLVM's, for programs that run once: a third of it without optimizations and without the
# emitters of fusions that use MLIR, and a quarter less than that in one module instead of one for each thread.  What
# XLA's own passes do, which tests count, is the same.  A GPU's programs need the passes, and torch_xla's XLA, another
# one, ends the process at a flag that it does not know.
if os.environ["JAX_PLATFORMS"] == "cpu" and find_spec("torch_xla") is None:
    flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # which has no other emitters
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))

# Tests run side by side, a process for each core.  The threads of torch and NumPy would only wait for each other: an
# eighth of the time of what compares with the CPU.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# The suite neither reads nor writes the user's cache of programs; a test of it names a folder.
os.environ["XLA_AMP_CACHE"] = "off"

FOREIGN = ("XLA_AMP_", "XLA_USE_", "PT_HPU_AUTOCAST_")


TORCH_XLA = Path(__file__).parent / "torch_xla_engine"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--platform-policy",
        choices=("tpu", "gpu"),
        help="the default policy of XLA:CPU in this run: with gpu, tests run under the rules and low dtype of a GPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Processes that tests copy (`forked`) have the chosen policy, too; new interpreters keep the platform's own."""
    # Products have the form for a CPU with units for bfloat16 on every CPU: others get float32 operands.
    from xla_amp import hardware

    found = hardware.processor()
    hardware.processor = lambda: found._replace(flags=found.flags | {"avx512_bf16"})
    if chosen := config.getoption("--platform-policy"):
        from xla_amp.policy import load

        sys.modules[load.__module__]._DEFAULTS["cpu"] = os.environ["TESTS_PLATFORM_POLICY"] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What a million objects of imported libraries need is not looked through again: a third of the collection's time.

    A ``gc.collect()`` of a test takes a second with them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _rows(item: pytest.Function) -> Iterator[Hashable]:
    """A key of the row that the item has of each `parametrize` of its test, and of each parameter of a fixture."""
    params = dict(item.callspec.params)
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        if all(name in params for name in names):
            yield (*names, *(id(params.pop(name)) for name in names))
    yield from ((name, repr(value)) for name, value in params.items())


def _is_one_more_dtype(item: pytest.Function) -> bool:
    """Whether the item's dtype is neither the first of its test nor the first of 16 bits."""
    for mark in item.iter_markers("parametrize"):
        if mark.args[:1] == ("dtype",):
            dtypes = [row.values[0] if hasattr(row, "values") else row for row in mark.args[1]]
            kept = [*dtypes[:1], *[dtype for dtype in dtypes if "float16" in str(dtype)][:1]]
            return not any(item.callspec.params["dtype"] is dtype for dtype in kept)
    return False


def _is_on_the_cpu(item: pytest.Function) -> bool:
    return any(str(item.callspec.params.get(name)) == "cpu" for name in ("device", "where"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as ``full`` what is one more row of the same.

    Of dtypes the default run has the first and the first of 16 bits, of a matrix each row of each side.  Of a matrix
    come first items with new rows only, which is a diagonal, then those with a new row beside others; the rest is one
    more combination of them.  The CPU comes last: the XLA device has all rows of a test that runs on both.
    """
    for item in items:
        if os.environ["JAX_PLATFORMS"] != "cpu" and item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.skip(reason="several processes or devices; one device serves one process"))
        if hasattr(item, "callspec") and _is_one_more_dtype(item):
            item.add_marker("full")
    seen: dict[str, set[Hashable]] = collections.defaultdict(set)
    crossed = [
        (item, set(_rows(item)), seen[item.nodeid.partition("[")[0]])
        for item in sorted(items, key=lambda item: hasattr(item, "callspec") and _is_on_the_cpu(item))
        if hasattr(item, "callspec") and not item.get_closest_marker("full")
    ]
    chosen = set()
    for item, rows, before in crossed:
        if before.isdisjoint(rows) and not _is_on_the_cpu(item):
            chosen.add(item)
            before |= rows
    for item, rows, before in crossed:
        if item not in chosen and rows <= before:
            item.add_marker("full")
        before |= rows


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says what a run without torch_xla did not do; here, because pytest-xdist's main process reads no other."""
    asked = [config.invocation_params.dir / argument.split("::")[0] for argument in config.args]
    if find_spec("torch_xla") is None and any(TORCH_XLA.is_relative_to(path.resolve()) for path in asked):
        files = sorted(path.name for path in TORCH_XLA.glob("test_*.py"))
        terminalreporter.write_line(
            f"torch_xla is not installed: {len(files)} files of tests/{TORCH_XLA.name} are left to "
            f"scripts/torch_xla_env.sh ({', '.join(files)})"
        )


@pytest.fixture(scope="session", autouse=True)
def _seeds_are_for_devices_that_are_here() -> None:
    """``torch.manual_seed`` keeps a formatted stack for each of CUDA, XPU and MTIA, should they be started later.

    Of the operator database, which seeds before each sample, that was a third of the time.
    """
    torch = sys.modules.get("torch")
    for device in (torch.cuda, torch.xpu, torch.mtia) if torch is not None else ():
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


@pytest.fixture(scope="session", autouse=True)
def _programs_share_a_context_of_mlir() -> None:
    """JAX makes a context, with some thousand operations of dialects, for each program that it lowers.

    Of tests that compile small programs, that was a tenth of the time.  A context keeps every type and location that
    it has seen, so another one is made now and then.
    """
    mlir = sys.modules.get("jax._src.interpreters.mlir")
    if not hasattr(mlir, "make_ir_context"):
        return
    make, made = mlir.make_ir_context, itertools.count()
    contexts: list[object] = []

    def shared() -> object:
        if next(made) % 100 == 0:
            contexts[:] = [make()]
        return contexts[0]

    mlir.make_ir_context = shared


@pytest.fixture(scope="session", autouse=True)
def _samples_look_for_their_test_alone() -> None:
    """``extract_test_fn`` of torch without ``inspect.stack``, which reads the source of each frame, for each sample.

    Of wrong calls in a worker of pytest-xdist, whose own frames have no file to read, that was 19 parts of 20.
    """

    def running() -> Callable[..., object] | None:
        frame = sys._getframe()
        while (frame := frame.f_back) is not None:
            test = frame.f_locals.get("self")
            if isinstance(test, unittest.TestCase):
                return getattr(test, test._testMethodName).__func__
        return None

    for name in ("torch.testing._internal.common_utils", "torch.testing._internal.opinfo.core"):
        if name in sys.modules:
            assert callable(sys.modules[name].extract_test_fn)
            sys.modules[name].extract_test_fn = running


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(FOREIGN)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XLA_AMP_CACHE", "off")


@pytest.fixture(autouse=True)
def _regions_are_closed(request: pytest.FixtureRequest) -> Iterator[None]:
    """A region or override that a test leaves open is closed, so that it fails no test but its own."""
    failed = request.session.testsfailed
    yield
    if left := open_regions.close_regions():
        said = f"left open, and closed now: {', '.join(left)}"
        if request.session.testsfailed == failed:
            pytest.fail(said)
        print(said)


@pytest.fixture(scope="session")
def own_policy(request: pytest.FixtureRequest) -> str:
    """The name of the policy of a region that names none on the XLA device, by --platform-policy or the platform."""
    from xla_amp.lazy.programs import pjrt

    return request.config.getoption("--platform-policy") or ("gpu" if pjrt.platform() == "gpu" else "tpu")


@pytest.fixture(scope="session")
def low_of(own_policy: str) -> Callable[[object], object]:
    """Gives the low dtype of a region that names none on a torch device."""
    import torch

    def low(device: torch.device) -> torch.dtype:
        return torch.float16 if device.type in ("jax", "xla") and own_policy == "gpu" else torch.bfloat16

    return low


@pytest.fixture(params=["cpu", "xla"])
def device(request: pytest.FixtureRequest) -> object:
    """The CPU and the XLA device, in turn."""
    import torch

    import xla_amp

    return torch.device("cpu") if request.param == "cpu" else xla_amp.xla_device()


@pytest.fixture(scope="module")
def compile_for() -> Iterator[Callable[..., object]]:
    """Compiles a program for hardware that is not here; skips the test where there is no compiler for it."""
    import targets

    with targets.Compilers() as compilers:

        def compiled(program: str, target: str, options: dict[str, str] | None = None) -> object:
            if not targets.available(target):
                pytest.skip(f"the compiler for {target} is not installed")
            return compilers.compile(program, target, options)

        yield compiled


@pytest.fixture(autouse=True)
def _lines_have_compiled_nothing() -> Iterator[None]:
    """A line of a helper that many tests call is not warned about because of the tests before."""
    yield
    if "xla_amp.lazy.programs.recompile_reasons" in sys.modules:
        sys.modules["xla_amp.lazy.programs.recompile_reasons"].reset()


@pytest.fixture(scope="module", autouse=True)
def _programs_of_other_files_are_dropped() -> Iterator[None]:
    """Some thousand executables in one process run into the kernel's limit of memory maps, and XLA crashes."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    if "xla_amp.lazy.programs.execute" in sys.modules:
        sys.modules["xla_amp.lazy.programs.execute"].clear_programs()
