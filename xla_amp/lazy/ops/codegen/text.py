"""The fast path: the source of a kernel, written for its schema, and what it refers to."""

from __future__ import annotations

import _thread
import functools
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch

from xla_amp.common import interrupts
from xla_amp.lazy.base import private_api
from xla_amp.lazy.graph import generator
from xla_amp.lazy.graph.trace import Buffer, add_parameter, instruction_cache, trace
from xla_amp.lazy.ops.checks import argument_rules
from xla_amp.lazy.ops.codegen.plan import Instructions
from xla_amp.lazy.ops.codegen.schema import Operation, SchemaArgument, Variant
from xla_amp.lazy.steps.loops import look
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lowering import Lowering
from xla_amp.torch_common import dynamo

_CHECKS = {"Device": "_require_here"}
"""Schema type of a dropped argument -> the check that the kernel calls with it first."""


def make_kernel(lowering: Lowering, operator: Any, variant: Variant) -> Callable[..., Any]:
    """The kernel of `operator` under `lowering`; its first call defines it, because most are never called."""
    kernel = FunctionType(_first_call.__code__, {})
    kernel.__globals__["_define"] = functools.partial(_define, kernel, lowering, operator, variant)
    return kernel


def _first_call(*args: Any, **kwargs: Any) -> Any:
    return _define()(*args, **kwargs)  # type: ignore[call-arg]  # its globals have a partial function


def _define(kernel: FunctionType, lowering: Lowering, operator: Any, variant: Variant) -> FunctionType:
    """Gives the function that torch already has its code."""
    with trace.lock:
        if kernel.__code__ is _first_call.__code__:
            defined = dynamo.skip(_defined(Operation(lowering, operator, variant), kernel.__globals__))
            kernel.__defaults__, kernel.__kwdefaults__ = defined.__defaults__, defined.__kwdefaults__
            kernel.__code__ = defined.__code__
    return kernel


def _defined(operation: Operation, scope: dict[str, Any]) -> FunctionType:
    """The compiled kernel, whose globals are `scope`."""
    source = _Source(operation).text()
    instructions = Instructions(operation)
    scope |= {
        "_cache": instruction_cache(),
        "_specialize": instructions.specialize,
        "_check_out": instructions.check_out,
        "_plain": tensor_io.PLAIN,
        "_lock": trace.lock,
        "_acquire": trace.lock.acquire,
        "_release": trace.lock.release,
        "_thread": _thread.get_ident,
        "_changes_hands": interrupts.changes_hands,
        "_waiting": interrupts.waiting,
        "_deliver": interrupts.deliver,
        "_trace": trace,
        "_look": look,
        "_add_parameter": add_parameter,
        "_Buffer": Buffer,
        "_ref": weakref.ref,
        "_create": private_api.create_tensor,
        "_dtype": torch.dtype,
        "_numbers": (float, int, complex),
        "_fits": instructions.check_fits,
        "_default_dtype": torch.get_default_dtype,
        "_read_view": tensor_io.read_view,
        "_operand": tensor_io.operand,
        "_operands": tensor_io.operands,
        "_require_here": tensor_io.require_here,
        "_bump": torch.autograd.graph.increment_version,
        "_write": tensor_io.fill if operation.name.split(".")[0] in ("fill_", "zero_") else tensor_io.write,
        "_write_all": tensor_io.write_all,
        "_write_out": tensor_io.write_out,
        "_new": tensor_io.new_tensor,
        "_draw": generator.draw,
        "_number_key": number_key,
        "_lift": lift,
    }
    scope |= {f"_d{i}": argument.default for i, argument in enumerate(operation.arguments)}
    exec(_compiled(source), scope)
    kernel: FunctionType = scope["kernel"]
    kernel.__code__ = kernel.__code__.replace(co_filename=f"<kernel of {operation.name}>")
    return kernel


@functools.cache
def _compiled(source: str) -> CodeType:
    """Two kernels in three have the source of another one."""
    return compile(source, "<kernel>", "exec")


def number_key(value: Any) -> Any:
    """Cache key of a Python number: lifted ones by type alone, the others by value."""
    kind = type(value)
    if kind is float:
        return torch.get_default_dtype()
    return int if kind is int else (kind, value)


def lift(value: Any) -> None:
    """Appends a Python number, given instead of a tensor, to the trace's lifted numbers."""
    if type(value) is float:
        trace.floats.append(value)
    elif type(value) is int:
        trace.ints.append(value)


