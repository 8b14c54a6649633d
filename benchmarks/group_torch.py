"""One of several processes that train together in PyTorch: the peer that `multiprocess.py` times."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import group
import numpy as np
import torch
import torch.distributed as dist
from models import LEARNING_RATE, mlp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

DDP, DDP_FP16 = "torch DDP", "torch DDP, float16 hook"


class Layers(torch.nn.Module):
    """The tanh layers of `models.mlp`, with their mean square as loss."""

    def __init__(self, params: dict[str, np.ndarray[Any, Any]]) -> None:
        super().__init__()
        self.names = list(params)
        self.leaves = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor(x)) for x in params.values()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss of some rows."""
        for w, b in zip(self.leaves[0::2], self.leaves[1::2], strict=True):
            x = torch.tanh(x @ w + b)
        return x.square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--address")
    for name in ("--processes", "--process", "--layers", "--width", "--rows"):
        parser.add_argument(name, type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // arguments.processes))
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{arguments.address}",
        rank=arguments.process,
        world_size=arguments.processes,
    )
    model = mlp(arguments.layers, arguments.width, arguments.rows, "beyond")
    rows = np.split(model.batch("float32", arguments.processes), arguments.processes)[arguments.process]
    batch = torch.tensor(rows)
    made: dict[str, Any] = {}

    def make(form: str, steps: int) -> dict[str, Any]:
        layers = Layers(model.params("float32"))
        ddp = DistributedDataParallel(layers, gradient_as_bucket_view=True)
        if form == DDP_FP16:
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        made[form] = ddp, torch.optim.SGD(ddp.parameters(), lr=LEARNING_RATE, fused=True)
        for _ in range(steps):
            step(form)
        sums = {
            name: float(x.detach().double().sum())
            for name, x in zip(layers.names, layers.leaves, strict=True)
        }
        return {"sums": sums}

    def step(form: str) -> None:
        ddp, optimizer = made[form]
        optimizer.zero_grad()
        ddp(batch).backward()
        optimizer.step()

    def run(form: str, calls: int) -> dict[str, Any]:
        start_s = time.perf_counter()
        for _ in range(calls):
            step(form)
        return {"ms": (time.perf_counter() - start_s) * 1e3 / calls}

    group.serve({"make": make, "run": run})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
