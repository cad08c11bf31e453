"""The same loop, attached: paceline run --nproc-per-node 3 examples/plain_loop/attached.py."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

torch.manual_seed(0)
points = torch.randn(4096, 16)
data = TensorDataset(points, (points[:, 0] * points[:, 1] > 0).long())
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 320)
loader = DataLoader(data, batch_size=64, shuffle=True)
run = pl.attach(model, optimizer, loader, protocol="balanced(m=8)", scheduler=scheduler)

for epoch in run.epochs(10):
    for x, y in run.loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
    print(f"epoch {epoch}: loss {loss.item():.3f}")
