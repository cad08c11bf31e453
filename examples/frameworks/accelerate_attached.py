"""Loop with Accelerate on the ranks of torchrun; `accelerate_single.py` is that of one process."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.integrations.accelerate import PacelineAccelerator

x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(data, batch_size=16, shuffle=True)

accelerator = PacelineAccelerator(cpu=True, protocol="k_batch_async(k=2)", stop="epochs=4")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(4):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
accelerator.end_training()
if accelerator.is_main_process:
    print(f"loss {nn.functional.mse_loss(model(x), data.tensors[1]).item():.3f}")
