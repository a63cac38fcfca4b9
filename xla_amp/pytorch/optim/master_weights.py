"""The `master` option of sync-free optimizers: what 16-bit weights keep beside them, and a step around that.

In each mode the step computes on float32 values of the weights, with the kernel that steps float32 weights:

==============  ==========================================  ============================================  ==========
mode            state beside the weight                     averages of the gradient                      bytes, Adam
==============  ==========================================  ============================================  ==========
``fp32``        ``master``: the float32 value               float32                                       14
``split16``     ``master_low``: int16, its lower half       float32                                       12
``kahan``       ``compensation``: bfloat16, its error       bfloat16; of squares float32                  10
``stochastic``  ``rng_state``: seed and count               bfloat16, rounded at random as the weight is  6
==============  ==========================================  ============================================  ==========

The average of squares moves by a thousandth in a step (``1 - beta2``), half of what bfloat16 can hold: rounded to
nearest it would stand still.  The operations are in ``torch.ops.xla_amp``: `_join`, `_part` and `_round_at_random` for
torch's CPU, `xla_amp.lowering.training.master_weights` for the lazy device, of the same formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from xla_amp import master_weights
from xla_amp.backends import base
from xla_amp.errors import EngineError

Master: TypeAlias = Literal["fp32", "split16", "kahan", "stochastic"]
Tensors = list[Tensor]

HALF = (torch.bfloat16, torch.float16)
RNG = "rng_state"


class Mode(NamedTuple):
    """One mode."""

    rest: str | None
    """Name in the state of what the weight lacks."""
    low: tuple[str, ...]
    """State tensors in the weight's dtype; others are float32."""
    dtypes: tuple[torch.dtype, ...]
    """Weights that it is for."""
    at_random: bool = False


_LOW = ("exp_avg", "momentum_buffer")
MODES: Mapping[str, Mode] = MappingProxyType(
    {
        "fp32": Mode("master", (), HALF),
        "split16": Mode("master_low", (), (torch.bfloat16,)),
        "kahan": Mode("compensation", _LOW, (torch.bfloat16,)),
        "stochastic": Mode(None, (*_LOW, "exp_avg_sq", "max_exp_avg_sq"), (torch.bfloat16,), at_random=True),
    }
)
RESTS: Mapping[str, torch.dtype] = MappingProxyType(
    {"master": torch.float32, "master_low": torch.int16, "compensation": torch.bfloat16}
)
"""Name in the state -> its dtype.  A tensor of another dtype went through an optimizer that does not know it."""


# ---- operations ------------------------------------------------------------------------------------------------------

_DTYPES = {"int16": torch.int16, "int32": torch.int32, "float32": torch.float32}
_DTYPES |= {"bfloat16": torch.bfloat16, "float16": torch.float16}
_ARRAYS = master_weights.Arrays(
    cast=lambda x, dtype: x.to(_DTYPES[dtype]), bits=lambda x, dtype: x.view(_DTYPES[dtype]), where=torch.where
)


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    result: Tensor = master_weights.rounded(_ARRAYS, value, str(dtype).removeprefix("torch."))
    return result


def _join(weights: Sequence[Tensor], rests: Sequence[Tensor]) -> Tensors:
    """float32 values of weights with their rests: the lower half (int16), the value (float32), or an error (16 bits).

    Of a rest in float32 only elements count whose rounding is the weight: weights may have been set from outside.
    """
    if not rests:
        return [weight.to(torch.float32, copy=True) for weight in weights]
    values = []
    for weight, rest in zip(weights, rests, strict=True):
        if rest.dtype is torch.int16:
            values.append(master_weights.joined(_ARRAYS, weight, rest))
        elif rest.dtype is torch.float32:
            values.append(torch.where(_rounded(rest, weight.dtype) == weight, rest, weight.float()))
        else:
            values.append(weight.float() + rest.float())
    return values


def _part(
    weights: Sequence[Tensor], rests: Sequence[Tensor], values: Sequence[Tensor], found_inf: Tensor | None
) -> None:
    """Writes weights and rests of float32 values, unless the flag is set."""
    for index, (weight, value) in enumerate(zip(weights, values, strict=True)):
        new = _rounded(value, weight.dtype)
        if rests:
            rest = rests[index]
            if rest.dtype is torch.int16:
                left = master_weights.lower(_ARRAYS, value, new)
            elif rest.dtype is torch.float32:
                left = value
            else:
                left = torch.where(torch.isfinite(new), value - new.float(), 0.0)
            _write(rest, left, found_inf)
        _write(weight, new, found_inf)


def _round_at_random(
    weights: Sequence[Tensor],
    values: Sequence[Tensor],
    rng_states: Sequence[Tensor],
    stream: int,
    found_inf: Tensor | None,
) -> None:
    """Writes float32 values rounded at random by (seed, count), int64[2] of each, unless the flag is set."""
    for weight, value, state in zip(weights, values, rng_states, strict=True):
        index = torch.arange(value.numel(), dtype=torch.int32, device=value.device).view(value.shape)
        seed, count = state.to(torch.int32).unbind()
        noise = master_weights.noise(index, seed, count, stream)
        _write(weight, master_weights.rounded_at_random(_ARRAYS, value, noise), found_inf)


