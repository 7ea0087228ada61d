"""A small Llama of Hugging Face's transformers, made from a config, that learns to sort letters."""

import random
from typing import Any

from datasets import Dataset, IterableDataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

from midstride.engine import DataModule, TrainingModule

__all__ = ["LanguageModel", "SortedLetters"]

disable_progress_bars()
WORDS = ["<pad>", ">", *"abcdefghijklmnop"]


class LanguageModel(TrainingModule):
    """A causal language model, trained on its own loss.

    Args:
        lr: the highest learning rate.
        gradient_checkpointing: compute activations again in backward instead of keeping them.
        frozen: names of parts of the model that are not trained.
    """

    def __init__(self, lr: float = 3e-3, gradient_checkpointing: bool = False, frozen: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.lr = lr
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=len(WORDS), attention_dropout=0.1, pad_token_id=0, **sizes)
        self.model = AutoModelForCausalLM.from_config(config)
        for name in frozen:
            self.model.get_submodule(name).requires_grad_(False)
        if gradient_checkpointing:
            self.model.gradient_checkpointing_enable()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the model's loss, which is Hugging Face's."""
        loss = self.model(**batch).loss
        self.log("train/loss", loss, on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss on letters that training has not seen."""
        self.log("val/loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return AdamW with Hugging Face's cosine schedule, over what is trained."""
        optimizer = AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)
        steps = self.trainer.estimated_stepping_batches
        scheduler = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class SortedLetters(DataModule):
    """Lines such as "d b a > a b d", tokenized.

    Args:
        lines: to train on.
        batch_size: lines in one process's batch.
        streaming: read a stream of `datasets`, shuffled in a buffer, instead of rows by their number.
        mlm: hide random words, as for BERT, instead of predicting the next one; the collator draws which.
    """

    def __init__(self, lines: int = 512, batch_size: int = 16, streaming: bool = False, mlm: bool = False) -> None:
        super().__init__()
        self.lines, self.batch_size, self.streaming = lines, batch_size, streaming
        tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=">"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", mask_token=">")
        self.collate = DataCollatorForLanguageModeling(self.tokenizer, mlm=mlm)

    def rows(self, lines: int, seed: int) -> Dataset:
        """Return so many lines as token ids."""
        draw = random.Random(seed)
        drawn = [draw.sample(WORDS[2:], draw.randint(2, 6)) for _ in range(lines)]
        text = {"text": [" ".join([*letters, ">", *sorted(letters)]) for letters in drawn]}
        return Dataset.from_dict(text).map(lambda row: self.tokenizer(row["text"]), remove_columns="text")

    def loader(self, data: Dataset | IterableDataset, shuffle: bool) -> DataLoader[Any]:
        """Return batches of what was tokenized, padded to the longest of each."""
        return DataLoader(data, self.batch_size, shuffle=shuffle, collate_fn=self.collate)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return what is trained on."""
        rows = self.rows(self.lines, seed=1)
        if self.streaming:
            return self.loader(rows.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=64), shuffle=False)
        return self.loader(rows, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return lines of their own."""
        return self.loader(self.rows(64, seed=2), shuffle=False)
