"""Problems of a load: lines that each begin with the name of a tensor or value, and say why it does not fit."""

from __future__ import annotations


class Problem(str):
    """A line about one name that a load has a problem with: the name, a colon, and the reason.

    Parameters
    ----------
    name, what
        The name of a tensor or value, which may contain a colon itself, and the reason.
    cure
        The option with which the state would load, such as "cast"; "" if no option helps.
    lacks
        The name that the checkpoint lacks, if that is the reason; it is what patterns of `allow_missing` match.

    Examples
    --------
    >>> line = Problem("model.w", "not in the checkpoint", cure="allow_missing", lacks="model.w")
    >>> print(line, "|", line.name, "|", line.cure)
    model.w: not in the checkpoint | model.w | allow_missing
    """

    name: str
    what: str
    cure: str
    lacks: str
    __slots__ = ("cure", "lacks", "name", "what")

    def __new__(cls, name: str, what: str, cure: str = "", lacks: str = "") -> Problem:
        line = super().__new__(cls, f"{name}: {what}")
        line.name, line.what, line.cure, line.lacks = name, what, cure, lacks
        return line

    @classmethod
    def of(cls, line: str) -> Problem:
        """Convert a line that a format has written to a problem without a cure; the first colon ends the name."""
        if isinstance(line, Problem):
            return line
        name, _, what = line.partition(": ")
        return cls(name, what)

    @property
    def fields(self) -> tuple[str, str, str, str]:
        """The arguments that make this line, as plain strings."""
        return self.name, self.what, self.cure, self.lacks


COMBINE = "combine"
"""The cure of `PerRank` values that another number of ranks saved: its argument says what becomes of them."""


ELSEWHERE = "elsewhere"
"""The cure of a saved value that this rank passes over because other ranks may take it: it is a problem only if none does."""


def elsewhere(name: str) -> Problem:
    """Return the problem of a saved value that this rank leaves to others: its state has no module or optimizer to take it."""
    what = (
        "in the checkpoint, but every rank passes None, an empty list or dict, or no key there; pass the module or optimizer, or "
        "for a plain value {}, a Value or PerRank; ignore= of this name leaves it out"
    )
    return Problem(name, what, ELSEWHERE)


def not_saved(name: str) -> Problem:
    """Return the problem of a wanted tensor or value whose name the checkpoint lacks."""
    return Problem(name, "not in the checkpoint", "allow_missing", name)


def no_place(name: str, where: str = "", *, what: str = "") -> Problem:
    """Return the problem of a saved value that has no place in the module, optimizer or state that loads."""
    what = what or f"saved as a value, for which the {where} has no place"
    return Problem(name, f"{what}; ignore= of this name leaves it out", "ignore")
