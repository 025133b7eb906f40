"""The warm ``python``: its programs begin, print, are told and end as those of a new process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch import ROOT
from tests.warm_python import warm_python

SHOWS = """\
import os, sys, pickle
import beside
class Here: pass
assert type(pickle.loads(pickle.dumps(Here()))) is Here  # __main__ is this program
print(sys.argv, __name__, beside.WORD, os.getcwd(), ascii(os.environ["WORD"]), sys.stdin.read(), sys.path[0])
print("to stderr", file=sys.stderr)
"""
LEAVES = """\
import atexit, threading
def late():
    threading.main_thread().join()
    print("the thread has ended")
threading.Thread(target=late).start()
atexit.register(print, "the last word")
class Last:
    def __del__(self): print("modules are cleared")
kept = Last()
print("the program has ended")
"""
WAITS = """\
import os, signal, sys
def told(number, frame):
    os.write(1, b"told\\n")  # the line before may still be under way
    sys.exit(5)
signal.signal(signal.SIGUSR1, told)
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""


def run(arguments: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([warm_python(), *arguments], text=True, capture_output=True, check=False, **options)  # type: ignore[call-overload]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shows.py").write_text(SHOWS)
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    (tmp_path / "elsewhere").mkdir()
    return tmp_path


def test_a_script_has_what_its_caller_gives_it(folder: Path):
    elsewhere = folder / "elsewhere"
    done = run([str(folder / "shows.py"), "-x", "a b"], cwd=elsewhere, input="typed", env={**os.environ, "WORD": "é\udcff"})
    script = str(folder / "shows.py")
    assert done.stdout == f"{[script, '-x', 'a b']} __main__ found {elsewhere} '\\xe9\\udcff' typed {folder}\n"
    assert (done.stderr, done.returncode) == ("to stderr\n", 0)


def test_a_module_and_a_program_of_the_command_line(folder: Path):
    env = {**os.environ, "WORD": "word"}
    done = run(["-u", "-m", "shows", "x"], cwd=folder, input="", env=env)
    assert done.stdout == f"{[str(folder / 'shows.py'), 'x']} __main__ found {folder} 'word'  {folder}\n"
    done = run(["-c", SHOWS, "x"], cwd=folder, input="", env=env)
    assert done.stdout == f"['-c', 'x'] __main__ found {folder} 'word'  \n"
    assert "torch" in run(["-c", "import sys; print([n for n in sys.modules if n == 'torch'])"]).stdout


def test_exit_codes_are_those_of_a_process():
    codes = {
        "pass": 0,
        "import sys; sys.exit(7)": 7,
        "import sys; sys.exit('why')": 1,
        "1 / 0": 1,
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
        "raise KeyboardInterrupt": -signal.SIGINT,
    }
    done = {program: run(["-c", program]) for program in codes}
    assert {program: done[program].returncode for program in codes} == codes
    assert done["import sys; sys.exit('why')"].stderr == "why\n"
    assert "ZeroDivisionError" in done["1 / 0"].stderr


def test_a_program_leaves_through_the_end_of_the_interpreter():
    done = run(["-c", LEAVES])
    assert done.stdout.splitlines() == ["the program has ended", "the thread has ended", "the last word", "modules are cleared"]
    assert (done.returncode, done.stderr) == (0, "")


def test_signals_reach_the_program_and_a_killed_client_takes_it_along():
    with subprocess.Popen([warm_python(), "-c", WAITS], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        client.stdout.readline()
        client.send_signal(signal.SIGUSR1)
        assert client.stdout.read() == "told\n"
    assert client.returncode == 5
    with subprocess.Popen([warm_python(), "-c", WAITS], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert int(client.stdout.readline()) != client.pid
        client.kill()
        assert client.stdout.read() == ""  # whoever could write to it has ended


@pytest.mark.parametrize("ignored", [True, False])
def test_a_program_ignores_what_its_caller_ignores(ignored: bool):
    """As one does that a shell starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        program = "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
        assert run(["-c", program]).stdout == f"{ignored}\n"
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_a_program_starts_is_warm_too():
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; print(\"torch\" in sys.modules)'])"
    assert run(["-c", program]).stdout == "True\n"
    shown = subprocess.run([Path(warm_python()).with_name("reshard-ckpt"), "--help"], text=True, capture_output=True, check=True)
    assert "reshard" in shown.stdout


def test_ranks_of_torchrun_are_forks(tmp_path: Path):
    (tmp_path / "rank.py").write_text("import os, sys; print('rank', os.environ['RANK'], 'reshard_ckpt' in sys.modules)")
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(tmp_path / "rank.py")]
    done = run(arguments, cwd=ROOT)
    assert sorted(done.stdout.splitlines()) == ["rank 0 True", "rank 1 True"], done.stderr
    assert sys.executable != warm_python()
