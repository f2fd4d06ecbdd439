"""One model over several ranks: FSDP2 with float32 shards, and its weights as whole tensors again.

Every decoder layer is sharded by itself, what is left (embeddings, last norm, head) with the module
around the model, so that a layer's weights are whole only while it runs. Forward and backward see
the weights rounded to the model's dtype, as they are published; gradients are reduced and added up
in float32, as sums: the step's denominator is known only at its end.

A rank holds the rows r x c to (r + 1) x c of a tensor of n rows, c = ceil(n / ranks), as far as
there are such rows.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from services.common.errors import UserError
from services.trainer.forward import PolicyForward
from services.trainer.ranks import Group


class ShardedWeights:
    """The trainable parameters of a model over all ranks: of each this rank's rows, in float32,
    with float32 gradients in `.grad` once `collect` has been called.

    Shards the module in place; every rank must hold the same weights before. Raises UserError when
    the model cannot be sharded.
    """

    def __init__(self, forward: PolicyForward, group: Group) -> None:
        model = forward.model
        self._group = group
        dtype = _the_dtype(model)
        device = model.get_output_embeddings().weight.device
        mesh = init_device_mesh(device.type, (group.size,))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        # Layer by layer: the whole model in float32 is never on one device.
        for module in (*_layers(model), forward):
            for parameter in module.parameters():
                if not isinstance(parameter, DTensor):
                    parameter.data = parameter.data.float()
            sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
            assert isinstance(sharded, FSDPModule)
            sharded.set_gradient_divide_factor(1.0)
            # gloo has neither means nor factors.
            sharded.set_force_sum_reduction_for_comms(True)
            # An expert that got no token on one rank may have got some on another.
            sharded.set_reduce_scatter_unused_params(True, recurse=False)
            self._root = sharded
        self._whole: dict[str, Any] = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        with torch.no_grad():  # with gradients it would be a view that autograd follows
            self.by_name = {name: shard.to_local() for name, shard in self._whole.items()}
        """Parameter name -> this rank's rows; shared parameters once."""

    @torch.no_grad()
    def collect(self) -> None:
        """Let `.grad` of each tensor of `by_name` be what was added up since `clear`."""
        for name, weight in self.by_name.items():
            gradient = self._whole[name].grad
            weight.grad = None if gradient is None else gradient.to_local()

    def clear(self) -> None:
        """Forget the gradients."""
        for name, weight in self.by_name.items():
            weight.grad = self._whole[name].grad = None

    def write_back(self) -> None:
        """Let forward see what the optimizer made of the shards."""
        self.changed()

    def changed(self) -> None:
        """Shards were written to: after a forward without backward the weights outside of layers
        are still there whole, as they were."""
        self._root.reshard()

    def shape(self, name: str) -> torch.Size:
        """Of the whole tensor."""
        shape: torch.Size = self._whole[name].shape
        return shape


def local_rows(num_rows: int, group: Group) -> slice:
    """The rows of a tensor that a rank holds.

    Example: of 5 rows over 2 ranks the first has 0 to 2, the second 3 and 4.
    """
    size = -(-num_rows // group.size)
    first = min(num_rows, group.rank * size)
    return slice(first, min(num_rows, first + size))


def unique_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and saved buffers as a checkpoint has them: what is tied once, under the name that
    comes first."""
    parameters = dict(model.named_parameters())
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - parameters.keys()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in tied:
            yield name, tensor


@torch.no_grad()
def whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor with all its rows, in `dtype`, on this rank's device; all ranks call it. Cast before
    it is gathered."""
    if isinstance(tensor, DTensor):
        gathered: torch.Tensor = cast(DTensor, tensor.to(dtype)).full_tensor()
        return gathered
    return tensor.detach().to(dtype)


def as_sharded(local: torch.Tensor, shape: torch.Size) -> DTensor:
    """A rank's rows, on the CPU, as a part of the tensor of all ranks."""
    world = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, world, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _layers(model: Any) -> list[torch.nn.Module]:
    """The decoder layers."""
    kinds = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    if not layers:
        raise UserError(
            f"trainer.ranks: {type(model).__name__} does not say which of its modules are layers, "
            "so that they cannot be sharded one by one; set it to 1"
        )
    return layers


def _the_dtype(model: Any) -> torch.dtype:
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise UserError(
            f"trainer.ranks: {type(model).__name__} has parameters of several dtypes ({names}), "
            "and shards are computed with in one; set it to 1"
        )
    found: torch.dtype = dtypes.pop()
    return found
