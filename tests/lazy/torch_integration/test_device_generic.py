"""torch's own machinery for tests of any device, on this one: its modules, optimizers and mixed precision.

`instantiate_device_type_tests` makes a test per entry of torch's databases.  torch's wheel has the machinery and the
databases; the tests here are ours, and compare with the CPU.  Its operators are in tests/lazy/op_db.
scripts/result_tables.py writes the results to docs/lists/device_tests.md.
"""

from __future__ import annotations

import copy
import inspect
import io
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import SkipTest

import pytest
import result_tables
import torch
from optimizer_runs import Training
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal import common_device_type
from torch.testing._internal.common_device_type import PrivateUse1TestBase, instantiate_device_type_tests
from torch.testing._internal.common_modules import (
    ModuleErrorEnum,
    ModuleInfo,
    ModuleInput,
    TrainEvalMode,
    module_db,
    modules,
)
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db, optims
from torch.testing._internal.common_utils import TestCase
from torch.utils._pytree import tree_leaves, tree_map

import xla_amp
from xla_amp import lazy as engine
from xla_amp.lazy.steps import step_marker

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's, on every device

ALWAYS = {"nn.Linear", "nn.Conv2d", "nn.BatchNorm2d", "nn.GRUCell", "nn.SmoothL1Loss", "AdamW", "SGD"}
"""Entries that every run of the suite tests; the others are marked full."""

