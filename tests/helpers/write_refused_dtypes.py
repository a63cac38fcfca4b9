"""Writes xla_amp/lazy/ops/checks/refused_dtypes.toml: dtypes that torch's CPU kernels refuse.

python tests/helpers/write_refused_dtypes.py            # takes minutes; run it after an update of torch
"""

from __future__ import annotations

import collections
import itertools
import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from xla_amp import lowering
from xla_amp.lazy.ops.checks import refused_dtypes

TABLE = Path(refused_dtypes.__file__).with_suffix(".toml")
SAMPLES = 12
"""Samples of each entry and dtype."""
HEADER = """\
# What torch's CPU kernels refuse and its meta kernels accept, by operation.
# Written by tests/helpers/write_refused_dtypes.py from the operator database of torch {version}; not edited by hand.
#
# Columns: ATen name, with overload where overloads differ; dtypes, after promotion for pointwise operations, of the
# first operand for others; error class; its message, with {{}} for torch's name of the dtype.  Half types are there
# only where float32 is refused too: XLA computes them where the CPU's kernels lack them.
"""


OTHER_CAUSES = ("Could not run", "can't be cast")
"""Words of errors that do not come from the dtype of the operands alone."""


ACCEPTED = {"histc": "CUDA counts integers, and transformers' mixtures of experts pass integers to every accelerator"}
"""Operation that is not refused although the CPU refuses it -> reason."""


class Watch(TorchDispatchMode):
    """Collects for each ATen operation the dtypes that it accepts, and the errors for others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.accepted: dict[str, set[torch.dtype]] = collections.defaultdict(set)
        self.errors: dict[str, dict[torch.dtype, Exception]] = collections.defaultdict(dict)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        name = refused_dtypes.name_of(func)
        dtype = refused_dtypes.computing_dtype(func, {k: v for k, v in given.items() if not k.startswith("out")})
        try:
            result = func(*args, **kwargs or {})
        except Exception as error:
            if dtype is not None:
                self.errors[name].setdefault(dtype, error)
            raise
        # Kernels have shortcuts for a single element.
        if dtype is not None and all(x.numel() > 1 for x in tree_leaves(args) if isinstance(x, torch.Tensor)):
            self.accepted[name].add(dtype)
        return result


def rows(watch: Watch) -> list[tuple[str, str, str, str]]:
    """The table: (operation, dtypes, error class, message)."""
    have = {name.rpartition("::")[2].partition(".")[0] for name in lowering.table()}
    have |= {name.removesuffix("_") for name in have} | set(refused_dtypes.ALIASES.values())
    found: dict[tuple[str, str, str], list[torch.dtype]] = {}
    for name in sorted(watch.errors):
        base = name.partition(".")[0]
        for dtype, error in watch.errors[name].items():
            text = str(error).splitlines()[0]
            if (
                base not in have
                or base in ACCEPTED
                or dtype in watch.accepted[name]
                or any(words in text for words in OTHER_CAUSES)
            ):
                continue
            text = re.sub(r"(you specified |but got )(c10|torch|CPU)\S*", r"\1{}", text)
            text = re.sub(rf"\b{refused_dtypes.NAMES[dtype]}\b", "{}", text)
            if "not implemented for '" in text and "'{}'" not in text:
                continue  # the dtype of another argument
            differs = any(
                dtype in accepted for other, accepted in watch.accepted.items() if other.partition(".")[0] == base
            )
            dtypes = found.setdefault((name if differs else base, type(error).__name__, text), [])
            dtypes += [] if dtype in dtypes else [dtype]
    table = []
    for (name, kind, text), dtypes in found.items():
        kept = [d for d in dtypes if torch.float32 in dtypes or d not in (torch.float16, torch.bfloat16)]
        if kept:
            table.append((name, words(kept), kind, text))
    return table


def words(dtypes: list[torch.dtype]) -> str:
    """The dtypes, as groups where a whole group is there."""
    left = [dtype for dtype in refused_dtypes.NAMES if dtype in dtypes]
    said = []
    for group, members in refused_dtypes.GROUPS.items():
        if set(members) <= set(left):
            said.append(group)
            left = [dtype for dtype in left if dtype not in members]
    return " ".join([*(str(dtype).removeprefix("torch.") for dtype in left), *said])


def quoted(text: str) -> str:
    """`text` in TOML."""
    return f"'{text}'" if "'" not in text else json.dumps(text)


def main() -> None:
    """Writes the table."""
    warnings.simplefilter("ignore")
    watch = Watch()
    for op, dtype in itertools.product(op_db, refused_dtypes.NAMES):
        try:
            samples = list(itertools.islice(op.sample_inputs("cpu", dtype), SAMPLES))
        except Exception:  # the entry has no samples of this dtype
            continue
        for sample in samples:
            try:
                with watch:
                    op(sample.input, *sample.args, **sample.kwargs)
            except Exception:  # `watch` has it
                continue
    lines = ["refused = [", *(f"    [{', '.join(map(quoted, row))}]," for row in rows(watch)), "]", ""]
    TABLE.write_text(HEADER.format(version=torch.__version__.partition("+")[0]) + "\n" + "\n".join(lines), "utf-8")


if __name__ == "__main__":
    main()
