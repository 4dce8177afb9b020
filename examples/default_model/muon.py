"""Optimizes most matrices of the layers with Muon and the other parameters with AdamW.

Muon orthogonalizes the momentum of a matrix by a Newton-Schulz iteration. Matrices of one shape
are stacked, so that the iteration consists of a few batched products.
"""

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(update: Tensor, steps: int = 5) -> Tensor:
    """Returns approximately the nearest (semi-)orthogonal matrices. update: [N, rows, cols]."""
    is_tall = update.shape[-2] > update.shape[-1]
    x = update.mT if is_tall else update
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    a, b, c = _COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).float()


class Muon(torch.optim.Optimizer):
    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.1
    ) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for param in params:
            by_shape.setdefault(param.shape, []).append(param)
        groups = [{"params": same} for same in by_shape.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            updates = []
            for param in group["params"]:
                assert param.grad is not None, f"no gradient for {tuple(param.shape)}"
                state = self.state[param]
                buffer = state.setdefault("momentum", torch.zeros_like(param))
                buffer.lerp_(param.grad, 1 - group["momentum"])
                updates.append(param.grad.lerp(buffer, group["momentum"]))
            rows, cols = group["params"][0].shape
            scale = group["lr"] * max(1.0, rows / cols) ** 0.5
            for param, update in zip(
                group["params"], orthogonalize(torch.stack(updates)), strict=True
            ):
                param.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-scale)


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Returns Muon and AdamW.

    AdamW optimizes the query and key projections, the embedding, routers, experts (whose many
    matrices would take Muon longer than all else) and all parameters that are not matrices. Muon
    would let queries and keys, which have no norm in a Llama, grow until attention selects a single
    token."""
    named = dict(model.named_parameters())
    is_key = {n: any(part in n for part in ("q_proj", "k_proj", "sparse_moe")) for n in named}
    is_other = {n: "embed" in n or p.ndim != 2 for n, p in named.items()}
    matrices = [p for n, p in named.items() if not is_key[n] and not is_other[n]]
    adam = torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if is_key[n]], "lr": 1e-3},
            {"params": [p for n, p in named.items() if is_other[n]], "lr": 3e-3},
        ],
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    return [Muon(matrices, lr=0.01), adam]


def schedule(step: int, total: int, warmup: int = 100, decay_share: float = 0.6) -> float:
    """Returns the learning rate factor: warm-up, a constant part, then a linear fall to zero."""
    falling = (total - step) / max(1, int(total * decay_share))
    return min(1.0, (step + 1) / min(warmup, max(1, total // 4)), falling)
