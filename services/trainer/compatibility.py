"""Which models can be trained, and how their rows are forwarded: found once, at start.

What a model needs is tried and not guessed: a small packed row with forks and two prompts must give
the log-probabilities of separate forwards of the model as it came, with transformers' reference
attention ("eager"). The first way that does is taken: all samples of a row in one forward with
shared prefixes, or one sample at a time with the model's own attention. What a small row cannot
show is decided by name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import structlog
import torch

from services.common.errors import UserError
from services.trainer.attention import IMPLEMENTATION
from services.trainer.forward import PolicyForward, Way
from services.trainer.logprobs import PLAIN_HEAD, HeadScores, base_model
from services.trainer.packing import pack
from services.trainer.types import TrainSample

PROOF_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest difference of a log-probability in the proof, by dtype; a leak between samples is orders
above."""

PROOF_WINDOW = 3
"""Sliding windows are this wide during the proof, so that its short rows reach over them."""

REFERENCE = "eager"
"""The attention of transformers that does all that a model's configuration asks for."""

SHAREABLE = {"full_attention", "sliding_attention"}
"""Kinds of layers that see the tokens of a sample's path and nothing else of a row."""

UNSHAREABLE_ROPE = {"dynamic", "longrope"}
"""Rotary embeddings that depend on the longest sequence of the forward."""

NAMED_DROPOUTS = 3
"""So many are named in a refusal; a model may have three a layer."""

CANNOT = (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError)
"""What a model raises when a way asks for something that it does not have."""

_log = structlog.get_logger()


def prepare_model(model: Any, *, kernel: str = "blocks") -> Way:
    """Switch a causal language model to the best way of forwarding packed rows that is right for
    it, or raise UserError that says why it cannot be trained.

    kernel: `trainer.attention`; "flex" is taken, or refused with the reason. The weights and the
    train/eval mode stay as they are. The way is kept with the model (`Way.of`).
    """
    name = type(model).__name__
    if model.get_output_embeddings() is None:
        raise UserError(f"model.path: {name} has no output head; give a causal language model")
    _refuse_dropout(model)
    own = model.config._attn_implementation
    try:
        proof = _Proof(model)
    except CANNOT as error:
        raise UserError(
            f"model.path: {name} cannot be forwarded as causal language models are: {_line(error)}"
        ) from error
    tried = []
    if reason := _why_not_shared(model):
        tried.append(f"shared prefixes: {reason}")
    else:
        model.set_attn_implementation(IMPLEMENTATION)
        if model.config._attn_implementation != IMPLEMENTATION:
            reason = "its attention cannot be replaced"
        else:
            reason = proof.why_not(Way(scores=proof.scores))
        if not reason and kernel == "flex":
            return _chosen(model, _flex(model, proof))
        if reason:
            tried.append(f"shared prefixes: {reason}")
        else:
            return _chosen(model, Way(scores=proof.scores))
    reason = tried[0].removeprefix("shared prefixes: ")
    for implementation in dict.fromkeys([own, REFERENCE]):
        model.set_attn_implementation(implementation)
        way = Way(shares_prefixes=False, scores=proof.scores, reason=reason)
        why_not = proof.why_not(way)
        if not why_not:
            return _chosen(model, way)
        tried.append(f"one sample at a time, {implementation} attention: {why_not}")
    raise UserError(
        f"model.path: {name} gives other log-probabilities in training than its own forward does "
        f"({'; '.join(tried)}): its attention, positions or output head do something that is not "
        "carried here; train another model"
    )


def _flex(model: Any, proof: "_Proof") -> Way:
    way = Way(scores=proof.scores, kernel="flex")
    if why_not := proof.why_not(way) or proof.why_not_gradient(way):
        raise UserError(
            f"trainer.attention: {type(model).__name__} cannot use flex attention here: {why_not}; "
            'set it to "blocks"'
        )
    return way


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _chosen(model: Any, way: Way) -> Way:
    _log.info("way of forwarding rows", model=type(model).__name__, rows=str(way))
    way.keep_with(model)
    return way


