"""One function for each result: what docs/benchmarks.md says of it, in Markdown."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from measured import shown

Result = Mapping[str, Any]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [list(heads), ["---", *["---:"] * (len(heads) - 1)], *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def generator(result: Result) -> str:
    """The service against LLM.generate."""
    rows = [
        [
            name,
            shown(each["ratio"], 3),
            shown(each["service_tokens_per_s"]),
            shown(each["offline_tokens_per_s"]),
            f"{each['tokens_per_conversation']:.1f}",
            f"{each['service_cpu_us_per_token']['median']:.0f}",
            f"{each['offline_cpu_us_per_token']['median']:.0f}",
        ]
        for name, each in result["workloads"].items()
    ]
    heads = (
        *("workload", "ratio", "service, tokens/s", "vLLM offline, tokens/s"),
        *("tokens a conversation", "CPU us a token", "offline"),
    )
    return (
        f"**{result['ratio_to_offline']:.2f}** of what vLLM's own `LLM.generate` reaches on the "
        "same prompts, model, core and cache, both with log-probabilities and without turning "
        "tokens into text in the engine (the least of the workloads' medians). The service reads "
        "requests from the queue, renders prompts, follows announced policy versions and writes "
        f"groups with texts into the queue.\n\n{table(heads, rows)}"
    )


def weights(result: Result) -> str:
    """A publish, by number of replicas."""
    rows = [
        [
            str(number),
            _number(result["ratio_to_tcp_by_replicas"][number]),
            _number(result["ratio_to_copy_by_replicas"][number]),
            _number(seconds),
        ]
        for number, seconds in result["seconds_by_replicas"].items()
    ]
    heads = ("replicas", "to plain TCP", "to a file copy", "seconds of a publish")
    deltas = [
        [
            f"{each['rate']:g}",
            f"{each['scale']:g}",
            each["steps"],
            shown(each["changed"], 3),
            shown(each["ratio"], 3),
        ]
        for each in result["deltas"]
    ]
    changes = ("learning rate", "weights' scale", "step", "weights changed", "size, of the whole")
    parts = [
        "Seconds of a publish over those of the same bytes copied, or sent by one plain TCP "
        "connection, once for each replica.",
        table(heads, rows),
        "Differences in bfloat16, of optimizer steps of the trainer's learner (5 million random "
        "weights of that standard deviation, its float32 weights rounded as a publish rounds "
        "them): the first step, in which every weight moves by the learning rate, and steps after "
        "30, when AdamW's moments have settled.",
        table(changes, deltas),
    ]
    if result["engines"] is not None:
        parts.append(_engines(result["engines"]))
    return "\n\n".join(parts)


def _engines(found: Result) -> str:
    """Joins and pauses with real engines."""
    columns = ("fetched_s", "transfer_s", "load_s", "values_s", "proof_s")
    joins = [
        [
            kind,
            shown(each["ratio_to_fetch"], 2),
            shown(each["ratio_without_load"], 2),
            *(shown(each[key], 2) for key in columns),
        ]
        for kind, each in found["joins"].items()
    ]
    pauses = [[phase, shown(each, 3)] for phase, each in found["pause_s"].items()]
    heads = (
        *(
            "join",
            "to one fetch",
            "without the load",
            "until fetched, s",
            "of it transfer",
            "load of the true, s",
        ),
        *("wait for the proof's values, s", "proof, s"),
    )
    return "\n\n".join(
        [
            "A replica that joins in mid-run, its engine up, everything real: a learner that takes "
            "steps, two replicas that serve and generate, and the one that joins, each with vLLM, "
            "threads and cores as `headrace run` gives them; a model of "
            f"{found['megabytes']:.0f} MB in float32, so that each "
            "version travels whole. Counted is from the start of its client to the true weights, "
            "without the proof and the wait for its values, over one fetch by the same replica "
            f"while nothing else goes on ({shown(found['fetch_s'], 2)} s). `quiet`: no version is "
            "published meanwhile. `overtaken`: one is, as soon as it fetches; none fetched a "
            "second version before it served.",
            table(heads, joins),
            "Pause of the two that serve at a load, with what they generate kept. All engines "
            "share the cores; in `control` the third does the work of a proof and joins nothing:",
            table(("publishes", "seconds"), pauses),
        ]
    )


def endtoend(result: Result) -> str:
    """The demo, and asynchrony."""
    parts = []
    if demo := result.get("demo"):
        trl = demo["trl"]
        rows = [
            [
                str(number),
                f"{run['all_samples_per_s']:.0f}",
                f"{run['step_s_median']:.2f}",
                _number(run["eval_before"], digits=3),
                _number(run["eval_after"], digits=3),
                str(sum(run["groups"]["dropped"].values())),
                f"{sum(run['cpu_s_per_step'].values()):.2f}",
            ]
            for number, run in enumerate(demo["runs"], start=1)
        ]
        rows += [
            [
                f"TRL {number}",
                f"{run['trained_samples_per_s']:.0f}",
                f"{run['step_s_median']:.2f}",
                _number(run["eval_before"], digits=3),
                _number(run["eval_after"], digits=3),
                "",
                "",
            ]
            for number, run in enumerate(trl["runs"], start=1)
        ]
        heads: tuple[str, ...] = (
            "run",
            "samples/s",
            "s/step",
            "accuracy before",
            "after",
            "dropped",
            "CPU s/step",
        )
        parts.append(
            f"**{demo['ratio_to_trl']:.2f} times** TRL's: {shown(demo['of_runs'])} trained "
            f"samples/s, where TRL {trl['version']}'s asynchronous GRPO reached "
            f"{shown(trl['of_runs'])} in turns with it, on the same task, model and batch (32 "
            "prompts x 16 generations, both cores; its call of FlashAttention replaced by SDPA, "
            "which runs on CPUs, and its weights sent by a file). Counted are all samples of the "
            "groups that a step takes, those of groups without signal included, as TRL "
            f"counts.\n\n{table(heads, rows)}"
        )
    if cases := result.get("cases"):
        rows = [
            [
                name.replace("_", " "),
                f"{case['speedup']:.2f}",
                shown(case["asynchronous"]["seconds"], 1),
                shown(case["synchronous"]["seconds"], 1),
                f"{case['asynchronous']['steps']['median']:.0f}",
                f"{case['synchronous']['steps']['median']:.0f}",
            ]
            for name, case in cases.items()
        ]
        heads = (
            *("case", "ratio", "asynchronous, s", "synchronous, s"),
            *("steps, asynchronous", "synchronous"),
        )
        parts.append(
            "Asynchronous against the same recipe made synchronous (`max_staleness = 0`: one step "
            "at a time), seconds until the mean reward of the conversations of 8 steps reached "
            f"{result['level']}. In `slow reward` each group's reward takes 0.2 s, of 16 groups at "
            "a time (of the 8 that are the default the scorer is the limit of both); in `long "
            "tail` conversations wait lognormal times (median 0.15 s, sigma 1), as if answers of "
            "such lengths were written on other machines. In `plain` all stages share the same "
            f"cores, so that little is to be had.\n\n{table(heads, rows)}"
        )
    return "\n\n".join(parts)


def overhead(result: Result) -> str:
    """Recording."""
    rows = [
        [
            service,
            f"{row['recording_s_per_step'] / row['cpu_s_per_step']:.2%}",
            f"{row['recording_s_per_step'] * 1e3:.2f} ms",
            f"{row['sender_s_per_step'] * 1e3:.2f} ms",
            f"{row['cpu_s_per_step']:.3f} s",
            f"{row['calls_per_step']:.0f}",
            f"{row['timing_s_per_call'] * 1e6:.1f} us",
        ]
        for service, row in result["by_service"].items()
    ]
    heads = (
        "service",
        "share",
        "recording, CPU a step",
        "of it sending",
        "all CPU a step",
        "calls a step",
        "timing one",
    )
    return (
        f"**{result['overhead_frac']:.2%}** of the CPU time of the demo's steps (the aggregator's "
        "own not counted) goes into calls that record and threads that send, without what timing "
        "a call costs, which is measured where the calls are made. As a cross-check, a "
        f"step with metrics over one without: {shown(result['step_ratio'], 3)} in time, "
        f"{shown(result['cpu_ratio'], 3)} in CPU time; without means that these calls return at "
        "once and nothing is sent. The aggregator took "
        f"{result['aggregator_cpu_s_per_step']:.3f} CPU s a step.\n\n{table(heads, rows)}"
    )


def queue(result: Result) -> str:
    """Samples through streams."""
    rows = []
    for size in ("1k", "32k"):
        rows.append(
            [
                f"{size} tokens",
                f"{result[f'ratio_to_pickle_{size}']:.2f}",
                f"{result[f'samples_per_s_{size}']:,.0f}",
                f"{result[f'baseline_pickle_samples_per_s_{size}']:,.0f}",
                f"{result[f'whole_way_samples_per_s_{size}']:,.0f}",
            ]
        )
    heads = ("samples of", "ratio", "one hop, samples/s", "pickled, samples/s", "whole way")
    return table(heads, rows)


def trainer(result: Result) -> str:
    """A step."""
    rows = [
        [
            name,
            f"{variants['shared']['ratio']:.2f}",
            *(f"{variants[kind]['step_s']:.2f} s" for kind in ("shared", "packed", "padded")),
        ]
        for name, variants in result["sets"].items()
    ]
    heads = ("samples", "padded / shared", "shared prefixes", "packed rows", "padded batches")
    return f"CPU seconds of one optimizer step on one core.\n\n{table(heads, rows)}"


def soak(result: Result) -> str:
    """Hours."""
    rows = []
    for kind, row in result["memory"].items():
        if row is None:
            rows.append([kind, "", "no life was long enough", ""])
            continue
        slope = f"{row['mib_per_hour']:+.1f} ± {row['interval_mib_per_hour']:.1f}"
        grows = f"{row['growth_frac_in_2_hours']:+.1%}"
        rows.append([kind, grows, slope, f"{row['pss_mib']:.0f}"])
    streams = [
        [name, *(f"{row[key]:.1f}" for key in ("first_half", "second_half", "most"))]
        for name, row in result["streams"].items()
    ]
    groups = result["groups"]
    return "\n\n".join(
        [
            f"{groups['trained']:,} groups in {result['wall_s'] / 60:.0f} minutes, "
            f"{len(result['ended'])} ends of services by SIGTERM and SIGKILL. "
            + (
                "; ".join(result["wrong"])
                or "What was judged of memory and streams stayed flat, the ledger balances"
            )
            + ".",
            table(("memory (PSS)", "in 2 hours", "MiB an hour", "MiB"), rows),
            table(("entries", "first half", "second half", "most"), streams),
        ]
    )


def _number(value: Any, *, digits: int | None = None) -> str:
    """A plain number, or a spread's median with its ends."""
    if isinstance(value, Mapping) and "median" in value and "least" in value:
        return shown(value, 2)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_number(each)}" for key, each in value.items())
    if isinstance(value, float):
        return f"{value:.3g}" if digits is None else f"{value:.{digits}f}"
    return "none" if value is None else str(value)


SECTIONS: dict[str, Callable[[Result], str]] = {
    "generator": generator,
    "weights": weights,
    "endtoend": endtoend,
    "overhead": overhead,
    "queue": queue,
    "trainer": trainer,
    "soak": soak,
}
