"""Run as a process of its own, with POSITIONS VOCABULARY HIDDEN: peak memory of the
log-probabilities of a row and of their gradients, and how far off they are at a few positions, as
JSON."""

import json
import os
import sys
from pathlib import Path

import torch

from services.trainer.logprobs import token_logprobs

TEMPERATURE = 0.7


def resident_bytes() -> int:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """The most that it ever was. (The maximum of getrusage begins with what the parent had when it
    started this process.)"""
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x]
    return int(line.split()[1]) * 1024


def main(positions: int, vocabulary: int, size: int) -> None:
    """Inputs and gradients are no part of the peak."""
    torch.manual_seed(0)
    hidden = torch.randn(positions, size).requires_grad_()
    head = torch.nn.Linear(size, vocabulary, bias=False)
    slots, targets = torch.arange(positions), torch.randint(vocabulary, (positions,))
    weights = torch.randn(positions)
    before = resident_bytes()
    logprobs, entropy = token_logprobs(
        hidden, head, slots=slots, targets=targets, temperature=TEMPERATURE
    )
    (logprobs * weights).sum().backward()  # type: ignore[no-untyped-call]
    gradients = 4 * (hidden.numel() + head.weight.numel())
    peak = peak_bytes() - before - gradients

    # The ends of the row, and both sides of a chunk's edge (111 positions of 150,000 logits).
    checked = [0, min(110, positions - 2), min(111, positions - 1), positions - 1]
    exact = hidden.detach()[checked].double().requires_grad_()
    wanted = (exact @ head.weight.detach().double().T / TEMPERATURE).log_softmax(-1)
    chosen = wanted.gather(1, targets[checked, None])[:, 0]
    (gradient,) = torch.autograd.grad((chosen * weights[checked]).sum(), exact)
    assert hidden.grad is not None
    differences = {
        "logprobs": logprobs.detach()[checked] - chosen.detach(),
        "entropy": entropy[checked] + (wanted.exp() * wanted).sum(-1).detach(),
        "gradient": hidden.grad[checked] - gradient,
    }
    result = {name: float(value.abs().max()) for name, value in differences.items()}
    json.dump(result | {"peak_bytes": peak}, sys.stdout)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
