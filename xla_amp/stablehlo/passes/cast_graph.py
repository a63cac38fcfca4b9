"""A module as the painter sees it: slots, which are float32 values that must share a colour, and the nodes that read
and write them.

One slot stands for one value, or for several that are the same one: what a loop carries (operand, argument, yield and
result), what a function is called with by all of its callers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from xla_amp.stablehlo import ir
from xla_amp.stablehlo.passes.op_table import Colour, Structure, Treatment, Treatments


class Feed(NamedTuple):
    """An operand that must have the colour of the node that it feeds."""

    operation: Any
    position: int
    value: Any
    slot: int


class Node:
    """What reads slots and writes slots of one colour: an operation, or a join (loop carry, branch result)."""

    __slots__ = (
        "colour", "edge", "feeds", "function", "inputs", "inside", "kept", "lane", "low", "narrows", "operation",
        "outputs", "sealed", "structure", "treatment", "upstream", "why", "writes",
    )  # fmt: skip

    def __init__(self, treatment: Treatment | None, operation: Any, function: str, lane: int | None = None) -> None:
        self.treatment = treatment
        self.operation = operation
        self.function = function
        self.lane = lane
        """Which value of the operation, for a join."""
        self.colour: Colour = treatment.colour if treatment else "clear"
        self.structure: Structure = treatment.structure if treatment else "op"
        self.upstream = treatment.upstream if treatment else True
        self.why = treatment.why if treatment else ""
        self.kept = ""
        """Why it must stay float32; empty when it need not."""
        self.edge = False
        """Whether it is the module's signature: an argument or a result of the program."""
        self.sealed = False
        """Whether its types are those of something that is not in the module."""
        self.inside = False
        """Whether it is in a region that does not change."""
        self.narrows = False
        """Whether it is the program's own cast to the low dtype."""
        self.low = False
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.feeds: list[Feed] = []
        self.writes: list[Any] = []
        """Values to retype when it is low."""


class _Function:
    def __init__(self, operation: Any, arguments: dict[int, Node], results: dict[int, Node]) -> None:
        self.operation, self.arguments, self.results = operation, arguments, results


