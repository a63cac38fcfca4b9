"""Layouts by name: `shard` splits the parameters of a model over a mesh, and its batches with them.

A layout decides where values are, never what they are: XLA inserts the collectives that it needs.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import torch
from jax.sharding import Mesh
from torch import nn

from xla_amp.common import arguments, events
from xla_amp.engines import base, devices
from xla_amp.errors import DeviceError
from xla_amp.lazy.graph.trace import trace
from xla_amp.lazy.layouts import spmd
from xla_amp.lazy.processes import same_values
from xla_amp.lazy.programs import execute
from xla_amp.lazy.programs import mesh as meshes
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lazy.tensors.tensor_io import DEVICE_TYPE, is_lazy
from xla_amp.torch_common import trees


class Recipe(NamedTuple):
    """A row of `RECIPES`; the names are those of `AXES`."""

    parts: str
    """The axis of the model's plan (``tp_plan``); empty to leave it out."""
    rest: tuple[str, ...]
    """Axes that every large parameter is split over, along another dimension; those that the mesh has."""
    batch: tuple[str, ...]
    """Axes of a batch's first dimensions; those that the mesh has."""
    needs: tuple[str, ...]
    why: str


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "fsdp": Recipe(
            "", ("data",), ("data",), ("data",),
            "Each device has 1/N of every large parameter and of its optimizer state, and its rows of the batch.  A "
            "layer's parameters are gathered before it and its gradients scattered after it.",
        ),
        "tp": Recipe(
            "model", (), ("data",), ("model",),
            "Each device has its heads and hidden units (Megatron-LM): one sum over the devices after each attention "
            "and each MLP, and no gathering of parameters.  For the fast interconnect inside a host or slice.",
        ),
        "fsdp+tp": Recipe(
            "model", ("data",), ("data",), ("data", "model"),
            "TP inside a host, FSDP between hosts: parameters are split over both axes, along two dimensions.",
        ),
        "sequence": Recipe(
            "", ("data", "sequence"), ("data", "sequence"), ("sequence",),
            "Each device has its tokens of each row, so that activations of long rows fit; keys and values are "
            "gathered in attention.  Parameters as in fsdp, over both axes.",
        ),
    }
)  # fmt: skip
"""Layouts by the name that `shard` takes."""

AXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "data": ("data", "fsdp", "dp", "batch"),
        "model": ("model", "tensor", "tp", "mp"),
        "sequence": ("sequence", "seq", "sp", "context", "cp"),
    }
)
"""What the axes of a mesh may be called.  A mesh with a single axis may give it any name."""


_STYLES = (("embedding", "rows"), ("colwise", "outputs"), ("packed_colwise", "outputs"), ("rowwise", "inputs"))
"""Beginnings of the styles in transformers' plans, and which dimension of the weight they split."""
LEAST = 2048
"""Elements from which a parameter is split over the axes of `Recipe.rest`: gathering less costs more than it saves."""


class Placed(NamedTuple):
    """How one parameter is laid out."""

    name: str
    shape: tuple[int, ...]
    spec: tuple[spmd.Axis, ...]
    why: str


@dataclasses.dataclass(frozen=True)
class Layout:
    """What `shard` did; as text a table with a line for each parameter."""

    recipe: str
    mesh: Mesh
    parameters: tuple[Placed, ...]
    batch: tuple[spmd.Axis, ...]
    """Of the first dimensions of a batch, for `xla_amp.global_batch` and `xla_amp.mark_sharding`."""

    def __str__(self) -> str:
        width = max((len(each.name) for each in self.parameters), default=0)
        shapes = max((len(str(list(each.shape))) for each in self.parameters), default=0)
        lines = [
            f"{each.name:{width}}  {list(each.shape)!s:{shapes}}  {_text(each.spec)}  {each.why}"
            for each in self.parameters
        ]
        return "\n".join([f"{self.recipe} over {meshes.describe(self.mesh)}, batch {_text(self.batch)}", *lines])


