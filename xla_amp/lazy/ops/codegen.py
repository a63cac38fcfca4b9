"""One Python kernel per ATen overload, generated from the operation's schema.

A kernel finds the value numbers of its operands, looks up its `Instruction` by the specs and constants of the call,
appends a few integers to the trace, and wraps the number of the result in a new tensor.  Python is the cost of tracing,
so the source of each kernel is generated for its schema and compiled at its first call: it has no loops and no look-ups
by name.  Only the first call with new specs takes the slow path (`_Operation.specialize`).
"""

from __future__ import annotations

import _thread
import functools
import keyword
import weakref
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType
from typing import Any, Literal

import torch

from xla_amp.common import interrupts
from xla_amp.lazy.base import private_api
from xla_amp.lazy.base.dtypes import TO_NUMPY
from xla_amp.lazy.graph import generator
from xla_amp.lazy.graph.trace import Buffer, Family, Instruction, Spec, add_parameter, instruction_cache, spec, trace
from xla_amp.lazy.ops.checks import argument_rules, shape_inference
from xla_amp.lazy.ops.operators import functional_variant
from xla_amp.lazy.programs import mesh
from xla_amp.lazy.programs.compile import Context
from xla_amp.lazy.steps.loops import look
from xla_amp.lazy.tensors import tensor_io
from xla_amp.lowering import Lowering
from xla_amp.torch_common import dynamo

Variant = Literal["functional", "inplace", "out"]
"""Variant of the operator: as registered, in-place (writes the first argument), or with ``out=`` arguments."""

DROPPED = frozenset(("Device", "Layout", "Generator", "MemoryFormat"))
_CHECKS = {"Device": "_require_here"}
"""Schema type of a dropped argument -> the check that the kernel calls with it first."""
_DROPPED_NAMES = frozenset(("pin_memory",))


class SchemaArgument:
    """One schema argument, its variable in the kernel and its kind."""

    def __init__(self, position: int, argument: Any, lowering: Lowering) -> None:
        self.name: str = argument.name
        self.keyword = bool(argument.kwarg_only)
        usable = self.keyword and not keyword.iskeyword(self.name)
        self.variable = self.name if usable else f"a{position}"
        self.is_out = bool(argument.is_out)
        self.has_default = argument.has_default_value()
        self.default = argument.default_value if self.has_default else None
        text = str(argument.real_type)
        base = text.removeprefix("Optional[").removesuffix("]") if text.startswith("Optional[") else text
        self.optional = base != text
        self.type = base
        self.kind = self._kind(base, lowering)

    def _kind(self, base: str, lowering: Lowering) -> str:
        if base in DROPPED or self.name in _DROPPED_NAMES:
            return "dropped"
        if base == "Tensor":
            return "tensor"
        if base in ("List[Tensor]", "List[Optional[Tensor]]"):
            return "tensors"
        if base == "number":
            return "constant" if self.name in lowering.static else "number"
        if base == "List[number]":
            return "numbers"
        if base == "float" and self.name in lowering.lifted:
            return "number"
        if base == "ScalarType":
            return "dtype"
        return "list" if base.startswith("List[") else "constant"


