"""Training sequences on the wire: the invariants that whoever makes or reads one checks."""

import numpy as np
from headrace.v1 import rollout_pb2


def broken_invariant(sequence: rollout_pb2.Sequence) -> str | None:
    """What is wrong with a sequence, or None.

    Promised are one mask byte and one log-probability for each token, mask 0 or 1 and 0 at the
    first token (it has no predecessor to be predicted from), and finite log-probabilities where
    the mask is 1.
    """
    num_tokens, odd = divmod(len(sequence.token_ids), 4)
    lengths = (len(sequence.token_ids), len(sequence.trained_mask), len(sequence.logprobs))
    if odd or len(sequence.trained_mask) != num_tokens or len(sequence.logprobs) != 4 * num_tokens:
        return f"token_ids, trained_mask, logprobs have {lengths} bytes; expected (4n, n, 4n)"
    if num_tokens == 0:
        return "it has no tokens"
    mask = np.frombuffer(sequence.trained_mask, dtype=np.uint8)
    if mask[0] != 0:
        return "its first token is marked as trained"
    if mask.max() > 1:
        return "its mask has values other than 0 and 1"
    logprobs = np.frombuffer(sequence.logprobs, dtype="<f4")
    if not np.isfinite(logprobs[mask == 1]).all():
        return "a trained token has a log-probability that is not finite"
    return None
