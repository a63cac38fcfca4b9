"""Train a small ConvNet on handwritten digits in float32, bfloat16 or float16: on XLA, or on PyTorch's own CPU device.

    python examples/mnist.py --precision bf16
    python examples/mnist.py --precision fp16 --policy gpu --optimizer adam --plot curve.png --log-dir logs
    python examples/mnist.py --num-processes 2
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/mnist.py --spmd

The data are scikit-learn's bundled digits (1797 images of 8x8), so nothing is downloaded; `--data-dir` reads MNIST's
four IDX files instead.  The loop is an ordinary PyTorch loop: mixed precision adds `autocast` around the forward pass
and a `GradScaler` around the backward pass, and neither makes the host wait for the device.  `--num-processes` shares
each batch between processes with one device each, `--spmd` between all devices of one process.
"""

from __future__ import annotations

import gzip
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from absl import app, flags
from jax.sharding import Mesh
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

import xla_amp
from xla_amp import DeviceLoader, GradScaler, autocast, syncfree, xla_device
from xla_amp import xla_model as xm

PRECISION = flags.DEFINE_enum("precision", "bf16", ["fp32", "bf16", "fp16"], "what the forward pass computes in")
POLICY = flags.DEFINE_string("policy", None, "cast rules: tpu, gpu, ... or a TOML file; default: those of the device")
OPTIMIZER = flags.DEFINE_enum("optimizer", "sgd", ["sgd", "adam", "adamw"], "which optimizer")
SYNCFREE = flags.DEFINE_bool("syncfree", True, "take it from xla_amp.syncfree rather than from torch.optim")
EPOCHS = flags.DEFINE_integer("epochs", 15, "passes over the training data", lower_bound=1)
BATCH_SIZE = flags.DEFINE_integer("batch-size", 64, "images per training step", lower_bound=2)
LR = flags.DEFINE_float("lr", None, "highest learning rate; default: 0.05 for sgd, 0.003 for adam and adamw")
DATA_DIR = flags.DEFINE_string("data-dir", None, "folder of MNIST's IDX files; default: scikit-learn's digits")
DEVICE = flags.DEFINE_enum("device", "xla", ["xla", "cpu"], "xla, or cpu: PyTorch's own kernels, for comparison")
SEED = flags.DEFINE_integer("seed", 0, "seed of weights, shuffling and dropout")
PLOT = flags.DEFINE_string("plot", None, "write the learning curve to this image file")
LOG_DIR = flags.DEFINE_string("log-dir", None, "write loss, accuracy, rate and loss scale here (TensorBoard, CSV)")
PROCESSES = flags.DEFINE_integer("num-processes", 1, "processes, one device each, that share a batch", lower_bound=1)
SPMD = flags.DEFINE_bool("spmd", False, "share each batch between all devices of this process")
JSON = flags.DEFINE_bool("json", False, "print the results as one JSON object on the last line")

LOW = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
WARM_UP = 8  # steps before timing starts: the first ones compile
MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

Batches = Iterable[tuple[Tensor, Tensor]]
Step = Callable[[Tensor, Tensor], Tensor]


# ---- data ------------------------------------------------------------------------------------------------------------


def read_idx(path: Path) -> np.ndarray:
    """The uint8 array in an IDX file, gzipped when its name ends in .gz."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    zeros, code, ndim = struct.unpack_from(">HBB", data)
    if zeros != 0 or code != 0x08:
        raise ValueError(f"reading {path}: an IDX file of unsigned bytes begins 00 00 08, got {data[:4].hex(' ')}")
    shape = struct.unpack_from(f">{ndim}I", data, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * ndim).reshape(shape)


def load_mnist(folder: Path) -> list[np.ndarray]:
    """MNIST's train images (60000, 28, 28), train labels (60000,), test images and test labels."""
    found = [next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None) for name in MNIST_FILES]
    paths = [path for path in found if path is not None]
    if len(paths) < len(MNIST_FILES):
        missing = [name for name, path in zip(MNIST_FILES, found, strict=True) if path is None]
        raise FileNotFoundError(
            f"--data-dir={folder} must hold MNIST's four files, each plain or with .gz: {', '.join(MNIST_FILES)}; "
            f"missing: {', '.join(missing)}. Leave --data-dir out to train on scikit-learn's digits"
        )
    return [read_idx(path) for path in paths]