def _why_not_shared(model: Any) -> str:
    """What the configuration or the modules name that packed rows cannot carry, and a short proof
    may not show; empty for nothing."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or []) | set(
        getattr(config, "layers_block_type", None) or []
    )
    other = kinds - SHAREABLE - {"attention"}
    if getattr(config, "attention_chunk_size", None):
        other.add("chunked_attention")
    if other:
        return f"it has layers of type {', '.join(sorted(other))}"
    if any(isinstance(module, torch.nn.Conv1d) for module in model.modules()):
        return "it has convolutions along the sequence"
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [part for part in rope.values() if isinstance(part, dict)]
    types = {str(part.get("rope_type")) for part in [rope, *nested]} & UNSHAREABLE_ROPE
    if types:
        return f"its rotary embeddings ({', '.join(sorted(types))}) depend on the longest sequence"
    return ""


def _refuse_dropout(model: Any) -> None:
    dropouts = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            dropouts[name] = module.p
        for attribute, rate in vars(module).items():
            if "drop" in attribute and isinstance(rate, float) and rate > 0:
                dropouts[attribute] = rate
    if dropouts:
        shown = list(dropouts.items())[:NAMED_DROPOUTS]
        named = ", ".join(f"{name} = {rate}" for name, rate in shown)
        named += ", …" if len(dropouts) > NAMED_DROPOUTS else ""
        raise UserError(
            f"model.path: {type(model).__name__} has dropout ({named}): its log-probabilities are "
            "random and their ratios to the sampler's are noise; set it to 0 in the model's "
            "config.json"
        )


class _Proof:
    """Samples, and the log-probabilities that the model as it came gives them, with windows as they
    are and narrow ones."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._samples = _proof_samples(model.config.get_text_config().vocab_size)
        self._device = model.get_output_embeddings().weight.device
        self._tolerance = PROOF_TOLERANCE.get(model.dtype, 0.25)
        self._has_windows = bool(list(_windows(model)))
        kinds = getattr(model.config.get_text_config(), "layer_types", None)
        self._uses_windows = self._has_windows and (not kinds or "sliding_attention" in kinds)
        model.set_attn_implementation(REFERENCE)
        self.scores = self._find_scores()
        """From the head's outputs to logits."""
        self._expected = self._separate_logprobs()
        with _narrow_windows(model):
            self._narrow = self._separate_logprobs()

    def why_not(self, way: Way) -> str:
        """What speaks against a way, with the attention that the model is set to; empty for
        nothing."""
        why_not = self._compare(way, self._expected)
        if why_not or not (way.shares_prefixes and self._has_windows):
            return why_not
        moved = float((self._narrow - self._expected).abs().max())
        if self._uses_windows and moved <= self._tolerance:
            return "its sliding window cannot be narrowed for the proof"
        with _narrow_windows(self._model):
            return self._compare(way, self._narrow)

    def why_not_gradient(self, way: Way) -> str:
        """What speaks against the backward of a way, next to that of the usual one; empty for
        nothing."""
        expected = self._gradient(Way(scores=self.scores))
        try:
            found = self._gradient(way)
        except CANNOT as error:
            return _line(error)
        difference = float((found - expected).norm() / expected.norm())
        # Log-probabilities of the proof are about 10, and their tolerance is not relative.
        tolerance = self._tolerance / 10
        if difference <= tolerance:
            return ""
        return f"gradients differ by {difference:.3g}, at most {tolerance:g} is allowed"

    def _gradient(self, way: Way) -> torch.Tensor:
        """Of the sum of all log-probabilities, for the weights of the output head's inputs and of
        the first layers: the embeddings."""
        embeddings = self._model.get_input_embeddings().weight
        was_training, was_trained = self._model.training, embeddings.requires_grad
        embeddings.requires_grad_(True)  # not so where only an adapter is trained
        forward = PolicyForward(self._model.train(), temperature=1.0, way=way)
        row = pack(self._samples).to(self._device)
        [gradient] = torch.autograd.grad(forward(row).logprobs.sum(), [embeddings])
        embeddings.requires_grad_(was_trained)
        self._model.train(was_training)
        return gradient.float()

    @torch.no_grad()
    def _compare(self, way: Way, expected: torch.Tensor) -> str:
        row = pack(self._samples, share_prefixes=way.shares_prefixes).to(self._device)
        # In train mode, as steps run: what is random there would show as a difference.
        was_training = self._model.training
        try:
            forward = PolicyForward(self._model.train(), temperature=1.0, way=way)
            found = forward(row).logprobs
        except CANNOT as error:
            return _line(error)
        finally:
            self._model.train(was_training)
        difference = float((found - expected).abs().max())
        if difference <= self._tolerance:
            return ""
        return (
            f"log-probabilities differ by {difference:.3g}, at most {self._tolerance:g} is allowed"
        )

    @torch.no_grad()
    def _separate_logprobs(self) -> torch.Tensor:
        """Log-probabilities of all tokens but the first, each sample forwarded by itself through
        the whole model, in eval mode."""
        was_training = self._model.training
        self._model.eval()
        parts = []
        for sample in self._samples:
            token_ids = torch.from_numpy(sample.token_ids).to(self._device)[None]
            logits = self._model(input_ids=token_ids, use_cache=False).logits[0, :-1].float()
            parts.append(logits.log_softmax(-1).gather(1, token_ids[0, 1:, None])[:, 0])
        self._model.train(was_training)
        return torch.cat(parts)

    @torch.no_grad()
    def _find_scores(self) -> HeadScores:
        """Which of the known maps from the head's outputs to logits is the model's: the one that is
        nearest. Whether it is near enough is the comparison's matter."""
        was_training = self._model.training
        self._model.eval()
        token_ids = torch.from_numpy(self._samples[0].token_ids).to(self._device)[None]
        states = base_model(self._model)(input_ids=token_ids, use_cache=False).last_hidden_state
        outputs = self._model.get_output_embeddings()(states).float()
        logits = self._model(input_ids=token_ids, use_cache=False).logits.float()
        self._model.train(was_training)

        def distance(scores: HeadScores) -> float:
            mapped = outputs * scores.scale
            if scores.softcap is not None:
                mapped = torch.tanh(mapped / scores.softcap) * scores.softcap
            return float((mapped - logits).abs().max())

        return min(_known_scores(self._model), key=distance)