def _text(spec: Sequence[spmd.Axis]) -> str:
    return f"({', '.join(map(repr, spec))}{',' if len(spec) == 1 else ''})"


def shard(model: nn.Module, mesh: Mesh, recipe: str) -> Layout:
    """Splits the parameters of a model over a mesh, after a recipe, and from now on the batches that it is called with.

    It moves the model to the lazy device if it is elsewhere, module by module, so that no device holds it whole.
    Optimizer state gets the layout of its parameters.  On a mesh of several processes all call it; parameters and
    buffers that differ between them get the values of process 0, as torch's DistributedDataParallel does.

    Tensors that the model is called with and that have no layout yet are split along their first dimensions
    (`Layout.batch`), where those divide.  They hold the whole batch, in every process: `xla_amp.global_batch` makes
    such tensors of what each process has.  Results of layers are split as the batch is.

    Args:
        model: any module.  In "tp" and "fsdp+tp" its ``tp_plan`` decides, as models of transformers have it and others
            may: ``model.tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}``, by names of modules;
            "embedding_rowwise" splits the rows of a table of words.
        mesh: from `xla_amp.make_mesh`; the axes are called "data", "model", "sequence" (or as `AXES` says).
        recipe: "fsdp", "tp", "fsdp+tp" or "sequence" (`RECIPES`).

    Returns:
        The layout of each parameter, and why; print it.

    Raises:
        ValueError: an unknown recipe, an axis that the mesh lacks, or a model without a plan for it.
        DeviceError: a parameter on another device than the CPU and the lazy one, or another mesh than before.
        EngineError: the process uses torch_xla.

    Example:
        >>> mesh = xla_amp.make_mesh({"data": 4, "model": 2})  # doctest: +SKIP
        >>> print(shard(model, mesh, "fsdp+tp"))               # doctest: +SKIP
    """
    base.require_lazy("shard()")
    if recipe not in RECIPES:
        raise ValueError(f"shard(recipe={recipe!r}): expected one of {', '.join(map(repr, RECIPES))}")
    arguments.require("shard(model)", model, nn.Module, "a torch.nn.Module")
    arguments.require("shard(mesh=...)", mesh, Mesh, "a mesh from xla_amp.make_mesh")
    axes = _axes(mesh, recipe)
    placed = tuple(_placed(model, mesh, RECIPES[recipe], axes))
    if RECIPES[recipe].parts and not any(axes["model"] in each.spec for each in placed):
        raise ValueError(
            f"shard(recipe={recipe!r}): no parameter of {type(model).__name__} has a plan, and a shape that divides, "
            f"for the axis {axes['model']!r}; set a plan by names of modules, such as model.tp_plan = "
            '{"layers.*.up": "colwise", "layers.*.down": "rowwise"}, or use \'fsdp\', or xla_amp.mark_sharding'
        )
    layout = Layout(recipe, mesh, placed, tuple(axes[name] for name in RECIPES[recipe].batch if name in axes))
    device = devices.engine().device()
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.device.type not in ("cpu", DEVICE_TYPE):
            raise DeviceError(
                f"shard(): expected a model on the CPU or {DEVICE_TYPE!r}, got {name!r} on {value.device}"
            )
    spmd.start(mesh)
    specs = {id(value): each.spec for (_, value), each in zip(model.named_parameters(), placed, strict=True)}
    for module in model.modules():
        mine = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        marks = [specs.get(id(value), ()) for value in mine]
        _move(module, device)
        now = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if meshes.spans_processes():
            _equalize(now)
        for value, spec in zip(now, marks, strict=True):
            specs[id(value)] = spec
            if any(entry is not None for entry in spec):
                spmd.mark_sharding(value, mesh, spec)
    if whole := [each.name for each in placed if each.why is _UNEVEN]:
        events.warn(
            f"shard(recipe={recipe!r}): whole on every device, because no dimension divides: {', '.join(whole)}"
        )
    if layout.batch:
        batches = _Batches(layout)
        model.register_forward_pre_hook(batches.before, with_kwargs=True)
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_hook(batches.after)
    return layout