class Graph:
    """Nodes and slots of a module, for one low dtype."""

    def __init__(self, module: Any, treatments: Treatments, low: str) -> None:
        self.treatments = treatments
        self.low_element = low
        self.nodes: list[Node] = []
        self.producer: list[int] = []
        """Slot -> node."""
        self.users: list[list[int]] = []
        """Slot -> nodes."""
        self.exact: set[int] = set()
        """Slots that the program widened from the low dtype."""
        self.slot_of: dict[Any, int] = {}
        self._index: dict[Node, int] = {}
        self._kinds: dict[Any, str] = {}
        self._functions: dict[str, _Function] = {}
        self._module = module
        self._structures: dict[Structure, Callable[[Any, Treatment], Any]] = {
            "op": self._op,
            "contraction": self._op,
            "body": self._body,
            "lanes": self._lanes,
            "loop": self._loop,
            "branch": self._branch,
            "inline": self._inline,
            "call": self._call,
            "cast": self._cast,
            "constant": self._op,
            "sealed": self._seal,
        }
        self._name = ""
        self._build()

    def _build(self) -> None:
        functions = ir.functions(self._module)
        called = self._called()
        for name, operation in functions.items():
            if len(operation.regions[0].blocks):
                self._name = name
                self._functions[name] = self._signature(operation, edge=name not in called)
        for name, function in self._functions.items():
            self._name = name
            block = function.operation.regions[0].blocks[0]
            self._join_terminator(self._block(block), function.results)

    def _called(self) -> set[str]:
        called: set[str] = set()
        opaque: set[str] = set()
        for operation in ir.operations(self._module.operation):
            structure = self.treatments.of(operation).structure
            if structure == "call":
                called.update(_callees(operation))
            elif structure == "sealed" and operation.name != "func.func":
                opaque.update(_callees(operation))
        public = {name for name, op in ir.functions(self._module).items() if not ir.is_private(op)}
        return called - opaque - public

    # Nodes and slots.

    def _add(self, node: Node) -> Node:
        self._index[node] = len(self.nodes)
        self.nodes.append(node)
        return node

    def _slot(self, node: Node) -> int:
        slot = len(self.producer)
        self.producer.append(self._index[node])
        self.users.append([])
        node.outputs.append(slot)
        return slot

    def _join(self, operation: Any, treatment: Treatment | None, lane: int, values: Iterable[Any]) -> Node:
        node = self._add(Node(treatment, operation, self._name, lane))
        node.colour = "clear"
        slot = self._slot(node)
        for value in values:
            self.slot_of[value] = slot
            node.writes.append(value)
        return node

    def _feed(self, node: Node, operation: Any, index: int, value: Any) -> None:
        slot = self.slot_of[value]
        node.feeds.append(Feed(operation, index, value, slot))
        node.inputs.append(slot)
        users = self.users[slot]
        number = self._index[node]
        if not users or users[-1] != number:
            users.append(number)

    def kind(self, value: Any) -> str:
        """``wide`` for float32 tensors, ``low`` for tensors of the low dtype, else empty."""
        value_type = value.type
        found = self._kinds.get(value_type)
        if found is None:
            tensor = ir.tensor_type(value_type)
            element = tensor.element if tensor else ""
            found = "wide" if element == "f32" else "low" if element == self.low_element else ""
            self._kinds[value_type] = found
        return found

    # Structures.

    def _signature(self, operation: Any, *, edge: bool) -> _Function:
        block = operation.regions[0].blocks[0]
        arguments: dict[int, Node] = {}
        for index, argument in enumerate(block.arguments):
            if self.kind(argument) == "wide":
                arguments[index] = self._join(operation, None, index, [argument])
                arguments[index].edge = edge
        results: dict[int, Node] = {}
        terminator = _terminator(block)
        for index, operand in enumerate(terminator.operands):
            if self.kind(operand) == "wide":
                results[index] = self._join(operation, None, index, [])
                results[index].edge = edge
        return _Function(operation, arguments, results)

    def _block(self, block: Any) -> Any:
        # The terminator is left to whoever owns the block.
        views = list(block.operations)
        for view in views[:-1]:
            operation = view.operation
            treatment = self.treatments.of(operation)
            self._structures[treatment.structure](operation, treatment)
        return views[-1].operation

    def _join_terminator(self, terminator: Any, joins: dict[int, Node]) -> None:
        for index, operand in enumerate(terminator.operands):
            if index in joins and self.kind(operand) == "wide":
                self._feed(joins[index], terminator, index, operand)

    def _op(self, operation: Any, treatment: Treatment) -> Node | None:
        reads = [(index, value) for index, value in enumerate(operation.operands) if self.kind(value) == "wide"]
        writes = [value for value in operation.results if self.kind(value) == "wide"]
        if not reads and not writes:
            return None
        node = self._add(Node(treatment, operation, self._name))
        for index, value in reads:
            self._feed(node, operation, index, value)
        for value in writes:
            self.slot_of[value] = self._slot(node)
            node.writes.append(value)
        return node

    def _cast(self, operation: Any, treatment: Treatment) -> None:
        node = self._op(operation, treatment)
        if node is None:
            return
        source, target = self.kind(operation.operands[0]), self.kind(operation.results[0])
        node.narrows = source == "wide" and target == "low"
        node.upstream = False
        if source == "low" and target == "wide":
            self.exact.add(node.outputs[0])

    def _body(self, operation: Any, treatment: Treatment) -> None:
        if treatment.colour == "deny" or not self._retypable(operation):
            self._seal(operation, treatment)
        else:
            self._op(operation, treatment)

    def _retypable(self, operation: Any) -> bool:
        # Regions that use nothing from outside and whose operations would take another element type.
        inside: set[Any] = set()
        for region in operation.regions:
            for block in region.blocks:
                inside.update(block.arguments)
                for view in block.operations:
                    inner = view.operation
                    if len(inner.regions) or any(operand not in inside for operand in inner.operands):
                        return False
                    treated = self.treatments.of(inner) if len(inner.results) else None
                    if treated and treated.colour == "deny" and any(map(self._touches, inner.results)):
                        return False
                    inside.update(inner.results)
        return True

    def _touches(self, value: Any) -> bool:
        return self.kind(value) == "wide"

    def _seal(self, operation: Any, treatment: Treatment, *, inside: bool = False) -> None:
        node = self._op(operation, treatment)
        for region in operation.regions:
            for block in region.blocks:
                for argument in block.arguments:
                    if self.kind(argument) == "wide":
                        join = self._join(operation, treatment, 0, [argument])
                        join.colour, join.inside = "deny", True
                for view in block.operations:
                    self._seal(view.operation, treatment, inside=True)
        if node is not None:
            node.colour, node.sealed, node.inside = "deny", treatment.structure == "sealed", inside

    def _lanes(self, operation: Any, treatment: Treatment) -> None:
        for index, (operand, result) in enumerate(zip(operation.operands, operation.results, strict=True)):
            if self.kind(operand) == "wide":
                self._feed(self._join(operation, treatment, index, [result]), operation, index, operand)

    def _loop(self, operation: Any, treatment: Treatment) -> None:
        blocks = [region.blocks[0] for region in operation.regions]
        joins: dict[int, Node] = {}
        for index, operand in enumerate(operation.operands):
            if self.kind(operand) == "wide":
                same = [operation.results[index], *(block.arguments[index] for block in blocks)]
                joins[index] = self._join(operation, treatment, index, same)
                self._feed(joins[index], operation, index, operand)
        for block in blocks:
            self._join_terminator(self._block(block), joins)

    def _results(self, operation: Any, treatment: Treatment) -> dict[int, Node]:
        results = enumerate(operation.results)
        return {i: self._join(operation, treatment, i, [value]) for i, value in results if self.kind(value) == "wide"}

    def _branch(self, operation: Any, treatment: Treatment) -> None:
        joins = self._results(operation, treatment)
        for region in operation.regions:
            self._join_terminator(self._block(region.blocks[0]), joins)

    def _inline(self, operation: Any, treatment: Treatment) -> None:
        block = operation.regions[0].blocks[0]
        for index, (operand, argument) in enumerate(zip(operation.operands, block.arguments, strict=True)):
            if self.kind(operand) == "wide":
                self._feed(self._join(operation, treatment, index, [argument]), operation, index, operand)
        self._join_terminator(self._block(block), self._results(operation, treatment))

    def _call(self, operation: Any, treatment: Treatment) -> None:
        callee = self._functions.get(_callees(operation)[0])
        if callee is None:  # declared only
            self._seal(operation, treatment)
            return
        for index, operand in enumerate(operation.operands):
            if index in callee.arguments:
                self._feed(callee.arguments[index], operation, index, operand)
        for index, result in enumerate(operation.results):
            if index in callee.results:
                node = callee.results[index]
                self.slot_of[result] = node.outputs[0]
                node.writes.append(result)


def _terminator(block: Any) -> Any:
    operations = block.operations
    return operations[len(operations) - 1].operation


def _callees(operation: Any) -> list[str]:
    """Functions that an operation names in its attributes."""
    symbol = ir.mlir().FlatSymbolRefAttr
    names: list[str] = []
    for named in operation.attributes:
        attribute = named.attr if hasattr(named, "attr") else operation.attributes[named]
        for each in attribute if isinstance(attribute, ir.mlir().ArrayAttr) else (attribute,):
            if isinstance(each, symbol):
                names.append(each.value)
    return names
