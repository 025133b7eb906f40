"""The vote of all ranks on a load: either every rank can load all that it wants, or all ranks raise the same error.

1. Gather: each rank sends its problems, one line of text for each, by kind, and the saved tensors that it wants.
2. Rank 0 merges the lines, adds a line for each saved tensor that no rank wants, and suggests known names for missing ones. It
   drops the line of a value that a rank passes over if another rank takes it.
3. Broadcast: rank 0 sends the merged lines. Every rank decides by them, and by its own ``strict``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...comm.protocol import Comm, merge_of_all
from ...comm.wire import name_ranks
from ...core.catalog.model import Catalog, TensorKind
from ...core.catalog.names import is_below
from ...core.catalog.problems import ELSEWHERE, Problem, not_saved
from ...core.planning.match import matches
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
    verifies_first: bool
    """Whether any rank verifies before it changes a tensor. If so, no rank may change one before all of these ranks have."""


class Wanted(NamedTuple):
    """One rank's part of a vote beside its `Resolved` tensors: all names that it wants, and the problems with its values.

    Attributes
    ----------
    prefixes
        Names of the state's parts. A saved tensor at or below a prefix of any rank is unexpected if no rank wants it.
    names
        All names that a pattern of the options may match: the names that this rank wants, and names ignored in the state or in
        the checkpoint.
    problems
        A line for each value that is missing or does not fit.
    unplaced
        Names of tensors that this rank wants and has no place for. They are among the problems, so they are not unexpected.
    holders
        Names of the objects and optimizers in the state, whose tensors may be made later.
    """

    prefixes: Sequence[str]
    names: Sequence[str] = ()
    problems: Sequence[str] = ()
    unplaced: Sequence[str] = ()
    holders: Sequence[str] = ()


def vote(
    comm: Comm, catalog: Catalog, resolved: Resolved, wanted: Wanted, options: LoadOptions, *, hints: Sequence[str] = ()
) -> VoteResult:
    """Merge the problems of all ranks, and raise or return the merged ones on every rank. Collective: a gather and a broadcast.

    Raise `MismatchError` if any rank has a problem, and ``strict`` is set, and `UsageError` if ranks were given options with
    which some ranks would enter a collective and others would not.

    Parameters
    ----------
    catalog
        The catalog without the names that ``ignore`` matches.
    hints
        Advice that is added to the error's message.
    """
    of_values = [*map(Problem.of, wanted.problems)]
    unfit = [problem for problem in of_values if not matches(problem.name, options.ignore)]
    allowed = [problem for problem in unfit if problem.cure == "allow_missing" and matches(problem.lacks, options.allow_missing)]
    kept = [Problem(problem.name, problem.what.partition("; ")[0]) for problem in allowed]  # without advice: it may be missing
    values = [problem for problem in unfit if problem not in allowed]
    named = resolved.named.union(catalog.index(name) for name in wanted.unplaced if name in catalog)
    problems = {**resolved.problems, "values": values, "kept": (*resolved.kept, *kept)}
    own_vote = {
        "problems": {kind: [Problem.of(line).fields for line in lines] for kind, lines in problems.items() if lines},
        "prefixes": list(wanted.prefixes),
        "named": sorted(named),
        "refused": sorted(resolved.refused),
        "has_ties": bool(resolved.ties),
        "verifies_first": options.verify_first and options.verify,
        "unused": unused_patterns(options, (*wanted.names, *(problem.lacks or problem.name for problem in of_values))),
        "options": _collective_options(options),
    }

    def merge(votes: list[Any]) -> dict[str, Any]:
        for option, own in votes[0]["options"].items():
            others = [rank for rank, of_rank in enumerate(votes) if of_rank["options"][option] != own]
            if others:
                raise UsageError(f"{option} is {own} on rank 0, {not own} on {name_ranks(others)}: pass the same on every rank")
        return _merge(catalog, votes)

    result = merge_of_all(comm, own_vote, merge)

    def with_sides(text: str) -> str:
        """Name both sides of the load in a message as this call does, such as ``src`` and ``dst`` of `reshard_live`."""
        return text.replace("the checkpoint", options.sides[0]).replace("the state passed", options.sides[1])

    found = {kind: [Problem(*each) for each in each_of] for kind, each_of in result["problems"].items() if each_of}
    lines: dict[str, Any] = {kind: tuple(map(with_sides, each_of)) for kind, each_of in found.items()}
    report = LoadReport(**lines)
    if options.strict and report.problems:
        hints = [*hints, *(f"{pattern} fits no name, so correct it" for pattern in result["unused"])]
        more = (*_other_keys(catalog, wanted.prefixes), *_not_made(catalog, wanted.holders, found))
        advice = "; ".join([*hints, *more, _advised_options(found, options.offered)])
        suggestions = {with_sides(line): with_sides(text) for line, text in result["suggestions"]}
        shown = {kind: [suggestions.get(line, line) for line in lines] for kind, lines in report.by_kind.items()}
        raise MismatchError(summarize_kinds(shown, with_sides(advice)), report.problems)
    return VoteResult(report, frozenset(result["refused"]), result["has_ties"], result["verifies_first"])


def _collective_options(options: LoadOptions) -> dict[str, bool]:
    """Return, by name, the options that decide which collectives a rank enters. They must be equal on all ranks."""
    once = bool(options.read_once)
    return {"read_once": once, "verify_first (with verify)": once and bool(options.verify_first and options.verify)}


def _advised_options(found: Mapping[str, Sequence[Problem]], offered: Collection[str]) -> str:
    """Return advice for the problems of each kind: the options with which the state would load, ``strict=False`` last.

    `offered` are the options that the function called by the user takes.
    """
    problems = [problem for kind, each_of in found.items() if kind != "kept" for problem in each_of]
    cures = {}
    # An optimizer of another kind lacks all of its state: the line that says so has the cure.
    explained = tuple(problem.lacks for problem in problems if problem.lacks and not problem.cure)
    missing = [problem for problem in problems if problem.cure == "allow_missing" and not problem.lacks.startswith(explained)]
    if missing:
        states = [problem.lacks for problem in missing if problem.lacks != problem.name]
        example = f", as {states[0]!r} does for hyperparameters" if states else ""
        cures["allow_missing"] = f"with allow_missing=[patterns] where the checkpoint may lack some{example}"
    others = {
        "ignore": "with ignore=[patterns] to leave some out",
        "cast": "with cast=[patterns] to convert dtypes",
        "allow_resize": "with allow_resize=[patterns] to load what overlaps",
    }
    cures |= {option: text for option, text in others.items() if any(problem.cure == option for problem in problems)}
    texts = [text for option, text in cures.items() if option in offered]
    if "strict" not in offered:
        return f"load {' or '.join(texts)}" if texts else "reshard_ckpt.checkpoint.load has options that load the rest"
    last = "with strict=False to load what fits and leave the rest as it is"
    return f"load {', '.join(texts)}, or {last}" if texts else f"load {last}"


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
    others = f"its top-level keys are {keys}, which rename= can map" if saved else "nothing else"
    return [f"the checkpoint has nothing under {under}, and {others}"]


def _not_made(catalog: Catalog, holders: Sequence[str], found: Mapping[str, Sequence[Problem]]) -> list[str]:
    """Return advice for each object or optimizer that lacks saved state. State of parameters does not count."""
    table = catalog.tensors_table
    of_parameters = {name for name, key in zip(table.names, table.key.tolist(), strict=True) if key}
    of_parameters.update(value.name for value in catalog.values_table if value.link)
    lacked = [problem.name for kind in ("unexpected", "values") for problem in found.get(kind, ()) if problem.cure == "ignore"]
    lacked = [name for name in lacked if name not in of_parameters]
    return [
        f"{holder} has no such state yet: let it make that first, as some optimizers do in a step, or save it as "
        f"checkpoint.Value({holder}), which loads whole"
        for holder in holders
        if any(is_below(name, [holder]) for name in lacked)
    ]


def _merge(catalog: Catalog, votes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the votes of all ranks, in order of rank, into the result that rank 0 broadcasts."""
    votes = list({id(vote): vote for vote in votes}.values())  # ranks that want the same have one vote
    problems = {}
    for kind in _KINDS:
        # Each problem once, in order of rank.
        problems[kind] = tuple(dict.fromkeys(tuple(each) for vote in votes for each in vote["problems"].get(kind, ())))
    if problems["values"]:
        problems["values"] = _unless_taken(problems["values"], votes)
        # A tensor that was saved as a value is not missing: the line about the value says so.
        of_values = {name for name, *_ in problems["values"]}.intersection(catalog.value_names)
        problems["missing"] = tuple(each for each in problems["missing"] if each[0] not in of_values)
    named: set[int] = set()
    prefixes: set[str] = set()
    for vote in votes:
        named.update(vote["named"])
        prefixes.update(vote["prefixes"])
    table = catalog.tensors_table
    problems["unexpected"] = tuple(
        Problem(name, "in the checkpoint, but not in the state passed", "ignore").fields
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
        **{key: any(vote[key] for vote in votes) for key in ("has_ties", "verifies_first")},
        "unused": unused,
        "suggestions": _suggestions(catalog, problems, named),
    }


