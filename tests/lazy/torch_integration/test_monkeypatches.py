"""Starting the device changes exactly those attributes of torch and `_signal` that the table of patches names."""

from __future__ import annotations

import json
import re

import forked
import torch
from source_tree import ROOT

from xla_amp.lazy.torch_integration import monkeypatches

# Compared by identity: module-level functions and classes of torch, members of its classes, entries of registries.
PROGRAM = """
import _signal, json, pkgutil, sys
from multiprocessing.reduction import ForkingPickler
import torch, torch.serialization, torch.optim, torch.utils.dlpack, torch.multiprocessing, torch.utils.data
import torch.optim.optimizer as optimizers
import safetensors.torch
from xla_amp import lazy
from xla_amp.lazy.torch_integration import monkeypatches  # imports of torch's modules are not counted

OPTIMIZERS = [f"torch.optim.{name}" for name, kind in vars(torch.optim).items() if isinstance(kind, type)]
CLASSES = {name: pkgutil.resolve_name(name) for name in OPTIMIZERS + '''
    torch.Tensor torch.nn.Parameter torch.nn.Module torch.UntypedStorage torch.TypedStorage torch.optim.Optimizer
    torch.nn.utils.rnn.PackedSequence torch.jit.RecursiveScriptModule torch.amp.GradScaler torch.autocast
    torch.nn.parallel.DistributedDataParallel torch.distributed.DeviceMesh torch.utils.data.DataLoader
    torch.nn.DataParallel torch.Generator torch.device torch.Size
'''.split()}

def snapshot():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("torch", "safetensors", "signal", "_signal") and module is not None:
            for key, value in list(vars(module).items()):
                if callable(value) or key == "jax":
                    found[f"{name}.{key}"] = id(value)
    for name, kind in CLASSES.items():
        for key, value in list(vars(kind).items()):
            found[f"{name}.{key}"] = id(value)
    for kind, reduce in ForkingPickler._extra_reducers.items():
        known = [name for name, value in CLASSES.items() if value is kind]
        found[f"ForkingPickler[{known[0] if known else kind}]"] = id(reduce)
    for owner, key in (
        (torch.serialization, "_package_registry"),
        (optimizers, "_global_optimizer_pre_hooks"),
        (optimizers, "_global_optimizer_post_hooks"),
    ):
        found[f"{owner.__name__}.{key}"] = str(list(getattr(owner, key)))
    return found

before, modules = snapshot(), set(sys.modules)
CHANGE
after = snapshot()
print(json.dumps(sorted(
    key for key in after
    if before.get(key) != after[key] and (key in before or key.rpartition(".")[0] in modules | set(CLASSES)
                                          or key.startswith("ForkingPickler"))
)))
"""


def changed(statement: str) -> set[str]:
    """The attributes of torch that `statement` replaces or adds in a process that has started no device."""
    # Without autoload: `import torch` would register the checkpoint loader before the first snapshot.
    variables = {"JAX_PLATFORMS": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    run = forked.run(program=PROGRAM.replace("CHANGE", statement), **variables)
    return set(json.loads(run.stdout.splitlines()[-1]))


def table() -> set[str]:
    return {name for patch in monkeypatches.PATCHES for name in patch.names}


def exists(name: str) -> bool:
    """Whether this torch version has the function; torch.accelerator grew over several."""
    return not name.startswith("torch._C.") or hasattr(torch._C, name.removeprefix("torch._C."))


def test_starting_the_device_changes_what_the_table_names():
    assert changed("lazy.device()") == set(filter(exists, table())) | set(monkeypatches.REGISTRATIONS)


def test_every_patch_has_one_row_and_a_reason():
    names = [name for patch in monkeypatches.PATCHES for name in patch.names]
    assert len(names) == len(set(names))
    assert all(patch.reason.endswith(".") for patch in monkeypatches.PATCHES)


def test_the_page_tells_the_number():
    page = (ROOT / "docs" / "limits.md").read_text()
    [number] = re.findall(r"replaces or adds (\d+)\s+attributes\s+of\s+torch", page)
    assert int(number) == len({name for name in table() if not name.startswith(("_signal.", "signal."))})
