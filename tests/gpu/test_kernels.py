"""The simulated device computes what the CPU does, though later: else no other test of it would mean anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.training import Net

pytestmark = pytest.mark.usefixtures("sim")

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (kind, {"lr": 0.01, **more, how: True})
    for kind, more in ((torch.optim.SGD, {"momentum": 0.9, "nesterov": True}), (torch.optim.AdamW, {"amsgrad": True}))
    for how in ("foreach", "fused")
] + [(torch.optim.SGD, {"lr": 0.01, "foreach": False}), (torch.optim.AdamW, {"foreach": False})]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", None))
def test_optimizers_do_what_they_do_on_the_cpu(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    state = []
    for device in ("cpu", "sim"):
        torch.manual_seed(1)
        model, data = Net(24, 2).to(device), torch.randn(8, 24).to(device)
        optimizer = kind(model.parameters(), **options)  # type: ignore[call-arg]
        for _ in range(3):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
        held = [value for of_param in optimizer.state.values() for value in of_param.values() if value is not None]
        assert any(value.device.type == device for value in held) or not held
        state.append([value.cpu() for value in (*model.state_dict().values(), *held)])
    assert len(state[0]) == len(state[1])
    assert all(torch.equal(*pair) for pair in zip(*state, strict=True))


def test_kernels_write_where_they_are_told_to() -> None:
    results = []
    for device in ("cpu", "sim"):
        base = torch.arange(60.0).reshape(6, 10).to(device)
        small, grown, whole = torch.zeros(5, 6, device=device), torch.empty(0, device=device), base.clone()
        returned = [base[::2].mul_(3), base.t()[3].add_(base.t()[4]), base.view(-1)[7:19].fill_(-1)]
        returned.append(torch.add(base[:5, :6], 1, alpha=2, out=small))
        returned.append(torch.cat([base, base], out=grown))
        returned.append(torch.mul(whole, 2, out=whole.t().t()))
        torch._foreach_add_([base, small], 0.5)
        torch._foreach_addcdiv_([small], [small + 1], [small.abs() + 2], value=-0.25)
        largest, at = base.max(dim=1)
        values = [base, small, grown, whole, largest, at, base.sum(), base > 4, *returned]
        assert returned[-3] is small
        assert returned[-2] is grown
        results.append([value.cpu() for value in values])
    assert [i for i, pair in enumerate(zip(*results, strict=True)) if not torch.equal(*pair)] == []
