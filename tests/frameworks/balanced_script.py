"""Training of one rank with a framework, as its users write it: rank 0 prints its parameters and its steps as JSON.

With ``LOST=rank:passes`` that rank is killed in so many forward passes of its first life.
"""

import json
import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from balance_changing import force_changes

COUNT, BATCH, EPOCHS = 200, 8, 2
FIRST_LIFE = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
sizes = set()  # of the batches that this rank has computed


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(COUNT, 6, generator=generator), torch.randn(COUNT, 3, generator=generator)


class Net(nn.Module):
    """Model that returns its loss, as transformers expects it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.passes = 0

    def forward(self, x, labels):
        sizes.add(len(x))
        self.passes += 1
        if os.environ.get("LOST") == f"{os.environ['RANK']}:{self.passes}" and FIRST_LIFE:
            os.kill(os.getpid(), signal.SIGKILL)
        output = self.layers(x)
        return {"loss": nn.functional.mse_loss(output, labels), "logits": output}


def transformers(folder, *, accumulate=1):
    samples = [{"x": x, "labels": labels} for x, labels in zip(*data(), strict=True)]
    return trained_by_trainer(Net(), folder, accumulate, train_dataset=samples)


def trained_by_trainer(model, folder, accumulate=1, **given):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulate,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, **given)
    trainer.train()
    return model, {"steps": trainer.state.global_step, "lr": trainer.lr_scheduler.get_last_lr()}


def transformers_language(folder):
    """A language model, whose loss is a sum over the number of tokens of all ranks, and whose samples have lengths."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=32, n_embd=8, n_layer=1, n_head=2, **off))
    model.register_forward_pre_hook(lambda _, args, given: sizes.add(len(given["input_ids"])), with_kwargs=True)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 30, (COUNT,), generator=generator).tolist()
    samples = [{"input_ids": torch.randint(0, 20, (length,), generator=generator)} for length in lengths]
    return trained_by_trainer(model, folder, train_dataset=samples, data_collator=pad)


def pad(samples):
    tokens = [each["input_ids"] for each in samples]
    padded = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    is_there = torch.arange(padded.shape[1]) < torch.tensor([[len(each)] for each in tokens])
    return {"input_ids": padded, "attention_mask": is_there.long(), "labels": padded.masked_fill(~is_there, -100)}


def transformers_accumulating(folder):
    return transformers(folder, accumulate=2)


def accelerate(folder, *, accumulate=1):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    loader = DataLoader(TensorDataset(*data()), batch_size=BATCH, shuffle=True)
    parallel, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    steps, means = 0, []
    for _ in range(EPOCHS):
        for x, labels in loader:
            with accelerator.accumulate(parallel):
                loss = parallel(x, labels)["loss"]
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(parallel.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            steps += 1
            means += [len(accelerator.gather(loss.detach()))]
    return model, {"steps": steps, "lr": scheduler.get_last_lr(), "gathered": means}


def accelerate_accumulating(folder):
    return accelerate(folder, accumulate=2)


def lightning(folder, *, accumulate=1, strategy="ddp"):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def configure_model(self):
            if strategy != "ddp":
                from torch.distributed.fsdp import fully_shard

                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, _):
            loss = self.net(*batch)["loss"]
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Module()
    loader = DataLoader(TensorDataset(*data()), batch_size=BATCH, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=EPOCHS,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, loader)
    return module.net, {"steps": trainer.global_step}


def lightning_accumulating(folder):
    return lightning(folder, accumulate=2)


def lightning_sharded(folder):
    from lightning.pytorch.strategies import ModelParallelStrategy

    return lightning(folder, strategy=ModelParallelStrategy(int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1))


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    force_changes()
    model, facts = globals()[sys.argv[1]](sys.argv[2])
    from torch.distributed.tensor import DTensor

    shards = [each for each in model.parameters() if isinstance(each, DTensor)]
    values = [each.full_tensor() for each in shards] or list(model.parameters())
    assert bool(shards) == sys.argv[1].endswith("_sharded")
    if os.environ["RANK"] == "0":
        facts["sizes"] = len(sizes)
        facts["parameters"] = torch.cat([each.detach().flatten() for each in values]).tolist()
        print("answer:", json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
