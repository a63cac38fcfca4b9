"""The model, the data and the log of the examples that train a small GPT-2 of transformers on bytes."""

from __future__ import annotations

from typing import Any

import common
import torch
import transformers

HEAD = 32
"""Channels of an attention head."""


def build(context: int, layers: int, width: int) -> transformers.GPT2LMHeadModel:
    """GPT-2 over bytes, with random weights."""
    config = transformers.GPT2Config(
        vocab_size=256,
        n_positions=context,
        n_embd=width,
        n_layer=layers,
        n_head=width // HEAD,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


class Recorder(transformers.TrainerCallback):
    """Gives a log what the Trainer logs of training steps."""

    def __init__(self, log: common.Log) -> None:
        self.log = log

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        """Called by the Trainer."""
        if "loss" in logs:
            self.log.add(state.global_step, logs)

    def on_train_end(self, *args: Any, **rest: Any) -> None:
        """Called by the Trainer."""
        self.log.close()


def pieces(text: bytes, context: int) -> list[dict[str, torch.Tensor]]:
    """Pieces of a text, each `context` bytes, that do not overlap, as a Trainer reads them."""
    count = len(text) // context
    rows = torch.frombuffer(bytearray(text[: count * context]), dtype=torch.uint8).view(count, context).long()
    return [{"input_ids": row, "labels": row} for row in rows]
