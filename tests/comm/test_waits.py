"""Every wait for another rank ends in its time, by an error of this package, when that rank is killed, or stopped."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import reshard_ckpt
from tests.comm import waits
from tests.comm.waits import LOCKED, TABLE
from tests.launch import run_ranks

PACKAGE = Path(reshard_ckpt.__file__).parent
BLOCKING = {
    *("clone", "TCPStore", "create_connection", "new_group", "group_class", "init_process_group", "flock"),
    *(
        "broadcast",
        "all_to_all_single",
        "all_gather",
        "all_gather_object",
        "broadcast_object_list",
        "barrier",
        "monitored_barrier",
    ),
    *("all_reduce", "gather_object", "scatter_object_list", "all_to_all", "send", "recv", "recv_anysource", "redistribute"),
}
"""The functions of torch and of the system that wait for another process."""

WAITS = {
    ("comm/bounded.py", "clone"): ["opening links"],
    ("comm/group.py", "connect"): ["the first session", "the job's store"],
    ("comm/group.py", "_kept_group"): ["an own store"],
    ("comm/group.py", "_own_store"): ["an own store"],
    ("comm/sessions.py", "launched_group"): ["joining"],
    ("comm/home.py", "_start"): ["the first session"],
    ("comm/home.py", "_client_at"): ["the first session"],
    ("comm/node.py", "_join"): ["joining a machine"],
    ("comm/node.py", "_serve"): ["joining a machine"],
    ("comm/node.py", "_connect"): ["joining a machine"],
    ("comm/links.py", "_meet"): ["opening links", "links that met half", "a group for an exchange"],
    ("comm/links.py", "swap"): ["links"],
    ("comm/links.py", "send"): ["a read over links", "the end of links"],
    ("comm/links.py", "receive"): ["a read over links"],
    ("comm/links.py", "receive_any"): ["the end of links"],
    ("comm/exchange.py", "start"): ["an exchange"],
    # The Trainer's own collective: its time limit is that of the Trainer's process group.
    ("families/deepspeed/trainer.py", "_finalize_training"): [],
    ("storage/posix.py", "release"): [],  # unlocking waits for nobody
    ("storage/posix.py", "_unlocks"): [],
    ("storage/posix.py", "_takes"): ["a lock of a checkpoint", "a lock of a run in memory", "a lock of a node"],
}
"""By function that names one of these: the rows in which it waits. Sessions, turns and stops wait by polling a store alone."""

JOBS = [
    (name, how, victim)
    for name, row in TABLE.items()
    # Before torch 2.8, machines have no stores of their own, and a group opens no connection to the job's store.
    if hasattr(dist.Store, "clone") or (len(set(row.machines)) == 1 and name != "the job's store")
    for how in (("killed", "stopped") if row.stops else ("killed",))
    for victim in row.victims
]


@pytest.mark.slow
def test_a_rank_that_is_killed_or_stopped_is_waited_for_no_longer_than_the_time_given(tmp_path: Path):
    jobs, folder, late = JOBS, tmp_path, []
    for at_once in (waits.AT_ONCE, 2, 1):  # on a busy machine a job may be late; one that waits too long is late each time
        folder = folder / "again"
        folder.mkdir()
        answers = run_ranks(waits.run_jobs, 1, jobs, str(folder), at_once, init=False)[0]
        problems = [problem for job, of_ranks in zip(jobs, answers, strict=True) for problem in problems_of(job, of_ranks)]
        assert not problems, "\n".join(problems)
        late = [
            (job, [seconds for *_, seconds in of_ranks])
            for job, of_ranks in zip(jobs, answers, strict=True)
            if any(seconds > waits.seconds_of(*job[:2]) for *_, seconds in of_ranks)
        ]
        if not late:
            break
        jobs = [job for job, _ in late]
    assert not late


def problems_of(job: tuple[str, str, int], of_ranks: list[tuple[list[str], str, list[int], float]]) -> Iterator[str]:
    """Yield what ranks raised that the table does not say."""
    name, how, victim = job
    row = TABLE[name]
    says = "" if row.says == LOCKED and how == "killed" else row.says  # the system takes it from the dead
    for kinds, message, ranks, _ in of_ranks:
        fits = ("CheckpointError" in kinds and re.search(says, message)) if says else not kinds
        if not fits or (says and ranks != [victim] and (ranks or victim in row.names)):
            yield f"{name}, rank {victim} {how}: {kinds[:1]} {ranks} {message}"


def functions_that_block() -> set[tuple[str, str]]:
    """Find the functions of the package that name one of `BLOCKING`, as an attribute of something of torch or the system."""
    names = re.compile(rf"(?:dist|fcntl|socket|_STORES|_group|store)\.(?:{'|'.join(BLOCKING)})\b|ProcessGroupGloo")
    texts = ((path, path.read_text()) for path in PACKAGE.rglob("*.py"))
    trees = [(path.relative_to(PACKAGE).as_posix(), ast.parse(text)) for path, text in texts if names.search(text)]
    functions = [(path, node) for path, tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {(path, function.name) for path, function in functions if any(map(blocks, own_attributes(function)))}


def own_attributes(function: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes in a function, without those of functions inside of it."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Attribute):
            yield node
        if not isinstance(node, ast.FunctionDef):
            yield from own_attributes(node)


def blocks(node: ast.Attribute) -> bool:
    owner = ast.unparse(node.value)
    of_torch = owner in ("dist", "fcntl", "socket", "_STORES", "self._group") or (
        owner in ("store", "self._store") and node.attr == "clone"
    )
    return (node.attr in BLOCKING and of_torch) or node.attr == "ProcessGroupGloo"


def test_every_function_that_may_wait_for_another_process_stands_in_the_table():
    assert functions_that_block() == set(WAITS)
    assert {row for rows in WAITS.values() for row in rows} <= set(TABLE)
