"""The slow path of a kernel: the instruction of an operation for a new combination of specs and constants."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_amp.lazy.base.dtypes import TO_NUMPY
from xla_amp.lazy.graph.trace import Family, Instruction, Spec, spec
from xla_amp.lazy.ops.checks import argument_rules, shape_inference
from xla_amp.lazy.ops.codegen.schema import Operation, SchemaArgument
from xla_amp.lazy.ops.operators import functional_variant
from xla_amp.lazy.programs import mesh
from xla_amp.lazy.programs.compile import Context


class Instructions:
    """Makes the instructions of an operation."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.families: weakref.WeakValueDictionary[str, Family] = weakref.WeakValueDictionary()

    def specialize(self, values: Sequence[Any]) -> Instruction:
        """The instruction for these argument values."""
        named = {argument.name: value for argument, value in zip(self.operation.inputs, values, strict=True)}
        argument_rules.check(functional_variant(self.operation.operator), named)
        new_results = self._new_results(values)
        written = tuple(
            spec(tuple(tensor.shape), tensor.dtype)
            for argument in self.operation.mutated
            for tensor in _tensors(values[self.operation.inputs.index(argument)])
        )
        outs = new_results + written
        family = self._family(values, outs)
        numbers = tuple(
            number
            for argument, value in zip(self.operation.inputs, values, strict=True)
            for number in self._numbers(argument, value)
        )
        return self._instruction(values, outs, frozenset(), family, numbers if family else ())

    def _numbers(self, argument: SchemaArgument, value: Any) -> tuple[float, ...]:
        """The numbers of an argument that may become data."""
        if argument.name not in self.operation.lowering.dynamic:
            return ()
        numbers = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        return numbers if all(type(number) in (float, int) for number in numbers) else ()

    def _family(self, values: Sequence[Any], outs: tuple[Spec | None, ...]) -> Family | None:
        """The family of the calls that differ in numbers only, if the lowering can take these as data."""
        pairs = list(zip(self.operation.inputs, values, strict=True))
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
        pairs = zip(self.operation.inputs, values, strict=True)
        last = sorted(pairs, key=lambda pair: pair[0].name in dynamic)  # `dynamic_numbers` appends these to the others
        found = {argument.name: plan.slot(argument, value) for argument, value in last}
        slots = [found[argument.name] for argument in self.operation.inputs]
        positions = {
            a.name: slot[1] for a, slot in zip(self.operation.inputs, slots, strict=True) if slot[:1] == ("input",)
        }
        return Instruction(
            self.operation.name,
            self._emitter(slots, outs, shape_inference.common_dtype(values)),
            outs,
            plan.inputs,
            plan.floats,
            plan.ints,
            random="rng" in self.operation.lowering.supplies,
            takes=self.operation.lowering.takes,
            collective="replicas" in self.operation.lowering.supplies,
            minor={
                platform: {positions[name]: dims for name, dims in wanted.items() if name in positions}
                for platform, wanted in self.operation.lowering.minor.items()
            },
            constants={
                a.name: slot[1]
                for a, slot in zip(self.operation.inputs, slots, strict=True)
                if slot[:1] == ("constant",)
            },
            family=family,
            numbers=numbers,
        )

    def _new_results(self, values: Sequence[Any]) -> tuple[Spec | None, ...]:
        """Specs of the results that are new tensors; torch's meta kernel, if there is one, checks the arguments."""
        positional = [v for a, v in zip(self.operation.inputs, values, strict=True) if not a.keyword]
        keywords = {a.name: v for a, v in zip(self.operation.inputs, values, strict=True) if a.keyword}
        if self.operation.variant == "out":
            return shape_inference.results(functional_variant(self.operation.operator), positional, keywords)
        if self.operation.mutated and not any(r.alias_info is None for r in self.operation.returns):
            if not any(a.kind == "tensors" for a in self.operation.mutated) and shape_inference.has_meta_kernel(
                self.operation.operator
            ):
                shape_inference.results(
                    self.operation.operator, positional, keywords
                )  # raises torch's error for a bad shape or dtype
            if self.operation.variant == "inplace" and torch.Tag.pointwise in self.operation.operator.tags:
                argument_rules.check_inplace(functional_variant(self.operation.operator), positional, keywords)
            return ()
        return shape_inference.results(self.operation.operator, positional, keywords)

    def _emitter(
        self, slots: list[Any], outs: tuple[Spec | None, ...], common: torch.dtype | None
    ) -> Callable[..., Any]:
        lowering, arguments = self.operation.lowering, self.operation.inputs
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
        argument_rules.check_fits(number, dtypes, elements=1 if self.operation.name == "scalar_tensor" else 2)

    def check_out(self, instruction: Instruction, outs: Sequence[torch.Tensor]) -> None:
        """Raises for ``out=`` tensors of a dtype that torch does not store the results in."""
        results = [value_spec.dtype for value_spec in instruction.outs if value_spec is not None]
        argument_rules.check_out(self.operation.name.partition(".")[0], results, [out.dtype for out in outs])


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
