"""The graph on which colours propagate: slots are float32 values, nodes are the operations that read and write them.

Values that must have the same dtype share a slot: a loop carry (operand, region argument, yielded value and result), or
a function's argument with the operands of all its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from xla_amp.stablehlo import composite_marks, ir, surgery
from xla_amp.stablehlo.op_table import Classifier, Colour, OpClass, Structure
from xla_amp.stablehlo.passes import float32_loops


class OpOperand(NamedTuple):
    """One float32 operand of a node; it is cast where its dtype differs from the node's."""

    operation: Any
    position: int
    value: Any
    slot: int


class CastNode:
    """An operation, or a join: a value that a loop, branch, call or function passes on (loop carry, branch result)."""

    __slots__ = (
        "adds", "boundary", "colour", "exact", "function", "in_loop", "in_opaque", "index", "inputs", "inside",
        "low", "narrows", "number", "of_first", "op_class", "opaque", "operands", "operation", "outputs", "passes_on",
        "scales", "structure", "sums_few", "upstream", "why", "wide_reason", "writes",
    )  # fmt: skip

    def __init__(
        self, number: int, op_class: OpClass | None, operation: Any, function: str, index: int | None = None
    ) -> None:
        self.number = number
        """Of the node among those of the graph."""
        self.op_class = op_class
        self.operation = operation
        self.function = function
        self.index = index
        """For a join: which value of the operation."""
        self.colour: Colour = op_class.colour if op_class else "clear"
        self.structure: Structure = op_class.structure if op_class else "op"
        self.upstream = op_class.upstream if op_class else True
        self.why = op_class.why if op_class else ""
        row = op_class.row if op_class else None
        single = row if index is None else None
        self.adds = single is not None and single.adds
        """Whether it adds two values element by element."""
        self.scales = single is not None and single.scales
        """Whether it multiplies with a power of two, which rounds nothing."""
        self.passes_on = index is not None or (row is not None and row.moves)
        """Whether it gives the elements of its operands."""
        self.exact = row is not None and row.exact
        """Whether it tells apart what a low dtype makes equal."""
        self.sums_few = op_class is not None and op_class.sums_few
        """Whether it is a contraction that no rule decides, because a low dtype gains nothing."""
        self.wide_reason = ""
        """Why it must stay float32; empty if it may be low."""
        self.boundary = False
        """Whether it is an argument or a result of the program."""
        self.inside = index is None and op_class is not None and op_class.inside
        """Whether it computes in float32 and rounds its first result if its operands are low."""
        self.of_first = self.inside
        """Whether its first operand alone decides that."""
        self.opaque = False
        """Whether its types are fixed by code outside of the module."""
        self.in_loop = False
        """Whether it is in a loop that would not end if it were low (`float32_loops`)."""
        self.in_opaque = False
        """Whether it is in a region that does not change."""
        self.narrows = False
        """Whether it is a cast to the low dtype in the original program."""
        self.low = False
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.operands: list[OpOperand] = []
        self.writes: list[Any] = []
        """Values to retype when it is low."""

    @property
    def ruled(self) -> bool:
        """Whether a rule decides it."""
        decision = self.op_class.decision if self.op_class else None
        return decision is not None and decision.rule is not None

    @property
    def moves(self) -> bool:
        """Whether it only passes on or moves the elements of values, which are its operands."""
        return self.passes_on and self.colour == "clear" and bool(self.inputs)


class _Function:
    def __init__(self, operation: Any, arguments: dict[int, CastNode], results: dict[int, CastNode]) -> None:
        self.operation, self.arguments, self.results = operation, arguments, results


