import torch

# The test processes already share the cores; more threads in each only wait for one another.
torch.set_num_threads(1)
