"""Train ResNet-50 on a folder of JPEGs in float32, bfloat16 or float16, on an XLA device.

    python examples/imagenet.py --data-dir imagenet --precision bf16 --checkpoint resnet50.pt
    python examples/imagenet.py --fake-data --batch-size 128 --steps 50

The folder has `train/CLASS/*.jpg` and `val/CLASS/*.jpg`; worker processes decode, crop and flip.  `--fake-data` trains
on one random batch, so that only the device is timed.  `--checkpoint` saves after every epoch and resumes from the file
if it exists, with the same results as an uninterrupted run.  The program is the same on the lazy device and on
torch_xla's (`XLA_AMP_ENGINE=torch_xla`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
import torch.nn.functional as F
from absl import app, flags
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from tqdm import tqdm

import xla_amp
from xla_amp import DeviceLoader, GradScaler, autocast, syncfree, xla_device
from xla_amp import xla_model as xm

PRECISION = flags.DEFINE_enum("precision", "bf16", ["fp32", "bf16", "fp16"], "what the forward pass computes in")
POLICY = flags.DEFINE_string("policy", None, "cast rules: tpu, gpu, ... or a TOML file; default: those of the device")
DATA_DIR = flags.DEFINE_string("data-dir", None, "folder with train/CLASS/*.jpg and val/CLASS/*.jpg")
FAKE_DATA = flags.DEFINE_bool("fake-data", False, "train on one random batch, to measure speed")
EPOCHS = flags.DEFINE_integer("epochs", 90, "passes over the training data, those before a checkpoint included")
STOP_AFTER = flags.DEFINE_integer("stop-after", None, "leave after this epoch; the schedule stays that of --epochs")
STEPS = flags.DEFINE_integer("steps", 100, "steps of an epoch of --fake-data", lower_bound=1)
BATCH_SIZE = flags.DEFINE_integer("batch-size", 64, "images per step", lower_bound=2)
IMAGE_SIZE = flags.DEFINE_integer("image-size", 224, "pixels of a side", lower_bound=16)
WIDTH = flags.DEFINE_integer("width", 64, "channels of the first stage; 64 is ResNet-50", lower_bound=1)
BLOCKS = flags.DEFINE_list("blocks", ["3", "4", "6", "3"], "blocks of each stage; 3,4,6,3 is ResNet-50")
WORKERS = flags.DEFINE_integer("workers", 4, "processes that read images; 0 reads in this one", lower_bound=0)
LR = flags.DEFINE_float("lr", None, "highest learning rate; default: 0.1 for each 256 images of a batch")
SEED = flags.DEFINE_integer("seed", 0, "seed of weights, shuffling and cropping")
CHECKPOINT = flags.DEFINE_string("checkpoint", None, "file to go on from, when it exists, and to save to")
LOG_STEPS = flags.DEFINE_integer("log-steps", 50, "steps between two readings of the loss", lower_bound=1)
LOG_DIR = flags.DEFINE_string("log-dir", None, "write losses, learning rates and loss scales here (TensorBoard, CSV)")
JSON = flags.DEFINE_bool("json", False, "print the results as one JSON object on the last line")

LOW = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # per channel of ImageNet
WARM_UP = 5  # steps before timing starts: the first ones compile
NO_LABEL = -1  # pads the last batch of an evaluation, so that all batches have one shape

Batch = tuple[Tensor, Tensor]
Step = Callable[[Tensor, Tensor], Tensor]


# ---- data ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Images(Dataset[Batch]):
    """The images below `folder`, one class per folder, as normalised float32 [3, side, side].

    With `train` a random crop of 8 to 100 % of the area, randomly flipped (Szegedy et al. 2015); otherwise the center.
    The random choice depends only on seed, epoch and index, not on the worker that reads the image.
    """

    folder: Path
    side: int
    train: bool
    seed: int

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise FileNotFoundError(f"--data-dir: expected a folder {self.folder}; --fake-data needs none")
        self.classes = sorted(path.name for path in self.folder.iterdir() if path.is_dir())
        self.files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((self.folder / name).iterdir())
            if path.suffix.lower() in (".jpg", ".jpeg")
        ]
        if not self.files:
            raise FileNotFoundError(f"--data-dir: found no CLASS/*.jpg in {self.folder}")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        epoch, index = key
        path, label = self.files[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        rng = np.random.default_rng([self.seed, epoch, index])
        image = self.random_crop(image, rng) if self.train else self.center_crop(image)
        pixels = (np.asarray(image, np.float32) / 255 - MEAN) / DEVIATION
        return torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1).contiguous(), torch.tensor(label)

    def random_crop(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        area = image.width * image.height * rng.uniform(0.08, 1)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        width = min(max(round(math.sqrt(area * ratio)), 1), image.width)
        height = min(max(round(math.sqrt(area / ratio)), 1), image.height)
        left, top = int(rng.integers(image.width - width + 1)), int(rng.integers(image.height - height + 1))
        part = image.resize(
            (self.side, self.side), Image.Resampling.BILINEAR, box=(left, top, left + width, top + height)
        )
        return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else part

    def center_crop(self, image: Image.Image) -> Image.Image:
        edge = 0.875 * min(image.size)
        left, top = (image.width - edge) / 2, (image.height - edge) / 2
        box = (left, top, left + edge, top + edge)
        return image.resize((self.side, self.side), Image.Resampling.BILINEAR, box=box)


class Padded:
    """The batches of a loader; the last one is padded with images that have no label."""

    def __init__(self, loader: DataLoader[Batch], size: int) -> None:
        self.loader, self.size = loader, size

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        for images, labels in self.loader:
            missing = self.size - len(labels)
            yield F.pad(images, (0, 0) * 3 + (0, missing)), F.pad(labels, (0, missing), value=NO_LABEL)


class Fake:
    """The same random batch for every step, without work for the host."""

    def __init__(self, batch: int, side: int, steps: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.steps = steps
        self.batch = (
            torch.randn(batch, 3, side, side, generator=generator).to(device),
            torch.randint(1000, (batch,), generator=generator).to(device),
        )

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.steps):
            yield self.batch
            xm.mark_step()


@dataclasses.dataclass
class Order(Sampler[tuple[int, int]]):
    """(epoch, index) of every image, shuffled for training.  Persistent workers get the epoch from here."""

    images: Images
    epoch: int = 0

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        generator = torch.Generator().manual_seed(self.images.seed + self.epoch)
        order = torch.randperm(len(self), generator=generator) if self.images.train else torch.arange(len(self))
        return ((self.epoch, index) for index in order.tolist())


def loader_of(images: Images, order: Order, batch: int, workers: int) -> DataLoader[Batch]:
    """Batches of `images`; for training only full ones."""
    return DataLoader(
        images,
        batch,
        sampler=order,
        drop_last=images.train,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="forkserver" if workers else None,  # XLA's threads do not survive a fork
    )


# ---- model -----------------------------------------------------------------------------------------------------------


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Convolution and batch norm."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """A residual block (He et al. 2015) with the stride on the 3x3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.one, self.two = conv(inputs, width, 1), conv(width, width, 3, stride)
        self.three = conv(width, 4 * width, 1)
        nn.init.zeros_(self.three.get_parameter("1.weight"))  # the block starts as an identity (Goyal et al. 2017)
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same else conv(inputs, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.three(F.relu(self.two(F.relu(self.one(x))))) + self.shortcut(x))


