"""Names of a program's arguments and results, and which results are new values of arguments."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from xla_amp.stablehlo import ir, locations, surgery

_WORD: Final = re.compile(r"^\w+")
UNNAMED: Final = "result "
"""Begins the name of a result that the program gives none."""
_INDEX: Final = re.compile(r"^\[\d+\]")
_NEW: Final = "new "
"""How `xla_amp.export` names the new value of what a call changed."""


def arguments(module: ir.MlirModule) -> list[str]:
    """Names of the arguments: ``params['w']``; ``argument 3`` where the program has none."""
    names = [locations.of(argument).name for argument in surgery.block_of(ir.entry(module)).arguments]
    return [f"argument {index}" if name is None else name for index, name in enumerate(names)]


def results(module: ir.MlirModule) -> list[str]:
    """Names of the results: ``result[0]['w']``; ``result 3`` where the program has none."""
    function = ir.entry(module)
    count = len(ir.signature(module).outputs)
    attributes: Sequence[Any] = function.attributes["res_attrs"] if "res_attrs" in function.attributes else [{}] * count
    names = [str(each["jax.result_info"].value) if "jax.result_info" in each else "" for each in attributes]
    return [name or f"{UNNAMED}{index}" for index, name in enumerate(names)]


def updated(inputs: Sequence[str], outputs: Sequence[str]) -> dict[int, int]:
    """Index of a result -> index of the argument whose new value it is, by their names.

    ``result[0]['w']`` is the new ``params['w']``.  Where several arguments end alike, as many results must, and they
    correspond in order.  Names without a letter behind the first word (``params[0]``) say too little.

    Example:
        >>> updated(["params['w']", "moments['w']", "x"], ["result[0]['w']", "result[1]['w']", "result[2]"])
        {0: 0, 1: 1}
    """
    places: dict[str, list[int]] = defaultdict(list)
    for index, name in enumerate(inputs):
        places[_WORD.sub("", name)].append(index)
        places[_NEW + name].append(index)
    for strip in (lambda name: name, lambda name: _INDEX.sub("", name)):
        made: dict[str, list[int]] = defaultdict(list)
        for index, name in enumerate(outputs):
            last = name.rpartition(_NEW)[2] if _NEW in name else ""
            made[_NEW + last if last else strip(name.removeprefix("result"))].append(index)
        pairs = {
            result: argument
            for ending, found in made.items()
            if re.search(r"[A-Za-z]", ending) and len(found) == len(places.get(ending, ()))
            for result, argument in zip(found, places[ending], strict=True)
        }
        if pairs:
            return dict(sorted(pairs.items()))
    return {}
