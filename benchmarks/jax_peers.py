"""Libraries that put unedited JAX functions into mixed precision, on fourteen small programs.

    python benchmarks/jax_peers.py [--again]

Each row of `PEERS` runs `peers/autocast_programs.py` in an environment under build/jax-peers, which pip makes the first
time (under a minute each); xla_amp runs in this one.  Writes results/jax_peers.json and .md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import results

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "jax-peers"
COMMON = ("dm-haiku==0.0.17", "numpy>=2.0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """One library in one environment."""

    name: str
    version: str
    environment: str
    """Folder below `FOLDER`; "" is the environment that runs this file."""


ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "0.10.2": (
        *("jax==0.10.2", "jaxlib==0.10.2", "flax==0.12.8", "equinox==0.13.8", "quax==0.4.6"),
        *("jaxamp==0.0.4", "grampax==0.1.0", "mixed-precision-for-jax==0.1.8"),
    ),
    "0.6.2": (
        *("jax==0.6.2", "jaxlib==0.6.2", "flax==0.10.7", "equinox==0.13.2", "quax==0.2.1"),
        *("jaxamp==0.0.4", "grampax==0.1.0", "mixed-precision-for-jax==0.1.8"),
    ),
}
"""JAX's version -> what pip installs, as the libraries' metadata allow."""

PEERS = (
    Peer(name="xla_amp", version="", environment=""),
    *(
        Peer(name=name, version=version, environment=environment)
        for environment in ENVIRONMENTS
        for name, version in (("jaxamp", "0.0.4"), ("grampax", "0.1.0"), ("mpx", "0.1.8"))
    ),
)


def python_of(environment: str) -> str:
    """The Python of an environment, which is made when it is not there.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    if not environment:
        return sys.executable
    folder = FOLDER / environment
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q"]
        subprocess.run([*pip, *ENVIRONMENTS[environment], *COMMON], check=True)
        (folder / "complete").touch()
    return str(folder / "bin" / "python")


def run(peer: Peer) -> dict[str, Any]:
    """Program -> what was found."""
    script = ROOT / "benchmarks" / "peers" / "autocast_programs.py"
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": "" if peer.environment else str(ROOT)}
    command = [python_of(peer.environment), "-P", str(script), peer.name]  # -P: beside it is a file flax.py
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(peer: Peer, found: dict[str, Any], jax_version: str) -> list[str]:
    """The table's row of a peer."""
    ran = [each for each in found.values() if "failed" not in each]
    right = [each for each in ran if each["right"] and each["throughout"]]
    plain, traced = (sum(each["seconds"][place] for each in ran) for place in (0, 1))
    asked = [each for each in ran if each["asked"]]
    return [
        f"{peer.name} {peer.version}".strip(),
        peer.environment or jax_version,
        str(len(ran)),
        str(sum(each["right"] for each in ran)),
        str(len(right)),
        f"{sum(each['low'] for each in ran)} of {sum(each['contractions'] for each in ran)}",
        "-" if not asked else "yes" if all(each["kept"] == each["asked"] for each in asked) else "no",
        f"{traced / plain:.2f}" if plain else "-",
    ]


def main() -> None:
    """Runs every peer and writes the table."""
    import jax

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="make the environments again")
    if parser.parse_args().again:
        shutil.rmtree(FOLDER, ignore_errors=True)
    found = {peer: run(peer) for peer in PEERS}
    named = {f"{peer.name}, JAX {peer.environment or jax.__version__}": each for peer, each in found.items()}
    results.write_json("jax_peers", {"programs": named})
    headings = [
        *("library", "JAX", "run", "right", "right and low throughout", "low contractions"),
        *("keeps `precision=`", "tracing, share of float32"),
    ]
    title = (
        "Fourteen small JAX programs under each library's autocast, in bfloat16: `python benchmarks/jax_peers.py`. "
        "Right: loss within 2 %, gradients within 5 % of float32, and dtypes as without it."
    )
    rows = [row(peer, each, jax.__version__) for peer, each in found.items()]
    results.write_markdown("jax_peers", headings, rows, title)
    path = results.RESULTS / "jax_peers.md"
    lines = ["", "| library | why not | programs |", "|---|---|---|", *failures(named), ""]
    path.write_text(path.read_text() + "\n".join(lines))


def failures(named: dict[str, dict[str, Any]]) -> list[str]:
    """A row for each library and reason, with its programs."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, programs in named.items():
        for program, each in programs.items():
            if "failed" in each or not (each["right"] and each["throughout"]):
                reasons.setdefault((name, each.get("failed") or _why(each)), []).append(program)
    return [f"| {name} | {why} | {', '.join(programs)} |" for (name, why), programs in reasons.items()]


def _why(found: dict[str, Any]) -> str:
    """What a program that runs lacks."""
    if not found["right"]:
        return f"errors of loss and gradients {found['errors'][0]:.1e}, {found['errors'][1]:.1e}, or another dtype"
    lost = f", {found['asked'] - found['kept']} of `precision=` lost" if found["asked"] else ""
    return f"{found['low']} of {found['contractions']} low{lost}"


if __name__ == "__main__":
    main()
