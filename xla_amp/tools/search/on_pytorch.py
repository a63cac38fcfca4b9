"""`search` for PyTorch: the operations of a model or a loss function that must stay float32."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from xla_amp.common.events import DecisionRecord
from xla_amp.common.types import LowDtype
from xla_amp.errors import RecompileWarning, RuleWarning, SearchError
from xla_amp.pytorch.autocast.autocast import autocast
from xla_amp.tools.explain.on_pytorch import explain
from xla_amp.tools.overflow.on_pytorch import uncompiled
from xla_amp.tools.search import Plan, fronts
from xla_amp.tools.search.fronts import SearchResult
from xla_amp.torch_common.trees import tree_leaves, tree_map_only
from xla_amp.training.reader import reachable
from xla_amp.training.step_state import restored


def search(
    step: Callable[..., Any],
    batches: Sequence[Any],
    *,
    budget: float | Mapping[str, float],
    low: LowDtype = "bfloat16",
    objects: Sequence[Any] = (),
) -> SearchResult:
    """The policy that keeps the fewest operations in float32 while a model's error stays within `budget`.

    Every plan runs forward and backward under ``autocast(policy=plan)`` and is compared with float32 on the same batch;
    parameters, buffers, gradients and random generators are restored after each run.  The result is checked on batches
    that the search has not used.

    Args:
        step: a model, or a function that returns the loss; it does not call ``backward()`` and opens no autocast
            region.  A result with an attribute or a key ``loss`` gives that; other results that are no single number
            are compared as a whole, without gradients.
        batches: two or more, of which the last quarter only checks the result.  Each is passed as ``step(*batch)`` if
            it is a tuple or a list, ``step(**batch)`` if it is a dict, and ``step(batch)`` otherwise.  Batches of a
            model are moved to its device.
        budget: largest accepted relative error of the loss (of the result without a loss), or of several quantities:
            ``{"loss": 1e-3, "gradients": 1e-2}``.  The error of the gradients is that of all of them as one vector.
            Quantities without a budget are reported, and must be finite.
        low: the low dtype.
        objects: further modules that the step uses and does not reach by its closure, its arguments or its globals.

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
    program = TorchProgram(uncompiled(step), list(batches), objects, low)
    with program.prepared():
        return fronts.searched(program, budget=budget, device=str(program.device))


class TorchProgram(fronts.MeasuredProgram):
    """A model or a loss function of torch as a program of a search."""

    overflow_finder = "xla_amp.find_overflow()"

    def __init__(self, step: Callable[..., Any], batches: Sequence[Any], objects: Sequence[Any], low: LowDtype) -> None:
        super().__init__(low, len(batches))
        if not batches:
            raise SearchError("no batches: give two or more, e.g. itertools.islice(loader, 8)")
        self._step = step
        self._objects = [*reachable(step, ()), *objects]
        found = [p for each in self._objects if isinstance(each, torch.nn.Module) for p in each.parameters()]
        self._parameters = list({id(p): p for p in found}.values())
        tensors = [*self._parameters, *(t for t in tree_leaves(batches) if isinstance(t, torch.Tensor))]
        self.device = next((t.device for t in tensors), torch.device("cpu"))
        self._batches = list(batches)
        if isinstance(step, torch.nn.Module):
            self._batches = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), self._batches)

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Keeps the kernels of autocast, whose installation takes longer than a small step, until the block ends."""
        # Every plan has the same rules with other casts, so all have the kernels of this region.
        with autocast(self.device, policy=self.policy(Plan())), autocast(self.device, enabled=False):
            yield

    def run(self, batch: int, plan: Plan | None, *, region: bool = True) -> fronts.Quantities:
        """One forward and backward pass on one batch."""
        with restored(self._objects), warnings.catch_warnings(), torch.enable_grad():
            for expected in (RuleWarning, RecompileWarning):  # each plan is another program
                warnings.simplefilter("ignore", expected)
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
                leaves = tree_leaves(dict(result) if isinstance(result, Mapping) else result)
                outputs = [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]
                if not outputs:
                    raise SearchError(f"the step returns {type(result).__name__} without a floating tensor")
                return {"output": [_host(each) for each in outputs]}
            found: fronts.Quantities = {"loss": [_host(loss)]}
            if loss.requires_grad and self._parameters:
                loss.backward()
                found["gradients"] = [
                    _host(torch.zeros_like(p) if p.grad is None else p.grad) for p in self._parameters
                ]
            return found

    def _call(self, batch: int) -> Any:
        given = self._batches[batch]
        if isinstance(given, Mapping):
            return self._step(**given)
        return self._step(*given) if isinstance(given, tuple | list) else self._step(given)

    def records(self, plan: Plan | None, *, region: bool = True) -> list[DecisionRecord]:
        """The decisions about the forward operations of a run."""
        with explain() as report:
            self.run(0, plan, region=region)
        return report.records


def _loss(result: Any) -> torch.Tensor | None:
    """The loss in what a step returned, or None."""
    if isinstance(result, torch.Tensor):
        return result if result.numel() == 1 and result.is_floating_point() else None
    found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    return found if isinstance(found, torch.Tensor) and found.numel() == 1 else None


def _host(tensor: torch.Tensor) -> fronts.Array:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return np.asarray(dense.float().cpu())
