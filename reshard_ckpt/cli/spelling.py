"""Errors in the words of the command line: ``overwrite=True`` of a function is ``--overwrite`` of its command.

1. Read the options of a command from the annotations of its function, which typer reads too.
2. Spell each ``name=value`` of such an option in a message as people type it. A name that belongs to another function stays: one
   inside a call, as in ``convert(..., to='dcp')``, or behind "save with".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

_TEXT = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_VALUE = rf"True\b|False\b|None\b|nan\b|-?inf\b|-?\d[\d.e+-]*\d|-?\d|{_TEXT}|\[[^\]]*\]|\{{[^}}]*\}}"
_MENTION = re.compile(rf"(?<![\w.'\"-])([a-z_][a-z0-9_]*)=(?!=)({_VALUE})?")
_SAFE = re.compile(r"[\w@%+=:,./-]+")
_ELSEWHERE = re.compile(r"(?:\w\([^)]*|\b(?:save|saved|load) with(?:out)? )$")


@dataclass(frozen=True, slots=True)
class Typed:
    """A command-line option as people type it, such as ``--cast``.

    With `repeats`, the option is given once for each of several values. With `opposite`, it is a switch that turns off the
    parameter that it is named after, as ``--no-verify`` does.
    """

    text: str
    repeats: bool = False
    opposite: bool = False


def options_of(function: Callable[..., Any]) -> dict[str, Typed]:
    """Map the names of a command's parameters to the options that people type, as declared for typer.

    A switch that is declared as ``no_verify`` also gives ``verify``. An argument is shown as its metavar.
    """
    found: dict[str, Typed] = {}
    for name, hint in get_type_hints(function, include_extras=True).items():
        annotated = next((part for part in (hint, *get_args(hint)) if hasattr(part, "__metadata__")), hint)
        for info in getattr(annotated, "__metadata__", ()):
            declared = (getattr(info, "default", None), *(getattr(info, "param_decls", None) or ()))
            long = [text for text in declared if isinstance(text, str) and text.startswith("--")]
            text = long[0] if long else f"--{name.replace('_', '-')}"
            is_argument = type(info).__name__ == "ArgumentInfo"
            found[name] = Typed(info.metavar or name.upper() if is_argument else text, repeats="list[" in str(hint))
            if name.startswith("no_"):
                found[name.removeprefix("no_")] = Typed(text, opposite=True)
    return found


def spelled(message: str, options: Mapping[str, Typed]) -> str:
    """Replace the options in a message by those of the command line.

    >>> options = {"to": Typed("--to"), "cast": Typed("--cast", repeats=True), "verify": Typed("--no-verify", opposite=True)}
    >>> print(spelled("to={'dp': 2, 'tp': 4}, cast={'a': 'F32', '*.b': …} or verify=False", options))
    --to dp=2,tp=4, --cast a=F32 --cast '*.b=…' or --no-verify
    """

    def as_typed(mention: re.Match[str]) -> str:
        name, value = mention.groups()
        if name not in options or _ELSEWHERE.search(message[: mention.start()]):
            return mention[0]
        return _option(options[name], value)

    return _MENTION.sub(as_typed, message)


def _option(option: Typed, value: str | None) -> str:
    """Write one option with its value as on a command line. A switch that is off is written ``no --option``."""
    if value in (None, "True", "False", "None"):
        given = value in (None, "False") if option.opposite else value in (None, "True")
        return option.text if given else f"no {option.text}"
    parts = _parts(value or "")
    return " ".join(f"{option.text} {part}" for part in (parts if option.repeats else [",".join(parts)]))


def _parts(value: str) -> list[str]:
    """Write a Python value as command-line arguments: one text, or the parts of a list or dict, quoted if a shell needs it."""
    try:
        plain = ast.literal_eval(value.replace("…", "'…'"))
    except (ValueError, SyntaxError):
        return [value]
    if isinstance(plain, Mapping):
        plain = [f"{key}={of}" for key, of in plain.items()]
    texts = map(str, plain if isinstance(plain, list) else [plain])
    return [text if _SAFE.fullmatch(text) else f"'{text}'" for text in texts]
