"""The forward of the policy as one module: packed rows in, log-probabilities out.

It is the root that FSDP shards. A sharded weight is whole only between the hooks of a module that
holds it, and the output head's weight is read directly (logprobs.py), so everything that reads
weights happens within this module's forward: call it, never the model inside it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from services.trainer.logprobs import (
    PLAIN_HEAD,
    HeadScores,
    base_model,
    in_chunks,
    packed_states,
    plain_logprobs,
    term_logprobs,
)
from services.trainer.packing import PackedRow
from services.trainer.routers import RouterLoss


class RowOutput(NamedTuple):
    """What a forward says of its tokens. A tuple, since FSDP looks for the tensors of an output to
    hook its backward to, and does not look into other classes."""

    logprobs: torch.Tensor
    """[M] float32 with gradient, in nats at the temperature: of every term of the row."""
    entropy: torch.Tensor
    """[M] float32, detached, in nats at the temperature: at every term's position."""
    aux_loss: torch.Tensor | None = None
    """Scalar with gradient: the load-balancing loss of a model's routers over the row's forwarded
    tokens; None for models without, and for plain rows."""


@dataclass(frozen=True, eq=False)
class PlainRows:
    """Unpadded rows of one length, [R, L] int64, each by itself: all tokens but the first are
    terms, row after row."""

    token_ids: torch.Tensor
    temperature: float


_WAY = "headrace_way"
"""The attribute of a model that holds its way."""


@dataclass(frozen=True)
class Way:
    """How a model forwards packed rows: what compatibility.prepare_model found right for it."""

    shares_prefixes: bool = True
    """All samples of a row in one forward, shared prefixes once; else each sample in a forward of
    its own, with the model's own attention."""
    scores: HeadScores = PLAIN_HEAD
    """From the head's outputs to logits."""
    kernel: str = "blocks"
    """Of attention over shared prefixes: `trainer.attention`."""
    reason: str = ""
    """Why not the faster way; empty for it."""

    @classmethod
    def of(cls, model: Any) -> "Way":
        """The way that prepare_model found for this model object; ValueError before it did."""
        way = vars(model).get(_WAY)
        if way is None:
            raise ValueError(f"{type(model).__name__} has not been prepared: call prepare_model")
        assert isinstance(way, cls)
        return way

    def keep_with(self, model: Any) -> None:
        """What `of` then returns. The attention that a model is set to and its way belong
        together, so both are kept with the object."""
        setattr(model, _WAY, self)

    def __str__(self) -> str:
        name = "shared prefixes" if self.shares_prefixes else "one sample at a time"
        name += ", flex attention" if self.kernel == "flex" else ""
        return f"{name} ({self.reason})" if self.reason else name


class PolicyForward(torch.nn.Module):
    """Forward of a prepared causal language model, held as `model`.

    way: by default what prepare_model found for it. With several ranks every one of them has to
    make the same calls, since each call gathers the sharded weights; and a model that takes one
    sample at a time cannot be sharded, since the number of its forwards differs from rank to rank.
    """

    def __init__(self, model: Any, *, temperature: float, way: Way | None = None) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.way = way or Way.of(model)
        self._router_loss = RouterLoss.of(model)

    def forward(self, rows: PackedRow | PlainRows) -> RowOutput:
        """Log-probability and entropy of every term [M] of a packed row, at the temperature that
        was given; or of plain rows, at theirs, where M is R x (L - 1)."""
        if isinstance(rows, PlainRows):
            return RowOutput(
                *plain_logprobs(
                    self.model,
                    rows.token_ids,
                    temperature=rows.temperature,
                    scores=self.way.scores,
                )
            )
        options = self._router_loss.options if self._router_loss else {}
        outputs = (
            [packed_states(self.model, rows, attention_kernel=self.way.kernel, **options)]
            if self.way.shares_prefixes
            else _separate_states(self.model, rows, **options)
        )
        logprobs, entropy = term_logprobs(
            self.model.get_output_embeddings(),
            _own_states(outputs, rows),
            rows,
            temperature=self.temperature,
            scores=self.way.scores,
        )
        aux_loss = self._router_loss(outputs) if self._router_loss else None
        return RowOutput(logprobs, entropy, aux_loss)

    def sequence_logprobs(
        self, rows: NDArray[np.integer[Any]], *, temperature: float = 1.0
    ) -> NDArray[np.float32]:
        """Log-probabilities of tokens 1.. of every row given those before.

        rows: [R, L] token ids without padding, L >= 2. Returns [R, L - 1], in nats. The model may
        be in train or eval mode; no gradient is recorded.
        """

        def logprobs(token_ids: torch.Tensor) -> torch.Tensor:
            output: RowOutput = self(PlainRows(token_ids, temperature))
            return output.logprobs

        return in_chunks(logprobs, rows, device=self.model.get_output_embeddings().weight.device)


def _separate_states(model: Any, row: PackedRow, **options: Any) -> list[Any]:
    """The base model's outputs, path by path: the tokens that each run of the trie adds, with all
    tokens above them. For a row without shared prefixes that is sample by sample."""
    return [
        base_model(model)(
            input_ids=row.input_ids.index_select(1, path.to(row.input_ids.device)),
            use_cache=False,
            **options,
        )
        for path in map(torch.from_numpy, row.attention.trie.paths())
    ]


def _own_states(outputs: list[Any], row: PackedRow) -> torch.Tensor:
    """[N, H] final hidden states of a row's tokens: of one forward of all, or of each run's own
    tokens, which are the last of its path."""
    if len(outputs) == 1:
        states: torch.Tensor = outputs[0].last_hidden_state[0]
        return states
    sizes = row.attention.trie.run_sizes().tolist()
    return torch.cat(
        [o.last_hidden_state[0, -size:] for o, size in zip(outputs, sizes, strict=True)]
    )
