"""``python -m tests.fuzz [TARGET …] --seconds N``: fuzz each decoder for so long, in a process of its own.

What libFuzzer finds (an exception that is no `CheckpointError`, a hang of over 20 s, more than 2 GiB of memory) ends the run with
the input saved under ``--out``; ``--replay FILE`` runs one again.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

RSS_MB, HANG_S = 2048, 20


def fuzz_one(name: str, arguments: list[str]) -> None:
    """Run by a process of its own: libFuzzer does not return."""
    import atheris

    with atheris.instrument_imports(include=["reshard_ckpt"]):
        from reshard_ckpt.errors import CheckpointError
        from tests.fuzz.targets import SCRATCH, TARGETS
    warnings.simplefilter("ignore")
    target = TARGETS[name]
    seeds = list(target.seeds())
    corpus = Path(arguments[-1])
    if corpus.is_dir():
        for i, seed in enumerate(seeds):
            (corpus / f"seed-{i}").write_bytes(seed)

    last = SCRATCH / "last"

    def one(data: bytes) -> None:
        last.write_bytes(data)  # what ran when memory or time was over, which libFuzzer does not always know
        with suppress(CheckpointError):
            target.run(data)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if target.mutate is None or chance.random() < 0.3:
            return atheris.Mutate(data, max_size)
        try:
            return target.mutate(data, chance)[:max_size]
        except Exception:  # it is no input of this kind any more
            return target.mutate(chance.choice(seeds), chance)[:max_size]

    options = [f"-max_len={max(target.max_bytes, *map(len, seeds))}", *arguments]
    atheris.Setup([sys.argv[0], *options], one, custom_mutator=mutate)
    atheris.Fuzz()


def names() -> list[str]:
    from tests.fuzz.targets import TARGETS

    return list(TARGETS)


def run(name: str, seconds: int, out: Path, replay: Path | None) -> bool:
    """Fuzz one target; whether nothing was found."""
    corpus = out / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    limits = [f"-max_total_time={seconds}", f"-rss_limit_mb={RSS_MB}", f"-timeout={HANG_S}", f"-artifact_prefix={out}/{name}-"]
    command = [sys.executable, "-m", "tests.fuzz", "--only", name, *limits, str(replay or corpus)]
    if replay:
        command.remove(limits[0])
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory) as scratch:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "FUZZ_SCRATCH": scratch}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode and not replay:
            shutil.copy(Path(scratch, "last"), out / f"{name}-last")
    figures = re.findall(r"#(\d+)\s+\w+\s+cov: (\d+)", done.stderr)
    runs, coverage = figures[-1] if figures else ("0", "0")
    print(
        f"{name}: {runs} inputs, {coverage} places of the code reached, {'nothing found' if not done.returncode else 'FAILED'}",
        flush=True,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if not line.startswith(("INFO: Instr", "#", "WARNING"))]
        print(done.stdout[-4000:], *lines[-60:], sep="\n")
    return not done.returncode


def main() -> int:
    if sys.argv[1:2] == ["--only"]:
        fuzz_one(sys.argv[2], sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", help="all by default")
    parser.add_argument("--seconds", type=int, default=30, help="for each target")
    parser.add_argument(
        "--out", type=Path, default=Path("fuzz_out"), help="keeps what was found, and the inputs that reach new code"
    )
    parser.add_argument("--replay", type=Path, help="run this one input")
    args = parser.parse_args()
    known = names()
    unknown = [name for name in args.targets if name not in known]
    if unknown:
        parser.error(f"{', '.join(unknown)}: none of {', '.join(known)}")
    if args.replay and len(args.targets) != 1:
        parser.error("--replay needs one target")
    results = [run(name, args.seconds, args.out.resolve(), args.replay) for name in args.targets or known]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
