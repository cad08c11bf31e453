"""User's script: an attached loop whose rank 0 scrapes the metrics in one of its epochs.

Argument: port, protocol. Rank 0 prints the page.
"""

import os
import sys
import urllib.request

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl


def main(port, protocol):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 500), torch.randn(64, 1))
    model = nn.Linear(500, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=8)
    settings = {"cluster": "torchrun(share_memory=false)"} if protocol == "k_async(k=1)" else {}  # it counts bytes
    run = pl.attach(model, optimizer, loader, protocol=protocol, metrics=port, **settings)
    for epoch in run.epochs(5):
        for x, y in run.loader:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
        if epoch == 3 and os.environ["RANK"] == "0":
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
                print(page.read().decode())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
