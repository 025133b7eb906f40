"""The vote of all ranks on a load: either every rank can load all that it wants, or all ranks raise the same error.

1. Gather: each rank sends its problems, one line of text for each, by kind, and the saved tensors that it wants.
2. Rank 0 merges the lines, adds a line for each saved tensor that no rank wants, and suggests known names for missing ones.
3. Broadcast: rank 0 sends the merged lines. Every rank decides by them, and by its own ``strict``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...comm.protocol import Comm, merge_of_all
from ...comm.wire import name_ranks
from ...core.catalog.model import Catalog, TensorKind
from ...core.catalog.names import is_below
from ...core.catalog.param_groups import NO_GROUP, OTHER_KIND
from ...core.planning.match import LEAVES_OUT, MISSING, OTHER_NDIM, matches
from ...core.planning.scales import DEQUANTIZE
from ...core.report import MAX_NAMED, LoadReport, few, nearest, summarize_kinds
from ...errors import MismatchError, UsageError
from ...format.shard_file import opaque_name
from .load import LoadOptions, Resolved

_OPAQUE = (
    "saved by DCP as a pickled object, and this library unpickles nothing; load it with torch's own dcp.load and "
    "storage_reader=reshard_ckpt.dcp.ReshardReader(path)"
)

_KINDS = ("missing", "shape", "dtype", "uncovered", "values", "kept")


class VoteResult(NamedTuple):
    """Result of a vote: the report with the problems of all ranks, and the indices of tensors that no rank loads.

    These are tensors that some rank cannot load whole.
    """

    report: LoadReport
    refused: frozenset[int]
    has_ties: bool
    """Whether, on any rank, targets may share memory. If so, all ranks must call `load.verify_ties`."""


class Wanted(NamedTuple):
    """One rank's part of a vote beside its `Resolved` tensors: all names that it wants, and the problems with its values.

    Attributes
    ----------
    prefixes
        Names of the state's parts. A saved tensor at or below one of them that no rank wants is unexpected.
    names
        All names that a pattern of the options may match: the names that this rank wants, and names ignored in the state or in
        the checkpoint.
    problems
        A line for each value that is missing or does not fit.
    unplaced
        Names of tensors that this rank wants and has no place for. They are among the problems, so they are not unexpected.
    """

    prefixes: Sequence[str]
    names: Sequence[str] = ()
    problems: Sequence[str] = ()
    unplaced: Sequence[str] = ()


def vote(
    comm: Comm, catalog: Catalog, resolved: Resolved, wanted: Wanted, options: LoadOptions, *, hints: Sequence[str] = ()
) -> VoteResult:
    """Merge the problems of all ranks, and on every rank raise or return the same. Collective: a gather and a broadcast.

    Parameters
    ----------
    catalog
        The catalog without the names that ``ignore`` matches.
    hints
        Advice that is added to the error's message.

    Raises
    ------
    MismatchError
        Any rank has a problem, and ``strict`` is set.
    UsageError
        Ranks were given options with which some ranks would enter a collective and others would not.
    """
    values = [line for line in wanted.problems if not matches(_subject(line), options.ignore)]
    missing = [line for line in values if _divided(line)[1].startswith((MISSING, NO_GROUP))]
    allowed = [line for line in missing if matches(_missing_name(line), options.allow_missing)]
    values = [line for line in values if line not in allowed]
    kept = [line.partition("; ")[0] for line in allowed]  # drop the line's advice: a missing name is allowed here
    named = resolved.named.union(catalog.index(name) for name in wanted.unplaced if name in catalog)
    own_vote = {
        "problems": {**resolved.problems, "values": values, "kept": (*resolved.kept, *kept)},
        "named": sorted(named),
        "refused": sorted(resolved.refused),
        "has_ties": bool(resolved.ties),
        "unused": unused_patterns(options, (*wanted.names, *map(_missing_name, wanted.problems))),
        "options": _collective_options(options),
    }

    def merge(votes: list[Any]) -> dict[str, Any]:
        for option, own in votes[0]["options"].items():
            others = [rank for rank, of_rank in enumerate(votes) if of_rank["options"][option] != own]
            if others:
                raise UsageError(f"{option} is {own} on rank 0, {not own} on {name_ranks(others)}: pass the same on every rank")
        return _merge(catalog, votes, wanted.prefixes)

    result = merge_of_all(comm, own_vote, merge)
    problems: dict[str, Any] = {kind: tuple(lines) for kind, lines in result["problems"].items()}
    report = LoadReport(**problems)
    if options.strict and report.problems:
        hints = [*hints, *(f"{pattern} fits no name, so correct it" for pattern in result["unused"])]
        advice = "; ".join([*hints, *_other_keys(catalog, wanted.prefixes), _advised_options(report, options.offered)])
        suggestions = dict(result["suggestions"])
        shown = {kind: [suggestions.get(line, line) for line in lines] for kind, lines in report.by_kind.items()}
        raise MismatchError(summarize_kinds(shown, advice), report.problems)
    return VoteResult(report, frozenset(result["refused"]), result["has_ties"])


def _collective_options(options: LoadOptions) -> dict[str, bool]:
    """Return, by name, the options that decide which collectives a rank enters. They must be equal on all ranks."""
    once = bool(options.read_once)
    return {"read_once": once, "verify_first (with verify)": once and bool(options.verify_first and options.verify)}


def _advised_options(report: LoadReport, offered: Collection[str]) -> str:
    """Return advice: the options with which the load would succeed. ``strict=False``, which allows every difference, comes last.

    `offered` are the options that the function called by the user takes.
    """
    cures = {}
    states = [_missing_name(line) for line in report.values if _no_group(line)]
    # An optimizer of another kind lacks all of its state: the line that says so has the cure.
    others = [line.partition(".param_groups")[0] for line in report.values if f": {OTHER_KIND}" in line]
    missing = [line for line in report.missing if not line.startswith(tuple(f"{name}.state." for name in others))]
    if missing or states:
        example = f", as {states[0]!r} does for hyperparameters" if states else ""
        cures["allow_missing"] = f"with allow_missing=[patterns] where the checkpoint may lack some{example}"
    if report.unexpected or any(LEAVES_OUT in line for line in report.values):
        cures["ignore"] = "with ignore=[patterns] to leave some out"
    if any(DEQUANTIZE not in line for line in report.dtype):
        cures["cast"] = "with cast=[patterns] to convert dtypes"
    if not all(line.endswith(OTHER_NDIM) for line in report.shape):
        cures["allow_resize"] = "with allow_resize=[patterns] to load what overlaps"
    texts = [text for option, text in cures.items() if option in offered]
    if "strict" not in offered:
        return f"load {' or '.join(texts)}" if texts else "reshard_ckpt.checkpoint.load has options that load the rest"
    last = "with strict=False to load what fits and leave the rest as it is"
    return f"load {', '.join(texts)}, or {last}" if texts else f"load {last}"


def _divided(line: str) -> tuple[str, str]:
    """Split the text of a problem into the name that it begins with, which may contain ": ", and the rest."""
    for begin in (MISSING, NO_GROUP, ""):
        name, colon, rest = line.partition(f": {begin}")
        if colon:
            return name, begin + rest
    return line, ""


def _subject(line: str) -> str:
    """Return the name at the beginning of a problem's text."""
    return _divided(line)[0]


