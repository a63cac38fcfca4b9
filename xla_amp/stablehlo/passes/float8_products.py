"""The cast ``fp8``: products of a weight that read 8-bit copies of their operands (`xla_amp.policy.float8`).

`choose` says which products, after the pass has decided which run low; `rewrite` rounds their operands, with the
function that the other fronts use (`xla_amp.lowering.linalg.float8.rounded`), lowered for each shape.

A weight is a matrix that comes from outside of the program (`value_origins`).  Where no name tells which products are
gradients, a weight that one product reads tells it: there is no gradient of its data.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from xla_amp import hardware
from xla_amp.lowering.linalg.float8 import FORMATS, Format, rounded
from xla_amp.policy import float8
from xla_amp.stablehlo import ir
from xla_amp.stablehlo.passes.op_table import Classifier, OpClass
from xla_amp.stablehlo.passes.propagation import Propagation
from xla_amp.stablehlo.passes.value_origins import CALLS, Gradients, Sources, element
from xla_amp.types import FLOAT8_CASTS, LowDtype

_LOW: Final = "bf16"

_PREFIX: Final = "xla_amp."
"""Of the names of functions that round an operand."""


class Products(NamedTuple):
    """What becomes of the products of a program whose policy has the cast."""

    choices: dict[Any, Choice]
    """Of those whose rule is ``fp8`` and that run low, in program order."""
    estimates: dict[Any, float8.Estimate]
    """Of those with a weight, whatever their rule is."""


class Choice(NamedTuple):
    """What becomes of one product whose rule is ``fp8``."""

    formats: tuple[Format, Format] | None
    """Of its operands; None where it stays in 16 bits."""
    told: str
    """What the report says: the estimate, or why it stays."""
    op_class: OpClass

    @property
    def dtypes(self) -> str:
        """dtypes of its operands, one if they are the same."""
        return ", ".join(dict.fromkeys(FORMATS[each].dtype.name for each in self.formats or ()))


def choose(module: Any, classifier: Classifier, propagation: Propagation, low: LowDtype, target: str) -> Products:
    """What becomes of the products of `module`.

    Args:
        module: as the pass has it, before types change.
        classifier: of the pass.
        propagation: of the pass.
        low: the low dtype.
        target: the GPU of the estimates, of `float8.targets`.

    Raises:
        PolicyError: the low dtype is not bfloat16.
    """
    if not any(rule.cast in FLOAT8_CASTS for layer in classifier.policy.layers for rule in layer.rules):
        return Products({}, {})
    every = [(each, classifier.classify(each)) for each in ir.operations(module.operation)]
    every = [(each, op_class) for each, op_class in every if op_class.structure == "contraction"]
    for _, op_class in every:
        cast = op_class.decision and op_class.decision.cast
        if cast in FLOAT8_CASTS and cast != "fp8":
            raise float8.refused(
                "in StableHLO programs", "use 'fp8', or put xla_amp.jax.autocast around the JAX function", cast
            )
    products = [(each, op_class) for each, op_class in every if _is_ruled(op_class)]
    sources = Sources(module)
    estimates = {each: estimate for each, _ in every if (estimate := _estimate(each, sources, target))}
    if not products:
        return Products({}, estimates)
    if low != "bfloat16":
        raise float8.refused(f"where the low dtype is {low}", "pass dtype='bfloat16' to autocast")
    nodes = [node for node in propagation.nodes if node.structure == "contraction"]
    runs_low = {node.operation: node.low for node in nodes}
    # A gradient of a weight is an end: no further product depends on it.
    inner = {node.operation for node in nodes if propagation.wide.isdisjoint(node.outputs)}
    found = [
        (each, op_class)
        for each, op_class in products
        if runs_low.get(each, all(element(operand) == _LOW for operand in list(each.operands)[:2]))
    ]
    gradients = Gradients(sources.calls, [each for each, _ in found])
    chooser = _Chooser(sources, inner, every, target)
    chosen: dict[Any, Choice] = {}
    # Forward products first: they say which of the program's arguments are weights.
    for backward in (False, None, True):
        for each, op_class in found:
            if gradients.of(each) is backward:
                chosen[each] = chooser.choose(each, op_class, backward)
    return Products({each: chosen[each] for each, _ in found}, estimates)


def _is_ruled(op_class: OpClass) -> bool:
    decision = op_class.decision
    return op_class.colour == "allow" and decision is not None and decision.cast == "fp8"


class _Chooser:
    """Decides one product after the other.

    Args:
        sources: of the module.
        inner: products on whose result another one depends.
        every: the products of the module.
        target: of the estimates.
    """

    def __init__(self, sources: Sources, inner: set[Any], every: list[tuple[Any, OpClass]], target: str) -> None:
        self._sources, self._inner, self._target = sources, inner, target
        self._weights: set[Any] = set()
        """Those of forward products."""
        self._read: Counter[Any] = Counter()
        """How many products read an argument or constant."""
        for operation, _ in every:
            self._read.update({sources.of(operand) for operand in operation.operands})

    def choose(self, operation: Any, op_class: OpClass, backward: bool | None) -> Choice:
        """What becomes of a product; `backward` as of `Gradients.of`."""

        def stays(why: str) -> Choice:
            return Choice(None, f"{float8.LEFT_OUT}: {why}", op_class)

        if operation.name not in _PLAIN:
            return stays("it is no plain product")
        if any(read_element(operand) in _ELEMENTS for operand in operation.operands):
            return stays("the program rounds its operands to 8-bit floats itself")
        roots = [self._sources.of(operand) for operand in operation.operands]
        shapes, outside, summed = _product(operation, self._sources)
        asked = op_class.decision is not None and op_class.decision.from_user
        weight, told = float8.weight_of(shapes, outside, summed, asked=asked, target=self._target)
        if weight is None:
            return Choice(None, told, op_class)
        source, other = roots[weight], 1 - weight
        if backward is None and self._read[source] > 1:
            return stays("several products read its weight, and no location tells which of them is a gradient")
        only = operation in self._inner and self._read[source] == 1
        if backward and not only and source not in self._weights:
            return stays("the gradient of a weight, or of an argument of the program")
        if backward is False and not (outside[other] and len(shapes[other]) == 2):
            self._weights.add(source)  # of two matrices from outside, either could be the data
        formats: list[Format] = ["e4m3", "e4m3"]
        if backward:
            formats[other] = "e5m2"
        return Choice((formats[0], formats[1]), told, op_class)


def _shape(value: Any) -> tuple[int, ...]:
    """Sizes; -1 for one that is dynamic."""
    kind = ir.tensor_type(value.type)
    return tuple(-1 if size is None else size for size in kind.shape) if kind else ()


_PLAIN: Final = ("stablehlo.dot_general", "stablehlo.dot")


def _product(
    operation: Any, sources: Sources
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[bool, bool], tuple[list[int], list[int]]]:
    """Shapes of the operands, whether they come from outside, and their summed axes."""
    left, right = operation.operands
    shapes, outside = (_shape(left), _shape(right)), (sources.of(left) is not None, sources.of(right) is not None)
    if operation.name == "stablehlo.dot":
        return shapes, outside, ([len(shapes[0]) - 1], [0])
    numbers = ir.dialect().DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
    return shapes, outside, (list(numbers.lhs_contracting_dimensions), list(numbers.rhs_contracting_dimensions))


def _estimate(operation: Any, sources: Sources, target: str) -> float8.Estimate | None:
    if operation.name not in _PLAIN:
        return None
    sizes = float8.sizes_of(*_product(operation, sources))
    return None if isinstance(sizes, str) else float8.estimate(sizes.rows, sizes.depth, sizes.columns, target)


def rewrite(module: Any, choices: Mapping[Any, Choice]) -> Iterator[str]:
    """Rounds the operands of the chosen products by calls of functions; yields the text of these functions.

    Args:
        module: with the types that the pass decided; needs a current MLIR location.  The caller adds the functions.
        choices: from `choose`.
    """
    mlir = ir.mlir()
    rounded_values: dict[tuple[Any, Format], Any] = {}
    names: set[str] = set()
    taken = set(ir.functions(module))
    chosen = [(each, choice.formats) for each, choice in choices.items() if choice.formats is not None]
    for operation, formats in chosen:
        for index, format in enumerate(formats):
            value = operation.operands[index]
            if (value, format) not in rounded_values:
                shape = _shape(value)
                name = f"{_PREFIX}{FORMATS[format].dtype.name}.{'x'.join(map(str, shape)) or 'scalar'}"
                while name in taken:
                    name += "_"
                if name not in names:
                    names.add(name)
                    yield _function(name, shape, format)
                owner = value.owner
                at_begin = isinstance(owner, mlir.Block)
                where = mlir.InsertionPoint.at_block_begin(owner) if at_begin else mlir.InsertionPoint.after(owner)
                with where, operation.location:
                    call = mlir.Operation.create(
                        "func.call",
                        results=[value.type],
                        operands=[value],
                        attributes={"callee": mlir.FlatSymbolRefAttr.get(name)},
                    )
                rounded_values[value, format] = call.results[0]
            operation.operands[index] = rounded_values[value, format]
    if chosen:
        _add_options(module)


@functools.lru_cache(maxsize=256)
def _function(name: str, shape: tuple[int, ...], format: Format) -> str:
    """MLIR text of `rounded` for bfloat16 values of a shape, as a private function without calls of others."""
    import jax
    import jax.numpy as jnp

    def run(x: Any) -> Any:
        with jax.disable_jit():  # inlines the functions of jax.numpy
            # The form for CPUs has a barrier, without which XLA:CPU drops the rounding; on GPUs it costs nothing.
            return rounded(x, format, platform="cpu")

    lowered: Any = jax.jit(run).lower(jax.ShapeDtypeStruct(shape, jnp.bfloat16)).compiler_ir("stablehlo")
    (function,) = ir.functions(lowered).values()
    with lowered.context:
        function.attributes["sym_name"] = ir.mlir().StringAttr.get(name)
        function.attributes["sym_visibility"] = ir.mlir().StringAttr.get("private")
        for attributes in ("arg_attrs", "res_attrs"):
            if attributes in function.attributes:
                del function.attributes[attributes]
    return str(function.get_asm())


def rounds(operation: Any) -> bool:
    """Whether it is a call that `rewrite` made: it rounds its operand to an 8-bit format."""
    return operation.name in CALLS and operation.attributes["callee"].value.startswith(f"{_PREFIX}float8_")


def read_element(operand: Any) -> str:
    """Element type of what a product reads: ``f8E4M3FN`` of an operand that was scaled and rounded, otherwise its own.

    Args:
        operand: of a product, in any program: the other fronts have the rounding in line.
    """
    operation = _producer(operand)
    if operation is not None and rounds(operation):
        name = operation.attributes["callee"].value
        return next(each for each, dtype in _ELEMENTS.items() if name.startswith(_PREFIX + dtype))
    if operation is not None and operation.name == "stablehlo.multiply":
        operation = _producer(operation.operands[0])
        if operation is not None and operation.name == "stablehlo.convert":
            source = element(operation.operands[0])
            if source in _ELEMENTS:
                return source
    return element(operand)


_ELEMENTS: Final = {"f8E4M3FN": "float8_e4m3fn", "f8E5M2": "float8_e5m2"}


def _producer(value: Any) -> Any:
    return None if isinstance(value.owner, ir.mlir().Block) else value.owner.operation


def _add_options(module: Any) -> None:
    """Writes into the module with which of XLA's options a GPU makes 8-bit products of it."""
    mlir, given = ir.mlir(), module.operation.attributes
    before = given.get(hardware.ATTRIBUTES, ())
    attributes = {each.name: each.attr for each in before}
    for name, value in float8.compiler_options("gpu").items():
        attributes.setdefault(hardware.OPTION + name, mlir.StringAttr.get(value))
    given[hardware.ATTRIBUTES] = mlir.DictAttr.get(attributes)
