"""Nodes for jobs: network namespaces joined by virtual cables, with a tmpfs each; or what stands in for them.

1. A process holds the namespaces of a node for as long as it sleeps. When it is ended, the node is lost with its memory.
2. A rank goes into those of its node before its process group begins; two nodes reach each other over a cable alone.
3. Where this system permits no network namespaces, mount namespaces stand in, with a tmpfs each; else a folder for each node.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.fork_server import num_threads
from tests.launch import RanksFailed, _init_group, run_ranks

NETWORK, MOUNT, FOLDERS = "network namespaces", "mount namespaces", "folders"
_HOLD = 'mount -t tmpfs -o size=256m,mode=1777 tmpfs "$0" && echo held && exec cat'
_TRIES, _LIMIT_S = 3, 600


class Nodes(AbstractContextManager["Nodes"]):
    """Some nodes, by name, and the memory of each.

    Parameters
    ----------
    folder
        Any folder; in a namespace the node's memory is below it.
    shm
        A folder on tmpfs, for nodes that are folders.

    Attributes
    ----------
    kind
        What the nodes are.
    """

    def __init__(self, folder: Path, shm: Path) -> None:
        self._folder, self._shm = folder, shm
        self._mount = folder / "shm"
        self._mount.mkdir()
        self._held: dict[str, subprocess.Popen[str]] = {}
        self._cables: dict[str, str] = {}
        self._runs = 0
        self.kind = next(kind for kind in (NETWORK, MOUNT, FOLDERS) if self._is_permitted(kind))

    def _is_permitted(self, kind: str) -> bool:
        self.kind = kind
        try:
            self.start("A", "B")
            self._cable("AB")
        except (OSError, subprocess.CalledProcessError):
            return False
        finally:
            self.__exit__()
        return True

    def start(self, *names: str) -> None:
        """Start nodes, whose memory is empty."""
        for name in names:
            if self.kind == FOLDERS:
                (self._shm / name).mkdir()
                continue
            kinds = ["--net", "--mount"] if self.kind == NETWORK else ["--mount"]
            command = ["unshare", *kinds, "sh", "-c", _HOLD, str(self._mount)]
            held = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            self._held[name] = held
            assert held.stdout is not None
            if held.stdout.readline() != "held\n":
                raise OSError("no namespace")
            self._ip(name, "link", "set", "lo", "up")

    def lose(self, name: str) -> None:
        """Lose a node with its memory."""
        if self.kind == FOLDERS:
            shutil.rmtree(self._shm / name)
            return
        held = self._held.pop(name)
        held.kill()
        held.communicate()
        self._cables = {ends: address for ends, address in self._cables.items() if name not in ends}

    def __exit__(self, *_: object) -> None:
        for name in [*self._held] if self.kind != FOLDERS else [path.name for path in self._shm.iterdir()]:
            self.lose(name)

    def memory(self, name: str) -> Path:
        """Return where the memory of a node is seen from here."""
        if self.kind == FOLDERS:
            return self._shm / name
        return Path(f"/proc/{self._held[name].pid}/root{self._mount}")

    def _ip(self, name: str, *args: str) -> None:
        if self.kind == NETWORK:
            command = ["nsenter", "--net", "--target", str(self._held[name].pid), "ip", *args]
            subprocess.run(command, check=True, capture_output=True)

    def _cable(self, ends: str) -> str:
        """Join two nodes, if they are not; returns the address of the first."""
        if ends not in self._cables and self.kind == NETWORK:
            first, second = ends
            peer = ["peer", "name", ends, "netns", str(self._held[second].pid)]
            self._ip(first, "link", "add", ends, "type", "veth", *peer)
            for number, name in enumerate(ends, 1):
                self._ip(name, "address", "add", f"10.{len(self._cables) + 77}.{ord(second)}.{number}/24", "dev", ends)
                self._ip(name, "link", "set", ends, "up")
            self._cables[ends] = f"10.{len(self._cables) + 77}.{ord(second)}.1"
        return self._cables.get(ends, "")

    def run(self, names: str, function: Callable[..., Any], root: Path, *args: Any) -> list[Any]:
        """Run ``function(root, folders, *args)``, a rank on the node of each name; `folders` are where ranks find their memory.

        At most two nodes take part.
        """
        ends = "".join(dict.fromkeys(names))
        address = self._cable(ends) if len(ends) == 2 else "127.0.0.1"
        network = (address, ends if len(ends) == 2 else "lo") if self.kind == NETWORK else None
        pids = [self._held[name].pid for name in names] if self._held else []
        folders = [str(self._shm / name if self.kind == FOLDERS else self._mount) for name in names]
        for _ in range(_TRIES):
            self._runs += 1
            stuck = self._folder / f"stuck-{self._runs}"
            stuck.mkdir()
            try:
                passed = (str(root), folders, *args)
                return run_ranks(_rank, len(names), pids, network, str(stuck), function, passed, timeout_s=_LIMIT_S, init=False)
            except RanksFailed:
                if not any(stuck.iterdir()):
                    raise
        raise RanksFailed(f"no process group on {names} in {_TRIES} tries")


def _rank(
    pids: list[int], network: tuple[str, str] | None, stuck: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    """What one rank does."""
    rank = int(os.environ["RANK"])
    if pids:
        faulthandler.cancel_dump_traceback_later()  # its thread would keep this process from another mount namespace
        while num_threads() > 1:
            time.sleep(0.001)  # it is told to end, and may not have yet
        enter(pids[rank], ["net", "mnt"] if network else ["mnt"])
        faulthandler.dump_traceback_later(_LIMIT_S - 10)
    if network:
        address, interface = network
        os.environ.update(MASTER_ADDR=address, MASTER_PORT="29500", GLOO_SOCKET_IFNAME=interface)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # that is outside
    _init_group(Path(stuck, str(rank)))
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()


def enter(pid: int, kinds: list[str]) -> None:
    """Go into the namespaces of a process."""
    libc, here = ctypes.CDLL(None, use_errno=True), os.getcwd()
    files = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds]
    for kind, fd in zip(kinds, files, strict=True):
        if libc.setns(fd, 0):
            raise OSError(ctypes.get_errno(), f"setns to {kind}: {os.strerror(ctypes.get_errno())}")
        os.close(fd)
    os.chdir(here)
