"""Jobs of the installed megatron-core for `test_compat`: ``python -m tests.families.megatron.compat save FOLDER``.

``save`` makes a checkpoint of each case. ``load`` loads each of ``FOLDER/converted`` on other layouts with Megatron's own calls,
and each of ``FOLDER/old``, as it is, with those of this library; it prints what is wrong.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.families.megatron import cpu_shim
from tests.families.megatron.folders import saved_key

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "dense": (4, {"tp": 2, "pp": 2}),
    "moe": (4, {"pp": 2, "ep": 2, "experts": 4}),
    "uneven": (4, {"tp": 2, "pp": 2, "layers": 3, "first_stage": 1, "tied": True}),
    "virtual": (4, {"tp": 2, "pp": 2, "layers": 4, "vpp": 2}),
    "separate": (4, {"tp": 2, "pp": 2, "metadata": {"non_homogeneous_layers": True}}),
    "plain": (2, {"tp": 2, "distributed": False}),
}
LAYOUTS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "dense": [(4, {"pp": 2}), (4, {"tp": 4})],
    "moe": [(4, {"ep": 4, "experts": 4}), (2, {"ep": 2, "experts": 4})],
}


def holds_in(folder: str) -> Callable[[Any], Any]:
    """Return what gives a shard as a folder has it: its values were made of the key that it had there, not of today's."""
    from tests.families.megatron import jobs

    def holds(one: Any) -> Any:
        match = re.fullmatch(r"optimizer\.state\.(\w+)\.(.+)", one.key)
        key = one.key if match is None else saved_key(f"optimizer.state.{match[2]}.{match[1]}", folder)
        return jobs.wanted(replace(one, key=key, data=None))

    return holds


def main(what: str, folder: str) -> None:
    cpu_shim.install()
    from megatron.core import __version__

    from tests.families.megatron import jobs

    old = tuple(map(int, __version__.split(".")[:2])) < (0, 16)
    if what == "save":
        for name, (nproc, layout) in CASES.items():
            sharding = {} if old or not layout.get("distributed", True) else {"sharding": "fully_reshardable"}
            path = os.path.join(folder, "saved", name, "iter_0000007")
            cpu_shim.run_forked(jobs.save, nproc, jobs.Case(**layout, **sharding), path)
        print(json.dumps({"version": __version__}))
        return
    from reshard_ckpt import megatron

    wrong = {}
    for kind, calls in (("converted", jobs.dist_checkpointing), ("old", megatron)):
        for name in [] if old else sorted(os.listdir(os.path.join(folder, kind))):
            path = os.path.join(folder, kind, name)
            for nproc, layout in LAYOUTS[name.rpartition("-")[2]]:
                found = cpu_shim.run_forked(jobs.load, nproc, jobs.Case(**layout), path, holds_in(name), calls)
                wrong[f"{kind} {name} {layout}"] = sorted({one for rank in found for one in rank})
    print(json.dumps(wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])
