"""The demo's task, model and batch trained by TRL's asynchronous GRPO, on this machine.

    python benchmarks/peer.py                          two runs of each number of requests in flight
    python benchmarks/peer.py --runs 1 --inflight 512

TRL's trainer and rollout worker are as they are; its server is vLLM's own. Two parts
need a GPU and are replaced (peer_trainer.py): FlashAttention by SDPA, and NCCL by a file. Threads
are set as Headrace sets them: one core for the engine, one for the trainer. TRL's own limit of
requests in flight is `max_staleness` steps' worth; one step's worth wastes fewer samples, so both
are measured.

Prints a table and writes benchmarks/results/peer.json. TRL is installed beside the others by the
Makefile (requirements/trl.txt).
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import generator_sides
import httpx
import measured
import psutil
from rich.console import Console
from rich.table import Table

from services.common import config
from services.common.config import Recipe
from services.generator import engine_environment
from services.generator.template import ChatTemplate
from services.launcher import plan, ports, tiny_model
from services.scorer import builtin_rewards
from services.trainer import dataset

RECIPE = measured.ROOT / "recipes" / "arithmetic.toml"
HERE = Path(__file__).parent
INSTALLED = Path(sys.prefix) / "trl"
INFLIGHT = (512, 1024)
"""Requests: a step's worth, and TRL's own choice for the demo's max_staleness."""
START_WITHIN_S = 300.0
MOST_S = 900.0
"""Of one run; 80 steps take some two minutes."""


