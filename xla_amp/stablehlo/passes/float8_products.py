"""The casts to 8-bit floats: products of a weight that read 8-bit copies of their operands (`xla_amp.policy.float8`).

`choose` says which products, after the pass has decided which run low.  `rewrite` puts in calls of functions, which are
those of the other fronts (`xla_amp.lowering.linalg.float8`), lowered for each shape: with one scale for an operand
the call rounds the operand (`rounded`), with more of them it is the product (`float8_contract`).

A weight is a matrix that comes from outside of the program (`value_origins`).  Where no name tells which products are
gradients, a weight that one product reads tells it: there is no gradient of its data.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from xla_amp import hardware
from xla_amp.lowering.linalg.float8 import (
    BLOCK_PRODUCT,
    FORMATS,
    Format,
    expanded_block_product,
    float8_contract,
    rounded,
)
from xla_amp.policy import float8
from xla_amp.stablehlo import ir
from xla_amp.stablehlo.passes.op_table import PRODUCT, Classifier, OpClass
from xla_amp.stablehlo.passes.propagation import Propagation
from xla_amp.stablehlo.passes.value_origins import CALLS, Gradients, Sources, element
from xla_amp.types import FLOAT8_CASTS, Cast, LowDtype

_LOW: Final = "bf16"

_PREFIX: Final = "xla_amp."
"""Of the names of functions that round an operand."""
_MEANS: Final = "amp.means"
"""Frontend attribute of the call of a product: the operation that it was, as `written` tells it."""


class Products(NamedTuple):
    """What becomes of the products of a program whose policy has the cast."""

    choices: dict[Any, Choice]
    """Of those whose rule is a cast to 8-bit floats and that run low, in program order."""
    estimates: dict[Any, float8.Estimate]
    """Of those with a weight, whatever their rule is."""


class Choice(NamedTuple):
    """What becomes of one product whose rule is a cast to 8-bit floats."""

    formats: tuple[Format, Format] | None
    """Of its operands; None where it stays in 16 bits."""
    told: str
    """What the report says: the estimate, or why it stays."""
    op_class: OpClass

    @property
    def cast(self) -> Cast:
        """The cast, or ``low`` where it stays in 16 bits."""
        return _cast(self.op_class) if self.formats else "low"

    @property
    def dtypes(self) -> str:
        """dtypes of its operands, one if they are the same."""
        return ", ".join(dict.fromkeys(FORMATS[each].dtype.name for each in self.formats or ()))


def choose(
    module: Any, classifier: Classifier, propagation: Propagation, low: LowDtype, target: str | None
) -> Products:
    """What becomes of the products of `module`.

    Args:
        module: as the pass has it, before types change.
        classifier: of the pass.
        propagation: of the pass.
        low: the low dtype.
        target: what the program is for, of `hardware.names`; None for the default of each cast.

    Raises:
        DeviceError: unknown target.
        PolicyError: the low dtype is not bfloat16, or the target has no such products and would not say so.
    """
    device = None if target is None else _device(target)
    if not any(rule.cast in FLOAT8_CASTS for layer in classifier.policy.layers for rule in layer.rules):
        return Products({}, {})
    every = [(each, classifier.classify(each)) for each in ir.operations(module.operation)]
    every = [(each, op_class) for each, op_class in every if op_class.structure == "contraction"]
    products = [(each, op_class) for each, op_class in every if _is_ruled(op_class)]
    sources = Sources(module)
    estimates = {each: cost for each, op_class in every if (cost := _estimate(each, op_class, sources, target))}
    if not products:
        return Products({}, estimates)
    if low != "bfloat16":
        cast = _cast(products[0][1])
        raise float8.refused(f"where the low dtype is {low}", "pass dtype='bfloat16' to autocast", cast)
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
    chooser = _Chooser(sources, inner, every, target, device)
    chosen: dict[Any, Choice] = {}
    # Forward products first: they say which of the program's arguments are weights.
    for backward in (False, None, True):
        for each, op_class in found:
            if gradients.of(each) is backward:
                chosen[each] = chooser.choose(each, op_class, backward)
    return Products({each: chosen[each] for each, _ in found}, estimates)


def _is_ruled(op_class: OpClass) -> bool:
    return op_class.colour == "allow" and op_class.decision is not None and op_class.decision.cast in FLOAT8_CASTS


def _cast(op_class: OpClass) -> Cast:
    """The cast to 8-bit floats that its rule gives; ``fp8`` to estimate for others."""
    given = op_class.decision
    return given.cast if given is not None and given.cast in FLOAT8_CASTS else "fp8"


def _device(target: str) -> float8.Device:
    row = hardware.specification(target)
    capability = tuple(row["compute"]) if "compute" in row else None
    return float8.Device(row["platform"], row["title"], capability)


class _Chooser:
    """Decides one product after the other.

    Args:
        sources: of the module.
        inner: products on whose result another one depends.
        every: the products of the module.
        target, device: what the program is for, or None.
    """

    def __init__(
        self,
        sources: Sources,
        inner: set[Any],
        every: list[tuple[Any, OpClass]],
        target: str | None,
        device: float8.Device | None,
    ) -> None:
        self._sources, self._inner, self._target, self._device = sources, inner, target, device
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

        cast = _cast(op_class)
        if self._device is not None and (told := float8.unavailable(cast, self._device)):
            return Choice(None, told, op_class)
        if operation.name not in _PLAIN:
            return stays("it is no plain product")
        if any(each in _ELEMENTS for each in read_elements(operation)):
            return stays("the program rounds its operands to 8-bit floats itself")
        roots = [self._sources.of(operand) for operand in operation.operands]
        shapes, outside, summed = _product(operation, self._sources)
        asked = op_class.decision is not None and op_class.decision.from_user
        gpu = float8.target_of(self._target or "", cast)
        weight, told = float8.weight_of(shapes, outside, summed, asked=asked, target=gpu, cast=cast)
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
            formats[other] = float8.recipe(cast).gradient
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
    (of_left, of_right), _ = _dimensions(operation)
    return shapes, outside, (list(of_left), list(of_right))


_Pair: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


def _dimensions(operation: Any) -> tuple[_Pair, _Pair]:
    """The axes that a product sums, and its batch axes, of its left and of its right operand."""
    if operation.name == "stablehlo.dot":
        return ((len(_shape(operation.operands[0])) - 1,), (0,)), ((), ())
    numbers = ir.dialect().DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
    summed = tuple(numbers.lhs_contracting_dimensions), tuple(numbers.rhs_contracting_dimensions)
    return summed, (tuple(numbers.lhs_batching_dimensions), tuple(numbers.rhs_batching_dimensions))


def _estimate(operation: Any, op_class: OpClass, sources: Sources, target: str | None) -> float8.Estimate | None:
    if operation.name not in _PLAIN:
        return None
    sizes, cast = float8.sizes_of(*_product(operation, sources)), _cast(op_class)
    if isinstance(sizes, str):
        return None
    return float8.estimate(sizes.rows, sizes.depth, sizes.columns, float8.target_of(target or "", cast), cast)


def rewrite(module: Any, choices: Mapping[Any, Choice]) -> None:
    """Puts calls of functions for the chosen products into `module`.

    Args:
        module: with the types that the pass decided; needs a current MLIR location.
        choices: from `choose`.
    """
    functions = _Functions(module)
    rounded_values: dict[tuple[Any, Format], Any] = {}
    scalings = set()
    for operation, choice in choices.items():
        if choice.formats is None:
            continue
        scaling = float8.recipe(choice.cast).scaling
        scalings.add(scaling)
        if scaling != "tensor":
            _replace(operation, choice.cast, choice.formats, functions)
            continue
        for index, format in enumerate(choice.formats):
            value = operation.operands[index]
            if (value, format) not in rounded_values:
                rounded_values[value, format] = _round(value, format, operation.location, functions)
            operation.operands[index] = rounded_values[value, format]
    if not scalings <= {"block"}:
        _add_options(module)


class _Functions:
    """Private functions that are added to a module, one for each thing to do and each shape."""

    def __init__(self, module: Any) -> None:
        self._module, self._taken = module, set(ir.functions(module))
        self._made: dict[tuple[Any, ...], str] = {}

    def call(self, name: str, run: Callable[..., Any], operands: list[Any], result: Any, *settings: Any) -> Any:
        """The result of a call, at the current place, of `run` as a function with `name`.

        Args:
            name: the first part of the function's.
            run: the function, of JAX arrays and of `settings`.
            operands: values; their types are part of what is made.
            result: type of the result.
            settings: further arguments, which can be hashed.
        """
        mlir = ir.mlir()
        types = tuple((_shape(each), element(each)) for each in operands)
        key = (name, types, settings)
        if key not in self._made:
            chosen = ".".join([name, *("x".join(map(str, shape)) or "scalar" for shape, _ in types)])
            while chosen in self._taken:
                chosen += "_"
            self._taken.add(chosen)
            self._made[key] = chosen
            self._module.body.append(mlir.Operation.parse(_function(chosen, run, types, settings)))
        callee = mlir.FlatSymbolRefAttr.get(self._made[key])
        return mlir.Operation.create("func.call", results=[result], operands=operands, attributes={"callee": callee})


@functools.lru_cache(maxsize=256)
def _function(
    name: str, run: Callable[..., Any], types: tuple[tuple[tuple[int, ...], str], ...], settings: tuple[Any, ...]
) -> str:
    """MLIR text of a private function without calls of others."""
    import jax

    def inline(*operands: Any) -> Any:
        with jax.disable_jit():  # inlines the functions of jax.numpy
            return run(*operands, *settings)

    arguments = (jax.ShapeDtypeStruct(shape, ir.numpy_dtype(kind)) for shape, kind in types)
    lowered: Any = jax.jit(inline).lower(*arguments).compiler_ir("stablehlo")
    (function,) = ir.functions(lowered).values()
    with lowered.context:
        function.attributes["sym_name"] = ir.mlir().StringAttr.get(name)
        function.attributes["sym_visibility"] = ir.mlir().StringAttr.get("private")
        for attributes in ("arg_attrs", "res_attrs"):
            if attributes in function.attributes:
                del function.attributes[attributes]
    return str(function.get_asm())


def _round(value: Any, format: Format, location: Any, functions: _Functions) -> Any:
    """`value`, of which 8 bits keep the values."""
    mlir, owner = ir.mlir(), value.owner
    at_begin = isinstance(owner, mlir.Block)
    where = mlir.InsertionPoint.at_block_begin(owner) if at_begin else mlir.InsertionPoint.after(owner)
    with where, location:
        return functions.call(_PREFIX + FORMATS[format].dtype.name, rounded, [value], value.type, format).results[0]


def _replace(operation: Any, cast: Cast, formats: tuple[Format, Format], functions: _Functions) -> None:
    """Replaces a product by the call of one with a scale for each row or block."""
    result = operation.results[0]
    name = ".".join([PRODUCT + cast, *(FORMATS[each].dtype.name for each in formats)])
    contracted, batch = _dimensions(operation)
    with ir.mlir().InsertionPoint(operation), operation.location:
        call = functions.call(
            name, _multiply, list(operation.operands), result.type, contracted, batch, cast, formats, element(result)
        )
        means = ir.mlir().StringAttr.get(written(operation))
        call.attributes[hardware.ATTRIBUTES] = ir.mlir().DictAttr.get({_MEANS: means})
    result.replace_all_uses_with(call.results[0])
    operation.erase()


def _multiply(
    left: Any, right: Any, contracted: Any, batch: Any, cast: Cast, formats: tuple[Format, Format], result: str
) -> Any:
    scaling = float8.recipe(cast).scaling
    # XLA makes a product in blocks of its call only, which no other platform has (`expand_blocks`).
    platform = "gpu" if scaling == "block" else "any"
    product = float8_contract(left, right, contracted, batch, formats=formats, scaling=scaling, platform=platform)
    return product.astype(ir.numpy_dtype(result))


def expand_blocks(module: Any) -> None:
    """Replaces calls of XLA's product in blocks by what they compute, for a platform without it.

    It changes `module`, and needs a current MLIR context and location.
    """
    functions = _Functions(module)
    for operation in list(ir.operations(module.operation)):
        called = operation.attributes["call_target_name"] if operation.name == "stablehlo.custom_call" else None
        if called is None or called.value != BLOCK_PRODUCT:
            continue
        with ir.mlir().InsertionPoint(operation), operation.location:
            name, operands, kind = f"{_PREFIX}block_scaled_dot", list(operation.operands), operation.results[0].type
            call = functions.call(name, expanded_block_product, operands, kind)
        operation.results[0].replace_all_uses_with(call.results[0])
        operation.erase()


def is_product(operation: Any) -> bool:
    """Whether it is a call that `rewrite` made: a product of 8-bit floats with a scale for each row or block."""
    return operation.name in CALLS and operation.attributes["callee"].value.startswith(PRODUCT)


def short_name(operation: Any) -> str:
    """``stablehlo.dot_general`` -> ``dot_general``, also for the call that `rewrite` put in its place."""
    if is_product(operation):
        return written(operation).partition(" ")[0]
    return str(operation.name).removeprefix("stablehlo.")


def written(operation: Any) -> str:
    """Name and attributes of an operation without its precision; those of the product that `rewrite` replaced."""
    attributes = operation.attributes
    if is_product(operation):
        return str(next(each.attr.value for each in attributes[hardware.ATTRIBUTES] if each.name == _MEANS))
    names = sorted(name for name in attributes if name not in _PRECISION and "." not in name)
    return " ".join([operation.name.removeprefix("stablehlo."), *(f"{name}={attributes[name]}" for name in names)])


_PRECISION: Final = ("algorithm", "precision_config")


def rounds(operation: Any) -> bool:
    """Whether it is a call that `rewrite` made: it rounds its operand to an 8-bit format."""
    return operation.name in CALLS and operation.attributes["callee"].value.startswith(f"{_PREFIX}float8_")


def read_elements(operation: Any) -> tuple[str, str]:
    """Element types of what a product reads: ``f8E4M3FN`` of an operand that is scaled and rounded, otherwise its own.

    Args:
        operation: a product of any program: the other fronts have the rounding in line.
    """
    if is_product(operation):
        left, right = operation.attributes["callee"].value.removeprefix(PRODUCT).split(".")[1:3]
        return _NAMES[left], _NAMES[right]
    left, right = list(operation.operands)[:2]
    return _read_element(left), _read_element(right)


def _read_element(operand: Any) -> str:
    operation = _producer(operand)
    if operation is not None and rounds(operation):
        return _NAMES[operation.attributes["callee"].value.removeprefix(_PREFIX).partition(".")[0]]
    if operation is not None and operation.name == "stablehlo.multiply":
        operation = _producer(operation.operands[0])
        if operation is not None and operation.name == "stablehlo.convert":
            source = element(operation.operands[0])
            if source in _ELEMENTS:
                return source
    return element(operand)


_ELEMENTS: Final = {"f8E4M3FN": "float8_e4m3fn", "f8E5M2": "float8_e5m2"}
_NAMES: Final = {dtype: element for element, dtype in _ELEMENTS.items()}


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
