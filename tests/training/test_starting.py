"""Optimizers step without PyTorch's compiler, to the same numbers."""

import json
import subprocess
import sys

STEPS = """
import json, sys, torch
{before}
parameter = torch.nn.Parameter(torch.linspace(-1, 1, 5))
found = []
for kind in (torch.optim.Adam, torch.optim.SGD):
    optimizer = kind([parameter], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        (parameter**3).sum().backward()
        optimizer.step()
        scheduler.step()
    optimizer.load_state_dict(optimizer.state_dict())
    found.append(parameter.tolist())
"""


def test_no_compiler_is_loaded_and_the_steps_are_the_same():
    before = "from metadist.training.starting import leave_compiler_out; leave_compiler_out()"
    script = (
        STEPS.format(before=before) + "print(json.dumps([found, 'torch._dynamo' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    found, loaded = json.loads(done.stdout or done.stderr)
    names: dict = {}
    exec(STEPS.format(before="import torch._dynamo"), names)  # as PyTorch has it
    assert found == names["found"] and not loaded


def test_a_loaded_compiler_is_left_as_it_is():
    import torch._dynamo

    from metadist.training.starting import leave_compiler_out

    step = torch.optim.Adam.step
    leave_compiler_out()
    assert torch.optim.Adam.step is step
