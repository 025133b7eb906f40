"""What benchmarks start ends with them."""

from __future__ import annotations

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
