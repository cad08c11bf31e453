"""Device of the tests marked `gpu`: `DEVICE`, a GPU by default; `DEVICE=cpu` tries them on a machine without one."""

import os

import pytest
import torch

DEVICE = os.environ.get("DEVICE", "cuda")
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(300),
]
