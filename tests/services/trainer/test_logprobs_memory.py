"""Memory of log-probabilities over a large vocabulary, forward and backward. The bound is on what
comes on top of the states, the head and their gradients."""

import json
import subprocess
import sys

import pytest

VOCABULARY = 150_000


def measured(positions: int, *, size: int) -> dict[str, float]:
    """What a process of its own measured: memory that was used before would not show."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.services.trainer.logprobs_peak"),
            *map(str, (positions, VOCABULARY, size)),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("positions", [1_600, 4_096])
def test_peak_memory_is_below_a_quarter_of_the_logits(positions: int) -> None:
    """All logits of the long row would be 2.5 GB in float32; the peak does not grow with the row,
    so a short one is under the tighter bound."""
    found = measured(positions, size=8)
    assert found["peak_bytes"] < positions * VOCABULARY * 4 / 4
    assert found["logprobs"] < 1e-5
    assert found["entropy"] < 5e-5
    assert found["gradient"] < 5e-5


def test_the_heads_gradient_has_no_copy_beside_it() -> None:
    """The product that is added for each chunk would be one."""
    found = measured(32, size=384)
    assert found["peak_bytes"] < VOCABULARY * 384 * 4 / 2
    assert found["gradient"] < 1e-5
