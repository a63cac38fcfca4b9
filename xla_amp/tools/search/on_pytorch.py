"""`search` for PyTorch: the operations of a model or a loss function that must stay float32."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from xla_amp.backends.step_state import reachable, restored
from xla_amp.backends.trees import tree_leaves, tree_map_only
from xla_amp.common.events import DecisionRecord
from xla_amp.common.types import LowDtype
from xla_amp.errors import RecompileWarning, RuleWarning, SearchError
from xla_amp.pytorch.autocast.autocast import autocast
from xla_amp.tools.explain.on_pytorch import explain
from xla_amp.tools.overflow.on_pytorch import uncompiled
from xla_amp.tools.search import Plan, SearchResult, fronts


def search(
    step: Callable[..., Any],
    batches: Sequence[Any],
    *,
    budget: float | Mapping[str, float],
    low: LowDtype = "bfloat16",
    held_out: int | None = None,
    objects: Sequence[Any] = (),
    **left: Any,
) -> SearchResult:
    """The policy that keeps the fewest operations in float32 while a model's error stays within `budget`.

    Every plan runs forward and backward under ``autocast(policy=plan)`` and is compared with float32 on the same batch;
    parameters, buffers, gradients and random generators are restored after each run.  The result is checked on batches
    that the search has not used.

    Args:
        step: a model, or a function that returns the loss; it does not call ``backward()`` and opens no autocast
            region.  A result with an attribute or a key ``loss`` gives that; other results that are no single number
            are compared as a whole, without gradients.
        batches: three or more.  Each is passed as ``step(*batch)`` if it is a tuple or a list, ``step(**batch)`` if it
            is a dict, and ``step(batch)`` otherwise.  Batches of a model are moved to its device.
        budget: largest accepted relative error of the loss (of the result without a loss), or of several quantities:
            ``{"loss": 1e-3, "gradients": 1e-2}``.  The error of the gradients is that of all of them as one vector.
            Quantities without a budget are reported, and must be finite.
        low: the low dtype.
        held_out: number of batches, the last ones, that only check the result; None is a quarter, at least one.
        objects: further modules that the step uses and does not reach by its closure, its arguments or its globals.
        left: arguments of the release before, which raise.

    Returns:
        The plan, and its achieved errors.  If no plan is within the budget, which only a program that is not
        reproducible or not float32 can cause, ``result.met`` is False and an `XlaAmpWarning` is issued.

    Raises:
        SearchError: the arguments do not fit a search.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> def loss(x):
        ...     return model(x).square().mean()
        >>> result = search(loss, [torch.randn(4, 8) for _ in range(4)], budget=0.1)
        >>> result.met, result.policy.decide("linear", "0").cast
        (True, 'low')
    """
    fronts.check_left(left)
    fronts.check_low(low)
    program = TorchProgram(uncompiled(step), list(batches), objects, low)
    program.look()
    with program.prepared():
        return fronts.searched(program, budget=budget, held_out=held_out, device=str(program.device))


class _OpenRegion(TorchFunctionMode):
    """Notes whether an autocast region is open when a function of torch is called."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self.open = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.open = self.open or torch.is_autocast_enabled(self._device_type)
        return func(*args, **(kwargs or {}))


