"""A step of a GPT as StableHLO for 16 devices that are not here; test_many_hosts.py compiles it for them."""

from __future__ import annotations

import math

import torch
import transformers
from other_platform import text_for

import xla_amp

CONFIG = transformers.GPT2Config(
    n_layer=1, n_embd=128, n_head=4, vocab_size=512, n_positions=64, bos_token_id=0, resid_pdrop=0, embd_pdrop=0,
    attn_pdrop=0,
)  # fmt: skip


def texts(rank, world):
    """By platform, and the elements of the parameters that are split."""
    device, mesh = xla_amp.xla_device(), xla_amp.make_mesh({"data": 16})
    model = transformers.GPT2LMHeadModel(CONFIG)
    layout = xla_amp.shard(model, mesh, "fsdp")
    split = sum(math.prod(each.shape) for each in layout.parameters if "data" in each.spec)
    optimizer = xla_amp.syncfree.AdamW(model.parameters())
    tokens = torch.zeros(16, CONFIG.n_positions, dtype=torch.int64).to(device)
    for _ in range(2):
        with xla_amp.autocast(device, dtype=torch.bfloat16, policy="tpu"):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
        xla_amp.sync()
    return {"gpu": text_for("gpu"), "tpu": text_for("tpu"), "split": split}
