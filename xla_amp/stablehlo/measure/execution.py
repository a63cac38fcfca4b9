"""Compile and run modules with XLA.

Private APIs of jax and jaxlib, and differences between their versions, are confined to this file and `ir`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from xla_amp.errors import ModuleError
from xla_amp.stablehlo import constants, ir, surgery


def runnable(module: ir.MlirModule) -> ir.MlirModule:
    """The module as XLA takes it: its entry is ``main``, the only public function, and constants have their values."""
    chosen = surgery.name_of(ir.entry(module))
    module = constants.with_values(module)
    if chosen == ir.MAIN and not ir.is_chosen(module):
        return module
    mlir, copied = ir.mlir(), ir.without_choice(ir.copy(module))
    with copied.context:
        table = mlir.SymbolTable(copied.operation)
        renamed = {chosen: ir.MAIN, ir.MAIN: f"{ir.MAIN}.other"} if chosen != ir.MAIN else {}
        for name, function in ir.functions(copied).items():
            function.attributes["sym_visibility"] = mlir.StringAttr.get("public" if name == chosen else "private")
        for before in sorted(renamed, key=lambda name: name != ir.MAIN):  # main first, whose name the chosen one gets
            if before in ir.functions(copied):
                mlir.SymbolTable.replace_all_symbol_uses(before, renamed[before], copied.operation)
                table.set_symbol_name(ir.functions(copied)[before], renamed[before])
    return copied


def devices(platform: str | None = None) -> list[Any]:
    """PJRT devices of a platform, which is started."""
    import jax

    return list(jax.devices(platform) if platform else jax.devices())


def refined(module: ir.MlirModule, arguments: Sequence[Any]) -> ir.MlirModule:
    """The module with the shapes of `arguments` instead of dynamic ones; itself if all its arguments have fixed shapes.

    Calls are inlined.

    Raises:
        ModuleError: the shapes do not fit, or do not determine those of all values.
    """
    import jax
    from jax.extend import mlir as extended

    inputs = ir.signature(module).inputs
    if not any(kind is not None and -1 in kind.shape for kind in inputs):
        return module
    mlir, copied = ir.mlir(), ir.copy(runnable(module))
    with copied.context, mlir.Location.unknown():
        types = [
            str(mlir.RankedTensorType.get(np.shape(array), given.element_type)) if kind else str(given)
            for array, kind, given in zip(
                arguments,
                inputs,
                mlir.FunctionType(ir.entry(copied).attributes["function_type"].value).inputs,
                strict=True,
            )
        ]
        try:
            ir.run_passes(copied, f"stablehlo-refine-arguments{{types='{','.join(types)}'}}")
            data = extended.refine_polymorphic_shapes(ir.bytecode(copied), True, True)
        except (ModuleError, jax.errors.JaxRuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise ModuleError(f"the samples' shapes do not determine the program's: {reason}") from None
    return ir.parse(data)


def compile_module(module: ir.MlirModule, device: Any = None, options: Mapping[str, bool | int] | None = None) -> Any:
    """A loaded executable of the module for one device (default: the first of JAX's default platform).

    `options` are XLA's, by name, on top of its defaults.

    Raises:
        ModuleError: XLA rejects the module.
    """
    import jax
    from jaxlib import xla_client

    device = device or devices()[0]
    client = device.client
    chosen = xla_client.CompileOptions()
    chosen.env_option_overrides = list((options or {}).items())
    placed = xla_client.DeviceList((device,))
    # Every version of jaxlib accepts bytecode; not every one accepts a module of another context.
    data = ir.bytecode(runnable(module))
    made = (result for operation in ir.operations(module.operation) for result in operation.results)
    if b"quant" in data and any(map(ir.is_quantized, (*surgery.arguments(ir.entry(module)), *made))):
        raise ModuleError("XLA cannot run quantized types (!quant.uniform); they can be read and converted only")
    if missing := ir.without_body(module):
        raise ModuleError(f"XLA cannot run @{missing[0]}, a function that is declared without a body")
    if b"lapack_" in data:
        _start_lapack()
    try:
        return client.compile_and_load(data, placed, chosen)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if unknown := _UNREGISTERED.search(reason):
            raise ModuleError(
                _NO_CODE.format(unknown[1], "there is no code for it on the CPU, where samples run")
            ) from None
        raise ModuleError(f"XLA cannot compile the module: {reason}") from None


_UNREGISTERED: Final = re.compile(r"(?:custom call to|registered for) (\S+) (?:for|on) ")
_NO_CODE: Final = (
    "XLA cannot run the custom call @{}: {}; put StableHLO operations in its place, or convert without samples"
)
_CALLBACK: Final = re.compile(r"python_\w+_callback")
"""Targets of ``jax.pure_callback``, ``jax.debug.print`` and their like."""
_WAITING: Final = frozenset(f"stablehlo.{name}" for name in ("infeed", "outfeed", "recv", "send"))  # for another side


@functools.cache
def _start_lapack() -> None:
    """JAX loads LAPACK when it lowers a call of it; without that, a program that calls it ends the process."""
    import jax

    jax.jit(jax.numpy.linalg.cholesky).lower(jax.ShapeDtypeStruct((1, 1), np.float32))


def execute(executable: Any, arguments: Sequence[Any], device: Any = None) -> list[np.ndarray[Any, Any]]:
    """Runs the result of `compile_module` on arrays; returns the results as NumPy arrays.

    Raises:
        ModuleError: XLA cannot run it.
    """
    import jax

    device = device or devices()[0]
    placed = [jax.device_put(argument, device) for argument in arguments]
    try:
        results = executable.execute_sharded(placed).disassemble_into_single_device_arrays()
        return [np.asarray(each[0]) for each in results]
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise ModuleError(f"XLA cannot run the module: {str(error).splitlines()[0]}") from None


def run(
    module: ir.MlirModule, arguments: Sequence[np.ndarray[Any, Any]], options: Mapping[str, bool | int] | None = None
) -> list[np.ndarray[Any, Any]]:
    """Runs a module of fixed shapes on the CPU; the last programs are kept, so further arguments compile nothing.

    `options` are XLA's, by name, on top of its defaults.

    Raises:
        ModuleError: XLA cannot compile or run it, or only together with the program that made it.
    """
    import jax

    for operation in ir.operations(module.operation):
        if operation.name in _WAITING:
            raise ModuleError(f"{operation.name} waits for the program around it, without which it never ends")
        target = ir.attribute(operation, "call_target_name")
        if target is not None and _CALLBACK.search(target.value):
            raise ModuleError(_NO_CODE.format(target.value, "it calls Python of the process that made the program"))
    executable = _compiled(ir.bytecode(module), tuple((options or {}).items()))
    with jax.enable_x64(True):  # otherwise JAX converts 64-bit arguments to 32-bit
        return execute(executable, arguments, devices("cpu")[0])


@functools.lru_cache(maxsize=4)
def _compiled(code: bytes, options: tuple[tuple[str, bool | int], ...]) -> Any:
    return compile_module(ir.parse(code), devices("cpu")[0], dict(options))