class TorchProgram(fronts.MeasuredProgram):
    """A model or a loss function of torch as a program of a search."""

    overflow_finder = "xla_amp.find_overflow()"

    def __init__(self, step: Callable[..., Any], batches: Sequence[Any], objects: Sequence[Any], low: LowDtype) -> None:
        super().__init__(low, len(batches))
        self._step = step
        modules = [each for each in reachable(step, ()) if isinstance(each, torch.nn.Module)]
        if isinstance(step, torch.nn.Module):
            modules.append(step)
        self._objects = [*{id(each): each for each in (*modules, *objects)}.values()]
        found = [p for each in self._objects if isinstance(each, torch.nn.Module) for p in each.parameters()]
        self._parameters = list({id(p): p for p in found}.values())
        tensors = [*self._parameters, *(t for t in tree_leaves(batches) if isinstance(t, torch.Tensor))]
        self.device = next((t.device for t in tensors), torch.device("cpu"))
        self._batches = list(batches)
        if isinstance(step, torch.nn.Module):
            self._batches = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), self._batches)

    def look(self) -> None:
        """Checks that the step is one that can be searched."""
        if not self._batches:
            raise SearchError("no batches: give three or more, e.g. itertools.islice(loader, 8)")
        watch = _OpenRegion(self.device.type)
        with watch:
            self.reference(0)
        if watch.open:
            raise SearchError(
                "the step opens an autocast region, whose rules would hide those of the plan: take it out of the step, "
                "search opens one around it"
            )

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Keeps the kernels of autocast, whose installation takes longer than a small step, until the block ends."""
        # Every plan has the same rules with other casts, so all have the kernels of this region.
        with autocast(self.device, policy=self.policy(Plan())), autocast(self.device, enabled=False):
            yield

    def run(self, batch: int, plan: Plan | None, *, region: bool = True) -> fronts.Quantities:
        """One forward and backward pass on one batch."""
        return self._run_on(self._batches[batch], plan, region)

    def _run_on(self, batch: Any, plan: Plan | None, region: bool) -> fronts.Quantities:
        found: fronts.Quantities = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(restored(self._objects))
            stack.enter_context(warnings.catch_warnings())
            for expected in (RuleWarning, RecompileWarning):  # each plan is another program
                warnings.simplefilter("ignore", expected)
            stack.enter_context(torch.enable_grad())
            for parameter in self._parameters:
                parameter.grad = None
            with autocast(self.device, policy=self.policy(plan)) if region else contextlib.nullcontext():
                result = self._call(batch)
            if any(parameter.grad is not None for parameter in self._parameters):
                raise SearchError(
                    "the step calls backward(): return the loss and leave backward() to the search, so that the region "
                    "ends where it does in a training loop"
                )
            loss = _loss(result)
            if loss is None:
                outputs = [
                    t for t in tree_leaves(_plain(result)) if isinstance(t, torch.Tensor) and t.is_floating_point()
                ]
                if not outputs:
                    raise SearchError(f"the step returns {type(result).__name__} without a floating tensor")
                return {"output": [_host(each) for each in outputs]}
            if loss.requires_grad:
                loss.backward()
            found["loss"] = [_host(loss)]
            if loss.requires_grad and self._parameters:
                found["gradients"] = [None if p.grad is None else _host(p.grad) for p in self._parameters]
        return found

    def _call(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return self._step(**batch)
        return self._step(*batch) if isinstance(batch, tuple | list) else self._step(batch)

    def noise(self) -> dict[str, float]:
        """Errors of float32 with each parameter and operand moved to one of its neighbours."""
        generator = torch.Generator().manual_seed(0)
        moved = tree_map_only(torch.Tensor, lambda tensor: _neighbours(tensor, generator), self._batches[0])
        with restored(self._objects), torch.no_grad():
            for parameter in self._parameters:
                parameter.copy_(_neighbours(parameter.detach(), generator))
            return self.errors(self._run_on(moved, None, region=False), 0)

    def records(self, plan: Plan | None) -> list[DecisionRecord]:
        """The forward operations of a run."""
        with explain() as report, restored(self._objects), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuleWarning)
            with torch.no_grad(), autocast(self.device, policy=self.policy(plan)):
                self._call(self._batches[0])
        return report.records


def _plain(result: Any) -> Any:
    return dict(result) if isinstance(result, Mapping) else result


def _loss(result: Any) -> torch.Tensor | None:
    """The loss in what a step returned, or None."""
    if isinstance(result, torch.Tensor):
        return result if result.numel() == 1 and result.is_floating_point() else None
    found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    return found if isinstance(found, torch.Tensor) and found.numel() == 1 else None


def _host(tensor: torch.Tensor) -> fronts.Array:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return np.asarray(dense.float().cpu())


def _neighbours(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each element moved by one unit in its last place, up or down."""
    if not tensor.is_floating_point():
        return tensor
    host = tensor.detach().cpu()
    signs = torch.randint(0, 2, host.shape, generator=generator).to(host.dtype) * 2 - 1
    return torch.nextafter(host, signs * math.inf).to(tensor.device)
