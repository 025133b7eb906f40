"""The wheel that `make dist` builds, in a fresh environment and outside of this tree, saves, loads and has its commands."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.launch import ROOT, project_table

PROGRAM = """
import importlib.metadata, pkgutil, runpy, sys
import reshard_ckpt, torch
from reshard_ckpt import checkpoint

site, version, script = sys.argv[1:]
assert reshard_ckpt.__file__.startswith(site), reshard_ckpt.__file__
assert reshard_ckpt.__version__ == importlib.metadata.version("reshard-ckpt") == version
model = torch.nn.Linear(3, 2)
checkpoint.save("ckpt", {"model": model, "step": 7})
expected = model.weight.detach().clone()
torch.nn.init.zeros_(model.weight)
checkpoint.load("ckpt", {"model": model, "step": 0})
assert torch.equal(model.weight, expected)
checkpoint.convert("ckpt", "weights.safetensors", to="safetensors", select=["model"])
found = importlib.metadata.distribution("reshard-ckpt").entry_points.select(group="reshard_ckpt.formats")
assert len({each.load().name for each in found}) == len(found) > 5
print(*sorted(module.name for module in pkgutil.walk_packages(reshard_ckpt.__path__, "reshard_ckpt.")), sep="\\n")
sys.argv = [script, "inspect", "ckpt", "model.weight"]
runpy.run_path(script, run_name="__main__")  # here, because another process would import torch again
"""


def run(command: list[str], folder: Path) -> str:
    """Run a command in a folder, without this tree on its path; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_wheel_works_in_a_fresh_environment_outside_of_the_tree(tmp_path: Path):
    tree, fresh, wheels = tmp_path / "tree", tmp_path / "fresh", tmp_path / "wheels"
    shutil.copytree(ROOT / "reshard_ckpt", tree / "reshard_ckpt", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(wheels), str(tree)], tmp_path)

    venv.create(fresh, with_pip=False)
    python = fresh / "bin" / "python"
    site = Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], tmp_path).strip())
    (wheel,) = wheels.iterdir()
    run([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)], tmp_path)
    # The dependencies are those of this environment: it comes after the wheel, and its own editable install is not seen.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))

    version = project_table()["version"]
    script = fresh / "bin" / "reshard-ckpt"
    assert script.read_text().startswith(f"#!{python}\n")
    modules, _, inspected = run([str(python), "-c", PROGRAM, str(site), version, str(script)], tmp_path).partition("model.weight")
    source = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "reshard_ckpt").rglob("*.py")]
    assert {*modules.split()} == {".".join(path.parts).removesuffix(".__init__") for path in source} - {"reshard_ckpt"}
    assert "F32" in inspected
    assert importlib.metadata.version("reshard-ckpt") == version


def test_versions_agree_everywhere():
    version = project_table()["version"].partition(".dev")[0]
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