def _axes(mesh: Mesh, recipe: str) -> dict[str, str]:
    """The axes of the mesh by what they are for."""
    needs = RECIPES[recipe].needs
    if len(mesh.axis_names) == len(needs) == 1:
        return {needs[0]: str(mesh.axis_names[0])}
    found = {purpose: name for purpose, names in AXES.items() for name in mesh.axis_names if name in names}
    if missing := [purpose for purpose in needs if purpose not in found]:
        wanted = dict.fromkeys(needs, 2)
        raise ValueError(
            f"shard(recipe={recipe!r}): the mesh {meshes.describe(mesh)} lacks an axis {' and '.join(missing)!r}; make "
            f"it with xla_amp.make_mesh({wanted})"
        )
    return found


_Splits: TypeAlias = Sequence[tuple[re.Pattern[str], str]]
_WHOLE = "small: whole"
_UNEVEN = "no dimension divides: whole"


def _placed(model: nn.Module, mesh: Mesh, recipe: Recipe, axes: Mapping[str, str]) -> Iterator[Placed]:
    modules = dict(model.named_modules())
    plan = _plan(model)
    rest = tuple(axes[name] for name in recipe.rest if name in axes)
    for name, value in model.named_parameters():
        shape, why = tuple(value.shape), _WHOLE
        chosen: list[spmd.Axis] = [None] * value.dim()
        if recipe.parts:
            owner, _, kind = name.rpartition(".")
            dim, reason = _role(modules[owner], owner, kind, value, plan, mesh.shape[axes[recipe.parts]])
            if dim is not None:
                chosen[dim], why = axes[recipe.parts], reason
            elif not rest:
                why = reason or "the plan does not name it: whole"
        if rest and value.numel() >= LEAST:
            # Of a table that is split by its rows, XLA sends whole float32 rows of all devices' tokens.
            first = 1 if isinstance(modules[name.rpartition(".")[0]], nn.Embedding) else None
            dim = _divisible(shape, chosen, math.prod(mesh.shape[axis] for axis in rest), first)
            if dim is not None:
                chosen[dim] = rest if len(rest) > 1 else rest[0]
                why = f"{why}, and 1/N of dimension {dim}" if why is not _WHOLE else f"1/N of dimension {dim}"
            elif why is _WHOLE:
                why = _UNEVEN
        yield Placed(name, shape, tuple(chosen), why)


def _divisible(shape: Sequence[int], taken: Sequence[spmd.Axis], parts: int, first: int | None) -> int | None:
    """The free dimension whose extent divides: `first` if it does, otherwise the longest."""
    free = [dim for dim, extent in enumerate(shape) if taken[dim] is None and extent % parts == 0]
    return max(free, key=lambda dim: (dim == first, shape[dim]), default=None)


def _plan(model: nn.Module) -> _Splits:
    """Patterns of modules' names, and which dimension of their weight is split."""
    own = getattr(model, "tp_plan", None) or getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    return [
        (re.compile(re.escape(name).replace(r"\*", r"\d+") + "$"), split)
        for name, style in own.items()
        for beginning, split in _STYLES
        if str(style).startswith(beginning)
    ]


_WHYS = MappingProxyType({"outputs": "its outputs", "inputs": "its inputs", "rows": "its rows"})