def run(seed: int, folder: Path, *, inflight: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """One run of as many steps as the recipe has.

    `trained_samples_per_s` counts as the demo's `all_samples_per_s`: from the end of the first step
    to the end of the last.
    """
    if not INSTALLED.exists():
        sys.exit(f"no TRL at {INSTALLED}: `make .venv/.installed` installs requirements/trl.txt")
    folder.mkdir(parents=True, exist_ok=True)
    seeds = [f"data.seed={seed}", f"data.reasoning_gym.seed={seed}", f"trainer.seed={seed}"]
    recipe = config.load(RECIPE, overrides=[*seeds, *overrides])
    model = tiny_model.resolve("tiny:arithmetic")
    (folder / "recipe.toml").write_text(config.dump_toml(recipe))
    with _server(recipe, model, folder) as (url, server):
        before = _accuracy(recipe, model, url)
        with tempfile.TemporaryDirectory(dir=_memory()) as weights:
            settings = {
                "recipe": str(folder / "recipe.toml"),
                "model": str(model),
                "url": url,
                "folder": str(folder / "trainer"),
                "weights": str(Path(weights) / "model.safetensors"),
                "inflight": inflight,
            }
            spent_s = generator_sides.cpu_s(server.pid)
            found = _train(recipe, settings, folder)
            spent_s = generator_sides.cpu_s(server.pid) - spent_s
        after = _accuracy(recipe, model, url)
    ends = found["step_end_s"]
    steps = [end - begin for begin, end in itertools.pairwise(ends)]
    samples = recipe.trainer.groups_per_step * recipe.generation.num_generations
    return {
        "inflight": inflight,
        "steps": len(ends),
        "trained_samples_per_s": len(steps) * samples / (ends[-1] - ends[0]),
        "step_s_median": statistics.median(steps),
        "eval_before": before,
        "eval_after": after,
        "server_cpu_s_per_step": spent_s / len(ends),
        "log": found["log"],
    }


@contextmanager
def _server(
    recipe: Recipe, model: Path, folder: Path
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """vLLM's server with the engine settings of the demo; its URL, and its process."""
    generator, [port] = recipe.generator, ports.choose(1, host="127.0.0.1")
    words = {
        "host": "127.0.0.1",
        "port": port,
        "dtype": recipe.model.dtype,
        "max-model-len": generator.max_model_len,
        "max-num-seqs": generator.max_inflight,
        "max-num-batched-tokens": generator.max_num_batched_tokens,
        "kv-cache-memory-bytes": generator.kv_cache_bytes,
        "block-size": 32,
        "weight-transfer-config": json.dumps({"backend": "headrace"}),
        "worker-extension-cls": "services.generator.weight_backend.Extension",
        "uvicorn-log-level": "warning",
    }
    environ = plan.environment(
        recipe, "generator", replica=0, machine=plan.this_machine(), environ=os.environ
    )
    environ |= {"VLLM_SERVER_DEV_MODE": "1"}  # TRL asks for it: pauses and weights
    size = engine_environment.vocab_size(model)
    engine_environment.prepare(enforce_eager=True, vocab_size=size, environ=environ)
    flags = ["--enforce-eager", "--disable-log-stats", "--disable-uvicorn-access-log"]
    command = [sys.executable, str(HERE / "peer_server.py"), "--model", str(model), *flags]
    command += [word for key, value in words.items() for word in (f"--{key}", str(value))]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environ)
    try:
        url = f"http://127.0.0.1:{port}"
        _until_ready(url, process, log)
        yield url, process
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the server and its engine."""
    if process.poll() is not None:
        return
    children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()


def _until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline_s = time.monotonic() + START_WITHIN_S
    while True:
        if process.poll() is not None or time.monotonic() > deadline_s:
            sys.exit(f"vLLM's server has not started:\n{log.read_text()[-2000:]}")
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health").status_code == httpx.codes.OK:
                return
        time.sleep(0.2)


def _train(recipe: Recipe, settings: dict[str, Any], folder: Path) -> Any:
    """Run peer_trainer.py; what it found."""
    files = [folder / "settings.json", folder / "result.json"]
    files[0].write_text(json.dumps(settings))
    environ = plan.environment(
        recipe, "trainer", replica=0, machine=plan.this_machine(), environ=os.environ
    )
    paths = [str(INSTALLED), environ.get("PYTHONPATH", "")]
    environ |= {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    log = folder / "trainer.log"
    with log.open("wb") as output:
        status = subprocess.run(
            [sys.executable, str(HERE / "peer_trainer.py"), *map(str, files)],
            stdout=output,
            stderr=output,
            env=environ,
            timeout=MOST_S,
            check=False,
        ).returncode
    if status:
        sys.exit(f"TRL has ended with {status}:\n{log.read_text()[-2000:]}")
    return json.loads(files[1].read_text())


def _accuracy(recipe: Recipe, model: Path, url: str) -> float:
    """Of greedy answers to what the demo is evaluated on."""
    rows, template = list(dataset.load(recipe).evaluation), ChatTemplate(model)
    answer = httpx.post(
        f"{url}/v1/completions",
        json={
            "model": str(model),
            "prompt": [template.render(row.messages) for row in rows],
            "max_tokens": recipe.generation.max_completion_tokens,
            "temperature": 0.0,
        },
        timeout=START_WITHIN_S,
    ).raise_for_status()
    texts = [choice["text"] for choice in answer.json()["choices"]]
    columns: dict[str, Any] = {
        name: [row.columns[name] for row in rows] for name in ("question", "answer", "metadata")
    }
    rewards = builtin_rewards.reasoning_gym(texts=texts, **columns)
    return sum(reward >= recipe.evaluation.correct_at for reward in rewards) / len(rewards)


def _memory() -> str | None:
    """A folder in memory, where there is one."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() else None


def version() -> str:
    """TRL's."""
    found = metadata.distributions(name="trl", path=[str(INSTALLED)])
    return next(iter(found)).version


def main() -> None:
    """Run, print, write."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--inflight", type=int, nargs="+", default=INFLIGHT)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    about, found = measured.about(), []
    for inflight in arguments.inflight:
        for seed in range(arguments.runs):
            with tempfile.TemporaryDirectory() as folder:
                made = run(seed, Path(folder), inflight=inflight, overrides=arguments.overrides)
            print(
                f"{inflight} in flight: {made['trained_samples_per_s']:.0f} samples/s", flush=True
            )
            found.append(made)
    table = Table(title=f"the demo by TRL {version()}'s asynchronous GRPO")
    for column in ("in flight", "samples/s", "s/step", "accuracy", "server's CPU s/step"):
        table.add_column(column, justify="right")
    for each in found:
        table.add_row(
            str(each["inflight"]),
            f"{each['trained_samples_per_s']:.0f}",
            f"{each['step_s_median']:.2f}",
            f"{each['eval_before']:.3f} → {each['eval_after']:.3f}",
            f"{each['server_cpu_s_per_step']:.2f}",
        )
    Console().print(table)
    print(f"written: {measured.write('peer', {'trl': version(), 'runs': found, 'about': about})}")


if __name__ == "__main__":
    main()
