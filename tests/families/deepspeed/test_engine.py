"""DeepSpeed's engine with this library attached, on real ranks: needs DeepSpeed, as `make compat-deepspeed` installs it.

Whatever is saved is held against what DeepSpeed's own save of the same moment says: to its converters, to its live optimizer,
and to a save of its own after a load of ours.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from reshard_ckpt import checkpoint
from reshard_ckpt.errors import CheckpointError, CheckpointNotFound, CorruptError
from tests.families.deepspeed import jobs
from tests.launch import run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed: make compat-deepspeed")

OURS, STOCK = "ours", "stock"
EVERY = (*jobs.CASES, *jobs.PIPES, *jobs.PARALLEL)
NOT_NAMED = ("p0-fp16-tied", "p0-fp32-tied")
"""DeepSpeed's own folders of these do not say how the tied module is called."""


def save_both(out: str, cases: list[str]) -> dict[str, Any]:
    """Save each case twice at the same moment; return the losses of the next steps, and what DeepSpeed says is there."""
    from reshard_ckpt.families.deepspeed import calls as reshard_deepspeed

    found: dict[str, Any] = {}
    for case in cases:
        engine = jobs.engine_of(case)
        jobs.train(engine, jobs.STEPS)
        root = f"{out}/{case}"
        engine.save_checkpoint(f"{root}/{STOCK}", client_state=jobs.CLIENT)
        live = jobs.gathered(engine) if case[0] == "z" else {}
        state = jobs.unpartitioned(engine) if case[1] == "0" and case[0] != "t" else {}
        assert reshard_deepspeed.attach(engine) is engine
        engine.save_checkpoint(f"{root}/{OURS}", client_state=jobs.CLIENT)
        losses = jobs.train(engine, 2, jobs.STEPS)  # while it is being written
        reshard_deepspeed.detach(engine)
        engine.save_checkpoint(f"{root}/after")  # by DeepSpeed again, which must be as it was
        if dist.get_rank() == 0:
            truth = state or jobs.converted(f"{root}/{STOCK}", f"{root}/universal")
            found[case] = {"losses": losses, "truth": truth, "live": live}
            jobs.write_json(f"{root}/losses.json", {str(dist.get_world_size()): losses})
        dist.barrier()
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("kind", ["z0", "z1", "z2", "z3", "p", "t"])
def test_saves_and_folders_are_what_deepspeed_says(kind: str, num_ranks: int, tmp_path: Path) -> None:
    cases = [case for case in EVERY if case.startswith(kind)]
    if not cases:
        pytest.skip("not with this release of DeepSpeed")
    found = run_ranks(save_both, num_ranks, str(tmp_path), cases, timeout_s=1800)[0]
    for case in cases:
        ours = jobs.digests(tmp_path / case / OURS)
        truth = found[case]["truth"]
        if not case.endswith("robin"):  # DeepSpeed's universal conversion of round robin is wrong
            assert {name: ours.get(name) for name in truth} == truth, case
        for name, live in found[case]["live"].items():
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[case.split("-")[1]]
            master = checkpoint.read(tmp_path / case / OURS, [f"model.{name}"])[f"model.{name}"]
            assert jobs.digest(master.to(dtype)) == live, (case, name)
        assert checkpoint.verify(tmp_path / case / OURS).ok
        if case in NOT_NAMED:
            continue
        stock = jobs.digests(tmp_path / case / STOCK)
        assert {name: stock[name] for name in ours} == ours, case  # a pipeline's tied layer has a second name there
    if kind in ("z1", "z2"):
        # What round robin and elastic checkpoints change is the layout alone.
        pairs = {f"{kind}-fp32-robin": f"{kind}-fp32-groups", f"{kind}-fp32-elastic": f"{kind}-fp32-plain"}
        for case, same in ((case, same) for case, same in pairs.items() if case in cases):
            assert jobs.digests(tmp_path / case / STOCK) == jobs.digests(tmp_path / same / STOCK)


def load_and_save(out: str, pairs: list[tuple[str, str]]) -> dict[str, list[float]]:
    """Load each source into another kind of engine, save that with DeepSpeed itself, and train on."""
    from reshard_ckpt.families.deepspeed import calls as reshard_deepspeed

    losses = {}
    for source, case in pairs:
        for kind in (OURS, STOCK):
            engine = reshard_deepspeed.attach(jobs.engine_of(case, seed=9))
            path, client = engine.load_checkpoint(f"{out}/{source}/{kind}")
            assert Path(path).name == "global_step3"
            assert {key: client[key] for key in jobs.CLIENT} == jobs.CLIENT
            assert (engine.global_steps, engine.lr_scheduler.last_batch_iteration) == (3, 2)
            reshard_deepspeed.detach(engine)
            engine.save_checkpoint(f"{out}/{source}/{kind}-{case}-{dist.get_world_size()}")
            losses[f"{source} {kind} {case}"] = jobs.train(engine, 2, jobs.STEPS)
    return losses


