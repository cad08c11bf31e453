"""Training of one rank, in a plain loop or with a framework: prints its parameters, its steps and its samples."""

import json
import os
import sys
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

SAMPLES, BATCH, EPOCHS, LR = 64, 4, 3, 0.05
RANK = int(os.environ.get("RANK", "0"))
used = []  # samples of this rank's steps


class Numbers(Dataset):
    """Samples with their numbers."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        x = torch.randn(4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        return {"x": x, "labels": x.sum(), "number": number}


class Net(nn.Module):
    """Model that returns its loss, as the frameworks expect it."""

    def __init__(self, slow_s):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.slow_s = slow_s

    def forward(self, x, labels, number):
        output = self.layers(x).squeeze(-1)
        if self.training:
            used.extend(number.tolist())
            time.sleep(self.slow_s)
        return {"loss": nn.functional.mse_loss(output, labels), "logits": output}


def main():
    framework, settings = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    model = Net(0.1 if settings.get("slow_rank") == RANK else 0.0)
    facts = FRAMEWORKS[framework](model, settings)
    parameters = torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()
    facts = {"rank": RANK, "parameters": parameters, "samples": used, **facts}
    print(f"answer: {json.dumps(facts)}\n", end="", flush=True)  # one write, as other ranks print too
    os._exit(0)  # the end of a gloo group may wait for processes that have ended


def parts_of(model):
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9), DataLoader(Numbers(), batch_size=BATCH)


def plain(model, settings):
    import paceline as pl

    optimizer, loader = parts_of(model)
    steps, accumulate = 0, settings.get("accumulate", 1)
    run = pl.attach(model, optimizer, loader, **common(settings), accumulate=accumulate)
    for _ in run.epochs(EPOCHS):
        for number, batch in enumerate(run.loader, start=1):
            (model(**batch)["loss"] / accumulate).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
            if steps == settings.get("stop_after") and RANK == 0:
                run.stop()
                break
    return {"steps": steps}


def common(settings):
    return {
        "protocol": settings.get("protocol", "bsp"),
        "clip_norm": settings.get("clip_norm"),
        **folder_of(settings),
    }


def folder_of(settings):
    """Return the argument of attach that names the folder of a run, to record it or to resume it."""
    return {name: settings[name] for name in ("out", "resume") if name in settings}


def ddp(model, settings):
    torch.distributed.init_process_group("gloo")
    optimizer, _ = parts_of(model)
    parallel, data = DistributedDataParallel(model), Numbers()
    ranks = torch.distributed.get_world_size()
    for _ in range(EPOCHS):
        for first in range(RANK * BATCH, SAMPLES, ranks * BATCH):
            batch = torch.utils.data.default_collate([data[first + i] for i in range(BATCH)])
            optimizer.zero_grad()
            parallel(**batch)["loss"].backward()
            optimizer.step()
    return {"steps": EPOCHS * SAMPLES // BATCH // ranks}


def accelerate(model, settings):
    from paceline.integrations.accelerate import PacelineAccelerator

    optimizer, loader = parts_of(model)
    accelerator = PacelineAccelerator(
        cpu=True,
        protocol=settings.get("protocol", "bsp"),
        stop=f"epochs={EPOCHS}",
        clip_norm=settings.get("clip_norm"),
        gradient_accumulation_steps=settings.get("accumulate", 1),
        attach_options=folder_of(settings),
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
                steps += accelerator.sync_gradients
            if steps == settings.get("stop_after") and RANK == 0:
                break
        if steps == settings.get("stop_after") and RANK == 0:
            break
    accelerator.end_training()
    return {"steps": steps}


def transformers(model, settings):
    from transformers import TrainerCallback

    from paceline.integrations.transformers import PacelineArguments, PacelineTrainer

    class StopEarly(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop |= state.global_step == settings.get("stop_after") and RANK == 0

    class Trainer(PacelineTrainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(Numbers())

    schedule = "epoch" if settings.get("evaluates") else "no"
    arguments = PacelineArguments(
        output_dir=settings.get("folder", "runs/never-written"),
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        gradient_accumulation_steps=settings.get("accumulate", 1),
        max_grad_norm=settings.get("clip_norm") or 0.0,
        lr_scheduler_type="constant",
        use_cpu=True,
        eval_strategy=schedule,
        save_strategy=schedule,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        protocol=settings.get("protocol", "bsp"),
        run_folder=settings.get("resume", settings.get("out")),
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Numbers(),
        eval_dataset=Numbers(),
        optimizers=(parts_of(model)[0], None),
        callbacks=[StopEarly()],
    )
    trainer.train(resume_from_checkpoint="resume" in settings)
    evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return {"steps": trainer.state.global_step, "evaluations": evaluations}


def lightning(model, settings):
    import lightning.pytorch as framework

    from paceline.integrations.lightning import PacelineStrategy

    evaluations = []

    class Module(framework.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch):
            return self.net(**batch)["loss"]

        def validation_step(self, batch):
            self.log("eval_loss", self.net(**batch)["loss"])

        def on_validation_epoch_end(self):
            evaluations.append(self.trainer.callback_metrics["eval_loss"].item())

        def configure_optimizers(self):
            return parts_of(model)[0]

    class StopEarly(framework.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop |= trainer.global_step == settings.get("stop_after") and RANK == 0

    callbacks = [StopEarly()]
    if settings.get("evaluates"):
        folder = settings["folder"]
        callbacks += [framework.callbacks.ModelCheckpoint(folder, "checkpoint-{epoch}", "eval_loss", save_top_k=-1)]
    trainer = framework.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        strategy=PacelineStrategy(settings.get("protocol", "bsp"), **folder_of(settings)),
        gradient_clip_val=settings.get("clip_norm"),
        accumulate_grad_batches=settings.get("accumulate", 1),
        enable_checkpointing=len(callbacks) > 1,
        limit_val_batches=1.0 if settings.get("evaluates") else 0,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    _, loader = parts_of(model)
    trainer.fit(Module(), loader, DataLoader(Numbers(), batch_size=BATCH))
    return {"steps": trainer.global_step, "evaluations": evaluations}


FRAMEWORKS = {
    "plain": plain,
    "ddp": ddp,
    "accelerate": accelerate,
    "transformers": transformers,
    "lightning": lightning,
}

if __name__ == "__main__":
    main()
