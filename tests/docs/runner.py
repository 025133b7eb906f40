"""The runner of documents: their blocks are run in order, in one folder, and what they show is compared.

- ``pycon``: a session, as doctest runs it; one namespace for the whole document.
- ``python`` that begins with ``# name.py``: that file; other ``python`` is run in the session.
- ``sh``: ``python file.py …`` and ``torchrun --nproc-per-node=N file.py …`` (or ``-m module``) are run, the latter as real
  ranks; ``reshard-ckpt …`` in this process. They must find no problem; before ``; echo $?`` they may, and the exit code is
  printed.
- ``console``: commands for a cluster, a cloud or a system's own tools, which are not run.
- ``text`` and ``json`` after ``sh``: what that printed, rank 0's output first, stdout before stderr; ``...`` stands for anything.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib.util
import io
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.launch import RanksFailed, run_ranks

FLAGS = doctest.ELLIPSIS
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"# (\w+\.py)\n")
NOT_RUN = ("pip install",)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, and the line of the document that its text begins at."""

    language: str
    text: str
    line: int


def blocks(document: Path) -> Iterator[Block]:
    """The fenced blocks of a document that name a language."""
    source = document.read_text()
    for found in _FENCE.finditer(source):
        yield Block(found[1], found[2], source[: found.start(2)].count("\n") + 1)


def run_document(document: Path, folder: Path, setup: str = "") -> int:
    """Run every block of a document in `folder`, which is the current one; returns how many were run.

    `setup` is code that runs first: it defines names that the page takes for known, such as ``model``.

    Raises
    ------
    AssertionError
        A block shows something else than what happens.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(setup, f"setup of {document.name}", "exec"), names)
    printed = ""
    count = 0
    for block in blocks(document):
        where = f"{document.name}:{block.line}"
        if block.language == "pycon":
            _run_session(block, where, names)
        elif block.language == "python" and (named := _FILE_NAME.match(block.text)):
            (folder / named[1]).write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, where, "exec"), names)
        elif block.language == "sh":
            printed = "".join(_run_command(line, folder) for line in block.text.splitlines())
        elif block.language in ("text", "json"):
            assert doctest.OutputChecker().check_output(block.text, printed, FLAGS), f"{where}: this was printed:\n{printed}"
        elif block.language == "console":
            pass
        else:
            raise AssertionError(f"{where}: nobody knows how to run {block.language}")
        count += 1
    return count


def _run_session(block: Block, where: str, names: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, names, where, where, block.line - 1)
    assert test.examples, f"{where}: a session without a prompt"
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.append, clear_globs=False)
    names.update(test.globs)
    assert not result.failed, f"{where}\n{''.join(said)}"


def _run_command(line: str, folder: Path) -> str:
    if line.startswith(NOT_RUN):
        return ""
    line, _, then = line.partition("; ")
    program, *arguments = shlex.split(line)
    if program == "reshard-ckpt":
        return _run_reshard_ckpt(arguments, then, line)
    nproc = 1
    if program == "torchrun":
        option, number = arguments.pop(0).split("=")
        assert option == "--nproc-per-node", line
        nproc = int(number)
    else:
        assert program == "python", line
    script, *arguments = arguments
    imports = "" if script == "-m" else imports_of((folder / script).read_text())
    try:
        ranks = run_ranks(run_script_here, nproc, str(folder), script, arguments, init=False, imports=imports)
    except RanksFailed as error:
        if then != "echo $?":
            raise
        return f"{error}\n1\n"
    return "".join(ranks) + ("0\n" if then else "")


def _run_reshard_ckpt(arguments: list[str], then: str, line: str) -> str:
    from tests.cli.running import run  # not above: ranks that run a script need no command line

    shown = run(*arguments)
    assert then == "echo $?" or (not then and shown.code == 0), f"{line}: {then or f'exit code {shown.code}'}\n{shown.err}"
    return shown.out + shown.err + (f"{shown.code}\n" if then else "")


def not_imported(code: str) -> list[str]:
    """Modules of ``torch.distributed`` that a script uses by way of another one's import of them.

    The ranks are forks of a process that has imported more than a script does, so that running it does not show this.
    """
    lines = [line for line in code.splitlines() if not line.lstrip(">. ").startswith(("import ", "from "))]
    attributes = re.findall(r"(?<![\w\"])(?:dist|torch\.distributed)\.(\w+)", "\n".join(lines))  # a name in quotes is an argument
    return sorted({name for name in attributes if importlib.util.find_spec(f"torch.distributed.{name}")})


def imports_of(code: str) -> str:
    """The statements by which a script imports torch, transformers and this package; its own modules are where it runs alone."""
    shared = {"peft", "reshard_ckpt", "torch", "torchdata", "transformers"}
    statements = [node for node in ast.parse(code).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in statements]
    return "\n".join(ast.unparse(n) for n, name in zip(statements, names, strict=True) if name and name.split(".")[0] in shared)


def run_script_here(folder: str, script: str, arguments: list[str]) -> str:
    """Run a script on this rank, as ``python script`` does in that folder; returns what it printed."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = [script, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if script == "-m":
            sys.argv = arguments
            try:
                runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
            except SystemExit as left:
                if left.code:
                    raise AssertionError(f"{arguments}: exit code {left.code}") from left
        else:
            runpy.run_path(script, run_name="__main__")
    return printed.getvalue()