PAIRS = [
    ("z1-bf16-plain", "z1-bf16-plain"), ("z1-bf16-plain", "z2-bf16-plain"), ("z2-fp16-groups", "z3-fp16-groups"),
    ("z3-bf16-subgroups", "z3-bf16-subgroups"), ("z3-fp32-tied", "z1-fp32-tied"), ("z2-fp32-aligned", "z1-fp32-robin"),
    ("z3-bf16-frozen", "z2-bf16-frozen"), ("z0-bf16-plain", "z0-bf16-plain"), ("z0-fp32-tied", "z3-fp32-tied"),
    ("p1-bf16-tied", "p1-bf16-tied"), ("p0-fp16-plain", "p0-fp16-plain"), ("t1-bf16-tp", "t2-bf16-tp"), ("t3-fp32-tp",
    "t3-fp32-tp"),
]  # fmt: skip
PAIRS = [(source, case) for source, case in PAIRS if source in EVERY]


@pytest.fixture(scope="module")
def saved_on_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two")
    run_ranks(save_both, 2, str(out), list(dict.fromkeys(source for source, _ in PAIRS)), timeout_s=1800)
    return out


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_loads_at_any_size_and_stage_bit_for_bit(num_ranks: int, saved_on_two: Path) -> None:
    found = run_ranks(load_and_save, num_ranks, str(saved_on_two), PAIRS, timeout_s=1800)[0]
    for source, case in PAIRS:
        for kind in (OURS, STOCK):
            wanted = jobs.digests(saved_on_two / source / kind)
            got = jobs.digests(saved_on_two / source / f"{kind}-{case}-{num_ranks}")
            assert {name: got.get(name) for name in wanted} == wanted, (source, kind, case)
            if num_ranks == 2 and source == case:
                same = json.loads((saved_on_two / source / "losses.json").read_text())["2"]
                assert found[f"{source} {kind} {case}"] == same


def options_of_load(out: str) -> dict[str, Any]:
    """Load parts of a checkpoint, each into an engine of its own; return what became of it."""
    from reshard_ckpt.families.deepspeed import calls as reshard_deepspeed

    found: dict[str, Any] = {}
    for name, options in (
        ("module", {"load_module_only": True}), ("no state", {"load_optimizer_states": False}),
        ("no scheduler", {"load_lr_scheduler_states": False}), ("tag", {"tag": "global_step3"}),
    ):  # fmt: skip
        engine = reshard_deepspeed.attach(jobs.engine_of("z1-bf16-plain", seed=9))
        engine.load_checkpoint(f"{out}/z1-bf16-plain/{OURS}", **options)
        base = engine.optimizer.optimizer
        found[name] = {
            "model": jobs.gathered(engine),
            "steps": engine.global_steps,
            "schedule": engine.lr_scheduler.last_batch_iteration,
            "state": any("exp_avg" in state for state in base.state.values()),
        }
    engine = reshard_deepspeed.attach(jobs.engine_of("z1-bf16-plain"))
    found["nothing"] = engine.load_checkpoint(f"{out}/nowhere")
    try:
        engine.save_checkpoint(f"{out}/bad", client_state={"hook": os.getcwd})
        reshard_deepspeed.detach(engine)
    except CheckpointError as error:
        found["bad"] = str(error)
    engine = reshard_deepspeed.attach(jobs.engine_of("z2-bf16-frozen"))
    jobs.train(engine, 1)
    engine.save_checkpoint(f"{out}/frozen", exclude_frozen_parameters=True, client_state={"seen": torch.arange(3)})
    engine.checkpoint_engine.cleanup()
    dist.barrier()
    found["kept"] = checkpoint.catalog(f"{out}/frozen/global_step1").names
    return found


