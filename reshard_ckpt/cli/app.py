"""The common parts of all commands: the application, printing, progress bars, and exit codes.

A command is a function under ``@command(example)`` that returns its exit code (None is 0). It prints only by these functions:

- `print_text` prints text and `Columns` for people, on stdout;
- `print_json` prints JSON on stdout; with ``--json`` nothing else may be printed there;
- `print_note` prints on stderr;
- ``with progress() as on_progress:`` gives the function to which long work reports. It draws a bar on stderr, or nothing if
  stderr is not a terminal. ``with together(timeout_s) as shared:`` gives it among the options of a call that processes share.

A `CheckpointError` is printed as its message, with options as people type them (`spelling`). The exit code is then 1, or 2 if the
call was wrong. On several ranks only rank 0 prints.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from .. import __version__
from ..errors import CheckpointError, CheckpointNotFound, UsageError, visible
from .columns import Columns
from .spelling import options_of, spelled

PROBLEM, WRONG_USE = 1, 2
INTERRUPTED, BROKEN_PIPE = 130, 141
"""The exit codes by which shells report that SIGINT or SIGPIPE ended a program."""

PLAIN_WIDTH = 100_000
"""The width of output that does not go to a terminal. Lines are not broken there, so grep finds whole names."""

app = typer.Typer(
    name="reshard-ckpt",
    help="Look at, check and compare checkpoints, without the job, the model code or the GPUs that made them.",
    epilog="Exit codes: 0 fine, 1 a problem was found, 2 wrong use. COMMAND --help shows an example of each.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print_text(__version__)
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version, and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def command(*examples: str) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Add a function to the application, as a command with its name; the function returns the exit code."""

    def add(function: Callable[..., int | None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> None:
            code = _run_guarded(lambda: function(*args, **options), function, as_json=bool(options.get("as_json")))
            raise typer.Exit(code)

        shown = "\n\n".join(f"$ {line}" for line in examples)
        # Rich would take the brackets of `reshard-ckpt[plot]` for markup.
        text, example = escape(inspect.getdoc(function) or ""), escape(f"Example:\n\n{shown}")
        return app.command(function.__name__.rstrip("_"), help=text, epilog=example, no_args_is_help=True)(run)

    return add


def _run_guarded(call: Callable[[], int | None], command: Callable[..., Any], *, as_json: bool) -> int:
    """Call a command; print an error that it raises, and return its exit code."""
    try:
        code = call() or 0
        sys.stdout.flush()  # at exit it would be too late: a closed pipe could then only cause an error message
    except CheckpointError as error:
        options = options_of(command)
        message, problems = spelled(str(error), options), [spelled(line, options) for line in getattr(error, "problems", ())]
        if as_json:
            looked_for = {"looked_for": error.looked_for} if isinstance(error, CheckpointNotFound) else {}
            print_json({"error": {"type": type(error).__name__, "message": message, "problems": problems, **looked_for}})
        print_note(f"{type(error).__name__}: {message}", every_rank=True)
        return WRONG_USE if isinstance(error, UsageError) else PROBLEM
    except KeyboardInterrupt:
        print_note("stopped")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe has gone: send the bytes that are still buffered nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code


class _Console(Console):
    """A console that prints names as they are: brackets are not markup, and numbers get no colours."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = PLAIN_WIDTH

    def on_broken_pipe(self) -> NoReturn:
        """Raise BrokenPipeError. Without this method rich would exit with code 1, which here means that a problem was found."""
        raise BrokenPipeError


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def print_text(*items: str | Columns) -> None:
    """Print text and tables for people, on stdout."""
    if not _is_rank_0():
        return
    console = _Console()
    for item in items:
        if isinstance(item, Columns) and console.is_terminal and item.is_drawn:
            console.print(item)
        else:
            sys.stdout.write(f"{visible(item) if isinstance(item, str) else item.text()}\n")


def print_note(text: str, *, every_rank: bool = False) -> None:
    """Print a note for people on stderr, apart from the answer on stdout."""
    if every_rank or _is_rank_0():
        _Console(stderr=True).print(visible(text), soft_wrap=True)


_JSON_CONTROLS = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}
"""Escapes for the control codes 0x7F to 0x9F: JSON does not require to escape them, but some terminals obey them."""


def print_json(thing: Any) -> None:
    """Print JSON on stdout: dataclasses as objects; numbers that JSON lacks as text (``"NaN"``, ``"Infinity"``)."""
    if _is_rank_0():
        text = json.dumps(as_plain(thing), indent=2, ensure_ascii=False, allow_nan=False)
        sys.stdout.write(text.translate(_JSON_CONTROLS) + "\n")


def as_plain(value: Any) -> Any:
    """Convert a value to types that JSON has; other values become the text of their ``repr``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return as_plain(value.item()) if hasattr(value, "item") and getattr(value, "size", 0) == 1 else repr(value)


@contextmanager
def together(timeout_s: float) -> Iterator[dict[str, Any]]:
    """Yield the options by which a call reports its progress, and shares its work with the other processes under torchrun."""
    from ..comm import launched_group

    with launched_group(), progress() as on_progress:
        yield {"progress": on_progress, "process_group": None, "timeout_s": timeout_s}


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function of a step, the bytes done and the bytes in all, which draws a bar with rate and time left on stderr."""
    console = _Console(stderr=True)
    if not (console.is_terminal and _is_rank_0()):
        yield lambda step, done, total: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def on_progress(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total)
            bars.update(tasks[step], completed=done, total=total)

        yield on_progress