SAMPLES = int(os.environ.get("DEVICE_TEST_SAMPLES", "2"))
"""How many of a module's inputs are tested, evenly spaced, and sets of options of an optimizer; 0 for all."""
FEW = SAMPLES and max(1, SAMPLES // 2)

KNOWN: dict[tuple[str, str], str] = {
    ("test_wrong_arguments", "nn.CrossEntropyLoss"): "torch's meta kernel raises an AssertionError for weights",
    ("test_wrong_arguments", "nn.MaxPool2d"): "torch's meta kernel raises an IndexError for one dimension",
    ("test_wrong_arguments", "nn.MultiMarginLoss"): "torch's meta kernel raises an error in other words",
    ("test_wrong_arguments", "nn.NLLLoss"): "weights of another dtype are accepted",
    **{
        (test, f"nn.FractionalMaxPool{dims}d"): "has no lowering; XLA_AMP_FALLBACK=cpu computes it"
        for test in ("test_forward_and_backward", "test_inputs_with_gaps", "test_second_derivatives")
        for dims in (2, 3)
    },
}
"""(test, entry) -> why it fails."""


class LazyDevice(PrivateUse1TestBase):
    """torch's base class for a device of an extension; starts the device with the first test, not at collection."""

    device_type = "jax"

    @classmethod
    def setUpClass(cls) -> None:
        xla_amp.xla_device()
        super().setUpClass()


common_device_type.device_type_test_bases[:] = [LazyDevice]  # the CPU is what we compare with


class _Marked:
    """Beside torch's decorators: marks entries that take long or are known to fail."""

    def _parametrize_test(self, test: Any, generic_cls: Any, device_cls: Any) -> Iterator[Any]:
        made = super()._parametrize_test(test, generic_cls, device_cls)  # type: ignore[misc]
        for wrapper, name, kwargs, decorators in made:
            entry = next(value for key, value in kwargs.items() if key.endswith("_info")).name
            marks = [] if entry in ALWAYS else [pytest.mark.full]
            if why := KNOWN.get((test.__name__, entry)):
                marks.append(pytest.mark.xfail(reason=why, strict=True))
            yield wrapper, name, kwargs, lambda given, old=decorators, new=marks: [*old(given), *new]


class each_module(_Marked, modules):  # a decorator, as torch's
    def __init__(self, entries: list[ModuleInfo], mode: TrainEvalMode = TrainEvalMode.train_only) -> None:
        super().__init__(entries, allowed_dtypes=[torch.float32], train_eval_mode=mode)


class each_optimizer(_Marked, optims):
    pass


def moved(value: Any, device: Any, gaps: bool = False) -> Any:
    """`value` with fresh leaf tensors on `device`; with `gaps` each is every second element of a wider one."""

    def move(x: Any) -> Any:
        if isinstance(x, nn.Module):
            return copy.deepcopy(x).to(device)
        if not isinstance(x, torch.Tensor):
            return x
        there = x.detach().clone().to(device)
        if gaps and x.dim():
            there = torch.stack((there, torch.zeros_like(there)), -1)[..., 0]
        return there.detach().requires_grad_(x.requires_grad)

    return tree_map(move, value)


def close(got: Any, want: Any, bound: float = 1e-4, exact: bool = False) -> None:
    """Compares tensors, lists or dicts of them; `bound` is relative to the number and to the greatest of its tensor."""
    if isinstance(want, dict):
        assert list(got) == list(want)
        got, want = list(got.values()), list(want.values())
    for x, y in zip(tree_leaves(got), tree_leaves(want), strict=True):
        if not isinstance(y, torch.Tensor):
            assert x == y
            continue
        x, y = x.detach().cpu(), y.detach().cpu()
        finite = y[y.isfinite()].abs() if y.is_floating_point() and not exact else y.new_empty(0)
        greatest = max(1.0, float(finite.max())) if finite.numel() else 1.0
        bounds = (0, 0) if exact else (bound, bound / 10 * greatest)
        torch.testing.assert_close(x, y, rtol=bounds[0], atol=bounds[1], equal_nan=True)


def tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


def weighed(outputs: list[torch.Tensor]) -> torch.Tensor:
    """A number that depends on each element in another way."""
    terms = [
        (x * torch.cos(torch.arange(1.0, x.numel() + 1)).reshape(x.shape).to(x.device)).sum()
        for x in outputs
        if x.requires_grad
    ]
    return torch.stack(terms).sum()


def inputs_of(info: ModuleInfo, training: bool, most: int = SAMPLES) -> list[ModuleInput]:
    torch.manual_seed(0)
    made = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training)
    found = [given for given in made if given.forward_input is not None]
    count = min(most or len(found), len(found))
    return [found[i * len(found) // count] for i in range(count)]


def module_on_cpu(info: ModuleInfo, given: ModuleInput, training: bool, **more: Any) -> nn.Module:
    torch.manual_seed(1)
    module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs, **more)
    module.train(training).to(torch.float32)  # some make float64
    if info.is_lazy:  # the first call makes the parameters
        module(*moved(given.forward_input.args, "cpu"), **moved(given.forward_input.kwargs, "cpu"))
    return module


class Run:
    """One forward and backward pass of a module; second derivatives, too, if asked."""

    def __init__(self, module: nn.Module, given: ModuleInput, device: Any, second: bool = False, gaps: bool = False):
        self.module = module
        args, kwargs = moved((given.forward_input.args, given.forward_input.kwargs), device, gaps)
        self.outputs = tensors(module(*args, **kwargs))
        leaves = [x for x in (*tensors((args, kwargs)), *module.parameters()) if x.requires_grad]
        self.gradients: list[torch.Tensor | None] = []
        if leaves and any(x.requires_grad for x in self.outputs):
            first = torch.autograd.grad(weighed(self.outputs), leaves, create_graph=second, allow_unused=True)
            self.gradients = list(first)
            again = [x for x in first if x is not None and x.requires_grad]
            if second and again:
                self.gradients += torch.autograd.grad(weighed(again), leaves, allow_unused=True)

    def all(self) -> list[torch.Tensor | None]:
        return [*self.outputs, *self.gradients, *self.module.buffers()]


class TestModules(TestCase):
    """Every module of torch.nn with the arguments and inputs of torch's database."""

    def compare(
        self, info: ModuleInfo, device: str, training: bool, make: Callable[..., Any], most: int = SAMPLES
    ) -> None:
        """``make(module, sample, device)`` on the device and on the CPU, all samples in one program."""
        pairs = []
        with step_marker.paused():
            for given in inputs_of(info, training, most):
                module = module_on_cpu(info, given, training)
                there = copy.deepcopy(module).to(device)
                want = make(module, given, "cpu")
                pairs.append((make(there, given, device), want))
            engine.sync()
        for got, want in pairs:
            for x, y in zip(got.all(), want.all(), strict=True):
                if y is None:
                    assert x is None
                else:
                    assert x.device.type == "jax"
                    close(x, y)

    @each_module(module_db, TrainEvalMode.train_and_eval)
    def test_forward_and_backward(self, device: str, dtype: Any, module_info: ModuleInfo, training: bool) -> None:
        self.compare(module_info, device, training, Run)

    @each_module([m for m in module_db if m.supports_gradgrad])
    def test_second_derivatives(self, device: str, dtype: Any, module_info: ModuleInfo, training: bool) -> None:
        def run(module: nn.Module, given: ModuleInput, device: str) -> Run:
            if device != "cpu":
                return Run(module, given, device, second=True)
            try:
                with sdpa_kernel(SDPBackend.MATH):
                    return Run(module, given, device, second=True)
            except RuntimeError as error:
                if "derivative for" not in str(error):
                    raise
                raise SkipTest("torch has no second derivative on the CPU") from error

        self.compare(module_info, device, training, run, FEW)

    @each_module(module_db)
    def test_inputs_with_gaps(self, device: str, dtype: Any, module_info: ModuleInfo, training: bool) -> None:
        """Tensors that are not contiguous on the device give what contiguous ones give on the CPU."""

        def run(module: nn.Module, given: ModuleInput, device: str) -> Run:
            return Run(module, given, device, gaps=device != "cpu")

        self.compare(module_info, device, training, run, FEW)

    @each_module([m for m in module_db if "inplace" in inspect.signature(m.module_cls).parameters])
    def test_in_place(self, device: str, dtype: Any, module_info: ModuleInfo, training: bool) -> None:
        for given in inputs_of(module_info, training):
            outputs = []
            for where in ("cpu", device):
                module = module_on_cpu(module_info, given, training, inplace=True).to(where)
                x = given.forward_input.args[0].detach().clone().to(where)
                version = x._version
                result = module(x)
                assert x._version > version
                outputs.append((result.cpu(), x.cpu()))
            close(outputs[1], outputs[0])

    @each_module([m for m in module_db if m.module_error_inputs_func is not None])
    def test_wrong_arguments(self, device: str, dtype: Any, module_info: ModuleInfo, training: bool) -> None:
        wrong = module_info.module_error_inputs_func(
            module_info, device=device, dtype=dtype, requires_grad=False, training=training
        )
        for row in wrong:
            made, given = row.module_error_input.constructor_input, row.module_error_input.forward_input
            raises = pytest.raises(row.error_type, match=row.error_regex)
            if row.error_on is ModuleErrorEnum.CONSTRUCTION_ERROR:
                with raises:
                    module_info.module_cls(*made.args, **made.kwargs)
            else:
                module = module_info.module_cls(*made.args, **made.kwargs).to(device).train(training)
                with raises:
                    [x.cpu() for x in tensors(module(*given.args, **given.kwargs))]


def sets_of_options(info: OptimizerInfo, where: str = "cpu") -> list[dict[str, Any]]:
    return [dict(given.kwargs) for given in info.optim_inputs_func(device=where)][: SAMPLES or None]


class TestOptimizers(TestCase):
    """Every optimizer of torch.optim with the options of torch's database; steps are in tests/lazy/ops."""

    @each_optimizer(optim_db)
    def test_state_dict_goes_to_the_cpu_and_back(self, device: str, dtype: Any, optim_info: OptimizerInfo) -> None:
        """A run that is saved and goes on, on either device, is the undisturbed one."""
        for options in sets_of_options(optim_info):
            first = Training(optim_info, options, device)
            for _ in range(2):
                first.step()
            file = io.BytesIO()
            torch.save((first.parameters, first.optimizer.state_dict()), file)
            first.step()
            for where, exact in ((device, True), ("cpu", False)):
                file.seek(0)
                parameters, state = torch.load(file, map_location=where, weights_only=False)
                second = Training(optim_info, options, where)
                for mine, saved in zip(second.parameters, parameters, strict=True):
                    mine.data.copy_(saved)
                second.optimizer.load_state_dict(state)
                second.step()
                close(second.values(), first.values(), exact=exact)

    @each_optimizer([o for o in optim_db if not o.step_requires_closure and not o.only_supports_sparse_grads])
    def test_a_stock_scaler(self, device: str, dtype: Any, optim_info: OptimizerInfo) -> None:
        """torch.amp.GradScaler: the second of four steps overflows and is skipped, as on the CPU."""
        for options in sets_of_options(optim_info):
            seen = []
            for where in ("cpu", device):
                run = Training(optim_info, options, where)
                scaler = torch.amp.GradScaler(torch.device(where).type, init_scale=256.0, growth_interval=2)
                for factor in (1.0, float("inf"), 1.0, 1.0):
                    run.loss(scaler, factor)
                    scaler.step(run.optimizer)
                    scaler.update()
                seen.append((run.values(), scaler.get_scale()))
            close(seen[1][0], seen[0][0])
            assert seen[1][1] == seen[0][1]


for case in (TestModules, TestOptimizers):
    instantiate_device_type_tests(case, globals())


def test_the_page_names_what_fails() -> None:
    """And nothing else: its numbers are from a run of all of these tests."""
    page, _, scaler = result_tables.DEVICES.read_text("utf-8").partition(result_tables.BEGIN_SCALER)
    results = [row.split("|")[2].strip() for row in scaler.splitlines() if row.startswith("| `")]
    assert len(results) == 22
    assert all(result == "passed" or result.startswith("does not apply") for result in results)
    lines = page.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    counts, reasons = ([row for row in rows if len(row) == width] for width in (5, 3))
    assert counts[0] == list(result_tables.DEVICE_COLUMNS)
    assert {row[4] for row in counts[2:]} == {"0"}
    known = {(test.removeprefix("test_").replace("_", " "), f"`{entry}`", why) for (test, entry), why in KNOWN.items()}
    assert set(map(tuple, reasons[2:])) == known
