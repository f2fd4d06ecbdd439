"""Tokens a second through the generator service, against vLLM's own offline `LLM.generate`.

    python benchmarks/generator.py                         both workloads, 7 rounds: 10 minutes
    python benchmarks/generator.py --workloads answers --rounds 3 --scale 0.25
    python benchmarks/generator.py --set generator.max_inflight=1024

Both sides get the same prompts, model, core, cache and number of conversations that the engine
samples at a time, with others waiting inside it, and return log-probabilities without turning
tokens into text inside the engine. The service does all that it does in a run: it reads requests
from the queue, renders prompts, follows announced policy versions, writes groups with texts and
log-probabilities into the queue, and records metrics. Offline gets token ids. Rounds alternate, and
whoever does not play waits.

Prints a table and writes benchmarks/results/generator.json: `ratio_to_offline` is the least of the
workloads' medians of the rounds' ratios.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

import generator_load as load
import generator_sides as sides
import measured
from rich.console import Console
from rich.table import Table


async def compare(
    workload: load.Workload, *, rounds: int, scale: float, overrides: list[str], one_process: bool
) -> dict[str, Any]:
    """Alternating rounds of one workload."""
    num_groups = max(4, round(workload.num_groups * scale))
    played: list[tuple[sides.Round, sides.Round]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = load.model_of(workload, folder / "model")
        recipe = load.recipe_of(workload, model=model, overrides=overrides)
        print(f"{workload.name}: starting both engines", flush=True)
        with sides.offline(
            recipe,
            model=model,
            num_groups=num_groups,
            folder=folder / "offline",
            one_process=one_process,
        ) as other:
            async with sides.service(
                workload, model=model, num_groups=num_groups, folder=folder, overrides=overrides
            ) as own:
                for number in range(-1, rounds):
                    pair = (await own.play(), await asyncio.to_thread(other.play))
                    _say(workload.name, number, pair)
                    if number >= 0:  # the first fills caches
                        played.append(pair)
    conversations = num_groups * recipe.generation.num_generations
    ratios = [own.tokens_per_s / other.tokens_per_s for own, other in played]
    cpu = [[each.cpu_s / each.tokens * 1e6 for each in pair] for pair in played]
    return {
        "ratio": measured.spread(ratios),
        "service_tokens_per_s": measured.spread([own.tokens_per_s for own, _ in played]),
        "offline_tokens_per_s": measured.spread([other.tokens_per_s for _, other in played]),
        "service_cpu_us_per_token": measured.spread([own for own, _ in cpu]),
        "offline_cpu_us_per_token": measured.spread([other for _, other in cpu]),
        "conversations": conversations,
        "tokens_per_conversation": played[-1][0].tokens / conversations,
    }


def _say(name: str, number: int, pair: tuple[sides.Round, sides.Round]) -> None:
    own, other = pair
    kind = f"round {number + 1}" if number >= 0 else "warm-up"
    print(
        f"{name} {kind}: service {own.tokens_per_s:,.0f} tokens/s in {own.seconds:.1f} s, "
        f"offline {other.tokens_per_s:,.0f}: {own.tokens_per_s / other.tokens_per_s:.3f}",
        flush=True,
    )


def show(found: dict[str, Any]) -> None:
    """Print the table."""
    table = Table(title="tokens/s, median of the rounds (least - greatest)")
    for column in ("", "ratio", "service", "vLLM offline", "CPU us a token", "offline"):
        table.add_column(column, justify="right")
    for name, result in found.items():
        table.add_row(
            name,
            measured.shown(result["ratio"], 3),
            measured.shown(result["service_tokens_per_s"]),
            measured.shown(result["offline_tokens_per_s"]),
            f"{result['service_cpu_us_per_token']['median']:.0f}",
            f"{result['offline_cpu_us_per_token']['median']:.0f}",
        )
    Console().print(table)


def main() -> None:
    """Compare, print, write."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [each.name for each in load.WORKLOADS]
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=7, help="of each workload, counted")
    parser.add_argument("--scale", type=float, default=1.0, help="of a round's conversations")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument(
        "--vllm-processes",
        action="store_true",
        help="leave offline its worker in a process of its own, as vLLM does on CPUs",
    )
    arguments = parser.parse_args()
    about = measured.about()
    found = {
        workload.name: asyncio.run(
            compare(
                workload,
                rounds=arguments.rounds,
                scale=arguments.scale,
                overrides=arguments.overrides,
                one_process=not arguments.vllm_processes,
            )
        )
        for workload in load.WORKLOADS
        if workload.name in arguments.workloads
    }
    show(found)
    ratio = min(result["ratio"]["median"] for result in found.values())
    print(f"ratio to offline: {ratio:.3f}")
    content = {
        "ratio_to_offline": ratio,
        "offline_worker_in_own_process": arguments.vllm_processes,
        "overrides": arguments.overrides,
        "workloads": found,
        "about": about,
    }
    print(f"written: {measured.write('generator', content)}")


if __name__ == "__main__":
    main()