def resnet(blocks: list[int], width: int, classes: int) -> nn.Sequential:
    """Images [batch, 3, side, side] -> logits [batch, classes]."""
    layers: list[nn.Module] = [conv(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
            inputs = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


# ---- training --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """Everything that a checkpoint holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    scaler: GradScaler
    epochs: int = 0

    def save(self, path: str) -> None:
        """Write the checkpoint atomically."""
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule", "scaler")}
        temporary = Path(f"{path}.part")
        xm.save({**parts, "epochs": self.epochs}, temporary)
        temporary.replace(path)

    def load(self, path: str) -> None:
        """Resume from a checkpoint."""
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        for name in ("model", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(state[name])
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.epochs = state["epochs"]


def make_step(run: Run, amp: autocast) -> Step:
    """A training step of images and labels that returns its loss, captured: recorded at first, then replayed."""
    model, optimizer, scaler = run.model, run.optimizer, run.scaler

    @xla_amp.compile
    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        with amp:
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def train_epoch(run: Run, step: Step, batches: Iterable[Batch], log: common.Log) -> tuple[float, float | None]:
    """One pass; returns the mean loss and the seconds per step."""
    run.model.train()
    losses: list[Tensor] = []
    began, steps = 0.0, 0
    bar = tqdm(batches, f"epoch {run.epochs + 1}", leave=False)
    for images, labels in bar:
        if len(losses) == WARM_UP:
            xla_amp.sync(wait=True)
            began, steps = time.perf_counter(), 0
        loss = step(images, labels)
        lr = run.schedule.get_last_lr()[0]
        run.schedule.step()
        losses.append(loss)
        steps += 1
        if run.schedule.last_epoch % LOG_STEPS.value == 0:
            log.add(run.schedule.last_epoch, {"loss": loss, "lr": lr, "loss_scale": run.scaler.get_scale()}, bar)
    xla_amp.sync(wait=True)
    seconds = (time.perf_counter() - began) / steps if began else None
    run.epochs += 1
    return torch.stack(losses).mean().item(), seconds


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], amp: autocast) -> tuple[float, float]:
    """Top-1 and top-5 accuracy."""
    model.eval()
    counts = []
    for images, labels in tqdm(batches, "evaluation", leave=False):
        with amp:
            logits = model(images)
        named = logits.float().topk(min(5, logits.shape[1])).indices == labels[:, None]
        counts.append(torch.stack([named[:, 0].sum(), named.sum(), (labels != NO_LABEL).sum()]))
    first, five, all_ = torch.stack(counts).sum(0).tolist()
    return first / all_, five / all_


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"expected flags only, got {argv[1:]}")
    if (DATA_DIR.value is None) == (not FAKE_DATA.value):
        raise app.UsageError("expected either --data-dir=FOLDER or --fake-data")
    torch.manual_seed(SEED.value)
    device = xla_device()
    batch, side = BATCH_SIZE.value, IMAGE_SIZE.value
    order: Order | None = None
    if FAKE_DATA.value:
        classes, steps = 1000, STEPS.value
        batches: Any = Fake(batch, side, steps, device)
    else:
        parts = [
            Images(Path(DATA_DIR.value or "") / part, side, part == "train", SEED.value) for part in ("train", "val")
        ]
        if parts[0].classes != parts[1].classes:
            raise app.UsageError(f"--data-dir: train has the classes {parts[0].classes}, val has {parts[1].classes}")
        classes, steps = len(parts[0].classes), len(parts[0]) // batch
        if not steps:
            raise app.UsageError(f"--batch-size={batch} is more than the {len(parts[0])} training images")
        order = Order(parts[0])
        batches = DeviceLoader(loader_of(parts[0], order, batch, WORKERS.value), device)
        held_out = DeviceLoader(Padded(loader_of(parts[1], Order(parts[1]), batch, WORKERS.value), batch), device)
    model = resnet([int(count) for count in BLOCKS.value], WIDTH.value, classes).to(device)
    lr = LR.value or 0.1 * batch / 256
    optimizer = syncfree.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    total, warm = EPOCHS.value * steps, min(5, EPOCHS.value) * steps / 2
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, 1.0) * 0.5 * (1 + math.cos(math.pi * step / total))
    )
    low = LOW[PRECISION.value]
    amp = autocast(device, dtype=low, enabled=low is not None, policy=POLICY.value)
    run = Run(model, optimizer, schedule, GradScaler(device.type, enabled=PRECISION.value == "fp16"))
    if CHECKPOINT.value is not None and Path(CHECKPOINT.value).exists():
        run.load(CHECKPOINT.value)
    results: dict[str, Any] = {"precision": PRECISION.value, "losses": []}
    step = make_step(run, amp)
    log = common.Log(LOG_DIR.value)
    while run.epochs < (STOP_AFTER.value or EPOCHS.value):
        if order is not None:
            order.epoch = run.epochs
        loss, seconds = train_epoch(run, step, batches, log)
        results["losses"].append(loss)
        results["images_per_second"] = batch / seconds if seconds else None
        if order is not None:
            results["top1"], results["top5"] = evaluate(model, held_out, amp)
        print(f"epoch {run.epochs}: " + ", ".join(f"{k} {v:.4g}" for k, v in results.items() if isinstance(v, float)))
        if CHECKPOINT.value is not None:
            run.save(CHECKPOINT.value)
    log.close()
    kind = f"{device} ({xm.xla_device_hw(device)})"
    common.show(f"ResNet, {classes} classes, {run.epochs} epochs of {steps} steps, {kind}", results, JSON.value)


if __name__ == "__main__":
    common.run(main)
