"""Parse the text of optimized HLO: dtypes of contractions, and XLA's time estimates of GPU kernels."""

from __future__ import annotations

import collections
import json
import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

_INSTRUCTION: Final = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_OPERAND: Final = re.compile(r"%([\w.\-]+)")
_SHAPE: Final = re.compile(r"\b([a-z]+[0-9]*\w*)\[([\d,]*)\]")
_LIBRARY: Final = re.compile(r'custom_call_target="__(?:cublas|cudnn)[^"]*"')
_DIMENSIONS: Final = re.compile(r'"lhs_batch_dimensions":\[([^\]]*)\]')
_COSTS: Final = re.compile(r'"reification_cost":(\[\{.*?\}\])')

_DTYPES: Final = MappingProxyType({"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"})
_BYTES: Final = MappingProxyType({"pred": 1, "bf16": 2, "c64": 8, "c128": 16, "s4": 1, "u4": 1})

_PRODUCT: Final = "experimental-gemm-cost-model"
_SPEED_OF_LIGHT: Final = "sol"
_ROWS: Final = '"kind":"__triton"'


class HloInstruction(NamedTuple):
    """One line of HLO text."""

    name: str
    type: str
    """As in the text, with layout; a tuple in parentheses."""
    operation: str
    rest: str
    """Operands and attributes."""

    @property
    def dtype(self) -> str:
        """dtype of the result, or of a tuple's first element."""
        found = _SHAPE.search(self.type)
        return _DTYPES.get(found[1], found[1]) if found else "?"

    @property
    def shape(self) -> list[int]:
        """Sizes of the result, or of a tuple's first element."""
        found = _SHAPE.search(self.type)
        return [int(size) for size in found[2].split(",") if size] if found else []

    @property
    def bytes(self) -> int:
        """Bytes of the result, of all elements of a tuple."""
        return sum(
            math.prod(int(size) for size in dimensions.split(",") if size) * _width(dtype)
            for dtype, dimensions in _SHAPE.findall(self.type)
        )

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return _OPERAND.findall(self.rest.partition(")")[0])


def _width(dtype: str) -> int:
    return _BYTES[dtype] if dtype in _BYTES else max(1, int(re.sub(r"\D", "", dtype.partition("e")[0]) or 8) // 8)


def instructions(hlo: str) -> Iterator[HloInstruction]:
    """Every instruction of every computation; names are unique within a module."""
    for line in hlo.splitlines():
        if found := _INSTRUCTION.match(line):
            yield HloInstruction(*found.groups())


class CollectiveKind(NamedTuple):
    """A kind of collective operation."""

    operation: str
    """As in HLO: ``"all-gather"``, ``"reduce-scatter"``."""
    dtype: str
    devices: int
    """That take part together; 0 for a permutation, which has pairs."""


class Traffic(NamedTuple):
    """What the operations of one kind move in one execution, for one device."""

    operations: int
    bytes: int
    """Of their results."""
    sent: int
    """Bytes that leave the device, by the ring algorithms."""


def _group_size(attributes: str) -> int:
    """Devices of the first of the ``replica_groups``; 0 if there are none."""
    given = _GROUPS.search(attributes)
    if given is None:
        return 0
    iota, listed, axes, over = given.groups()
    if iota:
        return int(iota)
    if listed is not None:
        return listed.count(",") + 1
    extents = dict(re.findall(r"'(\w+)'=(\d+)", axes))
    return math.prod(int(part or extents[name]) for name, part in _AXIS.findall(over))


def _sent(each: CollectiveKind, size: int) -> int:
    n = max(each.devices, 1)
    return {
        "all-gather": size * (n - 1) // n,
        "all-reduce": 2 * size * (n - 1) // n,
        "reduce-scatter": size * (n - 1),
        "all-to-all": size * (n - 1) // n,
        "ragged-all-to-all": size * (n - 1) // n,
    }.get(each.operation, size)


_GROUPS: Final = re.compile(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]*)\}|mesh\[([^\]]*)\][^{]*\{([^}]*)\})")
_AXIS: Final = re.compile(r"'(\w+)'(?::\(\d+\)(\d+))?")
_CHANNEL: Final = re.compile(r"channel_id=(\d+)")
_COLLECTIVES: Final = frozenset(
    {"all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all"}
    | {"reduce-scatter"}
)


