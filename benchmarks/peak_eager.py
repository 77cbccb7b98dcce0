"""Prints the bytes that PyTorch eager's training steps need; `memory.py` runs it.

python benchmarks/peak_eager.py MODEL BATCH STEPS
"""

from __future__ import annotations

import sys

import eager
import networks
import resident
import torch
import toy


def main() -> None:
    name, batch, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    small = torch.zeros(toy.BATCH, toy.INPUTS)
    warm = eager.eager_step(toy.toy(), small, torch.zeros(toy.BATCH, dtype=torch.long))
    warm()
    del warm, small
    before = resident.now_bytes()
    network = networks.NETWORKS[name].make()
    x = torch.randn(batch, *networks.NETWORKS[name].shape)
    labels = torch.randint(networks.CLASSES, (batch,))
    step = eager.eager_step(network.train(), x, labels)
    step()
    resident.forget_peak()
    for _ in range(steps):
        step()
    print(resident.peak_bytes() - before)


if __name__ == "__main__":
    main()
