import pytest
import torch
from hypothesis import settings

settings.register_profile("paceline", deadline=None)  # a busy machine is not a failure
settings.load_profile("paceline")

# The test processes already share the cores; more threads in each only wait for one another.
torch.set_num_threads(1)

pytest.register_assert_rewrite("contracts.harness")