class CastGraph:
    """Nodes and slots of a module, for one low dtype."""

    def __init__(self, module: Any, classifier: Classifier, low: str) -> None:
        self.classifier = classifier
        self.low_element = low
        self.nodes: list[CastNode] = []
        self.producer: list[int] = []
        """Slot -> node."""
        self.users: list[list[int]] = []
        """Slot -> nodes."""
        self.before: list[list[int]] = []
        """Node -> nodes whose values it reads."""
        self.after: list[list[int]] = []
        """Node -> nodes that read its values."""
        self.exact: set[int] = set()
        """Slots that the original program widened from the low dtype."""
        self.slot_of: dict[Any, int] = {}
        self._leaders = composite_marks.leaders(module) if classifier.composites else {}
        self._classes = {each: classifier.classify(each) for each in ir.operations(module.operation)}
        self._kinds: dict[Any, str] = {}
        self._functions: dict[str, _Function] = {}
        self._module = module
        self._structures: dict[Structure, Callable[[Any, OpClass], Any]] = {
            "op": self._op,
            "contraction": self._op,
            "body": self._body,
            "identity": self._identity,
            "loop": self._loop,
            "branch": self._branch,
            "inline": self._inline,
            "call": self._call,
            "cast": self._cast,
            "constant": self._op,
            "opaque": self._opaque,
        }
        self._name = ""
        self.unconverted: list[str] = []
        """Functions of several blocks, whose types stay as they are."""
        self._build()

    def _build(self) -> None:
        functions = ir.functions(self._module)
        called, opaque = self._called()
        for name, operation in functions.items():
            blocks = len(operation.regions[0].blocks)
            if blocks > 1:
                self.unconverted.append(name)
            elif blocks:
                self._name = name
                function = self._signature(operation, boundary=name not in called)
                for node in (*function.arguments.values(), *function.results.values()):
                    node.opaque = name in opaque
                self._functions[name] = function
        for name, function in self._functions.items():
            self._name = name
            block = surgery.block_of(function.operation)
            self._join_terminator(self._block(block), function.results)
        kept = float32_loops.kept_values(self._module, self._classes)
        for node in self.nodes if kept else ():
            defined = node.operation.results if node.index is None else node.writes
            node.in_loop = not kept.isdisjoint(defined)
        self._connect()

    def _connect(self) -> None:
        for node in self.nodes:
            self.before.append(read := [])
            for slot in node.inputs:
                read.append(self.producer[slot])
            self.after.append(given := [])
            for slot in node.outputs:
                given += self.users[slot]

    def _called(self) -> tuple[set[str], set[str]]:
        """Functions that only calls reach; functions that library calls and composites name."""
        called: set[str] = set()
        opaque: set[str] = set()
        for operation, op_class in self._classes.items():
            if op_class.structure == "call":
                called.update(surgery.callees(operation))
            elif op_class.structure == "opaque" and operation.name != "func.func":
                opaque.update(surgery.callees(operation))
        public = {name for name, op in ir.functions(self._module).items() if not ir.is_private(op)}
        return called - opaque - public, opaque

    # Nodes and slots.

    def _node(self, op_class: OpClass | None, operation: Any, index: int | None = None) -> CastNode:
        self.nodes.append(CastNode(len(self.nodes), op_class, operation, self._name, index))
        return self.nodes[-1]

    def _slot(self, node: CastNode) -> int:
        slot = len(self.producer)
        self.producer.append(node.number)
        self.users.append([])
        node.outputs.append(slot)
        return slot

    def _join(self, operation: Any, op_class: OpClass | None, index: int, values: Iterable[Any]) -> CastNode:
        node = self._node(op_class, operation, index)
        node.colour = "clear"
        slot = self._slot(node)
        for value in values:
            self.slot_of[value] = slot
            node.writes.append(value)
        return node

    def _read(self, node: CastNode, operation: Any, index: int, value: Any) -> None:
        slot = self.slot_of[value]
        node.operands.append(OpOperand(operation, index, value, slot))
        node.inputs.append(slot)
        users = self.users[slot]
        if not users or users[-1] != node.number:
            users.append(node.number)

    def kind(self, value: Any) -> str:
        """``wide`` for float32 tensors, ``low`` for tensors of the low dtype, otherwise empty."""
        value_type = value.type
        found = self._kinds.get(value_type)
        if found is None:
            tensor = ir.tensor_type(value_type)
            element = tensor.element if tensor else ""
            found = "wide" if element == "f32" else "low" if element == self.low_element else ""
            self._kinds[value_type] = found
        return found

    # Structures.

    def _signature(self, operation: Any, *, boundary: bool) -> _Function:
        block = surgery.block_of(operation)
        arguments: dict[int, CastNode] = {}
        for index, argument in enumerate(block.arguments):
            if self.kind(argument) == "wide":
                arguments[index] = self._join(operation, None, index, [argument])
                arguments[index].boundary = boundary
        results: dict[int, CastNode] = {}
        terminator = surgery.terminator(block)
        for index, operand in enumerate(terminator.operands):
            if self.kind(operand) == "wide":
                results[index] = self._join(operation, None, index, [])
                results[index].boundary = boundary
        return _Function(operation, arguments, results)

    def _block(self, block: Any) -> Any:
        # The caller handles the terminator.
        for operation in surgery.body(block):
            op_class = self._classes[operation]
            marked = composite_marks.mark_of(operation) if self._leaders else None
            if marked is not None and marked.is_edge and marked.number in self._leaders:
                self._leave(operation, op_class, self._leaders[marked.number])
            else:
                self._structures[op_class.structure](operation, op_class)
        return surgery.terminator(block)

    def _leave(self, operation: Any, op_class: OpClass, leaders: list[Any]) -> None:
        # The edge of a group in float32 whose result is rounded if `leaders`, which enter the group, are low.
        node = self._node(op_class, operation)
        node.inside = True
        for value in leaders:
            node.inputs.append(self.slot_of[value])
            self.users[self.slot_of[value]].append(node.number)
        self.slot_of[operation.results[0]] = self._slot(node)
        node.writes.append(operation.results[0])

    def _join_terminator(self, terminator: Any, joins: dict[int, CastNode]) -> None:
        for index, operand in enumerate(terminator.operands):
            if index in joins and self.kind(operand) == "wide":
                self._read(joins[index], terminator, index, operand)

    def _op(self, operation: Any, op_class: OpClass) -> CastNode | None:
        reads = [(index, value) for index, value in enumerate(operation.operands) if self.kind(value) == "wide"]
        writes = [value for value in operation.results if self.kind(value) == "wide"]
        if not reads and not writes:
            return None
        node = self._node(op_class, operation)
        for index, value in reads:
            self._read(node, operation, index, value)
        for value in writes:
            self.slot_of[value] = self._slot(node)
            node.writes.append(value)
        return node

    def _cast(self, operation: Any, op_class: OpClass) -> None:
        node = self._op(operation, op_class)
        if node is None:
            return
        source, target = self.kind(operation.operands[0]), self.kind(operation.results[0])
        node.narrows = source == "wide" and target == "low"
        node.upstream = False
        if source == "low" and target == "wide":
            self.exact.add(node.outputs[0])

    def _body(self, operation: Any, op_class: OpClass) -> None:
        if not op_class.inside and (op_class.colour == "deny" or not self._retypable(operation)):
            self._opaque(operation, op_class)
        else:
            self._op(operation, op_class)

    def _retypable(self, operation: Any) -> bool:
        # Whether the regions capture no outside value and all their operations accept the low element type.
        inside: set[Any] = set()
        for region in operation.regions:
            for block in region.blocks:
                inside.update(block.arguments)
                for view in block.operations:
                    inner = view.operation
                    if len(inner.regions) or any(operand not in inside for operand in inner.operands):
                        return False
                    treated = self._classes[inner] if len(inner.results) else None
                    if treated and treated.colour == "deny" and "wide" in map(self.kind, inner.results):
                        return False
                    inside.update(inner.results)
        return True

    def _opaque(self, operation: Any, op_class: OpClass, *, in_opaque: bool = False) -> None:
        node = self._op(operation, op_class)
        for region in operation.regions:
            for block in region.blocks:
                for argument in block.arguments:
                    if self.kind(argument) == "wide":
                        join = self._join(operation, op_class, 0, [argument])
                        join.colour, join.in_opaque = "deny", True
                for view in block.operations:
                    self._opaque(view.operation, op_class, in_opaque=True)
        if node is not None:
            node.colour, node.opaque, node.in_opaque = "deny", op_class.structure == "opaque", in_opaque

    def _identity(self, operation: Any, op_class: OpClass) -> None:
        for index, (operand, result) in enumerate(zip(operation.operands, operation.results, strict=True)):
            if self.kind(operand) == "wide":
                self._read(self._join(operation, op_class, index, [result]), operation, index, operand)

    def _loop(self, operation: Any, op_class: OpClass) -> None:
        blocks = [region.blocks[0] for region in operation.regions]
        joins: dict[int, CastNode] = {}
        for index, operand in enumerate(operation.operands):
            if self.kind(operand) == "wide":
                same = [operation.results[index], *(block.arguments[index] for block in blocks)]
                joins[index] = self._join(operation, op_class, index, same)
                self._read(joins[index], operation, index, operand)
        for block in blocks:
            self._join_terminator(self._block(block), joins)

    def _results(self, operation: Any, op_class: OpClass) -> dict[int, CastNode]:
        results = enumerate(operation.results)
        return {i: self._join(operation, op_class, i, [value]) for i, value in results if self.kind(value) == "wide"}

    def _branch(self, operation: Any, op_class: OpClass) -> None:
        joins = self._results(operation, op_class)
        for region in operation.regions:
            self._join_terminator(self._block(region.blocks[0]), joins)

    def _inline(self, operation: Any, op_class: OpClass) -> None:
        block = surgery.block_of(operation)
        for index, (operand, argument) in enumerate(zip(operation.operands, block.arguments, strict=True)):
            if self.kind(operand) == "wide":
                self._read(self._join(operation, op_class, index, [argument]), operation, index, operand)
        self._join_terminator(self._block(block), self._results(operation, op_class))

    def _call(self, operation: Any, op_class: OpClass) -> None:
        callee = self._functions.get(surgery.callees(operation)[0])
        if callee is None:  # declared only, or of several blocks
            self._opaque(operation, op_class)
            return
        for index, operand in enumerate(operation.operands):
            if index in callee.arguments:
                self._read(callee.arguments[index], operation, index, operand)
        for index, result in enumerate(operation.results):
            if index in callee.results:
                node = callee.results[index]
                self.slot_of[result] = node.outputs[0]
                node.writes.append(result)
