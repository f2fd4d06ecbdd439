"""Token arrays on the wire: packed repeated fields against little-endian bytes.

`python benchmarks/wire.py` encodes and decodes 8 samples of 1,000 tokens (ids, trained mask,
log-probabilities), numpy to numpy, with a proto of repeated fields compiled for this measurement
and with `headrace.v1.Sequence`, which carries bytes. It prints a table and writes
benchmarks/results/wire.json.
"""

import importlib.util
import json
import sys
import tempfile
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from grpc_tools import protoc  # type: ignore[import-untyped]
from headrace.v1 import rollout_pb2

NUM_SAMPLES, NUM_TOKENS = 8, 1_000
RESULT = Path(__file__).parent / "results" / "wire.json"

REPEATED = """
syntax = "proto3";
package benchmark;
message Sequence {
  repeated uint32 token_ids = 1;
  repeated bool trained_mask = 2;
  repeated float logprobs = 3;
}
"""


@dataclass(frozen=True)
class Tokens:
    """One sample, as services hold it: uint32, uint8 and float32 arrays of one length."""

    token_ids: np.ndarray
    trained_mask: np.ndarray
    logprobs: np.ndarray


def compiled(folder: Path) -> Any:
    """The message class with repeated fields."""
    (folder / "repeated.proto").write_text(REPEATED)
    status = protoc.main(["protoc", f"-I{folder}", f"--python_out={folder}", "repeated.proto"])
    assert status == 0, "protoc failed"
    spec = importlib.util.spec_from_file_location("repeated_pb2", folder / "repeated_pb2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Sequence


def write_repeated(message: Any, sample: Tokens) -> bytes:
    """Encode with repeated fields; lists, since the runtime takes those faster than arrays."""
    made = message(
        token_ids=sample.token_ids.tolist(),
        trained_mask=sample.trained_mask.astype(bool).tolist(),
        logprobs=sample.logprobs.tolist(),
    )
    encoded: bytes = made.SerializeToString()
    return encoded


def read_repeated(message: Any, data: bytes) -> Tokens:
    """Decode repeated fields."""
    seen = message.FromString(data)
    return Tokens(
        np.array(seen.token_ids, np.uint32),
        np.array(seen.trained_mask, np.uint8),
        np.array(seen.logprobs, np.float32),
    )


def write_bytes(message: Any, sample: Tokens) -> bytes:
    """Encode as little-endian bytes."""
    made = message(
        token_ids=sample.token_ids.astype("<u4", copy=False).tobytes(),
        trained_mask=sample.trained_mask.tobytes(),
        logprobs=sample.logprobs.astype("<f4", copy=False).tobytes(),
    )
    encoded: bytes = made.SerializeToString()
    return encoded


def read_bytes(message: Any, data: bytes) -> Tokens:
    """Decode bytes: views, no copies."""
    seen = message.FromString(data)
    return Tokens(
        np.frombuffer(seen.token_ids, "<u4"),
        np.frombuffer(seen.trained_mask, np.uint8),
        np.frombuffer(seen.logprobs, "<f4"),
    )


def best_s(work: Callable[[], Any], *, repeats: int = 15, number: int = 20) -> float:
    """Seconds of one call, the best of several rounds: what the machine can do undisturbed."""
    return min(timeit.repeat(work, repeat=repeats, number=number)) / number


def measure(
    message: Any,
    samples: Sequence[Tokens],
    write: Callable[[Any, Tokens], bytes],
    read: Callable[[Any, bytes], Tokens],
) -> dict[str, float]:
    """Milliseconds and bytes of all samples together; checks first that nothing is lost."""
    encoded = [write(message, sample) for sample in samples]
    for sample, data in zip(samples, encoded, strict=True):
        back = read(message, data)
        assert np.array_equal(back.token_ids, sample.token_ids)
        assert np.array_equal(back.trained_mask, sample.trained_mask)
        assert np.array_equal(back.logprobs, sample.logprobs)
    encode_ms = 1_000 * best_s(lambda: [write(message, sample) for sample in samples])
    decode_ms = 1_000 * best_s(lambda: [read(message, data) for data in encoded])
    return {
        "encode_ms": encode_ms,
        "decode_ms": decode_ms,
        "total_ms": encode_ms + decode_ms,
        "size_bytes": sum(map(len, encoded)),
    }


def main() -> None:
    """Measure both, print the table, write the result."""
    rng = np.random.default_rng(0)
    samples = [
        Tokens(
            rng.integers(0, 151_936, NUM_TOKENS, dtype=np.uint32),
            (rng.random(NUM_TOKENS) < 0.7).astype(np.uint8),
            -rng.exponential(1.0, NUM_TOKENS).astype(np.float32),
        )
        for _ in range(NUM_SAMPLES)
    ]
    with tempfile.TemporaryDirectory() as folder:
        sys.dont_write_bytecode = True
        repeated = measure(compiled(Path(folder)), samples, write_repeated, read_repeated)
    as_bytes = measure(rollout_pb2.Sequence, samples, write_bytes, read_bytes)
    ratio = repeated["total_ms"] / as_bytes["total_ms"]

    print(f"{NUM_SAMPLES} samples of {NUM_TOKENS:,} tokens, numpy to numpy")
    print(f"{'':16}{'encode':>12}{'decode':>12}{'both':>12}{'size':>14}")
    for name, row in (("repeated fields", repeated), ("bytes", as_bytes)):
        times = "".join(f"{row[key]:>9.3f} ms" for key in ("encode_ms", "decode_ms", "total_ms"))
        print(f"{name:16}{times}{row['size_bytes']:>12,.0f} B")
    print(f"bytes are {ratio:.0f} times faster")

    RESULT.parent.mkdir(exist_ok=True)
    result = {
        "num_samples": NUM_SAMPLES,
        "num_tokens": NUM_TOKENS,
        "repeated": repeated,
        "bytes": as_bytes,
        "ratio": ratio,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
