"""`reshard`: write a checkpoint again for another topology, offline, in one process or many."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from ..comm import Comm, open_session, value_of_first
from ..core.catalog.model import Catalog
from ..core.catalog.names import optimizer_of
from ..core.catalog.specs import AxisPlacement, Mesh
from ..core.planning.placement_rules import parse_rules
from ..core.planning.target_placement import TargetTopology, group_orders
from ..engine.common.files import FileDigests
from ..engine.common.progress import OnProgress, reporter
from ..engine.common.resuming import has_checksums
from ..engine.loading.saved_values import open_values
from ..engine.loading.scales import Dequantizer
from ..engine.resharding.plan import Choice, ReshardPlan, plan_reshard
from ..engine.resharding.read_back import ReadBack
from ..engine.resharding.reshard import (
    ProcessReport,
    RankShare,
    agree_on_id,
    commit,
    groups_of,
    rank_share,
    save_id_of,
    sources_of,
    write_share,
)
from ..engine.resharding.write_order import divide
from ..engine.saving.commit import check_free_space, read_previous
from ..engine.saving.options import PreviousCheckpoint
from ..errors import StorageError, UsageError
from ..format.files import RESHARD_LOCK, new_save_id
from ..formats.source import Path, Source, open_shared_source
from ..storage import Lock, LocksUnsupported, MissingKey, Storage, open_storage
from ..storage.protocol import begin
from .casting import applied_scales, cast_dtypes, dequantizer_of
from .selecting import Names, as_list, select_names
from .topology_options import idle_axes, mesh_of, read_rules, renamed_catalog, stage_boundaries


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """The result of `reshard`, or with ``dry_run=True`` the result that it would have.

    Attributes
    ----------
    save_id
        The id of the new checkpoint.
    mesh
        The axes of the new mesh and their sizes.
    ranks
        For each rank of the new topology: its files and bytes, the number of saved bytes that these are made of, and the saved
        ranks whose files contain them.
    placements
        The placement of each tensor on the new mesh, axis by axis.
    num_values
        The number of values in the new checkpoint.
    bytes_written, bytes_kept
        The size of all files of the new checkpoint, and the part of it that an interrupted attempt had finished.
    bytes_wanted, bytes_read
        Bytes of the old checkpoint that the new one is made of, and the bytes that were read for them. More are read, because
        whole blocks are verified.
    idle_axes
        Axes that the saved mesh does not have and that divide no tensor, so that all ranks along them hold the same bytes. To
        divide tensors along such an axis, add a rule.
    dry_run
        True if nothing was written.
    """

    save_id: str
    mesh: Mapping[str, int]
    ranks: tuple[RankShare, ...]
    placements: Mapping[str, tuple[AxisPlacement, ...]]
    num_values: int
    bytes_written: int
    bytes_kept: int
    bytes_wanted: int
    bytes_read: int
    idle_axes: tuple[str, ...]
    dry_run: bool


def reshard(
    src: Path,
    dst: Path,
    *,
    mesh: Mapping[str, int],
    rules: Any = None,
    stages: Sequence[int] | None = None,
    select: Names = None,
    exclude: Names = None,
    drop: Names = None,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    cast: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    verify: bool = True,
    progress: bool | OnProgress = False,
    process_group: Any = None,
    timeout_s: float = 3600.0,
) -> ReshardReport:
    """Write a checkpoint as a job of another topology would have saved it, so that each of its ranks reads few files, in order.

    Memory is bounded at any size. One process does all of it, or the ranks of a process group each write some of the files. A
    reshard that was killed continues if it is called again in the same way: finished files are kept.

    Parameters
    ----------
    src
        The checkpoint to read.
    dst
        Where to write. A checkpoint there is replaced in the last step. It cannot be `src`.
    mesh
        Axes and sizes of the new topology, outermost first, as in ``{"dp": 2, "tp": 4}``. The axis ``pp`` is for pipeline stages,
        ``ep`` for experts.
    rules
        Name patterns with placements, as a map, a list of maps, or the path of a YAML file; see the guide. A tensor that no rule
        matches stays as in the catalog: sharded along the same dim, replicated, or flat, on the new size of the axis.
    stages
        The first layer of each pipeline stage except stage 0; by default layers are divided evenly.
    select, exclude, drop
        Names, which also stand for everything below them, or patterns: what to take (by default all), and what to leave out.
        `drop` is another `exclude`, meant for whole parts such as ``"optimizer"``.
    rename
        As for `load`: old names, or dotted prefixes, mapped to new ones. All other options use the new names.
    cast
        Patterns of names, with the dtype that matching floating-point tensors get: ``{"model.*": "bfloat16"}``.
        FP8 weights of a Hugging Face folder are multiplied by their scales, which the result then lacks.
    dry_run
        Only plan and report; write nothing.
    verify
        Verify every block that is read, and read back every block that was written. S3 compares each upload with its checksum
        instead.
    progress
        True: show a line on stderr. A function is called with the name of the step, the bytes done and the bytes in all.
    process_group, timeout_s
        As for `save`.

    Returns
    -------
    ReshardReport

    Raises
    ------
    UsageError
        The options do not fit the checkpoint, or each other.
    CheckpointNotFound, CorruptError
        The source is missing or damaged; nothing at `dst` was replaced.
    StorageError
        The store refused; the checkpoint that was at `dst` is still there.
    """
    new_mesh = mesh_of("mesh", mesh)
    placement_rules = parse_rules(read_rules(rules), new_mesh)
    subject = f"{src} to {dst}"
    with (
        open_session("reshard", subject, process_group=process_group, timeout_s=timeout_s) as comm,
        open_storage(dst, timeout_s=timeout_s) as target,
        ExitStack() as opened,
    ):
        # Both are requests to a store, so they run at the same time.
        looking = begin(target, lambda: read_previous(target)) if comm.rank == 0 else None
        source = opened.enter_context(open_shared_source(comm, src, timeout_s=timeout_s))
        _check_target(source.storage, target)
        catalog = renamed_catalog(source, rename, verify=verify)
        dequantizer = dequantizer_of(source, verify=verify) if cast else None
        unwanted = [*(as_list(exclude) or ()), *(as_list(drop) or ())]
        taken = select_names(catalog, select, unwanted or None)
        taken.refuse_unreadable(catalog)
        if not taken.tensors and not taken.values:
            raise UsageError(f"select={select!r}, exclude={exclude!r}, drop={drop!r}: nothing is left to write; take less away")
        dtypes = cast_dtypes(catalog, taken.tensors, cast, dequantizer)
        applied = applied_scales(catalog, dtypes, dequantizer)
        choice = Choice([name for name in taken.tensors if name not in applied], taken.values, dtypes)
        topology = TargetTopology(
            new_mesh, placement_rules, stage_boundaries(stages, new_mesh), orders_of_groups(source, catalog, choice.values)
        )
        planned, report = plan_reshard(catalog, choice, topology), reporter(progress if comm.rank == 0 else False)
        return _write(comm, source, planned, target, looking, dequantizer, verify=verify, report=report, dry_run=dry_run)


def write_as_one_rank(
    comm: Comm,
    source: Source,
    catalog: Catalog,
    dtypes: Mapping[str, str],
    dst: Path,
    dequantizer: Dequantizer | None,
    *,
    verify: bool,
    report: OnProgress,
) -> ReshardReport:
    """Write a whole catalog in this library's format, in files as a job of one rank would have saved them. Collective.

    `catalog` describes the bytes in the files of `source`; `dtypes` maps tensors to the dtypes that they are converted to.
    """
    choice = Choice(catalog.names, catalog.value_names, dtypes)
    topology = TargetTopology(Mesh((), ()), (), None, orders_of_groups(source, catalog, choice.values))
    with open_storage(dst) as target:
        planned = plan_reshard(catalog, choice, topology)
        looking = (lambda: read_previous(target)) if comm.rank == 0 else None
        return _write(comm, source, planned, target, looking, dequantizer, verify=verify, report=report)


def _write(
    comm: Comm,
    source: Source,
    planned: ReshardPlan,
    target: Storage,
    looking: Callable[[], PreviousCheckpoint] | None,
    dequantizer: Dequantizer | None,
    *,
    verify: bool,
    report: OnProgress,
    dry_run: bool = False,
) -> ReshardReport:
    """Write a planned reshard to the store `target`; return the report.

    `looking` reads the checkpoint that is at the target now; it is None except on rank 0.
    """
    groups = divide(groups_of(planned), planned.plan.bytes_by_rank().tolist(), comm.rank, comm.size)
    digests = FileDigests(source.storage, planned.catalog, verify=verify)
    begin(source.storage, lambda: digests.of(sources_of(planned, [rank for group in groups for rank in group])))
    before = looking() if looking is not None else None
    save_id = agree_on_id(comm, save_id_of(planned, verify=verify))
    if not has_checksums(planned.catalog):
        # The id is normally computed from the catalog, so that a killed attempt continues under the same id. Without checksums an
        # equal catalog does not prove equal bytes, so a new id keeps earlier attempts apart.
        save_id = value_of_first(comm, new_save_id)
    if dry_run:
        return _report(planned, save_id, ProcessReport(), dry_run)
    # An attempt that continues has its files already, so the space for a whole checkpoint is not checked again.
    if before is not None and save_id not in before.folders:
        check_free_space(target, planned.plan)
    with _exclusive(target, save_id) if comm.rank == 0 else nullcontext() as lease:
        # No rank touches a file before rank 0 holds the lock that keeps other reshards out. Without a folder there is nothing to
        # list; if another reshard of this kind made one a moment ago, its files are replaced by equal ones.
        is_new = before is not None and save_id not in before.folders and not target.hints.has_locks
        there = dict(value_of_first(comm, lambda: [] if is_new else target.list(save_id)))
        done, tally = write_share(
            comm, source.storage, target, planned, save_id, digests, there, report=report, dequantizer=dequantizer
        )
        read_back = ReadBack(target, enabled=verify and not target.hints.checks_uploads)
        done = commit(comm, target, planned, save_id, done, before, lease, read_back)
        tally.finish()
    return _report(planned, save_id, done, dry_run)


@contextmanager
def _exclusive(target: Storage, save_id: str) -> Iterator[Lock | None]:
    """Hold a lock on the folder of this reshard, because the same command started twice would write the same files.

    Yields the lock; None in a store without locks. Raise `StorageError` if the same reshard is under way.
    """
    try:
        lock = target.lease(f"{save_id}/{RESHARD_LOCK}", b"reshard", once=True)
    except LocksUnsupported:
        yield None  # without locks, a second reshard fails when it finds files that exist already
        return
    except MissingKey:
        lock = None  # the holder has just finished, and deleted the lock's key
    if lock is None:
        raise StorageError(f"{target.url}: the same reshard is under way there; wait for its end, or pass another path")
    with lock:
        yield lock


def _check_target(source: Storage, target: Storage) -> None:
    """Refuse a destination that is the source checkpoint itself, or a file."""
    is_source = source.url == target.url
    if os.path.isdir(source.url) and os.path.isdir(target.url):
        is_source = os.path.samefile(source.url, target.url)
    if is_source:
        raise UsageError(f"{target.url}: is the checkpoint to be read; write to another path, and move it in place afterwards")
    if os.path.isfile(target.url):
        raise UsageError(f"{target.url}: is a file; pass the path of a folder, which need not be there yet")


def orders_of_groups(source: Source, catalog: Catalog, names: Sequence[str]) -> dict[str, list[str]]:
    """Map each optimizer to its parameters, in the order of its saved parameter groups.

    Groups whose names are not in `names` are left out.
    """
    groups = [name for name in names if optimizer_of(name) is not None]
    values = open_values(source.storage, catalog, groups, verify=True)
    return dict(group_orders({name: value.value for name, value in values.items()}))


def _report(planned: ReshardPlan, save_id: str, done: ProcessReport, dry_run: bool) -> ReshardReport:
    plan = planned.plan
    ranks = tuple(rank_share(planned, rank, save_id) for rank in range(planned.mesh.size))
    numbers = dict(zip(plan.tables.names, plan.catalog.tensors.placement.tolist(), strict=True))
    tensors = [spec.name for spec in planned.specs[: len(planned.placed)]]
    placements = {name: plan.placements[numbers[name]] if numbers[name] >= 0 else () for name in tensors}
    return ReshardReport(
        save_id=save_id,
        mesh=planned.mesh.by_axis,
        ranks=ranks,
        placements=placements,
        num_values=len(planned.values),
        bytes_written=sum(rank.bytes_written for rank in ranks),
        bytes_kept=done.bytes_kept,
        bytes_wanted=sum(rank.bytes_wanted for rank in ranks),
        bytes_read=done.bytes_read,
        idle_axes=idle_axes(planned.catalog, planned.mesh, placements),
        dry_run=dry_run,
    )