def load_data(folder: str | None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test set of float32 images (N, 1, side, side), normalised, and int64 labels (N,)."""
    if folder is None:
        digits = load_digits()
        train_x, test_x, train_y, test_y = train_test_split(
            digits.images, digits.target, test_size=0.2, stratify=digits.target, random_state=0
        )
    else:
        train_x, train_y, test_x, test_y = load_mnist(Path(folder))
    mean, std = train_x.mean(), train_x.std()

    def dataset(images: np.ndarray, labels: np.ndarray) -> TensorDataset:
        normal = torch.from_numpy(((images - mean) / std).astype(np.float32))
        return TensorDataset(normal.unsqueeze(1), torch.from_numpy(labels.astype(np.int64)))

    return dataset(train_x, train_y), dataset(test_x, test_y)


# ---- model and optimizer ---------------------------------------------------------------------------------------------


def convnet(side: int) -> nn.Module:
    """Two convolutions and two linear layers: images (N, 1, side, side) -> logits (N, 10)."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.25)),
        *(nn.Linear(32 * (side // 4) ** 2, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def make_optimizer(model: nn.Module, name: str, lr: float | None, sync_free: bool) -> torch.optim.Optimizer:
    """`name` from xla_amp.syncfree or torch.optim: the same classes, the same arguments."""
    library = syncfree if sync_free else torch.optim
    optimizer: torch.optim.Optimizer
    if name == "sgd":
        optimizer = library.SGD(model.parameters(), lr=lr or 0.05, momentum=0.9, weight_decay=5e-4)
    elif name == "adam":
        optimizer = library.Adam(model.parameters(), lr=lr or 0.003)
    else:
        optimizer = library.AdamW(model.parameters(), lr=lr or 0.003, weight_decay=0.01)
    return optimizer


# ---- training --------------------------------------------------------------------------------------------------------


class Meter:
    """Cost of steady training steps: seconds, executables and host syncs, from counter differences."""

    def __init__(self, warm_up: int = WARM_UP) -> None:
        self.warm_up = warm_up
        self.steps = 0
        self.seconds = 0.0
        self.counts = {"executions": 0, "host_syncs": 0}

    def watch(self, batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
        """Pass `batches` through, measuring what the caller does with them once the warm-up is over."""
        before: dict[str, int] = {}
        began, measured = 0.0, 0
        for batch in batches:
            if self.warm_up > 0:
                self.warm_up -= 1
            elif not before:
                xla_amp.sync(wait=True)
                before, began = xla_amp.metrics(), time.perf_counter()
            measured += bool(before)
            yield batch
        if before:
            xla_amp.sync()  # start recorded operations, so that they count
            after = xla_amp.metrics()
            xla_amp.sync(wait=True)
            self.seconds += time.perf_counter() - began
            self.steps += measured
            self.counts = {key: count + after[key] - before[key] for key, count in self.counts.items()}

    def per_step(self, key: str) -> float | None:
        """A count, or "seconds", per step; None when training ended within the warm-up."""
        total = self.seconds if key == "seconds" else self.counts[key]
        return total / self.steps if self.steps else None


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, amp: autocast) -> Step:
    """A training step of images and labels that returns its loss.

    Captured where the whole step is on the device: the first calls are recorded, the others run their program.
    """

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        with amp:
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        xm.reduce_gradients(optimizer)  # over all processes; nothing to do for one
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    on_the_device = next(model.parameters()).device.type == "jax" and SYNCFREE.value and xm.xrt_world_size() == 1
    return xla_amp.compile(step) if on_the_device else step


def train_epoch(
    model: nn.Module, step: Step, batches: Batches, schedule: LRScheduler, mesh: Mesh | None, bar: tqdm[Any]
) -> float:
    """One pass over `batches`; returns the mean loss, the only value that is read from the device."""
    model.train()
    losses = []
    for images, labels in batches:
        if mesh is not None:
            for tensor in (images, labels):
                xla_amp.mark_sharding(tensor, mesh, ("data",))
        losses.append(step(images, labels))
        schedule.step()
        bar.update()
    return torch.stack(losses).mean().item()


@torch.no_grad()
def evaluate(model: nn.Module, batches: Batches, amp: autocast) -> float:
    """The fraction of images that the model classifies correctly."""
    model.eval()
    right = []
    for images, labels in batches:
        with amp:
            logits = model(images)
        right.append((logits.argmax(dim=1) == labels).float())
    return torch.cat(right).mean().item()


def float32_step(device: torch.device, train_set: TensorDataset, sync_free: bool) -> float | None:
    """Seconds of a float32 step of the same model, optimizer and batches, after the same warm-up."""
    model = convnet(side=train_set[0][0].shape[-1]).to(device)
    optimizer = make_optimizer(model, OPTIMIZER.value, LR.value, sync_free)
    schedule = CosineAnnealingLR(optimizer, T_max=1000)
    scaler, off = GradScaler(device.type, enabled=False), autocast(device, enabled=False)
    step, meter = make_step(model, optimizer, scaler, off), Meter()
    with tqdm(disable=True) as bar:
        for _ in range(3):
            loader = DataLoader(train_set, BATCH_SIZE.value, shuffle=True, drop_last=True)
            batches = meter.watch(DeviceLoader(loader, device))
            train_epoch(model, step, batches, schedule, None, bar)
    return meter.per_step("seconds")


# ---- report ----------------------------------------------------------------------------------------------------------


def plot_curve(path: str, losses: list[float], accuracies: list[float]) -> None:
    """Write an image with the training loss and the test accuracy of every epoch."""
    import matplotlib

    matplotlib.use("Agg")  # needs no display
    from matplotlib import pyplot

    epochs = range(1, len(losses) + 1)
    figure, left = pyplot.subplots(figsize=(7, 4))
    left.plot(epochs, losses, ".-", color="tab:blue")
    left.set(xlabel="epoch", ylabel="training loss (blue)", yscale="log")
    right = left.twinx()
    right.plot(epochs, accuracies, ".-", color="tab:orange")
    right.set(ylabel="test accuracy (orange)")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def explained(model: nn.Module, images: Tensor, labels: Tensor, amp: autocast) -> str:
    """Which operations of the forward pass ran in which precision."""
    with xla_amp.explain() as report, amp:
        nn.functional.cross_entropy(model(images), labels)
    names: dict[str, list[str]] = {"low": [], "fp32": []}
    for row in report.rows():
        found = names.get(row["cast"], [])
        if row["operation"] not in found:
            found.append(row["operation"])
    low, wide = (", ".join(found) or "nothing" for found in names.values())
    return f"{PRECISION.value} by rule: {low}. float32 by rule: {wide}. The rest has the dtype of its operands."


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"expected flags only, got {argv[1:]}")
    if BATCH_SIZE.value % PROCESSES.value:
        raise app.UsageError(f"--batch-size={BATCH_SIZE.value} does not divide over --num-processes={PROCESSES.value}")
    if PROCESSES.value > 1:
        xla_amp.launch(train_as_process, PROCESSES.value, (sys.argv,))
    else:
        train()


def train_as_process(rank: int, argv: list[str]) -> None:
    """Entry point of each of several processes."""
    flags.FLAGS(argv)
    train()


def train() -> None:
    """Train, evaluate and report; each of several processes does so with its part of each batch."""
    torch.manual_seed(SEED.value)
    device = xla_device() if DEVICE.value == "xla" else torch.device("cpu")
    train_set, test_set = load_data(DATA_DIR.value)
    if len(train_set) < BATCH_SIZE.value:
        raise app.UsageError(f"--batch-size={BATCH_SIZE.value} is more than the {len(train_set)} training images")
    # Batches of one shape (no remainder, equal test batches), so that XLA compiles one step and one evaluation.
    count = xm.xrt_world_size()
    sampler: DistributedSampler[Any] | None = None
    if count > 1:
        sampler = DistributedSampler(train_set, count, xm.get_ordinal(), seed=SEED.value)
    train_loader = DataLoader(train_set, BATCH_SIZE.value // count, sampler is None, sampler, drop_last=True)
    test_loader = DataLoader(test_set, min(500, len(test_set)))

    model = convnet(side=train_set[0][0].shape[-1]).to(device)
    optimizer = make_optimizer(model, OPTIMIZER.value, LR.value, SYNCFREE.value)
    schedule = CosineAnnealingLR(optimizer, T_max=EPOCHS.value * len(train_loader))
    low = LOW[PRECISION.value]
    amp = autocast(device, dtype=low, enabled=low is not None, policy=POLICY.value)
    scaler = GradScaler(device.type, enabled=PRECISION.value == "fp16")  # bfloat16 has the range of float32

    mesh = xla_amp.make_mesh() if SPMD.value else None
    step, meter = make_step(model, optimizer, scaler, amp), Meter()
    losses, accuracies = [], []
    is_first = xm.is_master_ordinal()
    log = common.Log(LOG_DIR.value if is_first else None)
    with tqdm(total=EPOCHS.value * len(train_loader), unit="step", disable=not is_first) as bar:
        for epoch in range(1, EPOCHS.value + 1):
            if sampler is not None:
                sampler.set_epoch(epoch)
            bar.set_description(f"epoch {epoch}/{EPOCHS.value}" + (", which compiles" if epoch == 1 else ""))
            batches = meter.watch(DeviceLoader(train_loader, device))
            lr = schedule.get_last_lr()[0]
            losses.append(train_epoch(model, step, batches, schedule, mesh, bar))
            accuracies.append(evaluate(model, DeviceLoader(test_loader, device), amp))
            shown = {"loss": losses[-1], "accuracy": accuracies[-1], "lr": lr, "loss_scale": scaler.get_scale()}
            log.add(epoch, shown, bar)
    log.close()

    results: dict[str, str | float | int | None] = {
        "precision": PRECISION.value,
        "accuracy": accuracies[-1],
        "executions_per_step": meter.per_step("executions"),
        "host_syncs_per_step": meter.per_step("host_syncs"),
        "skipped_steps": int(scaler.skipped_steps()),
        "seconds_per_step": meter.per_step("seconds"),
    }
    if not is_first:
        return
    if PLOT.value is not None:
        plot_curve(PLOT.value, losses, accuracies)
    alone = count == 1 and mesh is None
    if alone and low is not None and not JSON.value:
        results["seconds_per_step_in_float32"] = float32_step(device, train_set, SYNCFREE.value)
    common.show(f"handwritten digits on {device} ({xm.xla_device_hw(device)})", results, JSON.value)
    if alone and low is not None and not JSON.value:
        images, labels = next(iter(DeviceLoader(test_loader, device)))
        print(explained(model, images, labels, amp))
        print(
            "So small a model may lose. Next: examples/gpt.py, docs/policy.md (other rules), docs/tools.md (what ran)."
        )


if __name__ == "__main__":
    common.run(main)