class _Operation:
    """A lowering bound to one torch operator; creates its instructions and its kernel."""

    def __init__(self, lowering: Lowering, operator: Any, variant: Variant) -> None:
        self.lowering = lowering
        self.operator = operator
        self.variant = variant
        self.name = str(operator).removeprefix("aten.").removesuffix(".default")
        schema = operator._schema
        self.arguments = [SchemaArgument(i, argument, lowering) for i, argument in enumerate(schema.arguments)]
        self.inputs = [argument for argument in self.arguments if not argument.is_out]
        self.returns = list(schema.returns)
        self.mutated = tuple(
            argument for name in lowering.mutates for argument in self.arguments if argument.name == name
        )
        if variant == "inplace":
            self.mutated = (self.arguments[0],)
        self.families: weakref.WeakValueDictionary[str, Family] = weakref.WeakValueDictionary()

    # -- the slow path: a new combination of specs and constants ------------------------------------------------

    def specialize(self, values: Sequence[Any]) -> Instruction:
        """The instruction for these argument values."""
        named = {argument.name: value for argument, value in zip(self.inputs, values, strict=True)}
        argument_rules.check(functional_variant(self.operator), named)
        new_results = self._new_results(values)
        written = tuple(
            spec(tuple(tensor.shape), tensor.dtype)
            for argument in self.mutated
            for tensor in _tensors(values[self.inputs.index(argument)])
        )
        outs = new_results + written
        family = self._family(values, outs)
        numbers = tuple(
            number
            for argument, value in zip(self.inputs, values, strict=True)
            for number in self._numbers(argument, value)
        )
        return self._instruction(values, outs, frozenset(), family, numbers if family else ())

    def _numbers(self, argument: SchemaArgument, value: Any) -> tuple[float, ...]:
        """The numbers of an argument that may become data."""
        if argument.name not in self.lowering.dynamic:
            return ()
        numbers = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        return numbers if all(type(number) in (float, int) for number in numbers) else ()

    def _family(self, values: Sequence[Any], outs: tuple[Spec | None, ...]) -> Family | None:
        """The family of the calls that differ in numbers only, if the lowering can take these as data."""
        pairs = list(zip(self.inputs, values, strict=True))
        dynamic = frozenset(argument.name for argument, value in pairs if self._numbers(argument, value))
        if not dynamic:
            return None
        tensors = [
            (tuple(t.shape), t.dtype) for _, value in pairs for t in _tensors(value) if isinstance(t, torch.Tensor)
        ]
        plan = _Plan(dynamic)
        key = repr((tensors, [plan.slot(argument, value) for argument, value in pairs], outs))
        family = self.families.get(key)
        if family is None:
            held = [shape_inference.on_meta(value) for value in values]
            family = self.families[key] = Family(lambda: self._instruction(held, outs, dynamic, None, ()))
        return family

    def _instruction(
        self,
        values: Sequence[Any],
        outs: tuple[Spec | None, ...],
        dynamic: frozenset[str],
        family: Family | None,
        numbers: tuple[float, ...],
    ) -> Instruction:
        """The instruction that takes the arguments in `dynamic` as data."""
        plan = _Plan(dynamic)
        pairs = zip(self.inputs, values, strict=True)
        last = sorted(pairs, key=lambda pair: pair[0].name in dynamic)  # `dynamic_numbers` appends these to the others
        found = {argument.name: plan.slot(argument, value) for argument, value in last}
        slots = [found[argument.name] for argument in self.inputs]
        positions = {a.name: slot[1] for a, slot in zip(self.inputs, slots, strict=True) if slot[:1] == ("input",)}
        return Instruction(
            self.name,
            self._emitter(slots, outs, shape_inference.common_dtype(values)),
            outs,
            plan.inputs,
            plan.floats,
            plan.ints,
            random="rng" in self.lowering.supplies,
            takes=self.lowering.takes,
            collective="replicas" in self.lowering.supplies,
            minor={
                platform: {positions[name]: dims for name, dims in wanted.items() if name in positions}
                for platform, wanted in self.lowering.minor.items()
            },
            constants={
                a.name: slot[1] for a, slot in zip(self.inputs, slots, strict=True) if slot[:1] == ("constant",)
            },
            family=family,
            numbers=numbers,
        )

    def _new_results(self, values: Sequence[Any]) -> tuple[Spec | None, ...]:
        """Specs of the results that are new tensors; torch's meta kernel, if there is one, checks the arguments."""
        positional = [v for a, v in zip(self.inputs, values, strict=True) if not a.keyword]
        keywords = {a.name: v for a, v in zip(self.inputs, values, strict=True) if a.keyword}
        if self.variant == "out":
            return shape_inference.results(functional_variant(self.operator), positional, keywords)
        if self.mutated and not any(r.alias_info is None for r in self.returns):
            if not any(a.kind == "tensors" for a in self.mutated) and shape_inference.has_meta_kernel(self.operator):
                shape_inference.results(
                    self.operator, positional, keywords
                )  # raises torch's error for a bad shape or dtype
            if self.variant == "inplace" and torch.Tag.pointwise in self.operator.tags:
                argument_rules.check_inplace(functional_variant(self.operator), positional, keywords)
            return ()
        return shape_inference.results(self.operator, positional, keywords)

    def _emitter(
        self, slots: list[Any], outs: tuple[Spec | None, ...], common: torch.dtype | None
    ) -> Callable[..., Any]:
        lowering, arguments = self.lowering, self.inputs
        structs = tuple(None if out is None else out.struct() for out in outs)
        constant: dict[str, Any] = {
            "out": structs[0] if structs else None,
            "outs": structs,
            "common": TO_NUMPY[common] if common is not None else None,
        }
        wanted = {name: value for name, value in constant.items() if name in lowering.supplies}
        of_context = [name for name in ("platform", "wide", "replicas") if name in lowering.supplies]

        def emit(context: Context, inputs: list[Any], floats: list[Any], ints: list[Any], rng: Any) -> Any:
            supplies = wanted | {name: getattr(context, name) for name in of_context}
            if "partitioned" in lowering.supplies:
                supplies["partitioned"] = mesh.is_partitioned()
            if "rng" in lowering.supplies:
                supplies["rng"] = rng
            positional, keywords = [], {}
            for argument, slot in zip(arguments, slots, strict=True):
                if argument.kind == "dropped":
                    continue
                value = _fill(slot, inputs, floats, ints)
                if argument.keyword:
                    keywords[argument.name] = value
                else:
                    positional.append(value)
            results = lowering.function(*positional, **keywords, **supplies)
            return results if isinstance(results, (tuple, list)) else (results,)

        return emit

    def check_fits(self, number: complex, instruction: Instruction) -> None:
        """Raises torch's error for a number that the dtype of a result does not hold."""
        dtypes = {out.dtype for out in instruction.outs if out is not None}
        argument_rules.check_fits(number, dtypes, elements=1 if self.name == "scalar_tensor" else 2)

    def check_out(self, instruction: Instruction, outs: Sequence[torch.Tensor]) -> None:
        """Raises for ``out=`` tensors of a dtype that torch does not store the results in."""
        results = [value_spec.dtype for value_spec in instruction.outs if value_spec is not None]
        argument_rules.check_out(self.name.partition(".")[0], results, [out.dtype for out in outs])

    # -- the fast path: the kernel's source ----------------------------------------------------------------------

    def define(self, scope: dict[str, Any]) -> FunctionType:
        """The compiled kernel, whose globals are `scope`."""
        source = _Source(self).text()
        scope |= {
            "_cache": instruction_cache(),
            "_operation": self,
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
            "_fits": self.check_fits,
            "_default_dtype": torch.get_default_dtype,
            "_read_view": tensor_io.read_view,
            "_operand": tensor_io.operand,
            "_operands": tensor_io.operands,
            "_require_here": tensor_io.require_here,
            "_bump": torch.autograd.graph.increment_version,
            "_write": tensor_io.fill if self.name.split(".")[0] in ("fill_", "zero_") else tensor_io.write,
            "_write_all": tensor_io.write_all,
            "_write_out": tensor_io.write_out,
            "_new": tensor_io.new_tensor,
            "_draw": generator.draw,
            "_number_key": number_key,
            "_lift": lift,
        }
        scope |= {f"_d{i}": argument.default for i, argument in enumerate(self.arguments)}
        exec(_compiled(source), scope)
        kernel: FunctionType = scope["kernel"]
        kernel.__code__ = kernel.__code__.replace(co_filename=f"<kernel of {self.name}>")
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


