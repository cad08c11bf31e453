"""User's script: an attached loop that counts how often each sample is used, with scripted faults.

Argument: settings as JSON. `faults` maps a rank to a step, and to a signal that it sends in it, to itself or to the
server, or to "raise". The other ranks wait in their step `free_steps` for the file `go`, which a rank that was started
again makes in its first step. Each rank prints its answer as one line of JSON.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline as pl
from machine_speed import scaled

SAMPLES, BATCH, EPOCHS = 50, 4, 3
LIMIT_S = scaled(60)


class Counts(nn.Module):
    """Parameter whose gradient is the number of times that each sample is in the batch."""

    def __init__(self):
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))


def main(settings):
    rank = os.environ["RANK"]
    model = Counts()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=settings.get("momentum", 0.0))
    if settings.get("first_state"):
        optimizer.state[model.counts]["momentum_buffer"] = torch.full([SAMPLES], settings["first_state"]).double()
    loader = DataLoader(range(SAMPLES), BATCH, shuffle=True, num_workers=settings.get("num_workers", 0))
    run = pl.attach(model, optimizer, loader, protocol=settings["protocol"], **settings.get("attach", {}))
    fault = settings["faults"].get(rank)
    is_first = not Path(f"{rank} began").exists()
    Path(f"{rank} began").touch()
    step = 0
    for _ in run.epochs(EPOCHS):
        for numbers in run.loader:
            step += 1
            (-model.counts[numbers].sum()).backward()
            if is_first and fault is not None and step == fault[0]:
                Path(f"{rank} fired").touch()
                if fault[1] == "raise":
                    raise RuntimeError("a scripted error")
                os.kill(server() if fault[2:] else os.getpid(), signal.Signals[fault[1]])
            if fault is None and step == settings.get("free_steps"):
                wait_for(Path("go"))
            optimizer.step()
            if not is_first:
                Path("go").touch()
    answer = {"rank": rank, "steps": step, "counts": model.counts.tolist(), "stopped_by": run.stopped_by}
    answer["is_default"] = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    answer["state"] = {key: value.tolist() for each in optimizer.state.values() for key, value in each.items()}
    os.write(1, f"ANSWER {json.dumps(answer)}\n".encode())


def server():
    """Return the process number of the server, which rank 0 has started."""
    [found] = [each for each in psutil.Process().children() if "paceline.user_loop.server" in each.cmdline()]
    return found.pid


def wait_for(path):
    deadline_s = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    os._exit(0)
