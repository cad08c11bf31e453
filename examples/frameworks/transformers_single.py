"""Trainer of transformers in one process; `transformers_attached.py` is the same on the ranks of torchrun."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

LENGTH, WORDS = 32, 50


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards from a random number."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        first = int(torch.randint(WORDS, (), generator=torch.Generator().manual_seed(index)))
        words = (first + torch.arange(LENGTH)) % WORDS
        return {"input_ids": words, "labels": words}


model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2))
arguments = TrainingArguments(
    output_dir="runs/counting",
    per_device_train_batch_size=8,
    num_train_epochs=8,
    learning_rate=5e-3,
    use_cpu=True,
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(model=model, args=arguments, train_dataset=Counting(), eval_dataset=Counting())
trainer.train()
if trainer.is_world_process_zero():
    print(f"loss {trainer.evaluate()['eval_loss']:.3f}")
