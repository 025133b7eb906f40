"""Children that a job forks, such as the workers of a data loader, and that live on when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from reshard_ckpt.checkpoint import Manager, Memory
from reshard_ckpt.memory.offline import drop_held, held_runs, persist_held
from tests.launch import ROOT
from tests.memory.test_manager import SLOT_BYTES, killed, loaded, state
from tests.warm_python import warm_python

JOB = """
import os, signal, sys
from pathlib import Path
from reshard_ckpt.checkpoint import Manager, Memory
from tests.memory.test_manager import state
manager = Manager(Path(sys.argv[1]), memory=Memory(copies=0, folder=sys.argv[2]), persist_every=1000)
for step in (1, 2):
    manager.async_save(step, state(step)).result()
if not os.fork():
    print(os.getppid(), flush=True)  # from the worker: until it runs, it holds its parent's locks
    os.read(0, 1)
    print("the worker was alive", flush=True)
    os._exit(0)
signal.pause()
"""


def test_a_worker_that_outlives_its_job_keeps_nothing_of_it(tmp_path: Path, shm: Path):
    root, memory = tmp_path / "run", Memory(copies=0, folder=str(shm))
    command = [warm_python(), "-c", JOB, str(root), str(shm)]
    job = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert job.stdin is not None
    assert job.stdout is not None
    try:
        pid = int(job.stdout.readline())
        assert held_runs(str(root), str(shm))[0].is_alive
        os.kill(pid, signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        assert not held_runs(str(root), str(shm))[0].is_alive
        assert persist_held(str(root), str(shm), step=1).is_published
        manager = Manager(root, memory=memory, persist_every=1000)
        assert loaded(manager) == (2, "memory")
        for step in range(3, 7):  # into the slots of the dead job
            manager.async_save(step, state(step)).result()
        assert held_runs(str(root), str(shm))[0].num_bytes < 4 * SLOT_BYTES
        killed(manager)
        assert drop_held(str(root), str(shm)) >= 3 * SLOT_BYTES
    finally:
        job.stdin.close()
        said = job.stdout.read()
        job.stdout.close()
    assert said == "the worker was alive\n"
