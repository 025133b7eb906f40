"""Runs the page's program on a small local cluster: ``python driver.py program storage workers steps [mode]``.

Mode ``async`` reports with ``CheckpointUploadMode.ASYNC``. Mode ``kill`` ends the worker of rank 0 just before its second commit,
once, and lets Ray start the workers anew.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import ray
from ray import train


def patched(worker: Any, mode: str, mark: str, config: dict[str, Any]) -> None:
    """Run a worker of the page's program, changed for a mode."""
    if mode == "async":
        scope = worker.__globals__
        asynchronous = {"checkpoint_upload_mode": train.CheckpointUploadMode.ASYNC}
        report, scope["train"] = train.report, _Changed(train)
        scope["train"].report = lambda metrics, **options: report(metrics, **options, **(asynchronous if options else {}))
    if mode == "kill" and train.get_context().get_world_rank() == 0 and not Path(mark).exists():
        from reshard_ckpt.engine.saving import commit

        publish = commit.publish

        def killing(*arguments: Any, **options: Any) -> Any:
            if Path(mark).exists():
                os._exit(9)
            Path(mark).touch()
            return publish(*arguments, **options)

        commit.publish = killing
    worker(config)


class _Changed:
    """A module with other attributes."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def main(program: str, storage: str, workers: str, steps: str, mode: str = "") -> None:
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False, configure_logging=False)
    scope = runpy.run_path(program)
    worker, config = scope["train_worker"], scope["RunConfig"]
    scope["main"].__globals__["train_worker"] = functools.partial(patched, worker, mode, f"{storage}/mark")
    if mode == "kill":
        failures = train.FailureConfig(max_failures=1)
        scope["main"].__globals__["RunConfig"] = functools.partial(config, failure_config=failures)
    scope["main"](storage, int(workers), int(steps))
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
