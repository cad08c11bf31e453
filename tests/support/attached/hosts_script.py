"""User's script: an attached loop whose hosts are workers; each rank prints its answer as one line of JSON."""

import json
import os
import sys

import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import paceline as pl
from loop_parts import loss_of, make_plain_network, numbered_data, sgd

BATCH, EPOCHS = 8, 2


def main(settings):
    model = make_plain_network()
    optimizer = sgd(model)
    scheduler = StepLR(optimizer, 2, 0.5)
    loader = DataLoader(numbered_data(), BATCH, shuffle=True, num_workers=settings.get("num_workers", 0))
    run = pl.attach(
        model,
        optimizer,
        loader,
        protocol=settings["protocol"],
        scheduler=scheduler,
        cluster="torchrun(workers=node)",
        out="run",
    )
    seen = []
    for _ in run.epochs(EPOCHS):
        for x, y in run.loader:
            seen.append([int(each) for each in y])
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            scheduler.step()
    answer = {
        "seen": seen,
        "parameters": torch.cat([each.detach().reshape(-1) for each in model.parameters()]).tolist(),
    }
    answer |= {"rates": [group["lr"] for group in optimizer.param_groups], "length": len(run.loader)}
    os.write(1, f"ANSWER {json.dumps(answer)}\n".encode())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    os._exit(0)