def _no_group(line: str) -> bool:
    """Return whether a problem's text says that a parameter has no saved hyperparameters."""
    return _divided(line)[1].startswith(NO_GROUP)


def _missing_name(line: str) -> str:
    """Return the name that the checkpoint lacks, from a problem's text.

    If a parameter lacks its hyperparameters, this is the name of its optimizer state.
    """
    name, what = _divided(line)
    if not _no_group(line):
        return name
    fqn = what.removeprefix(NO_GROUP).partition(";")[0]
    return f"{name.partition('.param_groups')[0].partition('[')[0]}.state.{fqn}"


def unused_patterns(options: LoadOptions, names: Sequence[str]) -> list[str]:
    """Return the patterns of the load's options that match none of some names, each as ``option=['pattern']`` for a message."""
    given = {option: getattr(options, option) for option in ("cast", "allow_resize", "allow_missing", "ignore")}
    return [
        f"{option}=[{pattern!r}]"
        for option, patterns in given.items()
        if not isinstance(patterns, bool)
        for pattern in patterns
        if not any(matches(name, [pattern]) for name in names)
    ]


def _other_keys(catalog: Catalog, prefixes: Sequence[str]) -> list[str]:
    """Return advice if the checkpoint has nothing below a top-level key of the state: it was often saved under another key."""
    saved = sorted({name.split(".", 1)[0] for name in (*catalog.names, *catalog.value_names)})
    absent = [prefix for prefix in prefixes if prefix.split(".", 1)[0] not in saved]
    if not absent:
        return []
    under, keys = few([repr(name) for name in absent]), few([repr(name) for name in saved])
    return [f"the checkpoint has nothing under {under}, and its top-level keys are {keys}, which rename= can map"]