def test_options_of_load_keep_their_meaning(saved_on_two: Path) -> None:
    found = run_ranks(options_of_load, 2, str(saved_on_two))[0]
    model = found["tag"]["model"]
    assert found["nothing"] == (None, None)
    assert (found["tag"]["steps"], found["tag"]["schedule"], found["tag"]["state"]) == (3, 2, True)
    assert (found["module"]["model"], found["module"]["steps"]) == (model, 0)
    assert (found["no state"]["model"], found["no state"]["steps"], found["no state"]["state"]) == (model, 3, False)
    assert found["no scheduler"]["schedule"] < 2
    assert "deepspeed.hook" in found["bad"]
    kept = {name for name in found["kept"] if name.startswith(("model.", "deepspeed."))}
    assert {"model.b.weight", "model.scale", "deepspeed.seen"} <= kept
    assert kept.isdisjoint({"model.a.weight", "model.emb.weight"})


def values_that_do_not_fit(folder: str) -> dict[str, list[str]]:
    """Load with values that do not fit on rank 1: what each rank raises, and whether a tensor changed."""
    from reshard_ckpt.families.deepspeed.loading import Saved, find_saved, load_checkpoint

    engine = jobs.engine_of("z2-bf16-plain", seed=9)
    jobs.train(engine, 1)
    found: dict[str, list[str]] = {}

    def changed(what: str, names: list[str], values: dict[str, Any]) -> dict[str, Any]:
        if what == "a step" and dist.get_rank() == 1:
            values[next(name for name in names if name.endswith(".step"))] = 77
        if what == "no number" and dist.get_rank() == 1:
            values |= {name: "three" for name in names if name.endswith(".step")}
        if what == "a group" and dist.get_rank() == 1:
            values["optimizer.param_groups"] = [
                {**group, "params": group["params"][1:]} for group in values["optimizer.param_groups"]
            ]
        if what == "damage" and dist.get_rank() == 1:
            raise CorruptError("a block is damaged")
        return values

    def lying(what: str) -> Any:
        def find(load_dir: str, tag: Any) -> Saved | None:
            saved = find_saved(load_dir, tag)
            assert saved is not None
            return replace(saved, read=lambda names: changed(what, names, saved.read(names)))

        return find

    def masters() -> list[str]:
        return [jobs.digest(flat) for flat in engine.optimizer.single_partition_of_fp32_groups]

    for what in ("a step", "no number", "a group", "damage"):
        before = masters()
        with pytest.raises(CheckpointError) as raised:
            load_checkpoint(engine, folder, find=lying(what))
        found[what] = [type(raised.value).__name__, str(raised.value), str(masters() == before)]
    return found


def test_values_that_do_not_fit_are_raised_on_all_ranks_before_a_tensor_changes(saved_on_two: Path) -> None:
    every = run_ranks(values_that_do_not_fit, 2, str(saved_on_two / "z1-bf16-plain" / OURS))
    assert all(message.startswith("rank 1: ") for _, message, _ in every[0].values()), every[0]
    for found in every:
        kinds = {what: kind for what, (kind, _, _) in found.items()}
        assert kinds == {
            "a step": "UnsupportedError", "no number": "UnsupportedError", "a group": "MismatchError", "damage": "CorruptError",
        }  # fmt: skip
        assert [same for _, _, same in found.values()] == ["True"] * 4


def saved_and_trained_on(out: str) -> None:
    """Save, and keep the losses of the next steps."""
    from reshard_ckpt.families.deepspeed import calls as reshard_deepspeed

    engine = reshard_deepspeed.attach(jobs.engine_of("z2-bf16-plain"))
    jobs.train(engine, jobs.STEPS)
    engine.save_checkpoint(out, client_state=jobs.CLIENT)
    losses = jobs.train(engine, 2, jobs.STEPS)
    engine.checkpoint_engine.finish()
    if dist.get_rank() == 0:
        jobs.write_json(f"{out}/losses.json", losses)


KILLS = {
    "the first bytes are written": 1, "a file is made durable": 0, "all is written": 0, "it is committed, before latest": 0,
}  # fmt: skip
"""When a rank is killed, and which; torchrun ends the other."""


def resumed(out: str) -> tuple[list[float], Any]:
    """Resume from ``latest`` and train on; return the losses, and the engine."""
    from reshard_ckpt.families.deepspeed import calls as reshard_deepspeed

    engine = reshard_deepspeed.attach(jobs.engine_of("z2-bf16-plain", seed=9))
    assert Path(engine.load_checkpoint(out)[0]).name == "global_step3"
    return jobs.train(engine, 2, jobs.STEPS), engine


