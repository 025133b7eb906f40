"""verl's own FSDP checkpoint manager through this library, with FSDP1 and FSDP2, beside its own files, on gloo and in Ray."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from reshard_ckpt import checkpoint
from tests.families.kills import assert_died_at_commit, die_at_commit
from tests.launch import RanksFailed, run_ranks

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("verl"), reason="needs verl: make compat-verl")

IMPORTS = "import verl.utils.checkpoint.fsdp_checkpoint_manager"
SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 31}
STEPS, AT = 4, 2


class Job:
    """A tiny Llama under FSDP, with its optimizer and schedule, and verl's manager of these."""

    def __init__(
        self, version: int, *, ours: bool, seed: int = 0, tied: bool = False, adapters: bool = False, **config: Any
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        from transformers import LlamaConfig, LlamaForCausalLM
        from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

        from reshard_ckpt.integrations import verl

        if ours:
            verl.install()
        torch.manual_seed(seed)
        net: Any = LlamaForCausalLM(
            LlamaConfig(num_key_value_heads=2, tie_word_embeddings=tied, architectures=["LlamaForCausalLM"], **SHAPE)
        )
        if adapters:
            from peft import LoraConfig, get_peft_model

            net = get_peft_model(net, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        if version == 1:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
            net = FullyShardedDataParallel(net, device_mesh=mesh, device_id=torch.device("cpu"))
        else:
            fully_shard(net)
        self.net, self.optimizer = net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.manager = FSDPCheckpointManager(net, self.optimizer, self.schedule, checkpoint_config=config or None)

    def train(self, steps: int) -> list[float]:
        """Train, with the same samples on every rank."""
        found = []
        for _ in range(steps):
            tokens = torch.randint(0, 31, (4, 8), generator=torch.Generator().manual_seed(self.schedule.last_epoch))
            loss = self.net(input_ids=tokens, labels=tokens).loss
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found


def save(folder: str, version: int, ours: bool, **options: Any) -> tuple[list[float], float]:
    """Train, save, and go on; also draw a random number of this rank."""
    job = Job(version, ours=ours, **options)
    job.train(AT)
    torch.manual_seed(100 + dist.get_rank())
    job.manager.save_checkpoint(folder, global_step=AT)
    drawn = float(torch.rand(()))
    return job.train(STEPS - AT), drawn


def load(folder: str, version: int, ours: bool, **options: Any) -> tuple[list[float], float]:
    job = Job(version, ours=ours, seed=5, **options)
    torch.manual_seed(200 + dist.get_rank())
    job.manager.load_checkpoint(folder)
    drawn = float(torch.rand(()))
    return job.train(STEPS - AT), drawn


def begin(stock: str, own: str, version: int) -> None:
    """On two ranks: verl's own save and load, and then ours."""
    from reshard_ckpt.integrations import verl

    expected = save(stock, version, False)
    assert load(stock, version, False) == expected
    assert save(own, version, True) == expected
    assert load(own, version, True) == expected, "with the random stream of each rank"
    losses, _ = load(own, 3 - version, True)
    assert losses == pytest.approx(expected[0], rel=1e-5)
    verl.uninstall()
    Path(own, f"expected-{dist.get_rank()}").write_text(repr(expected[0]))


def go_on(stock: str, own: str, version: int) -> tuple[float, str]:
    """On another number of ranks."""
    try:
        load(stock, version, False)
        said = "went on"
    except FileNotFoundError as error:
        said = str(error)
    losses, drawn = load(own, version, True)
    assert losses == pytest.approx(eval(Path(own, "expected-0").read_text()), rel=1e-5)
    return drawn, said


@pytest.mark.parametrize("version", [1, 2])
def test_it_goes_on_at_other_numbers_of_ranks_where_verl_cannot(version: int, tmp_path: Path) -> None:
    stock, own = str(tmp_path / "stock"), str(tmp_path / "own")
    run_ranks(begin, 2, stock, own, version, imports=IMPORTS)
    assert checkpoint.inspect(own).format == "reshard_ckpt"
    assert {"catalog.msgpack", "fsdp_config.json", "huggingface"} <= set(os.listdir(own))
    for ranks in (1, 3):
        found = run_ranks(go_on, ranks, stock, own, version, imports=IMPORTS)
        assert len({drawn for drawn, _ in found}) == ranks, "no two ranks draw the same"
        assert all(f"model_world_size_{ranks}" in said for _, said in found), "verl's own manager cannot"


def begin_tied(stock: str, own: str) -> list[float]:
    from reshard_ckpt.integrations import verl

    expected = save(stock, 2, False, tied=True)
    assert load(stock, 2, True, tied=True) == expected, "verl's own folder, on as many ranks by verl's own method"
    assert save(own, 2, True, tied=True) == expected
    verl.uninstall()
    return expected[0]


def go_on_tied(stock: str, own: str) -> list[list[float]]:
    return [load(folder, 2, True, tied=True)[0] for folder in (stock, own)]


def test_verls_own_folders_go_on_too(tmp_path: Path) -> None:
    folders = str(tmp_path / "stock"), str(tmp_path / "own")
    (expected, _) = run_ranks(begin_tied, 2, *folders, imports=IMPORTS)
    for ranks in (1, 3):
        for found in run_ranks(go_on_tied, ranks, *folders, imports=IMPORTS):
            assert found == [pytest.approx(expected, rel=1e-5)] * 2


def killed(folder: str) -> None:
    job = Job(2, ours=True)
    job.manager.save_checkpoint(f"{folder}/global_step_1", global_step=1, max_ckpt_to_keep=1)
    die_at_commit("global_step_2")
    job.manager.save_checkpoint(f"{folder}/global_step_2", global_step=2, max_ckpt_to_keep=1)


def test_a_kill_between_save_and_commit_leaves_the_folder_before(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        run_ranks(killed, 2, str(tmp_path), imports=IMPORTS)
    assert_died_at_commit(tmp_path / "global_step_2")
    assert checkpoint.verify(tmp_path / "global_step_1").ok


def rotated(folder: str) -> list[str]:
    from transformers import AutoModelForCausalLM

    job = Job(2, ours=True, load_contents=["model"], save_contents=["model", "hf_model"])
    for step in (1, 2, 3):
        job.manager.save_checkpoint(f"{folder}/global_step_{step}", global_step=step, max_ckpt_to_keep=2)
    dist.barrier()
    job.manager.load_checkpoint(f"{folder}/global_step_3")
    found = sorted(os.listdir(folder))
    saved = checkpoint.read(f"{folder}/global_step_3") if dist.get_rank() == 0 else {}
    if saved:
        assert all(name.startswith("model.") for name in saved)
        whole = AutoModelForCausalLM.from_pretrained(f"{folder}/global_step_3/huggingface")
        assert torch.equal(whole.lm_head.weight.bfloat16(), saved["model.lm_head.weight"].bfloat16())
    return found


def adapters(folder: str) -> None:
    """LoRA alone: a base model with other adapters takes the saved ones, and keeps its own weights."""
    config = {"adapters": True, "save_lora_only": True}
    save(folder, 2, True, **config)
    job = Job(2, ours=True, seed=5, **config)
    before = {name: part.full_tensor().clone() for name, part in job.net.named_parameters()}
    job.manager.load_checkpoint(folder)
    after = {name: part.full_tensor() for name, part in job.net.named_parameters()}
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {name for name in after if "lora_" in name}
    assert all("lora_" in name for name in checkpoint.catalog(folder).names)


def test_contents_rotation_hugging_face_models_and_adapters_stay_verls(tmp_path: Path) -> None:
    assert run_ranks(rotated, 2, str(tmp_path / "a"), imports=IMPORTS)[0] == ["global_step_2", "global_step_3"]
    run_ranks(adapters, 2, str(tmp_path / "b"), imports=IMPORTS)


class Worker:
    """A rank of a job, in a process of Ray's. Ray's environment names the module that calls `install`."""

    def begin(self, rank: int, size: int, port: int) -> int:
        from datetime import timedelta

        store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(seconds=60))
        self.begun = lambda: dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        return int(store.port)

    def do(self, job: str, folder: str) -> tuple[list[float], str]:
        self.begun()
        losses, _ = {"save": save, "load": load}[job](folder, 2, False)
        from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

        return losses, FSDPCheckpointManager.save_checkpoint.__module__


def test_it_goes_on_in_workers_of_ray(tmp_path: Path) -> None:
    import ray

    (tmp_path / "reshard_verl.py").write_text("from reshard_ckpt.integrations import verl\n\nverl.install()\n")
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    variables = {"VERL_USE_EXTERNAL_MODULES": "reshard_verl", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=3, include_dashboard=False, runtime_env={"env_vars": variables}, log_to_driver=False)
    try:
        expected: list[float] = []
        for job, size in (("save", 2), ("load", 3)):
            workers = [ray.remote(num_cpus=1)(Worker).remote() for _ in range(size)]
            port = ray.get(workers[0].begin.remote(0, size, 0))
            ray.get([worker.begin.remote(rank, size, port) for rank, worker in enumerate(workers) if rank])
            for losses, module in ray.get([worker.do.remote(job, str(tmp_path / "saved")) for worker in workers], timeout=300):
                assert module == "reshard_ckpt.families.verl.calls"
                expected = expected or losses
                assert losses == pytest.approx(expected, rel=1e-5)
            for worker in workers:
                ray.kill(worker)
    finally:
        ray.shutdown()


def test_install_and_uninstall() -> None:
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    from reshard_ckpt.integrations import verl

    stock = FSDPCheckpointManager.save_checkpoint
    for _ in range(2):  # a second call changes nothing
        verl.install()
    assert FSDPCheckpointManager.save_checkpoint.__module__ == "reshard_ckpt.families.verl.calls"
    verl.uninstall()
    assert FSDPCheckpointManager.save_checkpoint is stock