def _unless_taken(problems: Sequence[tuple[str, ...]], votes: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], ...]:
    """Drop each problem with a value that a rank leaves to others (`ELSEWHERE`), if some rank takes that value.

    A rank takes a value if the value's name lies below its prefixes and the rank does not have this problem.
    """
    of_ranks = [({*map(tuple, vote["problems"].get("values", ()))}, vote["prefixes"]) for vote in votes]
    return tuple(
        each
        for each in problems
        if each[2] != ELSEWHERE or all(each in lines or not is_below(each[0], prefixes) for lines, prefixes in of_ranks)
    )


def _suggestions(catalog: Catalog, problems: Mapping[str, Sequence[tuple[str, ...]]], named: set[int]) -> list[tuple[str, str]]:
    """For problems about a missing name, return pairs: the line, and the line with the most similar saved name as a suggestion.

    Only the lines that a message shows are looked at. A line without a similar name is left out.
    """
    shown = [Problem(*each) for kind in ("missing", "values") for each in problems[kind][:MAX_NAMED]]
    missing = [problem for problem in shown if problem.lacks == problem.name]
    if not missing:
        return []
    table = catalog.tensors_table
    left = (name for i, name in enumerate(table.names) if table.kind[i] == TensorKind.TENSOR and i not in named)
    meant = nearest((problem.name for problem in missing), (*left, *catalog.value_names))
    return [(problem, f"{problem} (did you mean {meant[problem.name]}?)") for problem in missing if problem.name in meant]


def missing_values(catalog: Catalog, names: Iterable[str]) -> list[Problem]:
    """Return a problem for each of these value names that the checkpoint lacks, or has as a tensor."""
    saved = set(catalog.value_names)
    absent = [name for name in names if name not in saved]
    tensors = set(catalog.tensors_table.names) if absent else set()
    return [
        Problem(name, _OPAQUE)
        if opaque_name(name) in tensors
        else Problem(name, "saved as a tensor, wanted as a value; pass a tensor under this key")
        if name in tensors
        else not_saved(name)
        for name in absent
    ]


def unreadable(catalog: Catalog, prefixes: Iterable[str], *, strict: bool) -> list[Problem]:
    """Return a problem for each entry of the checkpoint at or below these names that this library cannot read.

    Raise `CheckpointError` if there is such an entry, and ``strict`` is set. It is the error of reading the first of them.
    """
    at = tuple(prefixes)
    found = {name: why for name, why in catalog.unreadable.items() if is_below(name, at)}
    if strict:
        for error in found.values():
            raise error
    return [Problem(name, str(why)) for name, why in found.items()]
