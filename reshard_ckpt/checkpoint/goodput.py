"""How often a job should save, what it loses with that, and what a faster tier would buy."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..core.durations import duration_s
from ..core.planning.interval import MAX_OVERHEAD, Goodput, JobFigures, best_goodput
from ..errors import UsageError
from ..formats.source import Path
from .plotting import PICTURES, check_suffix, load_plotting, write_picture

GB = 1e9


@dataclass(frozen=True, slots=True)
class GoodputReport:
    """The best intervals of a job, and of the same job with one thing better.

    Attributes
    ----------
    job
        What was computed with.
    best
        Its intervals, and the shares of time that it loses by cause.
    alternatives
        By what would be different: the same for that job.
    """

    job: JobFigures
    best: Goodput
    alternatives: Mapping[str, Goodput]


def goodput(
    *,
    state_gb: float,
    write_gbps: float,
    mtbf: str | float,
    stall: float = 1.0,
    read_gbps: float | None = None,
    copy_gbps: float = 5.0,
    restart: str | float = "5min",
    nodes: int = 1,
    copies: int | None = None,
    node_share: float = 1.0,
    double_share: float = 0.0,
    max_overhead: float = MAX_OVERHEAD,
    output: Path | None = None,
) -> GoodputReport:
    """Compute the intervals between saves that lose least time. Nothing is read or measured.

    Parameters
    ----------
    state_gb
        Size of a checkpoint in GB, of all nodes together.
    write_gbps, read_gbps
        GB/s of the store, for all nodes together; it reads as fast as it writes by default.
    mtbf
        Mean time between failures of the whole job: seconds, or text such as ``"6h"``.
    stall
        Seconds of training that one save loses.
    copy_gbps
        GB/s at which one node sends to another one.
    restart
        Time from a failure until the new processes ask for the state.
    nodes, copies
        How many nodes the job has, and how many other nodes hold a copy of one's checkpoints in memory. Without `copies` there is
        no memory tier.
    node_share, double_share
        Share of the failures that take a node with its memory, and of these the share that takes a second node with it.
    max_overhead
        Share of time that saves may cost at most.
    output
        Also draw the time lost by interval: ``.png``, ``.svg`` or ``.html``. Needs the extra ``plot``.

    Raises
    ------
    UsageError
        A size, rate or share is out of range.
    """
    read_gbps = write_gbps if read_gbps is None else read_gbps
    rates = {"write_gbps": write_gbps, "read_gbps": read_gbps, "copy_gbps": copy_gbps}
    for option, value in {"state_gb": state_gb, **rates, "nodes": nodes, "max_overhead": max_overhead}.items():
        if not value > 0:
            raise UsageError(f"{option}={value!r}: must be above 0")
    for option, share in {"node_share": node_share, "double_share": double_share}.items():
        if not 0 <= share <= 1:
            raise UsageError(f"{option}={share!r}: a share is between 0 and 1")
    if stall < 0 or (copies is not None and copies < 0):
        raise UsageError(f"stall={stall!r}, copies={copies!r}: must not be below 0")
    job = JobFigures(
        state_bytes=state_gb * GB,
        write_bytes_per_s=write_gbps * GB,
        read_bytes_per_s=read_gbps * GB,
        copy_bytes_per_s=copy_gbps * GB,
        stall_s=max(stall, 1e-3),
        mtbf_s=duration_s(mtbf, option="mtbf"),
        restart_s=duration_s(restart, option="restart"),
        nodes=nodes,
        copies=copies,
        node_share=node_share,
        double_share=double_share,
    )
    better = {what: best_goodput(other, max_overhead) for what, other in _alternatives(job).items()}
    report = GoodputReport(job, best_goodput(job, max_overhead), better)
    if output is not None:
        file = pathlib.Path(output)
        check_suffix(file, PICTURES, "the picture of intervals")
        plotting = load_plotting()
        figure = plotting.draw_goodput(report.job, report.best)
        write_picture(file, plotting.rendered(figure, "Time lost by the interval between saves", file.suffix))
    return report


def _alternatives(job: JobFigures) -> dict[str, JobFigures]:
    fewer = {} if job.copies is None else {"no memory tier": replace(job, copies=None)}
    more = 1 if job.copies is None else job.copies + 1
    if more < job.nodes:
        fewer[f"memory with {more} {'copy' if more == 1 else 'copies'}"] = replace(job, copies=more)
    return {
        **fewer,
        "half the stall": replace(job, stall_s=job.stall_s / 2),
        "a store twice as fast": replace(
            job, write_bytes_per_s=2 * job.write_bytes_per_s, read_bytes_per_s=2 * job.read_bytes_per_s
        ),
        "restarts in half the time": replace(job, restart_s=job.restart_s / 2),
        "half as many failures": replace(job, mtbf_s=2 * job.mtbf_s),
    }
