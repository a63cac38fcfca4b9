"""Collators of transformers pad to few lengths, and the results stay the same."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is ever fetched
pytest.importorskip("accelerate", reason="the extra `huggingface`")
transformers = pytest.importorskip("transformers", reason="the extra `huggingface`")
tokenizers = pytest.importorskip("tokenizers", reason="the extra `huggingface`")

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from transformers import (  # noqa: E402
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

import xla_amp  # noqa: E402
from xla_amp.integrations import huggingface  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("huggingface_enabled")]

WORDS = [f"w{number}" for number in range(40)]
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}


class NoMaskTokenizer(transformers.PreTrainedTokenizerFast):  # type: ignore[misc]
    """Makes no attention mask, as the tokenizer of FNet."""

    model_input_names: ClassVar = ["input_ids"]


def tokenizer(kind: Any = transformers.PreTrainedTokenizerFast, limit: int = 100, **options: Any) -> Any:
    vocabulary = {word: number for number, word in enumerate([*SPECIAL.values(), *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return kind(tokenizer_object=made, model_max_length=limit, **SPECIAL, **options)


def test_texts_that_a_tokenizer_pads_stay() -> None:
    """A prompt keeps its end at the end: `generate` goes on there."""
    assert tokenizer()([text(5), text(20)], padding=True, return_tensors="pt")["input_ids"].shape == (2, 20)


def text(length: int, seed: int = 0) -> str:
    chosen = random.Random(seed * 1000 + length)
    return " ".join(chosen.choice(WORDS) for _ in range(length))


def examples(*lengths: int, made: Any = None) -> list[dict[str, Any]]:
    made = made or tokenizer()
    return [dict(made(text(length))) for length in lengths]


@pytest.fixture(autouse=True)
def _no_state() -> Iterator[None]:
    AcceleratorState._reset_state(True)
    huggingface.enable()
    yield
    AcceleratorState._reset_state(True)
    huggingface.enable()


@pytest.mark.parametrize(
    ("length", "limits", "expected"),
    [
        (1, (), 16),
        (16, (), 16),
        (17, (), 32),
        (32, (), 32),
        (33, (), 48),
        (49, (), 64),
        (97, (128,), 128),
        (97, (100,), 100),
        (97, (None, 110, 120), 110),
        (97, (50,), 128),  # a limit that the data does not keep
        (1000, (), 1024),
    ],
)
def test_lengths(length: int, limits: tuple[int | None, ...], expected: int) -> None:
    assert huggingface.bucket(length, *limits) == expected


# ---- what is padded, and what is not ---------------------------------------------------------------------------------


def test_examples_are_padded_with_their_masks_and_types() -> None:
    rows = [{**row, "token_type_ids": [1] * len(row["input_ids"])} for row in examples(5, 20)]
    batch = DataCollatorWithPadding(tokenizer())(rows)
    assert {name: tuple(x.shape) for name, x in batch.items()} == dict.fromkeys(rows[0], (2, 32))
    assert batch["attention_mask"].sum(1).tolist() == [5, 20]
    assert batch["input_ids"][0, :5].tolist() == rows[0]["input_ids"]
    assert set(batch["input_ids"][0, 5:].tolist()) == {0}


@pytest.mark.parametrize("kind", [list, torch.tensor, lambda x: torch.tensor(x).numpy()])
def test_labels_of_sequence_to_sequence_have_their_own_length(kind: Callable[[list[int]], Any]) -> None:
    rows = [{**row, "labels": kind([3] * n)} for row, n in zip(examples(5, 20), (30, 40), strict=True)]
    batch = DataCollatorForSeq2Seq(tokenizer(), model=t5())(rows)
    assert batch["input_ids"].shape == (2, 32)
    assert batch["labels"].shape == batch["decoder_input_ids"].shape == (2, 48)
    assert batch["labels"].dtype is torch.int64
    assert batch["labels"][0].tolist() == [3] * 30 + [-100] * 18
    assert len(rows[0]["labels"]) == 30  # the data set keeps its rows


def test_the_limits_of_model_and_collator_hold() -> None:
    made = tokenizer(limit=50)
    assert DataCollatorWithPadding(made)(examples(40, 49))["input_ids"].shape == (2, 50)
    assert DataCollatorWithPadding(made, max_length=49)(examples(40, 49))["input_ids"].shape == (2, 49)


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({"padding": "max_length"}, 100),
        ({"padding": "max_length", "max_length": 30}, 30),
        ({"pad_to_multiple_of": 7}, 21),
    ],
    ids=str,
)
def test_what_the_user_chose_stays(options: dict[str, Any], length: int) -> None:
    assert DataCollatorWithPadding(tokenizer(), **options)(examples(5, 20))["input_ids"].shape == (2, length)
    rows = [{**row, "labels": row["input_ids"]} for row in examples(5, 20)]
    labels = DataCollatorForSeq2Seq(tokenizer(), **options)(rows)["labels"]
    assert labels.shape[1] == (20 if options == {"padding": "max_length"} else length)  # as transformers has it


@pytest.mark.parametrize(
    ("kind", "options"),
    [(transformers.PreTrainedTokenizerFast, {"padding_side": "left"}), (NoMaskTokenizer, {})],
    ids=["left", "no mask"],
)
def test_padding_that_could_change_results_stays(kind: Any, options: dict[str, Any]) -> None:
    made = tokenizer(kind, **options)
    assert DataCollatorWithPadding(made)(examples(5, 20, made=made))["input_ids"].shape == (2, 20)
    if kind is not NoMaskTokenizer:
        rows = [{**row, "labels": row["input_ids"]} for row in examples(5, 20, made=made)]
        assert DataCollatorForSeq2Seq(made)(rows)["labels"].shape == (2, 20)


def test_an_option_turns_it_off() -> None:
    huggingface.enable(pad_to_buckets=False)
    assert DataCollatorWithPadding(tokenizer())(examples(5, 20))["input_ids"].shape == (2, 20)
    rows = [{**row, "labels": row["input_ids"]} for row in examples(5, 20)]
    assert DataCollatorForSeq2Seq(tokenizer())(rows)["labels"].shape == (2, 20)


def test_a_training_on_the_cpu_pads_as_ever() -> None:
    Accelerator(cpu=True)
    assert DataCollatorWithPadding(tokenizer())(examples(5, 20))["input_ids"].shape == (2, 20)


# ---- the results are the same ----------------------------------------------------------------------------------------

SIZE = {"vocab_size": 43, "pad_token_id": 0}


def bert(head: str) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(**sizes, **SIZE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return getattr(transformers, f"BertFor{head}")(config)


def gpt() -> Any:
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 128}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts, **SIZE))


def llama() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **SIZE))


def t5() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **SIZE, dropout_rate=0.0))


def for_class(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "label": 1}


def for_tokens(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "labels": [token % 2 for token in row["input_ids"]]}


def for_text(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "labels": row["input_ids"][3:]}


CASES = {
    "classification": (lambda: bert("SequenceClassification"), DataCollatorWithPadding, {}, for_class),
    "tokens": (lambda: bert("TokenClassification"), DataCollatorForTokenClassification, {}, for_tokens),
    "gpt": (gpt, DataCollatorForLanguageModeling, {"mlm": False}, dict),
    "llama": (llama, DataCollatorForLanguageModeling, {"mlm": False}, dict),
    "t5": (t5, DataCollatorForSeq2Seq, {}, for_text),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_the_batch_without_buckets(case: str) -> None:
    make, collator, options, row = CASES[case]
    made = tokenizer()
    rows = [row(example) for example in examples(5, 17, 27, made=made)]
    found = []
    for pads in (False, True):
        huggingface.enable(pad_to_buckets=pads)
        torch.manual_seed(0)
        model = make().double()
        batch = collator(made, **options)(rows)
        assert batch["input_ids"].shape == (3, 32 if pads else 27)
        loss = model(**batch).loss
        loss.backward()
        found.append((loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]))
    (expected, gradients), (loss, padded) = found
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)  # transformers computes some losses in float32
    torch.testing.assert_close(padded, gradients, rtol=1e-5, atol=1e-7)
    assert max(float(g.abs().max()) for g in gradients) > 1e-3


# ---- programs --------------------------------------------------------------------------------------------------------


def test_a_training_and_its_evaluation_have_few_programs(tmp_path: Path) -> None:
    """24 batches of a training and 12 of an evaluation; the longest rows of batches have some 16 lengths."""
    made, chosen, shapes = tokenizer(), random.Random(0), set()

    def collate(rows: list[Any]) -> Any:
        batch = DataCollatorWithPadding(made)(rows)
        shapes.add(batch["input_ids"].shape)
        return batch

    rows = [{**examples(chosen.randint(6, 30), made=made)[0], "label": n % 2} for n in range(144)]
    options = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "logging_steps": 10}
    arguments = TrainingArguments(tmp_path, report_to=[], disable_tqdm=True, num_train_epochs=1, **options)
    torch.manual_seed(0)
    model = bert("SequenceClassification")
    trainer = Trainer(model, arguments, collate, train_dataset=rows[:96], eval_dataset=rows[96:])
    xla_amp.sync(wait=True)
    xla_amp.metrics.reset()
    trainer.train()
    trained = xla_amp.metrics()["compilations"]
    # Beside them: the mean of the losses that is logged, their reset, and after an earlier training the first step.
    assert len(shapes) <= trained <= len(shapes) + 4
    shapes.clear()
    trainer.evaluate()
    assert xla_amp.metrics()["compilations"] == trained + len(shapes) <= 10