def _write(tensor: Tensor, value: Tensor, found_inf: Tensor | None) -> None:
    value = value.to(tensor.dtype)
    tensor.copy_(value if found_inf is None else torch.where(found_inf.reshape(()) != 0, tensor, value))


_library = torch.library.Library("xla_amp", "DEF")
_OPERATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "join_weights(Tensor[] weights, Tensor[] rests) -> Tensor[]": _join,
        "part_weights_(Tensor(a!)[] weights, Tensor(b!)[] rests, Tensor[] values, Tensor? found_inf) -> ()": _part,
        "round_at_random_(Tensor(a!)[] weights, Tensor[] values, Tensor[] rng_states, int stream, Tensor? found_inf)"
        " -> ()": _round_at_random,
    }
)
for _schema, _function in _OPERATIONS.items():
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")
_ops: Any = torch.ops.xla_amp


# ---- a step ----------------------------------------------------------------------------------------------------------


class MasterUpdate:
    """One step of parameters of one dtype: what the kernel for float32 takes instead of them.

    Without a mode, or of weights that are float32, these are the parameters, gradients and state themselves.

    Args:
        mode: of the group, or None.
        names: the state tensors of the parameters' shapes that the kernel writes.
    """

    def __init__(
        self, mode: str | None, parameters: Tensors, gradients: Tensors, states: Sequence[dict[str, Any]], *names: str
    ) -> None:
        self._mode = None if mode is None or parameters[0].dtype not in HALF else MODES[mode]
        self._parameters, self._gradients, self._names = parameters, gradients, names
        self._stored = {name: [state[name] for state in states] for name in names}
        self.weights, self.gradients, self.states = parameters, gradients, dict(self._stored)
        if self._mode is None:
            return
        self._rests = [] if self._mode.rest is None else [state[self._mode.rest] for state in states]
        self._rngs = [state[RNG] for state in states] if self._mode.at_random else []
        self.weights = _ops.join_weights(parameters, self._rests)
        self.gradients = _ops.join_weights(gradients, [])
        for name in self._low():
            self.states[name] = _ops.join_weights(self._stored[name], [])

    def _low(self) -> list[str]:
        return [] if self._mode is None else [name for name in self._names if name in self._mode.low]

    def end(self, found_inf: Tensor | None, *, unscaled: bool) -> None:
        """Writes what the kernel computed; `unscaled`: it wrote the gradients."""
        if self._mode is None:
            return
        if unscaled:
            torch._foreach_copy_(self._gradients, self.gradients)
        written = [(self._parameters, self._rests, self.weights)]
        written += [(self._stored[name], [], self.states[name]) for name in self._low()]
        for stream, (targets, rests, values) in enumerate(written):
            if self._mode.at_random:
                _ops.round_at_random_(targets, values, self._rngs, stream, found_inf)
            else:
                _ops.part_weights_(targets, rests, values, found_inf)
        if self._rngs:
            one = torch.ones((), dtype=torch.int64, device=self._rngs[0].device)
            taken = one if found_inf is None else (found_inf.reshape(()) == 0).to(torch.int64)
            torch._foreach_add_(self._rngs, [torch.stack([one - one, taken])] * len(self._rngs))


def make_states(optimizer: Optimizer, mode: str | None, parameters: Tensors, *names: str) -> None:
    """Makes the state tensors in `names` and the mode's own of parameters that lack them: zeros, or the weights."""
    chosen = None if mode is None or parameters[0].dtype not in HALF else MODES[mode]
    states = [optimizer.state[parameter] for parameter in parameters]
    device = parameters[0].device
    wanted: list[tuple[dict[str, Any], str, Tensor]] = []
    for name in names:
        dtype = torch.float32 if chosen is not None and name not in chosen.low else None
        wanted += [(s, name, _like(p, dtype)) for s, p in zip(states, parameters, strict=True) if s.get(name) is None]
    if chosen is not None and chosen.rest is not None:
        new = [(s, p) for s, p in zip(states, parameters, strict=True) if chosen.rest not in s]
        if chosen.rest == "master":
            values = _ops.join_weights([p.detach() for _, p in new], []) if new else []
            for (state, _), value in zip(new, values, strict=True):
                state["master"] = value
        else:
            wanted += [(s, chosen.rest, _like(p, RESTS[chosen.rest])) for s, p in new]
    for (state, name, _), zeros in zip(wanted, base.zeros_like([like for *_, like in wanted], device), strict=True):
        state[name] = zeros
    if chosen is not None and chosen.at_random and (missing := [state for state in states if RNG not in state]):
        for state, rng in zip(missing, _seeds(len(missing), device), strict=True):
            state[RNG] = rng