def _role(
    module: nn.Module,
    path: str,
    kind: str,
    value: torch.Tensor,
    plan: Sequence[tuple[re.Pattern[str], str]],
    parts: int,
) -> tuple[int | None, str]:
    """The dimension of a parameter that is split over the axis of tensor parallelism, and why; or why none is."""
    stem = kind.removesuffix("weight").removesuffix("bias").rstrip("_")
    full = f"{path}.{stem}".strip(".") if stem else path
    split = next((split for pattern, split in plan if pattern.search(full)), "")
    if not split:
        return None, ""
    if value.dim() == 1:
        if split == "inputs" or value.shape[0] % parts:
            return None, "added after the sum: whole" if split == "inputs" else _UNEVEN
        return 0, f"{_WHYS[split]} are split"
    if value.dim() != 2:
        return None, ""
    # The weight of transformers' Conv1D is (inputs, outputs), that of a Linear (outputs, inputs).
    dim = int(split == "inputs") ^ int(type(module).__name__ == "Conv1D")
    if value.shape[dim] % parts == 0:
        return dim, f"{_WHYS[split]} are split"
    if split == "rows" and value.shape[1] % parts == 0:
        return 1, f"{value.shape[0]} rows do not divide: its columns are split"
    return None, _UNEVEN


def _move(module: torch.nn.Module, device: torch.device) -> None:
    """Moves one module to the device, without the modules in it."""
    for parameter in module.parameters(recurse=False):
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.to(device)
        parameter.grad = None if gradient is None else gradient.to(device)
    for name, buffer in list(module.named_buffers(recurse=False)):
        setattr(module, name, buffer.to(device))


def _equalize(values: Sequence[torch.Tensor]) -> None:
    """Gives parameters and buffers the values of process 0."""
    with trace.lock:
        execute.flush()
        buffers = [tensor_io.buffer_of(value) for value in values]
        buffers = [buffer for buffer in buffers if isinstance(buffer.array, jax.Array)]
        meshes.move_to_mesh(buffers)
        whole = [buffer for buffer in buffers if buffer.array.is_fully_replicated]
        for buffer, array in zip(whole, same_values.take_from_first([each.array for each in whole]), strict=True):
            buffer.store(array)


class _Batches:
    """Hooks of a model's calls: split the tensors that it is given and that have no layout, and its layers' results."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._extents: tuple[int, ...] = ()
        """First extents of the batch, those that are split."""
        self._reported = False

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Splits the batch."""
        self._extents = ()
        for value in trees.tree_leaves((args, kwargs)):
            if is_lazy(value) and value.layout is torch.strided:
                self._split(value)

    def after(self, module: nn.Module, args: Any, result: Any) -> None:
        """Keeps a layer's result split as the batch: XLA might as well split it as the layer's weight is."""
        count = len(self._extents)
        if count and is_lazy(result) and result.dim() > count and tuple(result.shape[:count]) == self._extents:
            spmd.constrain(result, self._layout.mesh, self._layout.batch)

    def _split(self, value: torch.Tensor) -> None:
        shape, batch = self._layout.mesh.shape, self._layout.batch
        pairs = list(zip(value.shape, batch, strict=False))
        spec = [axis if extent % shape[str(axis)] == 0 else None for extent, axis in pairs]
        if len(spec) == len(batch) and None not in spec and not self._extents:
            self._extents = tuple(value.shape[: len(batch)])
        buffer = tensor_io.buffer_of(value)
        with trace.lock:
            uploaded = buffer.number < 0 and isinstance(buffer.array, jax.Array)
        whole = tuple(value.shape) == buffer.spec.shape and value.is_contiguous()
        if not uploaded or not whole or value.requires_grad or meshes.sharding_of(buffer) is not None:
            return
        if any(axis is not None for axis in spec):
            spmd.mark_sharding(value.detach(), self._layout.mesh, spec)
        uneven = [extent for (extent, _), axis in zip(pairs, spec, strict=True) if axis is None and extent > 1]
        if uneven and not self._reported:
            self._reported = True
            events.warn(
                f"a batch of shape {list(value.shape)} is whole on every device in the dimensions of extent {uneven}, "
                f"which do not divide over {meshes.describe(self._layout.mesh)}: each computes all of it; "
                "xla_amp.pad_to_bucket or drop_last=True make batches that divide",
            )
