"""Processes that use optimizers without torch's compiler."""

import json
import subprocess
import sys

import pytest

OPTIMIZERS = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
STEPS = """
import json, torch

def steps(name):
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 7))
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        (parameter**3).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return parameter.tolist()
"""
WITHOUT = """
import sys
from paceline.worker.torch_utils import leave_out_compiler
leave_out_compiler()
found = {name: steps(name) for name in json.loads(sys.argv[1])}
print(json.dumps([found, "torch._dynamo" in sys.modules]))
"""


@pytest.mark.slow
def test_optimizers_make_the_same_steps_without_the_compiler():
    answer = subprocess.run(
        [sys.executable, "-c", STEPS + WITHOUT, json.dumps(OPTIMIZERS)], check=True, stdout=subprocess.PIPE
    ).stdout
    found, has_compiler = json.loads(answer)
    assert not has_compiler
    names = {}
    exec(STEPS, names)  # the same code
    assert {name: names["steps"](name) for name in OPTIMIZERS} == found
