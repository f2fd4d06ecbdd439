"""A publish of 0.5 GB to 1, 2 and 4 replicas on loopback, a replica that joins in mid-run, and
what a difference saves.

Trainer and replicas are processes of their own, with the services' own store, servers and clients.
In every round the same file is also copied, and sent over one plain TCP connection: a publish to N
replicas is set against N times those, since all of it shares the same cores here. The time of a
publish is from the announcement until the last replica has the file whole, its digest checked.
What a join costs, and for how long engines pause, is measured with real engines and a real learner
(weights_joins.py), differences with real optimizer steps (weights_deltas.py).

    python benchmarks/weights.py [--rounds 5] [--megabytes 512] [--without-engines] [--again]
"""

import argparse
import shutil
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import measured
import weights_deltas
import weights_joins
import weights_parts as parts
from rich.console import Console
from rich.table import Table

REPLICAS = (1, 2, 4)
RATES = (1e-6, 1e-5)


def publishes(num: int, rounds: int, size_bytes: int, folder: Path) -> dict[str, Any]:
    """Rounds of a publish to `num` replicas, each with a copy and a stream; the first is not
    counted. With several, one more joins at the end."""
    place = Path(tempfile.mkdtemp(dir=folder))
    trainer = parts.Started(parts.trainer, str(place), size_bytes)
    replicas = [parts.Started(parts.replica, f"replica-{n}", trainer.first) for n in range(num)]
    assert all(each.first == "ready" for each in replicas)
    found: dict[str, list[float]] = {key: [] for key in ("s", "publish_s", "copy_s", "tcp_s")}
    sent: list[float] = []
    source, target = place / "source", place / "target"
    with source.open("wb") as file:
        file.write(bytes(range(256)) * (size_bytes // 256))
    before = 0
    try:
        for number in range(rounds + 1):
            for each in replicas:
                each.pipe.send(number + 1)
            trainer.pipe.send("publish")
            begin_s, announced_s, sent_bytes = trainer.pipe.recv()
            ends_s = [each.pipe.recv()[1] for each in replicas]
            if number:
                sent.append((sent_bytes - before) / size_bytes)
                found["s"].append(max(ends_s) - announced_s)
                found["publish_s"].append(announced_s - begin_s)
                found["copy_s"].append(parts.raw_copy_s(source, target))
                found["tcp_s"].append(parts.raw_tcp_s(source, target))
            before = sent_bytes
        joins_s = [_join_s(trainer.first, rounds + 1) for _ in range(rounds)] if num == 4 else []
    finally:
        for each in (*replicas, trainer):
            each.end()
        shutil.rmtree(place)
    ratios = {
        f"ratio_to_{key}": [
            own / (num * other) for own, other in zip(found["s"], found[f"{key}_s"], strict=True)
        ]
        for key in ("copy", "tcp")
    }
    # What was sent between two publishes belongs to the first of them.
    made = found | ratios | {"trainer_sent_files": sent} | ({"join_s": joins_s} if joins_s else {})
    return {key: measured.spread(values) for key, values in made.items()}


def _join_s(port: int, version: int) -> float:
    """From the start of a replica's client until it has the current version, the others having
    it."""
    late = parts.Started(parts.replica, "late", port)
    assert late.first == "ready"
    late.pipe.send(version)
    begin_s, end_s = late.pipe.recv()
    late.end()
    return float(end_s - begin_s)


def deltas(rounds: int, folder: Path) -> list[dict[str, Any]]:
    """By learning rate, scale of the weights and age of the optimizer: share of weights changed,
    size, seconds."""
    made = []
    for rate in RATES:
        for scale in weights_deltas.SCALES:
            found = weights_deltas.differences(
                folder, learning_rate=rate, scale=scale, rounds=rounds
            )
            for steps, each in found.items():
                values = {
                    key: measured.spread([getattr(one, key) for one in each])
                    for key in ("changed", "ratio", "make_s", "apply_s", "mb")
                }
                made.append({"rate": rate, "scale": scale, "steps": steps, **values})
    return made


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    table = Table(title=f"a publish of {result['megabytes']} MB, median (least - greatest)")
    heads = ("replicas", "to N copies", "to N TCP streams", "seconds", "MB/s each", "trainer sent")
    for column in heads:
        table.add_column(column, justify="right")
    for num, each in result["publishes"].items():
        table.add_row(
            num,
            measured.shown(each["ratio_to_copy"], 2),
            measured.shown(each["ratio_to_tcp"], 2),
            measured.shown(each["s"], 2),
            f"{result['megabytes'] * 1.048576 / each['s']['median']:,.0f}",
            f"{each['trainer_sent_files']['median']:.2f} files",
        )
    Console().print(table)
    table = Table(title="the difference of one AdamW step, bfloat16")
    heads = ("learning rate", "scale", "steps", "size", "weights changed", "made in, s")
    for column in (*heads, "applied in, s", "MB"):
        table.add_column(column, justify="right")
    for each in result["deltas"]:
        table.add_row(
            f"{each['rate']:g}",
            f"{each['scale']:g}",
            each["steps"],
            measured.shown(each["ratio"], 3),
            measured.shown(each["changed"], 3),
            measured.shown(each["make_s"], 2),
            measured.shown(each["apply_s"], 2),
            f"{each['mb']['median']:.0f}",
        )
    Console().print(table)
    join = result["join"]
    print(f"{join['join_s']['median']:.2f} s for a client that joins: its start and one fetch")
    if engines := result["engines"]:
        title = f"a replica that joins, real engines, {engines['megabytes']:.0f} MB"
        table = Table(title=title)
        columns = ("ratio_to_fetch", "fetched_s", "transfer_s", "load_s", "values_s", "proof_s")
        for column in ("join", *columns):
            table.add_column(column, justify="right")
        for kind, each in engines["joins"].items():
            table.add_row(kind, *(measured.shown(each[key], 2) for key in columns))
        Console().print(table)
        print(f"one fetch: {measured.shown(engines['fetch_s'], 2)} s")
        for phase, each in engines["pause_s"].items():
            print(f"pause, {phase}: {measured.shown(each, 3)} s")


def main() -> None:
    """Measure, print, write."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=512, help="of a version, in MiB")
    parser.add_argument("--without-engines", action="store_true", help="do not start vLLM")
    parser.add_argument("--again", action="store_true", help="not what an earlier run had measured")
    arguments = parser.parse_args()
    about, rounds = measured.about(), arguments.rounds
    settings = {"rounds": rounds, "megabytes": arguments.megabytes}
    kept = measured.Kept("weights", settings=settings, again=arguments.again)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="headrace-bench-"))
    try:
        size_bytes = arguments.megabytes << 20
        made = {}
        for num in REPLICAS:
            made[str(num)] = kept.once(
                f"publishes/{num}", partial(publishes, num, rounds, size_bytes, folder)
            )
            print(f"{num} replicas: {measured.shown(made[str(num)]['s'], 2)} s", flush=True)
        changes = kept.once("deltas", partial(deltas, rounds, folder))
    finally:
        shutil.rmtree(folder)
    join_s = made["4"]["join_s"]
    one_s = made["1"]["s"]["median"]
    result = {
        "about": about,
        "megabytes": arguments.megabytes,
        "seconds_by_replicas": {num: each["s"]["median"] for num, each in made.items()},
        "ratio_to_tcp_by_replicas": {n: e["ratio_to_tcp"]["median"] for n, e in made.items()},
        "ratio_to_copy_by_replicas": {n: e["ratio_to_copy"]["median"] for n, e in made.items()},
        "publish_s": statistics.median(made["1"]["publish_s"]["values"]),
        "pause_s": None,
        "delta_ratio": {
            f"{each['rate']:g}": each["ratio"]["median"]
            for each in changes
            if each["steps"] == "settled" and each["scale"] == weights_deltas.SCALES[0]
        },
        "join": {"join_s": join_s, "ratio_to_fetch": join_s["median"] / one_s},
        "engines": None,
        "publishes": made,
        "deltas": changes,
    }
    measured.write("weights", result)  # an engine may not start here
    if not arguments.without_engines:
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="headrace-bench-") as place:
            engines = kept.once("engines", partial(weights_joins.measure, rounds, Path(place)))
        pauses = {phase: each["median"] for phase, each in engines["pause_s"].items()}
        result |= {"engines": engines, "pause_s": pauses}
    show(result)
    print(f"wrote {measured.write('weights', result)}")


if __name__ == "__main__":
    main()
