"""Values of constants: dense attributes, and resources, whose values are behind the text of a module."""

from __future__ import annotations

import math
import re
from typing import Any, Final

import numpy as np

from xla_amp.errors import ModuleError
from xla_amp.stablehlo import ir


def array_of(attribute: Any) -> np.ndarray[Any, Any] | None:
    """Values of a dense float32 attribute or resource, one element for a splat; None if they cannot be read."""
    mlir = ir.mlir()
    if is_resource(attribute):
        kind = ir.tensor_type(attribute.type)
        return resource_array(attribute) if kind and kind.element == "f32" else None
    try:
        dense = mlir.DenseElementsAttr(attribute)
        if dense.is_splat:
            return np.asarray(dense.get_splat_value().value, dtype=np.float32).reshape(1)
        return np.array(mlir.DenseFPElementsAttr(dense), dtype=np.float32)
    except (ValueError, TypeError):  # a type that is not float32
        return None


_BLOB: Final = re.compile(r'"0x([0-9A-Fa-f]+)"\s*}\s*}\s*#-}\s*$')
_ALIGNMENT: Final = 8
"""Hexadecimal digits of a blob before its values."""


def is_resource(attribute: Any) -> bool:
    """Whether an attribute is a ``dense_resource``, whose values are behind the text of the module."""
    try:
        ir.mlir().DenseResourceElementsAttr(attribute)
    except ValueError:
        return False
    return True


def resource_array(attribute: Any) -> np.ndarray[Any, Any] | None:
    """Values of a ``dense_resource``; None if the module does not have them."""
    mlir, kind = ir.mlir(), ir.tensor_type(attribute.type)
    if kind is None or kind.element not in ir.NUMPY or kind.element in ("i4", "ui4"):
        return None
    # Python has no access to the bytes of a resource, but a module's text has.
    with attribute.context, mlir.Location.unknown():
        alone = mlir.Module.create()
        with mlir.InsertionPoint(alone.body):
            mlir.Operation.create("stablehlo.constant", [attribute.type], attributes={"value": attribute})
        found = _BLOB.search(alone.operation.get_asm(large_elements_limit=None))
    dtype = ir.numpy_dtype(kind.element)
    if found is None or len(found[1]) != _ALIGNMENT + 2 * dtype.itemsize * math.prod(kind.shape):
        return None
    return np.frombuffer(bytes.fromhex(found[1][_ALIGNMENT:]), dtype).reshape(kind.shape)


def with_values(module: ir.MlirModule) -> ir.MlirModule:
    """The module with the values of resources in its constants, as XLA takes them; itself without resources."""
    if not any(_resource_of(operation) for operation in ir.operations(module.operation)):
        return module
    copied = ir.copy(module)
    with copied.context:
        for operation in ir.operations(copied.operation):
            if attribute := _resource_of(operation):
                values = resource_array(attribute)
                if values is None:
                    raise ModuleError(f"a constant without values: {attribute}; print the module with its resources")
                mlir, bits = ir.mlir(), np.ascontiguousarray(values)
                if bits.dtype.kind == "b":
                    made = mlir.Attribute.parse(f"dense<{str(values.tolist()).lower()}> : {attribute.type}")
                else:
                    made = mlir.DenseElementsAttr.get(
                        bits if bits.dtype.kind == "c" else bits.view(f"u{bits.dtype.itemsize}"),
                        type=attribute.type.element_type,
                        shape=list(values.shape),
                    )
                operation.attributes["value"] = made
    return copied


def _resource_of(operation: Any) -> Any:
    """The resource that an operation is the constant of, or None."""
    value = ir.attribute(operation, "value") if operation.name == "stablehlo.constant" else None
    return value if value is not None and is_resource(value) else None


def attribute_of(array: np.ndarray[Any, Any], value_type: Any) -> Any:
    """Dense attribute of `value_type` with the values of `array`, which has the matching dtype (ml_dtypes for bf16).

    An array of one element becomes a splat.
    """
    mlir = ir.mlir()
    splat = array.size == 1
    bits = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
    if splat:
        scalar = mlir.FloatAttr.get(value_type.element_type, float(array.reshape(())))
        return mlir.DenseElementsAttr.get_splat(value_type, scalar)
    # MLIR does not accept buffers of ml_dtypes: pass the bits, and the element type separately.
    return mlir.DenseElementsAttr.get(bits, type=value_type.element_type, shape=list(value_type.shape))
