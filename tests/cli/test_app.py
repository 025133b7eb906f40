"""What all commands promise: exit codes, JSON alone on stdout, help with an example, no traceback for what a user can cause."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reshard_ckpt import checkpoint, cli
from reshard_ckpt.cli import app as shared
from reshard_ckpt.cli import columns
from reshard_ckpt.cli.columns import Columns
from reshard_ckpt.cli.spelling import options_of
from reshard_ckpt.errors import CorruptError, MismatchError, UsageError
from tests.cli.running import run, run_process, start
from tests.launch import ROOT, project_table


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "ckpt", {"model": torch.nn.Linear(3, 2), "extra": {"step": 7, "steps": {1: (2.5, [None])}}})
    return tmp_path / "ckpt"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_every_command_has_an_example(name: str):
    shown = run(name, "--help")
    assert shown.code == 0
    assert f"$ reshard-ckpt {name} " in shown.out


def test_help_shows_brackets():
    assert "reshard-ckpt[plot]" in run("plot", "--help").out


def test_errors_name_the_options_of_the_command(saved: Path, tmp_path: Path):
    def said(*arguments: object) -> str:
        shown = run(*arguments)
        assert shown.code == 2
        return shown.err

    assert "--overwrite to replace" in said("convert", saved, saved)
    assert "--to dcp" in said("convert", saved, tmp_path / "new", "--to", "dcp", "--unstack")
    assert "--cast 'model.*=int8':" in said("convert", saved, tmp_path / "new", "--cast", "model.*=int8")
    assert "as in --stages 8,16,24" in said("reshard", saved, tmp_path / "new", "--mesh", "pp=3", "--stages", "1")
    out = ("reshard", saved, tmp_path / "new", "--mesh", "dp=2", "--exclude", "model", "--exclude", "extra")
    assert "no --select, --exclude model --exclude extra, no --drop:" in said(*out)
    assert "--timeline and NAME model.weight:" in said("plot", saved, "model.weight", "--timeline", "-o", "x.svg")
    assert "--state-gb 0.0:" in said("goodput", "--state-gb", "0", "--write-gbps", "1", "--mtbf", "3h")
    shown = run("plot", saved, "model.weight", "--to", "pp=2", "-o", "x.svg", "--json").json["error"]["message"]
    assert not re.search(r"\b\w+=(True|False|\{)", shown)
    # What was passed to `save` is not an option of `verify`.
    assert "without sha256=True" in run("verify", saved, "--sha256").out


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if hasattr(checkpoint, name)])
def test_every_option_of_a_function_is_known_to_its_command(name: str):
    command = getattr(importlib.import_module(f"reshard_ckpt.cli.{name}"), name).__wrapped__
    options = set(inspect.signature(getattr(checkpoint, name)).parameters)
    assert options - set(options_of(command)) <= {"progress", "process_group", "memory"}


def test_help_does_not_wait_for_torch():
    lines = ["import sys", "from reshard_ckpt.cli import main", "try: main()"]
    code = "\n".join([*lines, "except SystemExit as left: print(left.code, 'torch' in sys.modules)"])
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, "--help"], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"


MAY_IMPORT = {
    "annotated_doc", "annotated_types", "attr", "click", "markdown_it", "mdurl", "msgpack", "numpy", "pydantic", "pydantic_core",
    "pygments", "reshard_ckpt", "rich", "shellingham", "typer", "typing_extensions", "typing_inspection", "xxhash", "zoneinfo",
}  # fmt: skip
"""Packages that ``inspect`` imports beside the standard library; each start of a tool pays for them."""


def test_a_catalog_is_read_and_inspected_without_torch_and_what_else_takes_long(saved: Path):
    lines = [
        "import sys",
        "before = set(sys.modules)",
        "from reshard_ckpt import checkpoint",
        "from reshard_ckpt.cli import main",
        "assert checkpoint.catalog(sys.argv[2]).names == ('model.bias', 'model.weight')",
        "assert checkpoint.inspect(sys.argv[2]).summary.step == 7",
        "try: main()",
        "except SystemExit as left: print('left', left.code)",
        "print(*sorted(set(sys.modules) - before))",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "\n".join(lines), "inspect", str(saved)]
    *_, left, modules = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert left == "left 0"
    beside = {name for name in modules.split() if name.partition(".")[0] not in sys.stdlib_module_names}
    assert "reshard_ckpt.checkpoint" in beside
    made = re.compile("_cython|cython_runtime|_sysconfigdata")  # modules that Cython and the interpreter make
    assert {name for name in beside if name.partition(".")[0] not in MAY_IMPORT and not made.match(name)} == set()


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["verify"], ["verify", "a", "b"], ["verify", "a", "--nonsense"]])
def test_wrong_use_is_exit_code_2(arguments: list[str]):
    assert run(*arguments).code == 2


def test_version_is_the_package_s():
    import reshard_ckpt

    assert run("--version").out.strip() == reshard_ckpt.__version__


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_path_without_checkpoint_is_said_without_traceback(command: str, tmp_path: Path):
    shown = run(command, tmp_path)
    assert (shown.code, shown.out) == (1, "")
    assert shown.err.startswith("CheckpointNotFound: ")
    assert str(tmp_path) in shown.err
    assert "Traceback" not in shown.err


def test_error_is_json_too_where_json_is_asked_for(tmp_path: Path):
    shown = run("verify", tmp_path, "--json")
    assert shown.code == 1
    assert shown.json["error"]["type"] == "CheckpointNotFound"
    assert shown.json["error"]["message"] in shown.err


@pytest.mark.parametrize(
    ("error", "code"),
    [(CorruptError("x"), 1), (MismatchError("x", ["a", "b"]), 1), (UsageError("x"), 2), (KeyboardInterrupt(), 130)],
)
def test_errors_become_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]):
    def fail() -> int:
        raise error

    assert shared._run_guarded(fail, fail, as_json=False) == code
    assert capsys.readouterr().out == ""


def test_problems_of_an_error_are_listed_in_json(capsys: pytest.CaptureFixture[str]):
    def fail() -> int:
        raise MismatchError("two", ["a", "b"])

    shared._run_guarded(fail, fail, as_json=True)
    assert json.loads(capsys.readouterr().out)["error"]["problems"] == ["a", "b"]


def test_a_mistake_of_this_package_is_no_answer():
    def fail() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shared._run_guarded(fail, fail, as_json=False)


@pytest.mark.parametrize("absent", ["rich", "typer"])
def test_missing_part_names_the_extra(absent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == absent else find(name))
    with pytest.raises(SystemExit) as left:
        cli.main()
    shown = capsys.readouterr()
    assert (left.value.code, shown.out) == (2, "")
    assert absent in shown.err
    assert "reshard-ckpt[cli]" in shown.err


def test_process_prints_and_leaves_as_it_does_in_tests(saved: Path, monkeypatch: pytest.MonkeyPatch):
    shown = run_process("verify", saved, "--json")
    assert (shown.code, shown.err) == (0, "")
    assert shown.json["ok"] is True
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")  # a screen without ×
    nothing = run_process("inspect", f"{saved.parent}/×", cold=True)
    assert (nothing.code, nothing.out) == (1, "")
    assert nothing.err.startswith("CheckpointNotFound")  # and what is imported says nothing
    assert "\\xd7" in nothing.err
    assert "Traceback" not in nothing.err


def test_reader_of_stdout_that_leaves_ends_it_quietly(saved: Path):
    read, write = os.pipe()
    os.close(read)
    process = start("inspect", saved, stdout=write)
    os.close(write)
    _, err = process.communicate()
    assert (process.returncode, err) == (141, "")


def test_installed_command_and_module_are_the_same_function():
    scripts = project_table()["scripts"]
    module, _, function = scripts["reshard-ckpt"].partition(":")
    assert getattr(importlib.import_module(module), function) is cli.main
    assert (ROOT / "reshard_ckpt" / "__main__.py").read_text().count("main()") == 1


def test_only_rank_0_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("RANK", "3")
    shared.print_text("to people")
    shared.print_json({"to": "machines"})
    shared.print_note("beside")
    assert capsys.readouterr() == ("", "")
    shared.print_note("why this rank failed", every_rank=True)
    assert capsys.readouterr().err == "why this rank failed\n"


def test_names_are_printed_as_they_are_and_lines_are_not_broken(capsys: pytest.CaptureFixture[str]):
    name = "model.[bold]layers[/bold].:smile:." + "x" * 300
    shared.print_text(name)
    assert capsys.readouterr().out == name + "\n"


def test_json_says_what_json_cannot():
    said = shared.as_plain({"a": float("nan"), "b": [float("inf"), -float("inf")], 3: b"\x01\xff", "t": torch.float32})
    assert said == {"a": "NaN", "b": ["Infinity", "-Infinity"], "3": "01ff", "t": "torch.float32"}


def test_long_work_draws_a_bar_with_rate_and_time_left_where_stderr_is_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with shared.progress() as on_progress:
        on_progress("verify", 500, 1000)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with shared.progress() as on_progress:
        on_progress("verify", 500_000, 2_000_000)
        on_progress("verify", 1_000_000, 2_000_000)
        on_progress("write", 0, 10)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert all(word in shown.err for word in ("verify", "50%", "1.0/2.0 MB", "write"))


def test_tables_on_a_terminal_fold_what_is_too_wide_and_elsewhere_do_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    table = Columns(["name", ">size"], [("model.layers.0." + "x" * 80, "7"), ("[red]b[/red]", "1,000")])
    shared.print_text(table)
    plain = capsys.readouterr().out
    assert plain.splitlines()[1].endswith("x" * 80 + "      7")
    assert len({len(line) for line in plain.splitlines()}) == 1
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    shared.print_text(table)
    drawn = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert all(len(line) <= 40 for line in drawn.splitlines())
    assert "[red]b[/red]" in drawn
    monkeypatch.setattr(columns, "MAX_DRAWN", 1)  # more rows than anybody waits for
    shared.print_text(table)
    assert capsys.readouterr().out == plain


def test_table_without_rows_is_drawn_as_its_headings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("FORCE_COLOR", "1")
    shared.print_text(Columns(["name", ">size"], []))
    assert re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).split() == ["name", "size"]


GUIDED = [
    ("├─ model", "", "", ""),
    ("│  └─ layers.0-31 ×32", "BF16", "4096 × 4096", "12"),
    ("│     ├─ self_attention.q_proj.weight ×32", "BF16", "pp=replicate dp=replicate tp=shard(0)", "1,234"),
    ("│     └─ norm", "BF16", "pp=replicate dp=replicate", "3"),
    ("└─ " + "x" * 70, "BF16", "dp=replicate", "3"),
]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_narrow_screens_keep_names_and_guides(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    rows = GUIDED if width < 80 else GUIDED[:-1]
    shared.print_text(Columns(["name", "dtype", "placement", ">size"], rows))
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()]
    assert all(len(line) <= width for line in lines)
    body = lines[next(i for i, line in enumerate(lines) if line.startswith("├─ model")) :]
    last = next(i for i, line in enumerate(body) if line.startswith("└─")) if width < 80 else len(body)
    # Down to the last row below it, the guide at the left goes on through every line.
    branch = next(i for i, line in enumerate(body) if "norm" in line)
    assert all(line[0] in "├│" for line in body[:branch])
    first = next(i for i, line in enumerate(body) if "q_proj" in line or "self_att" in line)
    assert all(line[:7] in ("│     ├", "│     │") for line in body[first:branch])
    if width >= 80:
        assert all(any(line.startswith(row[0]) for line in body) for row in rows)
        assert last == len(body)
    names = "".join(line[: max(width // 2, 16)] for line in body[last:])
    assert width >= 80 or names.count("x") >= 30


NUMBERS = [
    ("shape", "model.layers.0-31.self_attention.q_proj.weight ×32", "123456 × 654321", "→", "123456 × 654320"),
    ("value", "extra.loss", "0.00012345678901234", "→", "0.00012345678901235"),
    ("placement", "model.emb.weight", "pp=replicate dp=shard(0) tp=shard(1)", "→", "one rank"),
]
FILES = [(f"[{i}, 0]", "/data/runs/step_100/20261123T082215Z-f32cb3d8/rank00000-0.safetensors", "148,928") for i in range(3)]


@pytest.mark.parametrize("width", [40, 60, 80])
@pytest.mark.parametrize(("headings", "rows"), [(["", "name", "A", "", "B"], NUMBERS), (["offsets", "file", ">at byte"], FILES)])
def test_narrow_screens_break_neither_numbers_nor_file_names(
    headings: list[str],
    rows: list[tuple[str, ...]],
    width: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    shared.print_text(Columns(headings, rows))
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert all(len(line) <= width for line in lines)
    words = {word for row in rows for cell in row for word in re.findall(r"[^\s/]+", cell) if len(word) <= 30}
    assert {word for word in words if not any(word in line for line in lines)} == set()


def test_shells_complete_commands_options_and_paths():
    words = {"COMP_WORDS": "reshard-ckpt ver", "COMP_CWORD": "1", "_RESHARD_CKPT_COMPLETE": "complete_bash"}
    done = subprocess.run([sys.executable, "-m", "reshard_ckpt"], env={**os.environ, **words}, capture_output=True, text=True)
    assert done.stdout.split() == ["verify"]
    words |= {"COMP_WORDS": "reshard-ckpt verify --sha", "COMP_CWORD": "2"}
    done = subprocess.run([sys.executable, "-m", "reshard_ckpt"], env={**os.environ, **words}, capture_output=True, text=True)
    assert done.stdout.split() == ["--sha256"]
