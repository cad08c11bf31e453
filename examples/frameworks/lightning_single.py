"""Training with Lightning in one process; `lightning_attached.py` is the same on the ranks of torchrun."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sum(dim=1, keepdim=True))


class Regression(LightningModule):
    """Network with one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("loss", self.training_step(batch), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


trainer = Trainer(
    accelerator="cpu",
    max_epochs=4,
    default_root_dir="runs/lightning",
)
trainer.fit(Regression(), DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=64))
if trainer.is_global_zero:
    print(f"loss {trainer.callback_metrics['loss']:.3f}")
