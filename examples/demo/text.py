"""The text that the demo trains on: the prose of the documentation topics that ship with CPython, as numbers.

The text is cut into words and signs. The most frequent ones are tokens of their own; any other word is spelled.
"""

from __future__ import annotations

import re
from collections import Counter
from pydoc_data import topics

import torch
from torch import Tensor

VOCABULARY = 3989
"""A prime: no number of tensor-parallel ranks divides it, so that the shards of the embedding are uneven."""

_PIECES = re.compile(r" ?\w+|[^\w\s]+|.|\n")
_NO_PROSE = re.compile(r"::=|---|___")


def prose() -> str:
    """Yield paragraphs, one a line: no code, no grammar, no tables, and none twice."""
    paragraphs = (" ".join(part.split()) for topic in topics.topics.values() for part in topic.split("\n\n"))
    kept = (text for text in paragraphs if re.match(r"[A-Z].*[.:]$", text) and not _NO_PROSE.search(text))
    return "\n".join(dict.fromkeys(kept))


class Text:
    """The text as tokens, with the last tenth held back.

    Attributes
    ----------
    train, held_back
        Token numbers, int64.
    """

    def __init__(self) -> None:
        pieces = _PIECES.findall(prose())
        characters = sorted(set("".join(pieces)))
        words = [piece for piece, _ in Counter(pieces).most_common() if len(piece) > 1]
        unused = [""] * VOCABULARY  # another version of Python may have fewer words
        self._tokens = [*characters, *words, *unused][:VOCABULARY]
        self._number = {token: number for number, token in enumerate(self._tokens)}
        tokens = self._numbers(pieces)
        self.train, self.held_back = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]

    def _numbers(self, pieces: list[str]) -> Tensor:
        known = (token for piece in pieces for token in ([piece] if piece in self._number else piece))
        return torch.tensor([self._number[token] for token in known])

    def encode(self, text: str) -> Tensor:
        return self._numbers(_PIECES.findall(text))

    def decode(self, tokens: Tensor) -> str:
        return "".join(self._tokens[number] for number in tokens.tolist())

    def batch(self, step: int, size: int, context: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets (size, context) of one step: the same on every layout, so that the curve goes on."""
        return _windows(self.train, torch.Generator().manual_seed(step), size, context)

    def held_back_batch(self, size: int, context: int) -> tuple[Tensor, Tensor]:
        """Return the batch on which the loss before and after a change of layout is taken."""
        return _windows(self.held_back, torch.Generator().manual_seed(0), size, context)


def _windows(tokens: Tensor, generator: torch.Generator, size: int, context: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(tokens) - context - 1, (size, 1), generator=generator)
    windows = tokens[starts + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]
