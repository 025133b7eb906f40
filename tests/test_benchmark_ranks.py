"""Processes that benchmarks start end with them, and the rehearsal sends the messages that a save and a load send now."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT
from tests.warm_python import warm_python

RANK = """
import os, signal
os.write(1, b"%d\\n" % os.getpid())
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    signal.pause()
"""
PARENT = """
import os, sys
from benchmarks import ranks
sys.executable = sys.argv[1]
print(os.getpid(), flush=True)
ranks.launch("endless", 2, [], timeout_s=3600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_a_benchmark_that_is_ended(tmp_path: Path, number: signal.Signals):
    (tmp_path / "endless.py").write_text(RANK)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [warm_python(), "-c", PARENT, sys.executable]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as started:
        parent, *ranks = (int(started.stdout.readline()) for _ in range(3))
        ends = [os.pidfd_open(rank) for rank in ranks]
        os.kill(parent, number)
        assert started.wait() == -number
        try:
            for end in ends:
                assert select.select([end], [], [], 600)[0]
        finally:
            for end in ends:
                if not select.select([end], [], [], 0)[0]:
                    signal.pidfd_send_signal(end, signal.SIGKILL)
                os.close(end)


def test_rehearsal_goes_through_a_save_and_a_load_of_the_protocol_as_it_is(tmp_path: Path):
    found = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.rehearsal", "--ranks", "256", "--json", str(found)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    load = json.loads(found.read_text())["load"]
    assert (load["catalog_reads_per_node"], load["groups"]) == (1, 128)