def _tensors(value: Any) -> list[torch.Tensor]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


class _Plan:
    """Assigns arguments to an instruction's inputs, floats and ints."""

    def __init__(self, dynamic: frozenset[str]) -> None:
        self.inputs = self.floats = self.ints = 0
        self.dynamic = dynamic
        """Names of arguments whose numbers are data."""

    def slot(self, argument: SchemaArgument, value: Any) -> Any:
        """The slot of an argument: ("input", i), ("float", i), ("int", i), ("constant", value), or a list."""
        if argument.name in self.dynamic:
            return [self._number(item) for item in value] if isinstance(value, (list, tuple)) else self._number(value)
        match argument.kind:
            case "tensor":
                index, self.inputs = self.inputs, self.inputs + 1
                if value is None or isinstance(value, torch.Tensor):
                    return "input", index
                return self._number(value)
            case "tensors":
                if value is None:
                    return "constant", None
                first, self.inputs = self.inputs, self.inputs + len(value)
                return [("input", first + i) for i in range(len(value))]
            case "number":
                return ("constant", value) if value is argument.default else self._number(value)
            case "numbers":
                return [self._number(item) for item in value]
            case "dtype":
                return "constant", TO_NUMPY[value] if isinstance(value, torch.dtype) else None
            case _:
                return "constant", list(value) if isinstance(value, (list, tuple)) else value

    def _number(self, value: Any) -> Any:
        if type(value) is float:
            index, self.floats = self.floats, self.floats + 1
            return "float", index
        if type(value) is int:
            index, self.ints = self.ints, self.ints + 1
            return "int", index
        return "constant", value


def _fill(slot: Any, inputs: list[Any], floats: list[Any], ints: list[Any]) -> Any:
    if isinstance(slot, list):
        return [_fill(item, inputs, floats, ints) for item in slot]
    kind, value = slot
    match kind:
        case "input":
            return inputs[value]
        case "float":
            return floats[value]
        case "int":
            return ints[value]
    return list(value) if isinstance(value, list) else value


def _new_tensor(variable: str, number: str) -> list[str]:
    """Source of `tensor_io.new_tensor` of the spec in ``_s``, written out."""
    return [
        f"{variable} = _create(_s.shape, _s.dtype)",
        f"{variable}.untyped_storage()._xla_amp = _b = _Buffer(_s, {number}, None, _g)",
        "_trace.computed.append(_ref(_b))",
    ]


class _Source:
    """Writes the source of one kernel."""

    def __init__(self, operation: _Operation) -> None:
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
            f"if _i is None: _i = _cache[_key] = _operation.specialize(({values},))",
        ]
        outs = [a.variable for a in self.operation.arguments if a.is_out] if self.operation.variant == "out" else []
        if outs:
            differ = " or ".join(f"{name}.dtype is not _i.outs[{i}].dtype" for i, name in enumerate(outs))
            self.lines.append(f"if {differ}: _operation.check_out(_i, ({', '.join(outs)},))")
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
            defined = dynamo.skip(_Operation(lowering, operator, variant).define(kernel.__globals__))
            kernel.__defaults__, kernel.__kwdefaults__ = defined.__defaults__, defined.__kwdefaults__
            kernel.__code__ = defined.__code__
    return kernel
