"""Decide which nodes run low by propagating colours, as TensorFlow's grappler does.

The phases, each linear in the size of the graph:

1. deny propagates forward through infer operations;
2. a value that a loop adds to itself stays float32 (a running sum);
3. a contraction that only exact operations (comparisons, roundings) and the caller read, also behind clear ones, gives
   float32 directly from its accumulator;
4. infer and clear operations between two allow operations become low, if every operand is low, a number that fits, or
   the bias of a product (`xla_amp.analysis.beside_low`);
5. clear operations whose users all read low become low: the cast moves before them and no value changes;
6. a contraction whose result no further contraction depends on (a weight gradient, the program's result) gives
   float32 directly from its accumulator, unless an operation reads it low;
7. clear operations whose operands are all low become low: the cast moves behind them and no value changes.

References: tensorflow/core/grappler/optimizers/auto_mixed_precision.cc; for phase 4's operands, TVM's ToMixedPrecision
("follow"); for phase 5, XLA's BFloat16Propagation.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from xla_amp.analysis import beside_low
from xla_amp.analysis.value_graph import cycles, reached, settled
from xla_amp.policy.policy import ENDS_BY_FLOATS
from xla_amp.stablehlo import constants
from xla_amp.stablehlo.passes.biases import biases
from xla_amp.stablehlo.passes.cast_graph import CastGraph, CastNode

_UNDECIDED: Final = ("widest", "infer", "clear")
_ROUNDS: Final = ("widest", "infer")


class ConstantRange:
    """Tests whether a low dtype can represent constants."""

    def __init__(self, low: np.dtype[Any]) -> None:
        self.low = low
        self.numbers = beside_low.LOW_NUMBERS[low.name]  # type: ignore[index]

    def problem(self, values: np.ndarray[Any, Any] | None) -> str:
        """Why `values` (float32) must stay float32; empty if none overflows or becomes zero."""
        if values is None:
            return "a constant whose values cannot be read"
        with np.errstate(over="ignore", under="ignore"):
            narrowed = values.astype(self.low).astype(np.float32)
        for broken, how in (
            (np.isfinite(values) & ~np.isfinite(narrowed), "overflows"),
            ((values != 0) & (narrowed == 0), "becomes zero"),
        ):
            if broken.any():
                return f"the constant {float(values[broken].reshape(-1)[0]):.6g} {how} in {self.low.name}"
        return ""

    def exact(self, values: np.ndarray[Any, Any]) -> bool:
        """Whether narrowing changes nothing."""
        with np.errstate(over="ignore", under="ignore"):
            return np.array_equal(values.astype(self.low).astype(np.float32), values, equal_nan=True)


class Propagation:
    """One propagation over a graph: sets `CastNode.low` and the reason, `CastNode.why`, of each node."""

    def __init__(self, graph: CastGraph, low: np.dtype[Any], *, keep_io: bool, wide: Mapping[int, str]) -> None:
        self.graph = graph
        self.nodes, self.producer, self.users = graph.nodes, graph.producer, graph.users
        self.range = ConstantRange(low)
        self.keep_io = keep_io
        self.constant: dict[int, bool] = {}
        """Slots computed from constants only -> whether narrowing them is exact."""
        self.magnitudes: dict[int, float] = {}
        """Slots of `constant` whose elements are all one number -> its magnitude; 0 if it is not finite."""
        self.wide: set[int] = set()
        """Results that low contractions give in float32, and statistics of norms."""
        for number, node in enumerate(self.nodes):
            node.wide_reason = ENDS_BY_FLOATS if node.in_loop else wide.get(number, "")
            if node.wide_reason:
                node.why = node.wide_reason
            if node.inside:
                self.wide.update(node.outputs[1:])
            elif node.op_class is not None and node.op_class.wide_result:
                self.wide.update(node.outputs)
        self._run()

    def _run(self) -> None:
        self._constants()
        allowed = [
            number
            for number, node in enumerate(self.nodes)
            if node.colour == "allow" and not (node.opaque or node.wide_reason)
        ]
        for node in self.nodes:
            node.low = node.narrows
        for number in allowed:
            self.nodes[number].low = True
        self._deny_forward()
        self._running_sums()
        self._exact_reads(allowed)
        self._biases = biases(self.graph)
        down = self._reach(allowed, forward=True)
        widest = {number for number in down if self.nodes[number].colour == "widest"}
        up = self._reach([*allowed, *widest], forward=False)
        self._make_low(down & (up | widest), "between two low operations", exact=False)
        for node in map(self.nodes.__getitem__, widest):
            if node.low and node.op_class:
                node.why = node.op_class.why
        self._hoist_casts()
        self._accumulator_results(allowed)
        lows = (n for n, node in enumerate(self.nodes) if any(map(self.is_low, node.outputs)))
        self._make_low(self._reach(lows, forward=True, through=("clear",)), "its operands are low", exact=True)
        self._explain(down & up)

    # Conditions on single nodes.

    def _free(self, node: CastNode) -> bool:
        """Whether the node's dtype is still undecided."""
        if node.boundary:
            return not (self.keep_io or node.low or node.opaque)
        return not (node.low or node.wide_reason or node.opaque) and node.colour in _UNDECIDED

    # Phase 0: constants.

    def _constants(self) -> None:
        unread = deque(range(len(self.nodes)))
        while unread:
            node = self.nodes[unread.popleft()]
            if not node.outputs or node.boundary or node.outputs[0] in self.constant:
                continue
            slots = set(node.inputs).difference(node.outputs)
            if node.structure == "constant":
                values = constants.array_of(node.operation.attributes["value"])
                node.wide_reason = node.wide_reason or self.range.problem(values)
                self.constant[node.outputs[0]] = values is not None and self.range.exact(values)
                if values is not None and (values.size < 2 or np.ptp(values) == 0):
                    number = float(np.abs(values.flat[0])) if values.size else 0.0
                    self.magnitudes[node.outputs[0]] = number if np.isfinite(number) else 0.0
            elif slots and node.colour == "clear" and self.constant.keys() >= slots:
                found = {self.magnitudes[slot] for slot in slots if slot in self.magnitudes}
                self.constant.update(dict.fromkeys(node.outputs, all(self.constant[slot] for slot in slots)))
                if node.moves and len(found) == 1 and self.magnitudes.keys() >= slots:
                    self.magnitudes[node.outputs[0]] = found.pop()
            else:
                continue
            unread.extend(user for slot in node.outputs for user in self.users[slot])
        # Operations that read a constant out of range cannot be low, nor can those that read it through clear nodes.
        todo = deque(
            (slot, node.wide_reason)
            for node in self.nodes
            if node.structure == "constant" and node.wide_reason
            for slot in node.outputs
        )
        while todo:
            slot, why = todo.popleft()
            for number in self.users[slot]:
                user = self.nodes[number]
                if not user.wide_reason:
                    user.wide_reason = user.why = f"reads {why}"
                    if user.colour == "clear" and user.index is None and all(s in self.constant for s in user.inputs):
                        todo.extend((out, why) for out in user.outputs)

    # Phase 1.

    def _deny_forward(self) -> None:
        sources = [number for number, node in enumerate(self.nodes) if node.colour == "deny"]
        sources += [n for n, node in enumerate(self.nodes) if node.wide_reason and node.structure != "constant"]
        reached = self._reach(sources, forward=True)
        # Deny a clear node only if it leads from a deny node to a deny or infer node.
        ends = [
            n for n, node in enumerate(self.nodes) if node.colour == "deny" or (node.colour in _ROUNDS and n in reached)
        ]
        before = self._reach(ends, forward=False, through=("clear",))
        for number in reached:
            node = self.nodes[number]
            if self._free(node) and (node.colour in _ROUNDS or number in before):
                node.wide_reason = "follows an operation that stays float32"
                node.why = node.why if node.sums_few else node.wide_reason

    def _reach(self, sources: Iterable[int], *, forward: bool, through: tuple[str, ...] = _UNDECIDED) -> set[int]:
        """Free nodes reachable from `sources` forward (backward) through free nodes of the colours `through`."""
        edges, nodes = self.graph.after if forward else self.graph.before, self.nodes

        def near(number: int) -> list[int]:
            return [each for each in edges[number] if nodes[each].colour in through and self._free(nodes[each])]

        return reached(itertools.chain.from_iterable(map(near, sources)), near)

    # Phase 2.

    def _running_sums(self) -> None:
        if all(node.index is None or node.boundary or node.in_opaque for node in self.nodes):
            return  # no value comes back to where it was made
        graph, low = self.graph, {number for number, node in enumerate(self.nodes) if node.colour == "allow"}
        others = set(range(len(self.nodes))) - low
        after, before = ([others.intersection(each) for each in edges] for edges in (graph.after, graph.before))
        for cycle in cycles(others, after.__getitem__, before.__getitem__):
            members = [self.nodes[number] for number in cycle]
            if any(node.colour in (*_ROUNDS, "deny") for node in members):
                for node in members:
                    if self._free(node):
                        node.wide_reason = node.why = "a running sum in a loop: small terms would be lost"

    # Phase 3.

    def _exact_reads(self, allowed: list[int]) -> None:
        passing: list[list[int]] = [[] for _ in self.producer]
        read: list[int] = []
        for node in self.nodes:
            rounds = node.exact or node.narrows or node.colour != "clear"
            # What rounds nothing lets its users decide whether its operands may be rounded.
            if not rounds and (self.keep_io or not node.boundary):
                for slot in node.outputs:
                    passing[slot] = node.inputs
            elif not node.exact:
                read += node.inputs
        rounded = reached(read, passing.__getitem__)
        for number in allowed:
            if self.nodes[number].structure == "contraction":
                self.wide.update(slot for slot in self.nodes[number].outputs if slot not in rounded)

    # Phases 4 and 7.

    def _make_low(self, chosen: set[int], why: str, *, exact: bool) -> None:
        # Lowers the largest subset of `chosen` in which every node reads low; with `exact`, without loss of precision.
        chosen = settled(
            chosen, lambda number, left: self._all_operands_low(number, left, exact), self.graph.after.__getitem__
        )
        for number in chosen:
            self.nodes[number].low, self.nodes[number].why = True, why

    def _all_operands_low(self, number: int, chosen: set[int], exact: bool) -> bool:
        node = self.nodes[number]
        read = node.inputs[:1] if node.of_first else node.inputs
        return all(self._reads_low(slot, node, chosen, exact or not node.outputs) for slot in read)

    def _reads_low(self, slot: int, node: CastNode, chosen: set[int], exact: bool) -> bool:
        source = self.producer[slot]
        if slot in self.wide:
            return False
        if source in chosen or self.is_low(slot) or slot in self.graph.exact:
            return True
        if node.colour == "infer" and (node.number, slot) in self._biases:
            return True
        if slot not in self.constant or self.nodes[source].wide_reason:
            return False
        if self.constant[slot] and node.colour == "clear":
            return True
        # An array of constants has a dtype; only numbers have none.
        magnitude, numbers = self.magnitudes.get(slot), self.range.numbers
        if exact or magnitude is None or not numbers.in_range(magnitude):
            return False
        if node.colour == "clear":
            return numbers.stays_apart(magnitude)
        if node.colour == "infer" and not node.ruled:  # only a power of two scales without rounding
            return node.scales and numbers.scales(magnitude)
        return numbers.leaves_room(magnitude) and (magnitude != 0 or not node.adds)  # a running sum starts as zeros

    # Phase 5.

    def _hoist_casts(self) -> None:
        chosen = {
            n for n, node in enumerate(self.nodes) if node.upstream and node.colour == "clear" and self._free(node)
        }

        def all_users_low(number: int, left: set[int]) -> bool:
            users = self.graph.after[number]
            return bool(users) and all(self.nodes[user].low or user in left for user in users)

        chosen = settled(chosen, all_users_low, self.graph.before.__getitem__)
        # A loop without outside readers would justify itself.
        rooted = self._reach((n for n, node in enumerate(self.nodes) if node.low), forward=False, through=("clear",))
        for number in chosen & rooted:
            node = self.nodes[number]
            node.low, node.why = True, "only low operations read it"

    # Phase 6.

    def _accumulator_results(self, allowed: list[int]) -> None:
        before = self.graph.before.__getitem__
        feeding = reached(itertools.chain.from_iterable(map(before, allowed)), before)
        for number in allowed:
            node = self.nodes[number]
            if node.structure == "contraction" and number not in feeding:
                for slot in node.outputs:
                    if not any(self.nodes[user].low for user in self.users[slot]):
                        self.wide.add(slot)

    def _explain(self, between: set[int]) -> None:
        for number, node in enumerate(self.nodes):
            if self._free(node) and not node.boundary and not node.sums_few:
                if node.colour in _ROUNDS:
                    node.why = "an operand is float32" if number in between else "not between two low operations"
                elif node.structure != "constant":
                    node.why = "its operands or its users are float32"

    def is_low(self, slot: int) -> bool:
        """Whether the values of a slot are stored low."""
        return self.nodes[self.producer[slot]].low and slot not in self.wide
