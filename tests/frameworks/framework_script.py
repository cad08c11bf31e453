"""Training of one rank, in a plain loop or with a framework: prints its parameters, its steps and its samples."""

import contextlib
import json
import math
import os
import sys
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import paceline as pl

SAMPLES, BATCH, EPOCHS, LR, DECAY = 64, 4, 3, 0.05, 0.9
SCALE = 1024.0  # of float16 losses, at which none overflows by itself
RANK = int(os.environ.get("RANK", "0"))
used = []  # samples of this rank's steps


class Numbers(Dataset):
    """Samples with their numbers."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        x = torch.randn(4, generator=torch.Generator().manual_seed(number), dtype=self.dtype)
        return {"x": x, "labels": x.sum(), "number": number}


class Net(nn.Module):
    """Model that returns its loss, as the frameworks expect it."""

    def __init__(self, settings):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype_of(settings))
        self.slow_s = 0.1 if settings.get("slow_rank") == RANK else 0.0
        self.evaluation_s = settings.get("evaluation_s", 0.0)
        self.overflow = settings.get("overflow")  # sample whose loss is not finite

    def forward(self, x, labels, number):
        output = self.layers(x).squeeze(-1)
        loss = nn.functional.mse_loss(output, labels)
        if self.training:
            time.sleep(self.slow_s)
            used.extend(number.tolist())
            if self.overflow in number.tolist():
                loss = loss * math.inf
        else:
            time.sleep(self.evaluation_s)
        return {"loss": loss, "logits": output}


def main():
    framework, settings = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    model = Net(settings)
    facts = FRAMEWORKS[framework](model, settings)
    parameters = torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()
    facts = {"rank": RANK, "parameters": parameters, "samples": used, **facts}
    print(f"answer: {json.dumps(facts)}\n", end="", flush=True)  # one write, as other ranks print too
    os._exit(0)  # the end of a gloo group may wait for processes that have ended


def dtype_of(settings):
    return torch.float32 if "mixed" in settings else torch.float64  # autocast leaves float64 as it is


def parts_of(model, settings):
    """Return optimizer, scheduler and loader."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY) if settings.get("schedule") else None
    return optimizer, scheduler, DataLoader(Numbers(dtype_of(settings)), batch_size=BATCH)


def lr_of(optimizer):
    return optimizer.param_groups[0]["lr"]


def common(settings):
    """Return the arguments of attach that are the same in every framework."""
    folder = {name: settings[name] for name in ("out", "resume") if name in settings}
    if "heartbeat_timeout_s" not in settings:
        return folder
    return {"cluster": f"torchrun(heartbeat_timeout_s={settings['heartbeat_timeout_s']})", **folder}


def plain(model, settings):
    optimizer, scheduler, loader = parts_of(model, settings)
    steps, accumulate, schedule = 0, settings.get("accumulate", 1), settings.get("schedule")
    scaler = torch.amp.GradScaler("cpu", SCALE, enabled=settings.get("mixed") == "fp16")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.get("mixed"))
    autocast = torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext()
    run = pl.attach(
        model,
        optimizer,
        loader,
        protocol=settings.get("protocol", "bsp"),
        clip_norm=settings.get("clip_norm"),
        accumulate=accumulate,
        scheduler=scheduler,
        **common(settings),
    )
    for _ in run.epochs(EPOCHS):
        for number, batch in enumerate(run.loader, start=1):
            with autocast:
                loss = model(**batch)["loss"] / accumulate
            scaler.scale(loss).backward()
            if number % accumulate == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                steps += 1
                if schedule == "step":
                    scheduler.step()
            if steps == settings.get("stop_after") and RANK == 0:
                run.stop()
                break
        if schedule == "epoch":
            scheduler.step()
    return {"steps": steps, "lr": lr_of(optimizer)}


