import pytest
import torch
from hypothesis import settings

# A busy machine is no failure, and what was not changed fails today if it failed yesterday: `make explore` tries new
# examples.
settings.register_profile("paceline", deadline=None, derandomize=True)
settings.register_profile("exploring", deadline=None, max_examples=300)
settings.load_profile("paceline")

# The test processes already share the cores; more threads in each only wait for one another.
torch.set_num_threads(1)

pytest.register_assert_rewrite("coordinator_harness")
