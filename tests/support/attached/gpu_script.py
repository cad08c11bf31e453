"""User's script: an attached loop whose model is on the device of `DEVICE`.

Arguments: protocol, cluster, and what the loop has beside a plain one: nothing, bf16, scaler, compiled, clipped, or a
stream of its own, in which its gradients are late.
"""

import os
import sys
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

DEVICE = os.environ.get("DEVICE", "cuda")
BATCH, STEPS = 4, 8
CYCLES = 20_000_000  # of a kernel that waits, about 10 ms


def main(protocol, cluster, kind):
    generator = torch.Generator().manual_seed(0)
    samples = BATCH * STEPS * int(os.environ["WORLD_SIZE"])
    data = TensorDataset(
        torch.randn(samples, 5, generator=generator, dtype=torch.float64),
        torch.randint(3, [samples], generator=generator),
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double().to(DEVICE)
    if kind == "compiled":
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(DEVICE, enabled=kind == "scaler")
    context = torch.autocast(DEVICE, torch.bfloat16) if kind == "bf16" else nullcontext()
    is_on_gpu = DEVICE != "cpu"
    own = torch.cuda.stream(torch.cuda.Stream()) if kind == "streams" and is_on_gpu else nullcontext()
    run = pl.attach(model, optimizer, DataLoader(data, BATCH), protocol=protocol, cluster=cluster, seed=0)
    with own:
        for _ in run.epochs(1):
            for x, y in run.loader:
                optimizer.zero_grad()
                with context:
                    loss = cross_entropy(model(x.to(DEVICE)), y.to(DEVICE))
                scaler.scale(loss).backward()
                if kind == "streams" and is_on_gpu:
                    torch.cuda._sleep(CYCLES)
                    for each in model.parameters():
                        each.grad.mul_(1.0)  # so that it is complete after the kernel that waits
                if kind == "clipped":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
    parameters = torch.cat([each.detach().cpu().reshape(-1) for each in model.parameters()])
    print(f"ANSWER {os.environ['RANK']} {parameters.numpy().tobytes().hex()}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