def _merge(catalog: Catalog, votes: Sequence[Mapping[str, Any]], prefixes: Sequence[str]) -> dict[str, Any]:
    """Merge the votes of all ranks, in order of rank, into the result that rank 0 broadcasts."""
    votes = list({id(vote): vote for vote in votes}.values())  # ranks that want the same have one vote
    problems = {}
    for kind in _KINDS:
        lines = dict.fromkeys(line for vote in votes for line in vote["problems"].get(kind, ()))  # each once, in order of rank
        problems[kind] = tuple(lines)
    named: set[int] = set().union(*(vote["named"] for vote in votes))
    table = catalog.tensors_table
    problems["unexpected"] = tuple(
        f"{name}: in the checkpoint, but not in the state passed"
        for i, name in enumerate(table.names)
        if table.kind[i] == TensorKind.TENSOR
        and i not in named
        and is_below(name, prefixes)
        # An alias of a tensor that is loaded has no bytes of its own, so it is not unexpected.
        and (table.alias[i] < 0 or int(table.alias[i]) not in named)
    )
    unused = [pattern for pattern in votes[0]["unused"] if all(pattern in vote["unused"] for vote in votes)]
    return {
        "problems": problems,
        "refused": sorted({index for vote in votes for index in vote["refused"]}),
        "has_ties": any(vote["has_ties"] for vote in votes),
        "unused": unused,
        "suggestions": _suggestions(catalog, problems, named),
    }


def _suggestions(catalog: Catalog, problems: Mapping[str, Sequence[str]], named: set[int]) -> list[tuple[str, str]]:
    """For lines about a missing name, return pairs: the line, and the line with the most similar saved name as a suggestion.

    Only the lines that a message shows are looked at.
    """
    lines = [line for kind in ("missing", "values") for line in problems[kind][:MAX_NAMED] if line.endswith(f": {MISSING}")]
    if not lines:
        return []
    table = catalog.tensors_table
    left = (name for i, name in enumerate(table.names) if table.kind[i] == TensorKind.TENSOR and i not in named)
    meant = nearest(map(_subject, lines), (*left, *catalog.value_names))
    return [(line, f"{line} (did you mean {meant[name]}?)") for line in lines if (name := _subject(line)) in meant]


def missing_values(catalog: Catalog, names: Iterable[str]) -> list[str]:
    """Return one line of text for each of these value names that the checkpoint lacks."""
    saved = set(catalog.value_names)
    absent = [name for name in names if name not in saved]
    blobs = set(catalog.tensors_table.names) if absent else set()
    return [f"{name}: {_OPAQUE if opaque_name(name) in blobs else MISSING}" for name in absent]


def unreadable(catalog: Catalog, prefixes: Iterable[str], *, strict: bool) -> list[str]:
    """Return one line of text for each entry of the checkpoint at or below these names that this library cannot read.

    Raises
    ------
    CheckpointError
        There is such an entry, and ``strict`` is set. It is the error of reading the first of them.
    """
    at = tuple(prefixes)
    found = {name: why for name, why in catalog.unreadable.items() if is_below(name, at)}
    if strict:
        for error in found.values():
            raise error
    return [f"{name}: {why}" for name, why in found.items()]