def _new_tensor(variable: str, number: str) -> list[str]:
    """Source of `tensor_io.new_tensor` of the spec in ``_s``, written out."""
    return [
        f"{variable} = _create(_s.shape, _s.dtype)",
        f"{variable}.untyped_storage()._xla_amp = _b = _Buffer(_s, {number}, None, _g)",
        "_trace.computed.append(_ref(_b))",
    ]


class _Source:
    """Writes the source of one kernel."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.lines: list[str] = []
        self.keys: list[str] = []
        self.inputs: list[tuple[str, bool]] = []
        """(variable holding a number or a list of numbers, whether it is a list)"""
        self.lifts: list[str] = []
        self.checks: list[str] = []
        self.must_fit = argument_rules.must_fit(operation.operator)

    def text(self) -> str:
        operation = self.operation
        for index, argument in enumerate(operation.arguments):
            if argument.type in _CHECKS:
                self.lines.append(f"if {argument.variable} is not None: {_CHECKS[argument.type]}({argument.variable})")
            if argument.kind != "dropped" and not argument.is_out:
                getattr(self, f"_{argument.kind}")(argument, index)
            if argument.name in self.must_fit:
                name, small = argument.variable, argument_rules.SMALL
                far = f"(type({name}) is complex or not 0 <= {name} < {small})"
                self.checks.append(f"if type({name}) in _numbers and {far}: _fits({name}, _i)")
        self._instruction()
        self._append()
        self._results()
        body = "\n".join(f"        {line}" for line in self.lines)
        operands = ", ".join(a.variable for a in operation.arguments if a.kind in ("tensor", "tensors"))
        # A `with` of the lock, written out: its methods in Python would be two calls.
        return (
            f"def kernel({self._signature()}):\n    _acquire()\n    try:\n"
            f"        if _thread() != _lock.thread: _changes_hands()\n"
            f"        if _trace.count > _trace.limit: _look({operands})\n        _g = _trace.generation\n{body}\n"
            "    finally:\n        _release()\n        if _waiting: _deliver()\n"
        )

    def _signature(self) -> str:
        parts, starred = [], False
        for index, argument in enumerate(self.operation.arguments):
            if argument.keyword and not starred:
                parts.append("*")
                starred = True
            parts.append(argument.variable + (f"=_d{index}" if argument.has_default or argument.is_out else ""))
        return ", ".join(parts)

    def _tensor(self, argument: SchemaArgument, index: int) -> None:
        name, value, key = argument.variable, f"_v{index}", f"_k{index}"
        self.lines += [
            f"if type({name}) in _plain and (_b{index} := {name}.untyped_storage()._xla_amp) is not None:",
            f"    {key} = _b{index}.spec",
            f"    if {name}.shape == {key}.shape and {name}.is_contiguous() and {name}.dtype is {key}.dtype:",
            f"        if _b{index}.generation is _g: {value} = _b{index}.at",
            f"        else: {value} = _add_parameter(_b{index})",
            "    else:",
            f"        {value}, {key} = _read_view({name}, _b{index})",
            f"        _b{index} = None",
            *([f"elif {name} is None: {value} = -1; {key} = _b{index} = None"] if argument.optional else []),
            "else:",
            f"    {value}, {key} = _operand({name})",
            f"    _b{index} = None",
        ]
        self.keys.append(key)
        self.inputs.append((value, False))
        self.lifts.append(f"if {value} < 0: _lift({name})")

    def _tensors(self, argument: SchemaArgument, index: int) -> None:
        if argument in self.operation.mutated:
            self.lines.append(f"_v{index}, _k{index} = _operands({argument.variable}, _w{index} := [])")
        else:
            self.lines.append(f"_v{index}, _k{index} = _operands({argument.variable})")
        self.keys.append(f"_k{index}")
        self.inputs.append((f"_v{index}", True))

    def _number(self, argument: SchemaArgument, index: int) -> None:
        name, key = argument.variable, f"_k{index}"
        self.lines += [
            *([f"if {name} is _d{index}: {key} = None"] if argument.has_default else []),
            f"{'elif' if argument.has_default else 'if'} type({name}) is float: {key} = _default_dtype()",
            f"elif type({name}) is int: {key} = int",
            f"else: {key} = (type({name}), {name})",
        ]
        self.keys.append(key)
        self.lifts += [
            f"if {key} is int: _trace.ints.append({name})",
            f"elif type({key}) is _dtype: _trace.floats.append({name})",
        ]

    def _numbers(self, argument: SchemaArgument, index: int) -> None:
        name, key = argument.variable, f"_k{index}"
        self.lines.append(f"{key} = tuple([_number_key(_n) for _n in {name}])")
        self.keys.append(key)
        self.lifts.append(f"for _n in {name}: _lift(_n)")

    def _list(self, argument: SchemaArgument, index: int) -> None:
        name = argument.variable
        optional = f"(tuple({name}) if {name} is not None else None)"
        self.keys.append(optional if argument.optional else f"tuple({name})")

    def _constant(self, argument: SchemaArgument, index: int) -> None:
        # 1, 1.0 and True are equal as keys, so the type is part of the key.
        base = argument.variable
        self.keys.append(base if argument.name not in self.operation.lowering.static else f"(type({base}), {base})")

    def _dtype(self, argument: SchemaArgument, index: int) -> None:
        name = argument.variable
        # None may mean the default dtype or the input's, so it never has the key of an explicit dtype.
        self.keys.append(f"((None, _default_dtype()) if {name} is None else {name})" if argument.optional else name)

    def _instruction(self) -> None:
        arguments = self.operation.inputs
        values = ", ".join(argument.variable for argument in arguments)
        keys = ", ".join(self.keys)
        self.lines += [
            f"_key = ({keys}{',' if keys else ''})",
            "_i = _cache.get(_key)",
            f"if _i is None: _i = _cache[_key] = _specialize(({values},))",
        ]
        outs = [a.variable for a in self.operation.arguments if a.is_out] if self.operation.variant == "out" else []
        if outs:
            differ = " or ".join(f"{name}.dtype is not _i.outs[{i}].dtype" for i, name in enumerate(outs))
            self.lines.append(f"if {differ}: _check_out(_i, ({', '.join(outs)},))")
        self.lines += self.checks + self.lifts

    def _append(self) -> None:
        head = "_i.id"
        if "rng" in self.operation.lowering.supplies:
            own = [argument.variable for argument in self.operation.arguments if argument.type == "Generator"]
            self.lines.append(f"_stream, _index = _draw({', '.join(own)})")
            head += ", _stream, _index"
        if any(is_list for _, is_list in self.inputs):
            self.lines.append(f"_code = _trace.code; _code.extend(({head},))")
            self.lines += [f"_code.extend({v})" if is_list else f"_code.append({v})" for v, is_list in self.inputs]
        else:
            self.lines.append(f"_trace.code.extend(({', '.join([head, *(v for v, _ in self.inputs)])},))")

    def _results(self) -> None:
        operation = self.operation
        new_results = (
            [r for r in operation.returns if r.alias_info is None] if operation.variant == "functional" else []
        )
        single = len(operation.returns) == 1 and not operation.mutated and operation.variant == "functional"
        self.lines.append("_n = _trace.count")
        if single and str(operation.returns[0].type) == "Tensor":
            self.lines += [
                "_trace.count = _n + 1",
                "_s = _i.outs[0]",
                *_new_tensor("_t", "_n"),
                "return _t",
            ]
            return
        self.lines.append("_trace.count = _n + len(_i.outs)")
        if operation.variant == "out":
            outs = [argument for argument in operation.arguments if argument.is_out]
            self.lines += [f"_write_out({a.variable}, _i.outs[{i}], _n + {i})" for i, a in enumerate(outs)]
            self.lines.append(f"return {', '.join(a.variable for a in outs)}")
            return
        if new_results and str(new_results[0].type).startswith("List["):
            self.lines.append("return [_new(_s, _n + _j) for _j, _s in enumerate(_i.outs)]")
            return
        if new_results:
            self.lines.append("_outs = _i.outs")
            for position in range(len(new_results)):
                self.lines += [f"if (_s := _outs[{position}]) is None: _r{position} = None", "else:"]
                self.lines += [f"    {line}" for line in _new_tensor(f"_r{position}", f"_n + {position}")]
            self.lines.append(f"_n += {len(new_results)}")
        for argument in operation.mutated:
            index = operation.arguments.index(argument)
            name = argument.variable
            if argument.kind == "tensors":
                # PyTorch increments the version of a written argument, but not those of a list's tensors.
                self.lines.append(f"if {name}: _bump({name}); _write_all({name}, _w{index}, _n); _n += len({name})")
            else:
                self.lines += [
                    f"if _b{index} is not None: _b{index}.at = _n",
                    f"elif {name} is not None: _write({name}, _n)",
                ]
                if operation.mutated != (argument,):
                    self.lines.append(f"if {name} is not None: _n += 1")
        self._return(new_results)

    def _return(self, new_results: list[Any]) -> None:
        operation = self.operation
        aliased = operation.returns and operation.returns[0].alias_info is not None
        if aliased:
            self.lines.append(f"return {operation.arguments[0].variable}")
        elif new_results:
            self.lines.append(f"return {', '.join(f'_r{position}' for position in range(len(new_results)))}")
        else:
            self.lines.append("return None")
