"""Padding of transformers' tokenizers and collators to a few lengths, because each length is another program.

What pads to the longest row of a batch pads to a size of `xla_amp.pytorch.data.buckets.bucket_sizes` instead.  The
results stay the same where a mask excludes padding from attention, so padding without an attention mask is left alone.
Padding on the left is left alone, too: it moves a text to other positions, and the last of it predicts the first token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from xla_amp.pytorch.data import buckets


def bucket(length: int, *limits: int | None) -> int:
    """The length that `length` is padded to: at most the smallest of `limits` that is not less than `length`."""
    room = min((limit for limit in limits if limit is not None and limit >= length), default=None)
    size = next(size for size in buckets.bucket_sizes(2 * max(length, buckets.SHORTEST)) if size >= length)
    return size if room is None else min(size, room)


def _longest(padding: Any) -> bool:
    return padding is True or padding == "longest"


def _may_grow(tokenizer: Any, side: str | None, masked: bool | None) -> bool:
    """Whether more padding leaves the results of the tokenizer's model the same."""
    has_mask = "attention_mask" in tokenizer.model_input_names if masked is None else masked
    return has_mask and (side or tokenizer.padding_side) == "right"


def _lengths(name: str, inputs: Any) -> list[int]:
    """Lengths of the rows to pad, none where padding must stay as it is.

    A list has the examples of a data set, as a collator passes them.  A dict has the rows of texts, perhaps a prompt:
    rows that need no padding get none.
    """
    if isinstance(inputs, list | tuple):
        if not inputs or not isinstance(inputs[0], Mapping) or name not in inputs[0]:
            return []
        if getattr(inputs[0].get("attention_mask"), "ndim", 1) > 1:
            return []  # a mask of rows and columns is not padded
        return [len(example[name]) for example in inputs]
    rows = inputs.get(name, ())
    if len(rows) == 0 or not isinstance(rows[0], list | tuple):
        return []
    lengths = [len(row) for row in rows]
    return lengths if len(set(lengths)) > 1 else []


def pad_examples(
    wanted: Callable[[], bool],
    original: Any,
    self: Any,
    encoded_inputs: Any,
    padding: Any = True,
    max_length: int | None = None,
    pad_to_multiple_of: int | None = None,
    padding_side: str | None = None,
    return_attention_mask: bool | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``PreTrainedTokenizerBase.pad``, which collators and tokenizers in Python call."""
    chosen = pad_to_multiple_of is not None or not _longest(padding)
    if not chosen and wanted() and _may_grow(self, padding_side, return_attention_mask):
        lengths = _lengths(self.model_input_names[0], encoded_inputs)
        if lengths:
            pad_to_multiple_of = bucket(max(lengths), max_length, self.model_max_length)
    options = (padding, max_length, pad_to_multiple_of, padding_side, return_attention_mask)
    return original(self, encoded_inputs, *options, *args, **kwargs)


_OF_TOKENS = {
    "input_ids": "ids",
    "token_type_ids": "type_ids",
    "attention_mask": "attention_mask",
    "special_tokens_mask": "special_tokens_mask",
    "offset_mapping": "offsets",
    "length": "ids",
}
"""Entry of encoded texts -> the attribute of an encoding in Rust that it is made of."""


def encode_texts(wanted: Callable[[], bool], original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """``TokenizersBackend._encode_plus``, which pads in Rust."""
    chosen = kwargs.get("pad_to_multiple_of") is not None or not _longest(kwargs.get("padding_strategy"))
    may_grow = _may_grow(self, kwargs.get("padding_side"), kwargs.get("return_attention_mask"))
    if chosen or not wanted() or not may_grow or not _are_texts(kwargs):
        return original(self, *args, **kwargs)
    tensors = kwargs.pop("return_tensors", None)
    found = original(self, *args, **{**kwargs, "padding_strategy": "do_not_pad"})
    rows = found.encodings
    if rows is None:  # a chat, which `pad` pads
        return original(self, *args, **kwargs, return_tensors=tensors)
    lengths = [len(row.ids) for row in rows]
    if len(set(lengths)) > 1:
        size = bucket(max(lengths), kwargs.get("max_length"), self.model_max_length)
        for row in rows:
            row.pad(size, pad_id=self.pad_token_id, pad_type_id=self.pad_token_type_id, pad_token=self.pad_token)
        for name in found.keys() & _OF_TOKENS:
            values = [getattr(row, _OF_TOKENS[name]) for row in rows]
            found[name] = [len(x) for x in values] if name == "length" else values
    return found.convert_to_tensors(tensors)


def _are_texts(given: Mapping[str, Any]) -> bool:
    """Whether arguments of a tokenizer have several texts."""
    texts = given.get("text")
    if not isinstance(texts, list | tuple) or len(texts) < 2:
        return False
    return not given.get("is_split_into_words") or isinstance(texts[0], list | tuple)


def pad_labels(wanted: Callable[[], bool], original: Any, self: Any, features: Any, return_tensors: Any = None) -> Any:
    """``DataCollatorForSeq2Seq.__call__``, which pads labels to their own longest row."""
    name = "label" if "label" in features[0] else "labels"
    chosen = self.pad_to_multiple_of is not None or not _longest(self.padding)
    labels = [row.get(name) for row in features]
    if chosen or not wanted() or any(x is None for x in labels) or self.tokenizer.padding_side != "right":
        return original(self, features, return_tensors)
    room = bucket(max(len(x) for x in labels), self.max_length, self.tokenizer.model_max_length)
    padded = [_extended(row, room, self.label_pad_token_id) for row in labels]
    return original(self, [{**row, name: x} for row, x in zip(features, padded, strict=True)], return_tensors)


def _extended(row: Any, length: int, value: int) -> Any:
    rest = [value] * (length - len(row))
    if isinstance(row, torch.Tensor):
        return torch.cat([row, row.new_tensor(rest)])
    return [*row, *rest] if isinstance(row, list) else numpy.concatenate([row, numpy.array(rest, dtype=numpy.int64)])
