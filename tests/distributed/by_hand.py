"""Jobs whose processes are started one by one, as srun and mpirun do: rank 0's own process hosts the job's store."""

from __future__ import annotations

import os
import random
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.launch import ROOT
from tests.warm_python import WHOLE_END, warm_python

PREAMBLE = """
import os, sys, faulthandler, torch, torch.distributed as dist
from reshard_ckpt import checkpoint
faulthandler.dump_traceback_later(600, exit=True)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"]
def init():
    if sys.argv[1] == "env":
        dist.init_process_group("gloo", init_method="env://")
    else:
        dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=size)
"""


def free_port() -> int:
    """Find a port that nobody has, and that the system gives to nobody else meanwhile: it is none of those of connections."""
    lent = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(lent.read_text().split()[0]) if lent.exists() else 49152
    draw = random.SystemRandom()
    tried = [*(draw.randrange(max(1024, first // 2), first) for _ in range(100 if first > 2048 else 0)), 0]
    for port in tried:
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise AssertionError("no port is free")


def run_by_hand(
    program: str, size: int, folder: Path, *args: str, init: str = "env", timeout_s: float = 660
) -> list[tuple[int, str]]:
    """Run a program after `PREAMBLE` as a job of that many processes; the exit status and the output of each."""
    script = folder / "program.py"
    script.write_text(PREAMBLE + program)
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    env[WHOLE_END] = "1"
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [warm_python(), str(script), init, *args]
    return _finish([_start(command, {**env, "RANK": str(rank)}) for rank in range(size)], timeout_s)


def _start(command: Sequence[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _finish(processes: Sequence[subprocess.Popen[str]], timeout_s: float) -> list[tuple[int, str]]:
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]
