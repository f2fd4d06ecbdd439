"""Float32 copies of low-precision weights: what the optimizer updates and what gradients are added
up in.

The forward uses the weights as they are published (same rounding as the engines). In bfloat16 an
update of 1e-6 of a weight would round to nothing and sums of gradients would lose their small
terms, so both live in float32 here. Float32 models are their own masters: nothing is copied.
"""

import torch


class MasterWeights:
    """The trainable parameters of a model in float32, with float32 gradients in `.grad`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.by_name: dict[str, torch.Tensor] = {}
        """Parameter name -> float32 tensor; shared parameters once."""
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.dtype.itemsize >= torch.float32.itemsize:
                self.by_name[name] = parameter
                continue
            master = parameter.detach().float()
            self.by_name[name] = master
            self._copies.append((parameter, master))
            hook = _Mover(master)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def collect(self) -> None:
        """Let `.grad` of each master be what was added up since `clear`: hooks see to it."""

    def clear(self) -> None:
        """Forget the gradients."""
        for master in self.by_name.values():
            master.grad = None

    def shape(self, name: str) -> torch.Size:
        """Of the tensor."""
        return self.by_name[name].shape

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the model's parameters."""
        for parameter, master in self._copies:
            parameter.copy_(master)

    def changed(self) -> None:
        """The model's parameters were written to: there is no other copy of them."""


class _Mover:
    """Adds a parameter's gradient to its master's as soon as backward has made it."""

    def __init__(self, master: torch.Tensor) -> None:
        self.master = master

    def __call__(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        if self.master.grad is None:
            self.master.grad = parameter.grad.float()
        else:
            self.master.grad += parameter.grad
        parameter.grad = None