def ddp(model, settings):
    torch.distributed.init_process_group("gloo")
    optimizer, _, _ = parts_of(model, settings)
    parallel, data = DistributedDataParallel(model), Numbers(dtype_of(settings))
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

    optimizer, scheduler, loader = parts_of(model, settings)
    accelerator = PacelineAccelerator(
        cpu=True,
        protocol=settings.get("protocol", "bsp"),
        stop=f"epochs={EPOCHS}",
        clip_norm=settings.get("clip_norm"),
        gradient_accumulation_steps=settings.get("accumulate", 1),
        mixed_precision=settings.get("mixed", "no"),
        step_scheduler_with_optimizer=settings.get("schedule") == "step",
        attach_options=common(settings),
    )
    objects = [model, optimizer, loader] + ([scheduler] if scheduler else [])
    model, optimizer, loader, *scheduler = accelerator.prepare(*objects)
    steps = 0
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                if settings.get("schedule") == "step":
                    scheduler[0].step()
                optimizer.zero_grad()
                steps += accelerator.sync_gradients
            if steps == settings.get("stop_after") and RANK == 0:
                accelerator.set_trigger()
            if accelerator.check_trigger():
                break
        else:
            if settings.get("schedule") == "epoch":
                scheduler[0].step()
            continue
        break
    accelerator.end_training()
    return {"steps": steps, "lr": lr_of(optimizer)}


def transformers(model, settings):
    from transformers import EarlyStoppingCallback, TrainerCallback

    from paceline.integrations.transformers import PacelineArguments, PacelineTrainer

    class StopEarly(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop |= state.global_step == settings.get("stop_after") and RANK == 0

    class Trainer(PacelineTrainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    options, times = common(settings), "epoch" if settings.get("evaluates") else "no"
    arguments = PacelineArguments(
        output_dir=settings.get("folder", "runs/never-written"),
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        gradient_accumulation_steps=settings.get("accumulate", 1),
        max_grad_norm=settings.get("clip_norm") or 0.0,
        bf16=settings.get("mixed") == "bf16",
        lr_scheduler_type="constant",
        use_cpu=True,
        eval_strategy=times,
        save_strategy=times,
        metric_for_best_model="loss",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        protocol=settings.get("protocol", "bsp"),
        run_folder=options.pop("resume", None) or options.pop("out", None),
        attach_options=options,
    )
    optimizer, scheduler, loader = parts_of(model, settings)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=loader.dataset,
        eval_dataset=loader.dataset,
        optimizers=(optimizer, scheduler),
        callbacks=[StopEarly()],
    )
    if settings.get("patience"):
        trainer.add_callback(EarlyStoppingCallback(settings["patience"], early_stopping_threshold=1e9))
    trainer.train(resume_from_checkpoint="resume" in settings)
    evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return {"steps": trainer.state.global_step, "evaluations": evaluations, "lr": lr_of(optimizer)}


def lightning(model, settings):
    import lightning.pytorch as framework
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from lightning.pytorch.plugins import MixedPrecision

    from paceline.integrations.lightning import PacelineStrategy

    evaluations = []
    optimizer, scheduler, loader = parts_of(model, settings)

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
            if scheduler is None:
                return optimizer
            return [optimizer], [{"scheduler": scheduler, "interval": settings["schedule"]}]

    class StopEarly(framework.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop |= trainer.global_step == settings.get("stop_after") and RANK == 0

    callbacks = [StopEarly()]
    if settings.get("folder"):
        callbacks.append(ModelCheckpoint(settings["folder"], "checkpoint-{epoch}", "eval_loss", save_top_k=-1))
    if settings.get("patience"):
        callbacks.append(EarlyStopping("eval_loss", patience=settings["patience"], min_delta=1e9))
    precision = {
        "bf16": {"precision": "bf16-mixed"},
        "fp16": {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", SCALE))]},
    }.get(settings.get("mixed"), {})
    trainer = framework.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        strategy=PacelineStrategy(settings.get("protocol", "bsp"), **common(settings)),
        gradient_clip_val=settings.get("clip_norm"),
        accumulate_grad_batches=settings.get("accumulate", 1),
        enable_checkpointing="folder" in settings,
        limit_val_batches=1.0 if settings.get("evaluates") else 0,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **precision,
    )
    trainer.fit(Module(), loader, DataLoader(loader.dataset, batch_size=BATCH))
    return {"steps": trainer.global_step, "evaluations": evaluations, "lr": lr_of(optimizer)}


FRAMEWORKS = {
    "plain": plain,
    "ddp": ddp,
    "accelerate": accelerate,
    "transformers": transformers,
    "lightning": lightning,
}

if __name__ == "__main__":
    main()
