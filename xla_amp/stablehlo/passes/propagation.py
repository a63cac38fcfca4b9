"""Which nodes run low: paint and propagate, as TensorFlow's grappler does for its graphs.

In steps, each linear in the size of the graph:

1. deny forward: what follows a deny operation through infer operations stays float32;
2. a value that a loop adds to itself stays float32 (a running sum);
3. infer and clear operations between two allow operations become low, if every operand is low, a constant that fits,
   or, for infer, a small argument spread over a large value (a bias);
4. clear operations whose users all read low become low, which moves the cast before them and changes no value;
5. a contraction whose result no further contraction depends on (a weight gradient, the program's result) gives
   float32 straight from its accumulator, unless someone reads it low;
6. clear operations whose operands are all low become low, which moves the cast behind them and changes no value.

References: tensorflow/core/grappler/optimizers/auto_mixed_precision.cc; for step 3's operands, TVM's ToMixedPrecision
("follow"); for step 4, XLA's BFloat16Propagation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np

from xla_amp.stablehlo import ir
from xla_amp.stablehlo.passes.cast_graph import Graph, Node

_FOLLOWING: Final = ("infer", "clear")


class Range:
    """Which constants a low dtype can hold."""

    def __init__(self, low: np.dtype[Any]) -> None:
        self.low = low

    def problem(self, values: np.ndarray[Any, Any] | None) -> str:
        """Why `values` (float32) must stay; empty where each one stays finite, or infinite, and nonzero."""
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


class Painter:
    """One painting of one graph; afterwards each `Node.low` says what it runs in and `Node.why` why."""

    def __init__(self, graph: Graph, low: np.dtype[Any], *, keep_io: bool, keep: Callable[[Node], str]) -> None:
        self.graph = graph
        self.nodes, self.producer, self.users = graph.nodes, graph.producer, graph.users
        self.range = Range(low)
        self.keep_io = keep_io
        self.constant: dict[int, bool] = {}
        """Slots made of constants only -> whether narrowing them is exact."""
        self.wide: set[int] = set()
        """Results that low contractions give in float32."""
        for node in self.nodes:
            node.low, node.kept = False, keep(node)
            if node.kept:
                node.why = node.kept
        self._paint()

    def _paint(self) -> None:
        self._constants()
        allowed = [number for number, node in enumerate(self.nodes) if self._may_allow(node)]
        for number in allowed:
            self.nodes[number].low = True
        self._narrowing()
        self._deny_forward()
        self._running_sums()
        self._spread = self._spread_arguments()
        down = self._reach(allowed, forward=True)
        up = self._reach(allowed, forward=False)
        self._follow(down & up, "between two low operations", exact=False)
        self._pull()
        self._results(allowed)
        lows = (n for n, node in enumerate(self.nodes) if any(map(self.is_low, node.outputs)))
        self._follow(self._reach(lows, forward=True, through=("clear",)), "its operands are low", exact=True)
        self._say_why(down & up)

    # What a node may do.

    def _free(self, node: Node) -> bool:
        """Whether the painter may choose."""
        if node.edge:
            return not (self.keep_io or node.low)
        return not (node.low or node.kept or node.sealed) and node.colour in _FOLLOWING

    def _may_allow(self, node: Node) -> bool:
        if node.colour != "allow" or node.sealed:
            return False
        return not node.kept

    def _narrowing(self) -> None:
        for node in self.nodes:
            if node.narrows:
                node.low = True

    # Step 0: constants.

    def _constants(self) -> None:
        for node in self.nodes:
            if not node.outputs or node.lane is not None:
                continue
            if node.structure == "constant":
                values = ir.constant_array(node.operation.attributes["value"])
                node.kept = node.kept or self.range.problem(values)
                self.constant[node.outputs[0]] = values is not None and self.range.exact(values)
            elif node.inputs and node.colour == "clear" and all(slot in self.constant for slot in node.inputs):
                exact = all(self.constant[slot] for slot in node.inputs)
                self.constant.update((slot, exact) for slot in node.outputs)
        # What reads a constant that does not fit, through whatever moves it, cannot be low.
        todo = deque(
            (slot, node.kept)
            for node in self.nodes
            if node.structure == "constant" and node.kept
            for slot in node.outputs
        )
        while todo:
            slot, why = todo.popleft()
            for number in self.users[slot]:
                user = self.nodes[number]
                if not user.kept:
                    user.kept = user.why = f"reads {why}"
                    if user.colour == "clear" and user.lane is None and all(s in self.constant for s in user.inputs):
                        todo.extend((out, why) for out in user.outputs)

    # Step 1.

    def _deny_forward(self) -> None:
        sources = [number for number, node in enumerate(self.nodes) if node.colour == "deny"]
        sources += [n for n, node in enumerate(self.nodes) if node.kept and node.structure != "constant"]
        reached = self._reach(sources, forward=True)
        # Clear nodes are denied only between a deny and an infer (or deny) node.
        ends = [n for n in range(len(self.nodes)) if self._denies(n, reached)]
        before = self._reach(ends, forward=False, through=("clear",))
        for number in reached:
            node = self.nodes[number]
            if self._free(node) and (node.colour == "infer" or number in before):
                node.kept = node.why = "follows an operation that stays float32"

    def _denies(self, number: int, reached: set[int]) -> bool:
        node = self.nodes[number]
        return node.colour == "deny" or (node.colour == "infer" and number in reached)

    def _reach(self, sources: Iterable[int], *, forward: bool, through: tuple[str, ...] = _FOLLOWING) -> set[int]:
        """Free nodes that lie behind (before) `sources` with only free nodes between."""
        nodes, seen = self.nodes, set[int]()
        todo = list(sources)
        while todo:
            node = nodes[todo.pop()]
            near = (
                (user for slot in node.outputs for user in self.users[slot])
                if forward
                else (self.producer[slot] for slot in node.inputs)
            )
            for number in near:
                if number not in seen and nodes[number].colour in through and self._free(nodes[number]):
                    seen.add(number)
                    todo.append(number)
        return seen

    # Step 2.

    def _running_sums(self) -> None:
        for cycle in _cycles(self.nodes, self.users):
            members = [self.nodes[number] for number in cycle]
            if any(node.colour in ("infer", "deny") for node in members):
                for node in members:
                    if self._free(node):
                        node.kept = node.why = "a loop adds to it: a running sum, which swallows small terms"

    # Steps 3 and 6.

    def _spread_arguments(self) -> set[int]:
        """Slots that hold an argument of the program, moved only, over more elements than it has."""
        leaf = {n for n, node in enumerate(self.nodes) if node.outputs and (node.edge or _moves(node))}
        todo = [number for number in leaf if not self._reads_only(number, leaf)]
        while todo:
            number = todo.pop()
            if number in leaf:
                leaf.discard(number)
                users = (user for slot in self.nodes[number].outputs for user in self.users[slot])
                todo.extend(user for user in users if user in leaf)
        spread: set[int] = set()
        todo = [number for number in leaf if self._grows(self.nodes[number])]
        while todo:
            for slot in self.nodes[todo.pop()].outputs:
                if slot not in spread:
                    spread.add(slot)
                    todo.extend(user for user in self.users[slot] if user in leaf)
        return spread

    def _reads_only(self, number: int, sources: set[int]) -> bool:
        return all(self.producer[slot] in sources for slot in self.nodes[number].inputs)

    def _grows(self, node: Node) -> bool:
        return node.lane is None and _elements(node.writes[0]) > _elements(node.feeds[0].value)

    def _follow(self, chosen: set[int], why: str, *, exact: bool) -> None:
        # The largest part of `chosen` in which every node reads low; with `exact`, what it reads loses nothing by it.
        todo = [number for number in chosen if not self._follows(number, chosen, exact)]
        while todo:
            number = todo.pop()
            if number in chosen:
                chosen.discard(number)
                for slot in self.nodes[number].outputs:
                    todo.extend(n for n in self.users[slot] if n in chosen and not self._follows(n, chosen, exact))
        for number in chosen:
            self.nodes[number].low, self.nodes[number].why = True, why

    def _follows(self, number: int, chosen: set[int], exact: bool) -> bool:
        node = self.nodes[number]
        return all(self._reads_low(slot, node, chosen, exact or not node.outputs) for slot in node.inputs)

    def _reads_low(self, slot: int, node: Node, chosen: set[int], exact: bool) -> bool:
        source = self.producer[slot]
        if source in chosen or self.is_low(slot) or slot in self.graph.exact:
            return True
        if slot in self.constant:
            return not self.nodes[source].kept and (self.constant[slot] or not exact)
        return node.colour == "infer" and slot in self._spread

    # Step 4.

    def _pull(self) -> None:
        chosen = {
            n for n, node in enumerate(self.nodes) if node.upstream and node.colour == "clear" and self._free(node)
        }
        chosen = {n for n in chosen if self.nodes[n].outputs}
        todo = [number for number in chosen if not self._pulled(number, chosen)]
        while todo:
            number = todo.pop()
            if number not in chosen:
                continue
            chosen.discard(number)
            for slot in self.nodes[number].inputs:
                source = self.producer[slot]
                if source in chosen and not self._pulled(source, chosen):
                    todo.append(source)
        # A loop that nobody reads would hold itself up.
        rooted = self._reach((n for n, node in enumerate(self.nodes) if node.low), forward=False, through=("clear",))
        for number in chosen & rooted:
            node = self.nodes[number]
            node.low, node.why = True, "only low operations read it"

    def _pulled(self, number: int, chosen: set[int]) -> bool:
        users = [user for slot in self.nodes[number].outputs for user in self.users[slot]]
        return bool(users) and all(self.nodes[user].low or user in chosen for user in users)

    # Step 5.

    def _results(self, allowed: list[int]) -> None:
        feeding = self._before(allowed)
        for number in allowed:
            node = self.nodes[number]
            if node.structure == "contraction" and number not in feeding:
                for slot in node.outputs:
                    if not any(self.nodes[user].low for user in self.users[slot]):
                        self.wide.add(slot)

    def _before(self, targets: list[int]) -> set[int]:
        """Nodes on which `targets` depend, through anything."""
        seen: set[int] = set()
        todo = list(targets)
        while todo:
            for slot in self.nodes[todo.pop()].inputs:
                source = self.producer[slot]
                if source not in seen:
                    seen.add(source)
                    todo.append(source)
        return seen

    def _say_why(self, between: set[int]) -> None:
        for number, node in enumerate(self.nodes):
            if self._free(node) and not node.edge:
                if node.colour == "infer":
                    node.why = "an operand is float32" if number in between else "not between two low operations"
                elif node.structure != "constant":
                    node.why = "what it reads or who reads it is float32"

    def is_low(self, slot: int) -> bool:
        """Whether the values of a slot are stored low."""
        return self.nodes[self.producer[slot]].low and slot not in self.wide


def _moves(node: Node) -> bool:
    """Whether a node gives what it reads, elsewhere or in another shape."""
    return node.colour == "clear" and bool(node.inputs) and (node.lane is not None or len(node.feeds) == 1)


def _elements(value: Any) -> int:
    kind = ir.tensor_type(value.type)
    return int(np.prod([size or 1 for size in kind.shape])) if kind else 1


def _cycles(nodes: list[Node], users: list[list[int]]) -> list[list[int]]:
    """Strongly connected parts of the graph without its allow operations, those of one node that feeds itself included.

    Tarjan 1972, without recursion.
    """
    count = len(nodes)
    order, lowest, on_stack = [-1] * count, [0] * count, [False] * count
    stack: list[int] = []
    found: list[list[int]] = []
    clock = 0
    for root in range(count):
        if order[root] >= 0 or nodes[root].colour == "allow":
            continue
        work = [(root, iter(_after(nodes, users, root)))]
        order[root] = lowest[root] = clock
        clock += 1
        stack.append(root)
        on_stack[root] = True
        while work:
            number, rest = work[-1]
            following = next(rest, None)
            if following is not None:
                if order[following] < 0:
                    order[following] = lowest[following] = clock
                    clock += 1
                    stack.append(following)
                    on_stack[following] = True
                    work.append((following, iter(_after(nodes, users, following))))
                elif on_stack[following]:
                    lowest[number] = min(lowest[number], order[following])
                continue
            work.pop()
            if work:
                lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[number])
            if lowest[number] == order[number]:
                part: list[int] = []
                while True:
                    member = stack.pop()
                    on_stack[member] = False
                    part.append(member)
                    if member == number:
                        break
                if len(part) > 1:
                    found.append(part)
    return found


def _after(nodes: list[Node], users: list[list[int]], number: int) -> list[int]:
    return [user for slot in nodes[number].outputs for user in users[slot] if nodes[user].colour != "allow"]