def collectives(hlo: str) -> dict[CollectiveKind, Traffic]:
    """Collective operations by kind; those in a loop count once, and scalars are left out.

    An operation that carries several dtypes counts for each of them.
    """
    found: dict[CollectiveKind, Traffic] = {}
    groups: dict[str, int] = {}
    channels: set[str] = set()
    for each in instructions(hlo):
        operation = each.operation.removesuffix("-start").removesuffix("-done")
        if operation not in _COLLECTIVES:
            continue
        groups[each.name] = _group_size(each.rest)
        if each.operation.endswith("-start"):
            continue  # its type may have the operands, too
        if channel := _CHANNEL.search(each.rest):
            if channel[1] in channels:
                continue  # XLA:TPU repeats one that overlaps several fusions in each of them
            channels.add(channel[1])
        source = each.operands[0] if each.operation.endswith("-done") else each.name
        sizes: collections.Counter[str] = collections.Counter()
        for dtype, dimensions in _SHAPE.findall(each.type):
            if dimensions:
                sizes[dtype] += math.prod(map(int, dimensions.split(","))) * _width(dtype)
        for dtype, size in sizes.items():
            kind = CollectiveKind(operation, _DTYPES.get(dtype, dtype), groups.get(source, 0))
            count, total, sent = found.get(kind, (0, 0, 0))
            found[kind] = Traffic(count + 1, total + size, sent + _sent(kind, size))
    return found


def contractions(hlo: str) -> collections.Counter[tuple[str, str, str]]:
    """Matrix products, convolutions and library calls for them by (left, right, result) dtype."""
    found: collections.Counter[tuple[str, str, str]] = collections.Counter()
    dtypes: dict[str, str] = {}
    for each in instructions(hlo):
        dtypes[each.name] = each.dtype
        if each.operation in ("dot", "convolution") or (each.operation == "custom-call" and _LIBRARY.search(each.rest)):
            left, right = (dtypes.get(operand, "?") for operand in each.operands[:2])
            found[left, right, each.dtype] += 1
    return found


def _library_product(each: HloInstruction, shapes: Mapping[str, HloInstruction]) -> tuple[int, str] | None:
    """Multiply-adds and operand dtype of a matrix product that a library computes; None for another instruction.

    With b matrices of m x k and k x n the elements of both operands and of the result have the product b (bmkn)^2.
    """
    given = _DIMENSIONS.search(each.rest)
    operands = [shapes[name] for name in each.operands[:2] if name in shapes]
    if given is None or len(operands) < 2 or not _LIBRARY.search(each.rest):
        return None
    left, right, result = (x.shape for x in (*operands, each))
    batch = math.prod(left[int(axis)] for axis in re.findall(r"\d+", given[1]))
    return math.isqrt(math.prod(left) * math.prod(right) * math.prod(result) // batch), operands[0].dtype


def kernel_seconds(hlo: str, bandwidth: float, peaks: Mapping[str, float]) -> float | None:
    """Time of all kernels by the estimates in XLA:GPU's optimized HLO; None if there are none.

    A kernel with a matrix product takes the longer of two times: the matrix units on its tiles, and the memory at
    `bandwidth` (bytes per second) for its operands and result.  (XLA's performance tables lack many dtypes and batched
    forms; its estimates for those are wrong by factors of ten.)  A library's product has an estimate from those tables
    only, and takes its operations at `peaks` (operations per second by operand dtype) instead.  Triton row kernels take
    the memory's time, because the speed-of-light model underestimates them.  Other kernels take the speed-of-light
    time.  Loops count once.
    """
    total, shapes, known = 0.0, dict[str, HloInstruction](), False
    for each in instructions(hlo):
        shapes[each.name] = each
        found = _COSTS.search(each.rest)
        if found is None:
            continue
        known = True
        costs = {cost["name"]: cost for cost in json.loads(found[1])}
        by_memory = (each.bytes + sum(shapes[name].bytes for name in each.operands if name in shapes)) / bandwidth
        product = _library_product(each, shapes)
        if _PRODUCT in costs:
            total += max(costs[_PRODUCT]["compute_time_us"] * 1e-6, by_memory)
        elif product is not None and product[1] in peaks:
            total += max(2 * product[0] / peaks[product[1]], by_memory)
        elif _ROWS in each.rest:
            total += by_memory
        elif _SPEED_OF_LIGHT in costs:
            total += costs[_SPEED_OF_LIGHT]["exec_time_us"] * 1e-6
    return total if known else None