def killed_while_saving(out: str, when: str) -> None:
    """Resume, train on, and die in the next save."""
    from reshard_ckpt.engine.saving import commit
    from reshard_ckpt.families.deepspeed import engine as reshard_engine
    from reshard_ckpt.storage.local import LocalWriter

    losses, engine = resumed(out)
    if dist.get_rank() == 0:
        jobs.write_json(f"{out}/{when}.json", losses)
    dist.barrier()
    if dist.get_rank() == KILLS[when]:
        points = [(LocalWriter, "write"), (LocalWriter, "finish"), (commit, "build_catalog"), (reshard_engine, "write_latest")]
        setattr(*dict(zip(KILLS, points, strict=True))[when], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    engine.save_checkpoint(out)
    engine.checkpoint_engine.finish()
    dist.barrier()
    raise RuntimeError("nobody was killed")


def last_losses(out: str) -> list[float]:
    return resumed(out)[0]


def test_killed_at_any_point_of_a_save_leaves_latest_and_the_old_tag_resumes_exactly(tmp_path: Path) -> None:
    run_ranks(saved_and_trained_on, 2, str(tmp_path))
    losses = json.loads((tmp_path / "losses.json").read_text())
    new = tmp_path / "global_step5"
    for when in KILLS:
        with pytest.raises(AssertionError) as killed:
            run_ranks(killed_while_saving, 2, str(tmp_path), when)
        assert "nobody was killed" not in str(killed.value), when
        assert json.loads((tmp_path / f"{when}.json").read_text()) == losses, killed.value  # after what the one before has left
        assert (tmp_path / "latest").read_text() == "global_step3", when
        if when == "it is committed, before latest":  # whole
            assert checkpoint.verify(new).ok
        else:  # or absent
            with pytest.raises(CheckpointNotFound):
                checkpoint.catalog(new)
    assert run_ranks(last_losses, 2, str(tmp_path))[0] == losses


def two_saves(out: str) -> list[list[float]]:
    """Save twice, the second time before anybody waited for the first; return the states that were saved."""
    from reshard_ckpt.families.deepspeed import calls as reshard_deepspeed

    engine = reshard_deepspeed.attach(jobs.engine_of("z3-fp32-plain"))
    seen = []
    for step in range(3):
        jobs.train(engine, 1, step)
        engine.save_checkpoint(out, tag=f"s{step}")
        latest = Path(out, "latest")
        if step:
            assert latest.read_text() in (f"s{step - 1}", f"s{step}")
        seen.append(jobs.gathered(engine))
    engine.save_16bit_model(out, "weights.bin")
    engine.destroy()  # waits for the last; rank 0 for ``latest`` too
    dist.barrier()
    assert Path(out, "latest").read_text() == "s2"
    return seen


def test_saves_one_after_the_other_do_not_mix(tmp_path: Path) -> None:
    seen = run_ranks(two_saves, 2, str(tmp_path))[0]
    for step, live in enumerate(seen):
        found = jobs.digests(tmp_path / f"s{step}")
        assert {name: found[f"model.{name}"] for name in live} == live
    assert jobs.digests(tmp_path) == jobs.digests(tmp_path / "s2")


def installed(out: str) -> tuple[str, str]:
    """Have engines attached by their config; one without the block stays as it is."""
    deepspeed = jobs.import_deepspeed()
    from reshard_ckpt.families.deepspeed import calls as reshard_deepspeed

    reshard_deepspeed.install()
    reshard_deepspeed.install()
    found = []
    for extra in ({}, {"datastates_ckpt": {"host_cache_size": 1, "parser_threads": 2}}):
        model = jobs.Net()
        wanted = jobs.config(1, "fp32", extra=extra)
        engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=wanted)[0]
        jobs.train(engine, 1)
        engine.save_checkpoint(f"{out}/{len(found)}")
        engine.destroy()
        dist.barrier()
        found.append(type(engine.checkpoint_engine).__module__)
    return found[0], found[1]


def test_install_attaches_where_the_config_says(tmp_path: Path) -> None:
    plain, ours = run_ranks(installed, 2, str(tmp_path))[0]
    assert plain.startswith("deepspeed.")
    assert ours == "reshard_ckpt.families.deepspeed.engine"
    assert (tmp_path / "1" / "global_step1" / "catalog.msgpack").exists()
    assert jobs.digests(tmp_path / "1").keys() == jobs.digests(tmp_path / "0").keys()


def test_attach_refuses_what_is_no_engine() -> None:
    from reshard_ckpt.errors import UsageError
    from reshard_ckpt.families.deepspeed.calls import attach

    with pytest.raises(UsageError, match="deepspeed.initialize"):
        attach(torch.nn.Linear(2, 2))
