"""Every example runs, and loads what it saved under another layout.

One of them is started by ``torchrun``, the others in ranks that the warm server forks. All of these processes have imported torch
before, which saves 16 imports, and more of torch than an example does; so each module of torch that an example uses must be one
that it imports itself.

None of them ends as a new process does. There a thread of gloo may drop a gathered tensor after the interpreter has begun to end,
and torch 2.13 then aborts: "terminate called without an active exception". It happens once in some hundred runs on a busy
machine, whatever the program calls before its end.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.runner import imports_of, not_imported, run_script_here
from tests.launch import ROOT, run_ranks
from tests.warm_python import run_torchrun

NUM_PROCESSES = {
    "compiled_ema": 4,
    "custom_framework": 4,
    "dcp_fsdp2": 2,
    "dcp_torchtitan": 2,
    "ddp": 2,
    "fsdp2_tp": 4,
    "live_weights": 6,
    "lora": 2,
    "pipeline": 2,
}
UNDER_TORCHRUN = "ddp"
LATER = {"compiled_ema": "import torch._dynamo, torch._functorch.aot_autograd"}
"""What an example has torch import while it runs."""


def test_every_example_is_run():
    others = {"hf_llama", "npy_format", "preemption", "spare_ranks", "torchft_replicas"}  # in tests of their own
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(NUM_PROCESSES) | others


@pytest.mark.slow
@pytest.mark.parametrize("name", NUM_PROCESSES)
def test_example_loads_another_layout_bit_for_bit(name: str, tmp_path: Path):
    script, arguments = ROOT / "examples" / f"{name}.py", [str(tmp_path / "checkpoint")]
    if name == UNDER_TORCHRUN:
        output = run_torchrun(script, NUM_PROCESSES[name], arguments)
    else:
        imports = f"{imports_of(script.read_text())}\n{LATER.get(name, '')}"
        ranks = run_ranks(run_script_here, NUM_PROCESSES[name], str(ROOT), str(script), arguments, init=False, imports=imports)
        output = "".join(ranks)
    assert "bit for bit" in output


def test_spare_rank_takes_the_place_of_a_failed_one_and_three_go_on_after_the_second():
    script = ROOT / "examples" / "spare_ranks.py"
    imports = imports_of(script.read_text())
    output = "".join(run_ranks(run_script_here, 5, str(ROOT), str(script), [], init=False, imports=imports))
    assert "4 ranks go on at step 3, bytes from {'self': 76656, 'rank': 25552}" in output
    assert "3 ranks go on at step 6, bytes from {'self': 76656}" in output
    assert output.count("alike bit for bit") == 2


@pytest.mark.parametrize("name", NUM_PROCESSES)
def test_example_imports_each_module_of_torch_that_it_uses(name: str):
    assert not not_imported((ROOT / "examples" / f"{name}.py").read_text())
