"""`find_overflow` for StableHLO: run a module operation by operation; find the one that makes the first inf or NaN.

Loops, branches and calls are followed on the host; every other operation is compiled as a separate program, one for
all operations with the same text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from xla_amp.common.events import Place
from xla_amp.errors import ModuleError
from xla_amp.stablehlo import execution, ir, locations, samples, surgery
from xla_amp.stablehlo.passes.autocast import as_program
from xla_amp.stablehlo.passes.module_paths import own_path
from xla_amp.tools.inspect import inspection, widen
from xla_amp.tools.overflow.finder import Finder
from xla_amp.tools.overflow.report import ProgramOverflowReport

_NAMES: Final = re.compile(r"%[A-Za-z0-9_#:]+")
_OPAQUE: Final = frozenset({"custom_call"})
"""Operations that are library code."""


def find_overflow(module: Any, inputs: Sequence[Any]) -> ProgramOverflowReport:
    """Finds the operation of a module that produces the first inf or NaN on these inputs, on the CPU.

    Runs the module operation by operation; in a loop the report names the iteration.  A compiled module may keep more
    bits between operations that XLA fuses.  An infinity among the operands is not reported; a NaN computed from it is.
    What the program was given or wrote as a constant is no overflow until it reaches a result.

    Args:
        module: any kind of program that `autocast` takes.
        inputs: one array for each argument.

    Raises:
        ModuleError: the inputs do not fit, the module is for several devices or has dynamic shapes, or an operation
            cannot run by itself.
    """
    program = as_program(module).module
    devices = inspection.device_count(program)
    if devices > 1:
        raise ModuleError(f"the module is for {devices} devices; find_overflow runs it on one")
    arrays = samples.fitted(inputs, program)
    program = widen.for_cpu(execution.refined(program, arrays))
    run = _Evaluation(program)
    results = run.function(ir.entry(program), arrays)
    bad = [
        tuple(f"{what} {number}" for number, array in enumerate(given) if run.made(array))
        for what, given in (("argument", arrays), ("result", results))
    ]
    return run.report(*bad)


class _Evaluation(Finder):
    """Evaluates a module."""

    def __init__(self, module: ir.MlirModule) -> None:
        super().__init__()
        self._module = module
        self._functions = ir.functions(module)
        self._compiled: dict[str, Any] = {}
        self._device = execution.devices("cpu")[0]

    def function(self, function: Any, arguments: Sequence[Any]) -> list[Any]:
        """The results of a function."""
        return self._block(surgery.block_of(function), arguments, {})

    def _block(self, block: Any, arguments: Sequence[Any], around: dict[Any, Any]) -> list[Any]:
        values = {**around, **dict(zip(block.arguments, arguments, strict=True))}
        for view in block.operations:
            operation = view.operation
            operands = [values[operand] for operand in operation.operands]
            name = _name(operation)
            if name == "return":
                return operands
            for result, value in zip(operation.results, self._results(name, operation, operands, values), strict=True):
                values[result] = value
        return []

    def _results(self, name: str, operation: Any, operands: list[Any], values: dict[Any, Any]) -> list[Any]:
        if name == "call":
            return self.function(self._functions[operation.attributes[surgery.CALLEE].value], operands)
        if name == "composite":
            return self.function(self._functions[operation.attributes["decomposition"].value], operands)
        if name == "while":
            return self._while(operation, operands, values)
        if name in ("if", "case"):
            index = int(not operands[0]) if name == "if" else int(operands[0])
            branches = list(operation.regions)
            chosen = branches[index if 0 <= index < len(branches) else -1]
            return self._block(chosen.blocks[0], [], values)
        if name in _OPAQUE:
            self.inside[f"the inside of {name} {operation.attributes['call_target_name'].value}"] = None
        results = self._one(operation, operands)
        self.look(operation, operands, results, own=name == "constant")
        return results

    def _while(self, operation: Any, carry: list[Any], values: dict[Any, Any]) -> list[Any]:
        condition, body = (region.blocks[0] for region in operation.regions)
        number = 0
        while True:
            with self.iteration(number, "while"):
                (proceed,) = self._block(condition, carry, values)
                if not proceed:
                    return carry
                carry = self._block(body, carry, values)
            number += 1

    def _one(self, operation: Any, operands: list[Any]) -> list[Any]:
        """The results of an operation that is compiled by itself."""
        import jax

        mlir = ir.mlir()
        # Names of values in the text tell different operands apart; types and attributes follow them.
        key = _NAMES.sub("%", operation.get_asm(print_generic_op_form=True, use_local_scope=True))
        if key not in self._compiled:
            with self._module.context, mlir.Location.unknown():
                single, block = surgery.new_program(operation.operands, operation.results)
                with mlir.InsertionPoint(block):
                    clone = operation.clone().operation
                    for index, argument in enumerate(block.arguments):
                        clone.operands[index] = argument
                    mlir.Operation.create("func.return", operands=list(clone.results))
                self._compiled[key] = execution.compile_module(single, self._device)
        with jax.enable_x64(True):
            return execution.execute(self._compiled[key], operands, self._device)

    def parts(self, value: Any) -> list[np.ndarray[Any, Any]]:
        array = np.asarray(value)
        return [array] if array.dtype.kind in "fcV" and array.size else []

    def place(self, operation: Any) -> Place:
        where = locations.of(operation).line
        return Place(operation=_name(operation), phase="", module=own_path(operation) or "", location=where)


def _name(operation: Any) -> str:
    return str(operation.name).removeprefix("stablehlo.").removeprefix("func.")