def _like(parameter: Tensor, dtype: torch.dtype | None) -> Tensor:
    return parameter if dtype in (None, parameter.dtype) else torch.empty_like(parameter, dtype=dtype, device="meta")


def _seeds(count: int, device: torch.device) -> Iterable[Tensor]:
    """int64[2] each: a seed from the device's generator and the count zero; the same in all processes."""
    seeds = torch.randint(2**31 - 1, (count,), dtype=torch.int64, device=device)
    if device.type in base.DEVICE_TYPES and base.processes().world_size() > 1:
        [seeds] = base.processes().collective("collective_broadcast", [seeds], None, root=0)
    return [torch.stack([seed, torch.zeros_like(seed)]) for seed in seeds.unbind()]


# ---- options and checkpoints -----------------------------------------------------------------------------------------


def check(name: str, group: Mapping[str, Any]) -> None:
    """Raises if a group's mode is unknown, or not for one of its parameters.

    Raises:
        ValueError: so.
        EngineError: a parameter is on torch_xla's device.
    """
    master = group.get("master")
    if master is None:
        return
    if master not in MODES:
        raise ValueError(f"{name}(master={master!r}): expected None or one of {', '.join(map(repr, get_args(Master)))}")
    for parameter in group["params"]:
        if parameter.device.type == "xla":
            raise EngineError(
                f"{name}(master={master!r}): torch_xla has no operation that reads a number as bits, so this works on "
                "the lazy device and on the CPU; set XLA_AMP_ENGINE=jax, or leave master out"
            )
        if parameter.dtype in HALF and parameter.dtype not in MODES[master].dtypes:
            raise ValueError(
                f"{name}(master={master!r}): expected bfloat16 or float32 parameters, got {parameter.dtype} (parameter "
                f"{tuple(parameter.shape)}); use master='fp32' for float16"
            )


def check_effect(name: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError if a mode is set and acts on no parameter."""
    modes = [group["master"] for group in groups if group.get("master") is not None]
    if modes and not any(p.dtype in HALF for group in groups if group.get("master") for p in group["params"]):
        raise ValueError(
            f"{name}(master={modes[0]!r}): no parameter is bfloat16 or float16, so it has no effect; convert the model "
            "first, model.to(torch.bfloat16), or leave master out"
        )


def load(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """After `load_state_dict`: state tensors again, in the dtypes in which they were saved; torch casts them."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor) and (name == RNG or (value.shape == parameter.shape and name != "step")):
                optimizer.state[parameter][name] = value.to(parameter.device)


def knows(saved: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has state of a mode."""
    return any(not RESTS.keys().isdisjoint(state) or RNG in state for state in saved["state"].values())


@torch.no_grad()
def adopt(optimizer: Optimizer) -> None:
    """Converts state of another mode, which a checkpoint had, into that of each group's mode.

    The values of weights pass exactly into ``fp32`` and ``split16``, and into float32 weights.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                _adopt(optimizer.state[parameter], parameter, group.get("master"))


def _adopt(state: dict[str, Any], parameter: Tensor, master: str | None) -> None:
    mode = None if master is None or parameter.dtype not in HALF else MODES[master]
    kept = None if mode is None else mode.rest
    other = None
    for name, dtype in RESTS.items():
        rest = state.get(name)
        if rest is not None and (rest.dtype is not dtype or name != kept):
            del state[name]
            other = (name, rest) if rest.dtype is dtype else other
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point() and name != "step" and name != kept:
            wide = mode is not None and name not in mode.low
            state[name] = value.to(torch.float32 if wide else parameter.dtype)
    if mode is None or not mode.at_random:
        state.pop(RNG, None)
    elif RNG in state and state[RNG].dtype is not torch.int64:
        del state[RNG]
    if other is None or (kept is not None and kept in state):
        return
    name, rest = other
    if parameter.dtype is torch.float32:
        weight = torch.empty_like(parameter, dtype=torch.bfloat16)
        _ops.part_weights_([weight], [], [parameter], None)
        parameter.copy_(_ops.join_weights([weight], [rest])[0])
    elif kept is not None and (name == "master" or parameter.dtype is torch.bfloat16):
        [value] = _ops.join_weights([parameter], [rest])
        state[kept] = torch.empty_like(parameter, dtype=RESTS[kept])
        _ops.part_weights_([parameter], [state[kept]], [value], None)


def values(optimizer: Optimizer) -> Tensors:
    """float32 (parameters' shapes): the weights with what the state adds, in the order of the groups."""
    found = []
    for group in optimizer.param_groups:
        master = group.get("master")
        for parameter in group["params"]:
            mode = None if master is None or parameter.dtype not in HALF else MODES[master]
            rest = None if mode is None or mode.rest is None else optimizer.state[parameter].get(mode.rest)
            found += _ops.join_weights([parameter.detach()], [] if rest is None else [rest])
    return found
