"""What the precision search finds on twelve programs, and how far it is from the best of many random plans.

    python benchmarks/search_programs.py [--front jax] [--programs "batch norm" GPT-2] [--random 200] [--target h100]

Each program runs on the CPU at a tiny size.  The search sees eight batches, two of them held out.  Its plan is then
measured on four batches that it has not seen.  The column `to best` compares its estimated time with the shortest among
the plan and the random plans that are within the budget by the same bound; each random plan draws the share of
candidates that run low.  Times are estimates for the target: they say how good the search is, not how fast a program.

The front ``stablehlo`` searches modules of the loss and its gradients, as `jax.export` writes them; its time is that of
the products, and its error that of the worst result.  A row is added to results/search_FRONT.json when it is ready.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from results import RESULTS, machine, stamp, write_markdown

import xla_amp
from xla_amp.tools import search as plan_search
from xla_amp.tools.search import Plan, measurements

SEARCHED, UNSEEN = 8, 4
"""Batches that the search has, and batches that check its plan."""
USED = SEARCHED - SEARCHED // 4
"""Batches by which plans are judged; the search checks its plan on the others."""

Errors = Mapping[str, float]


def _training(loss: float, gradients: float) -> dict[str, float]:
    return {"loss": loss, "gradients": gradients}


BUDGETS: Mapping[str, Errors] = {
    "nearly equal": _training(2e-2, 2e-2),
    "batch norm": _training(2e-2, 5e-2),
    "RoPE": _training(2e-2, 2e-2),
    "log-sum-exp": _training(1e-3, 3.5e-3),
    "LSTM": _training(1e-3, 2.5e-3),
    "MoE": _training(5e-3, 2e-2),
    "GPT-2": _training(1e-3, 5e-3),
    "ResNet": _training(1e-2, 3e-2),
    "ViT": _training(5e-3, 6e-3),
    "BERT": _training(1e-3, 4e-3),
    "UNet": _training(1e-3, 3.5e-3),
    "overflow": _training(2e-2, 2e-2),
}
"""Largest budgets; `_budget` makes one smaller that everything low is within."""
SHARE = 0.7
"""Of the error of everything low."""
LOW: Mapping[str, Any] = {"overflow": "float16"}
"""Program -> low dtype, where it is not bfloat16."""


class Front(NamedTuple):
    """A program of one front."""

    program: Any
    """A `xla_amp.tools.search.SearchProgram` of all batches."""
    budget: Errors
    wide: float
    """Estimated seconds in float32."""
    same: Callable[[Plan, Path], bool]
    """Whether a plan that is written into a folder and read again gives the same casts."""
    size: str = ""
    """Where it is not the same program as in PyTorch."""


@contextlib.contextmanager
def torch_front(name: str, target: str) -> Iterator[Front]:
    """A loss in PyTorch."""
    import search_torch

    from xla_amp.tools.search.on_pytorch import TorchProgram

    low, rates = LOW.get(name, "bfloat16"), plan_search.rates(target)
    step, batches = search_torch.PROGRAMS[name].make(SEARCHED + UNSEEN)
    program = TorchProgram(step, batches, (), low)
    program.look(rates)

    def under(policy: Any) -> None:
        with xla_amp.autocast("cpu", policy=policy):
            step(*batches[0])

    same = functools.partial(_same_file, program, low, under)
    with program.prepared():
        yield Front(program, BUDGETS[name], program.estimate(Plan(), rates), same)


@contextlib.contextmanager
def jax_front(name: str, target: str) -> Iterator[Front]:
    """A loss in JAX."""
    import jax
    import search_jax

    from xla_amp.jax import autocast
    from xla_amp.tools.search.on_jax import JaxProgram

    low, rates = LOW.get(name, "bfloat16"), plan_search.rates(target)
    given = search_jax.PROGRAMS[name]
    loss, rows = given.make(SEARCHED + UNSEEN)
    program = JaxProgram(loss, rows, {0}, low)
    program.look(rates)

    def under(policy: Any) -> None:
        jax.eval_shape(autocast(loss, policy=policy), *rows[0])

    same = functools.partial(_same_file, program, low, under)
    yield Front(program, BUDGETS[name], program.estimate(Plan(), rates), same, given.size)


def _same_file(program: Any, low: Any, under: Callable[[Any], None], plan: Plan, folder: Path) -> bool:
    policy, path = plan_search.policy(plan, program.candidates, low), folder / "plan.toml"
    path.write_text(plan_search.to_toml(policy, "a plan"))
    return _casts(under, policy) == _casts(under, path) != []


def _casts(under: Callable[[Any], None], policy: Any) -> list[tuple[str, ...]]:
    with xla_amp.explain() as report:
        under(policy)
    return [(row["operation"], row["module"], row["cast"], row["after"]) for row in report.rows()]


@contextlib.contextmanager
def stablehlo_front(name: str, target: str) -> Iterator[Front]:
    """A module of a loss and its gradients."""
    import search_jax

    from xla_amp.stablehlo import io, ir
    from xla_amp.stablehlo.passes.autocast import settings
    from xla_amp.tools.inspect import target_error

    given = search_jax.PROGRAMS[name]
    module, samples = search_jax.exported(*given.make(SEARCHED + UNSEEN))
    program = target_error.Planned(module, *settings("gpu", LOW.get(name, "bfloat16"), None), samples)

    def same(plan: Plan, folder: Path) -> bool:
        converted = program.converted(plan)
        io.save(converted.program, folder / "low.mlirbc")
        return ir.text(io.load(folder / "low.mlirbc").module) == converted.text()

    rates = plan_search.rates(target)
    wide = math.fsum(rates.seconds(each.flops, 2 * each.bytes, "float32") for each in program.candidates)
    yield Front(program, {"results": max(BUDGETS[name].values())}, wide, same, given.size)


FRONTS = {"torch": torch_front, "jax": jax_front, "stablehlo": stablehlo_front}


def measure(front: str, name: str, target: str, plans: int) -> dict[str, Any]:
    """Searches one program, and draws `plans` random ones."""
    with FRONTS[front](name, target) as (program, given, wide, same, size), tempfile.TemporaryDirectory() as folder:
        useful = frozenset(each.name for each in program.candidates if each.seconds > 0)
        budget = _budget(program, given, useful)
        start = time.perf_counter()
        program.batches = SEARCHED  # the others are unseen
        found = plan_search.search(program, budget=budget)
        took = time.perf_counter() - start
        unseen = [program.evaluate(found.plan, batch) for batch in range(SEARCHED, SEARCHED + UNSEEN)]
        best = max([found.seconds, *_random(program, budget, plans, found.spread)])
        again = same(found.plan, Path(folder))
    return {
        "program": f"{name}, {size}" if size else name,
        "candidates": len(program.candidates),
        "low": len(found.plan),
        "plan": sorted(found.plan),
        "measured": len(found.tried),
        "seconds": took,
        "budget": dict(budget),
        "errors": dict(found.errors),
        "unseen": {key: max(each[key] for each in unseen) for key in budget},
        "all_low": next(each.load for each in found.tried if each.plan == useful),
        "met": found.met,
        "same": again,
        "time": (wide - found.seconds) / wide,
        "all_low_time": (wide - sum(max(0.0, each.seconds) for each in program.candidates)) / wide,
        "to_best": (wide - found.seconds) / (wide - best),
    }


def _budget(program: Any, given: Errors, useful: Plan) -> Errors:
    """A budget that everything low misses, so that there is something to find."""
    last = list(given)[-1]
    worst = max(program.evaluate(useful, batch)[last] for batch in range(USED))
    return {**given, last: min(given[last], float(f"{SHARE * worst:.1e}"))}


def _random(program: Any, budget: Errors, plans: int, spread: Errors) -> list[float]:
    """Savings of the random plans that are within the budget by the bound of the search."""
    draw, names = random.Random(0), [each.name for each in program.candidates]
    known = measurements.Measurements(program)
    found = []
    for _ in range(plans):
        share = draw.random()
        plan = frozenset(name for name in names if draw.random() < share)
        measured: list[Errors] = []
        for batch in range(USED):
            measured.append(known.errors(plan, batch))
            if any(measured[-1][key] > limit for key, limit in budget.items()):
                break
        errors = {key: [each[key] for each in measured] for key in budget}
        bounds = {key: measurements.bound(errors[key], plan_search.CONFIDENCE, spread[key]) for key in budget}
        finite = all(math.isfinite(value) for each in measured for value in each.values())
        if len(measured) == USED and finite and all(bounds[key] <= limit for key, limit in budget.items()):
            found.append(sum(each.seconds for each in program.candidates if each.name in plan))
    return found


HEADINGS = (
    *("program", "low", "plans", "budget", "achieved", "unseen", "time", "all low", "to best", "casts again"),
    "machine",
)


def main() -> None:
    """Measures, prints and writes ``results/search_FRONT``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--front", choices=list(FRONTS), default="torch")
    parser.add_argument("--programs", nargs="+", choices=list(BUDGETS), default=list(BUDGETS))
    parser.add_argument("--random", type=int, default=200, help="random plans for each program")
    parser.add_argument("--target", default="h100")
    parser.add_argument("--print-only", action="store_true", help="do not write the results")
    options = parser.parse_args()
    name = f"search_{options.front}"
    path = RESULTS / f"{name}.json"
    for each in options.programs:
        row = measure(options.front, each, options.target, options.random)
        row = {**row, "target": options.target, "random": options.random, "machine": machine()}
        print(row, flush=True)
        if options.print_only:
            continue
        # Read only now: another process may have added a row while this one measured.
        rows = {**(json.loads(path.read_text())["rows"] if path.exists() else {}), each: row}
        rows = {program: rows[program] for program in BUDGETS if program in rows}
        path.write_text(json.dumps({"stamp": stamp(), "rows": rows}, indent=1) + "\n")
        title = f"Search within a budget, {options.front}, for {options.target}"
        write_markdown(name, HEADINGS, table(list(rows.values())), title)


def table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows as text; errors are those of loss and gradients or of results, times shares of float32's."""

    def errors(found: Errors) -> str:
        return ", ".join(f"{value:.1e}" for value in found.values())

    return [
        (
            row["program"], f"{row['low']} of {row['candidates']}", str(row["measured"]), errors(row["budget"]),
            errors(row["errors"]), errors(row["unseen"]), f"{row['time']:.2f}", f"{row['all_low_time']:.2f}",
            f"{row['to_best']:.3f}", "same" if row["same"] else "others",
            row["machine"].partition("(")[2].partition(")")[0],
        )
        for row in rows
    ]  # fmt: skip


if __name__ == "__main__":
    main()