def _known_scores(model: Any) -> list[HeadScores]:
    """Maps from the head's outputs to logits that the configuration names. The same name divides in
    one model (Granite) and multiplies in another (HyperCLOVA X)."""
    config = model.config.get_text_config()
    known = [PLAIN_HEAD]
    if softcap := getattr(config, "final_logit_softcapping", None):
        known.insert(0, HeadScores(softcap=float(softcap)))
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        if factor := getattr(config, name, None):
            known += [HeadScores(scale=float(factor)), HeadScores(scale=1 / float(factor))]
    return known


def _windows(model: Any) -> Iterator[tuple[Any, str]]:
    """Every place that holds the width of a sliding window: configurations, and modules that copied
    it."""
    holders: dict[int, Any] = {id(model.config): model.config}
    text = model.config.get_text_config()
    holders[id(text)] = text
    for module in model.modules():
        holders[id(module)] = module
        config = vars(module).get("config")
        if config is not None:
            holders[id(config)] = config
    for holder in holders.values():
        width = vars(holder).get("sliding_window")
        # type() since a bool is an int. 0 is none.
        if type(width) is int and width:
            yield holder, "sliding_window"


@contextmanager
def _narrow_windows(model: Any) -> Iterator[None]:
    """Sliding windows of PROOF_WINDOW tokens for a while."""
    places = [(holder, name, getattr(holder, name)) for holder, name in _windows(model)]
    try:
        for holder, name, _ in places:
            setattr(holder, name, PROOF_WINDOW)
        yield
    finally:
        for holder, name, width in places:
            setattr(holder, name, width)


def _proof_samples(vocabulary: int) -> list[TrainSample]:
    """Two prompts; the first with a fork of three branches, one of them forking again."""
    draw = np.random.default_rng(0).integers(0, vocabulary, 24)
    rows = [draw[:8], draw[[0, 1, 2, 3, 8, 9]], draw[[0, 1, 2, 3, 8, 10, 11]], draw[12:20]]
    return [
        TrainSample(
            rollout_id="proof/0",
            token_ids=row,
            trained_mask=np.arange(row.size) > 0,
            logprobs=np.zeros(row.size, np.float32),
            advantage=0.0,
            lags=np.zeros(row.size, np.int16),
        )
        for row in rows
    ]
