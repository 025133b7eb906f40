"""`goodput`: the best intervals between a job's saves, the time that it loses with them, and the gain from a faster tier."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real

from ..core.planning.interval import MAX_OVERHEAD, Goodput, JobFigures, best_goodput
from ..core.report import duration_s, plural
from ..errors import UsageError
from ..formats.source import Path
from ..storage import path_text
from .plotting import PICTURES, check_suffix, load_plotting, write_picture

GB = 1e9
_MOST = 1e200


@dataclass(frozen=True, slots=True)
class GoodputReport:
    """The best intervals of a job, and those of the same job with one thing improved.

    Attributes
    ----------
    job
        The figures that were used.
    best
        The job's best intervals, and the shares of time that it loses, by cause.
    alternatives
        For each improvement (a description in words), the best intervals of the improved job.
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
    """Compute the intervals between saves that lose the least time. Nothing is read or measured.

    Parameters
    ----------
    state_gb
        Size of a checkpoint in GB, over all nodes.
    write_gbps, read_gbps
        Rates of the store in GB/s, over all nodes; by default it reads as fast as it writes.
    mtbf
        Mean time between failures of the whole job: seconds, or text such as ``"6h"``.
    stall
        Seconds of training that one save loses.
    copy_gbps
        Rate in GB/s at which one node sends to another.
    restart
        Time from a failure until the new processes load the state: seconds, or text such as ``"5min"``.
    nodes, copies
        The number of nodes, and how many other nodes hold a copy of one node's checkpoints in memory. Without `copies` there is
        no memory tier.
    node_share, double_share
        The share of failures that take a node with its memory, and the share of these that take a second node too.
    max_overhead
        The largest share of time that saves may cost.
    output
        Also draw the time lost over the interval, into a ``.png``, ``.svg`` or ``.html`` file. Needs the extra ``plot``.

    Returns
    -------
    GoodputReport

    Raises
    ------
    UsageError
        A size, rate or share is out of range.
    """
    read_gbps = write_gbps if read_gbps is None else read_gbps
    rates = {"write_gbps": write_gbps, "read_gbps": read_gbps, "copy_gbps": copy_gbps}
    for option, value in {"state_gb": state_gb, **rates, "nodes": nodes, "max_overhead": max_overhead}.items():
        if not _is_number(value) or not value > 0:
            raise UsageError(f"{option}={value!r:.80}: pass a number above 0")
    for option, share in {"node_share": node_share, "double_share": double_share, "max_overhead": max_overhead}.items():
        if not _is_number(share) or not 0 <= share <= 1:
            raise UsageError(f"{option}={share!r}: a share is between 0 and 1")
    if not _is_number(stall) or not stall >= 0:
        raise UsageError(f"stall={stall!r:.80}: pass seconds, 0 or more")
    if copies is not None and (not _is_number(copies) or not 0 <= copies < nodes):
        raise UsageError(
            f"copies={copies!r} with nodes={nodes!r}: copies lie on other nodes: pass copies from 0 to {nodes - 1}, or more nodes"
        )
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
        file = pathlib.Path(path_text(output))
        check_suffix(file, PICTURES, "the picture of intervals")
        plotting = load_plotting()
        figure = plotting.draw_goodput(report.job, report.best)
        write_picture(file, plotting.rendered(figure, "Time lost by the interval between saves", file.suffix))
    return report


def _is_number(value: object) -> bool:
    """Return whether a value is a finite number, far enough below the largest float to be multiplied by units."""
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and abs(float(value)) < _MOST
    except OverflowError:  # of an int above the largest float
        return False


def _alternatives(job: JobFigures) -> dict[str, JobFigures]:
    """Return variants of a job with one figure changed, such as half the stall; the keys describe the change in words."""
    fewer = {} if job.copies is None else {"no memory tier": replace(job, copies=None)}
    more = 1 if job.copies is None else job.copies + 1
    if more < job.nodes:
        fewer[f"memory with {plural(more, 'copy', 'copies')}"] = replace(job, copies=more)
    return {
        **fewer,
        "half the stall": replace(job, stall_s=job.stall_s / 2),
        "a store twice as fast": replace(
            job, write_bytes_per_s=2 * job.write_bytes_per_s, read_bytes_per_s=2 * job.read_bytes_per_s
        ),
        "restarts in half the time": replace(job, restart_s=job.restart_s / 2),
        "half as many failures": replace(job, mtbf_s=2 * job.mtbf_s),
    }
