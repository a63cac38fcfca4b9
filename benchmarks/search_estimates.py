"""Estimated times of searched plans at real sizes: by peak rates, as the search has them, and by XLA's compilers.

    python benchmarks/search_estimates.py [--programs GPT-2 MoE] [--target h100]

The plans are those of results/search_jax.json (`search_programs.py --front jax`), found at tiny sizes.  Nothing is run:
XLA compiles the loss with its gradients for the target and estimates its time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from results import RESULTS, stamp, write_markdown
from search_jax import Head, Mixture, NearlyEqual, Rotary
from search_programs import LOW
from workloads import Workload, language, resnet, vit

from xla_amp import events, plan_search
from xla_amp.jax import autocast
from xla_amp.plan_search import Plan
from xla_amp.stablehlo.tools import targets


def _shapes(*shapes: tuple[int, ...], labels: int = 0) -> list[Any]:
    kinds = [jnp.float32] * (len(shapes) - labels) + [jnp.int32] * labels
    return [jax.ShapeDtypeStruct(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]


def _workload(fields: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    workload = Workload(name="", **fields)
    return workload.flax_model(), [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in workload.flax_batch()]


_WIDE: dict[str, Any] = {"width": 768, "heads": 12}
PROGRAMS: Mapping[str, Any] = {
    "nearly equal": lambda: (NearlyEqual(width=2048), _shapes((4096, 2048))),
    "log-sum-exp": lambda: (Head(width=1024, classes=32768), _shapes((4096,), (4096,), labels=2)),
    "RoPE": lambda: (Rotary(width=128), _shapes((16, 2048, 128), (2048,))),
    "MoE": lambda: (Mixture(width=1024), _shapes((8192, 1024), (8192,), labels=1)),
    "GPT-2": lambda: _workload(language(8, 1024, layers=2, **_WIDE)),
    "BERT": lambda: _workload(language(16, 512, "BERT", layers=1, **_WIDE)),
    "ViT": lambda: _workload(vit(32, layers=1, **_WIDE)),
    "ResNet": lambda: _workload(resnet(64, 224, blocks=(1, 1))),
}
"""Models with the scopes of the tiny ones, and the shapes of their batches."""


def measure(compilers: targets.Compilers, name: str, plan: Plan, target: str) -> dict[str, Any]:
    """Estimates of float32, of everything low and of `plan`."""
    model, batch = PROGRAMS[name]()
    variables = jax.eval_shape(model.init, jax.random.key(0), *batch)
    rest = {key: part for key, part in variables.items() if key != "params"}
    low, rates = LOW.get(name, "bfloat16"), plan_search.rates(target)

    def loss(params: Any, rest: Any, *batch: Any) -> Any:
        return model.apply({"params": params, **rest}, *batch, mutable=list(rest))[0]

    def recorded(policy: Any) -> list[events.DecisionRecord]:
        with events.capture() as records:
            jax.eval_shape(autocast(loss, policy=policy), variables["params"], rest, *batch)
        return records

    candidates = plan_search.from_records(recorded(plan_search.policy(Plan(), (), low)), rates, low=low, backward=True)
    everything = frozenset(each.name for each in candidates)
    missing = plan - everything
    if missing:
        raise SystemExit(f"{name}: the large model has no {', '.join(sorted(missing))}")
    row: dict[str, Any] = {"program": name, "target": target, "low": len(plan), "candidates": len(candidates)}
    for kind, chosen in {"float32": Plan(), "all low": everything, "plan": plan}.items():
        policy = plan_search.policy(chosen, candidates, low)
        ours = plan_search.seconds(recorded(policy), candidates, rates, backward=True)
        step = jax.value_and_grad(autocast(loss, policy=policy))
        text = targets.lower(step, variables["params"], rest, *batch, target=target)
        compiled = compilers.compile(text, target)
        row[kind] = {"rates": ours, "xla": compiled.seconds, "bytes": compiled.bytes_accessed}
    return row


HEADINGS = ("program", "target", "low", "float32 ms", "XLA", "all low / float32", "XLA", "plan / float32", "XLA")


def main() -> None:
    """Compiles, prints and writes ``results/search_estimates``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--target", default="h100")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # targets are compiled in separate processes
    path = RESULTS / "search_estimates.json"
    rows: dict[str, Any] = json.loads(path.read_text())["rows"] if path.exists() else {}
    found = json.loads((RESULTS / "search_jax.json").read_text())["rows"]
    with targets.Compilers() as compilers:
        for name in options.programs:
            row = measure(compilers, name, frozenset(found[name]["plan"]), options.target)
            rows[f"{name}, {options.target}"] = row
            print(row, flush=True)
            path.write_text(json.dumps({"stamp": stamp(), "rows": rows}, indent=1) + "\n")
    write_markdown("search_estimates", HEADINGS, [_cells(row) for row in rows.values()], __doc__.splitlines()[0])


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    wide = row["float32"]
    shares = [
        f"{row[kind][by] / wide[by]:.2f}" if wide[by] and row[kind][by] else "-"
        for kind in ("all low", "plan")
        for by in ("rates", "xla")
    ]
    times = [f"{1e3 * wide[by]:.3g}" if wide[by] else "-" for by in ("rates", "xla")]
    return (row["program"], row["target"], f"{row['low']} of {row['candidates']}", *times, *shares)


if __name__ == "__main__":
    main()
