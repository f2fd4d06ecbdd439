"""The page of measurements, made of results as the benchmarks write them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def spread(median: float) -> dict[str, Any]:
    return {"median": median, "least": median * 0.9, "greatest": median * 1.1, "values": [median]}


ABOUT = {
    "date": "2026-01-31",
    "cpu": "A CPU",
    "cores": 2,
    "memory_gib": 24.0,
    "system": "Linux 6",
    "python": "3.11.2",
    "versions": {"torch": "2.13.0"},
    "load_before": 0.03,
}

GENERATOR = {
    "ratio_to_offline": 0.934,
    "workloads": {
        "answers": {
            "ratio": spread(0.934),
            "service_tokens_per_s": spread(4670.0),
            "offline_tokens_per_s": spread(5000.0),
            "service_cpu_us_per_token": spread(300.0),
            "offline_cpu_us_per_token": spread(200.0),
            "tokens_per_conversation": 3.0,
        }
    },
    "about": ABOUT,
}


def written(folder: Path, **results: Any) -> str:
    for name, result in results.items():
        (folder / f"{name}.json").write_text(json.dumps(result))
    page = folder / "page.md"
    script = str(ROOT / "benchmarks" / "report.py")
    command = [sys.executable, script, "--results", str(folder), "--page", str(page)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return page.read_text()


def test_a_section_has_its_command_the_ratio_first_and_the_spread(tmp_path: Path) -> None:
    page = written(tmp_path, generator=GENERATOR)
    section = page.partition("## The generator service")[2].partition("\n## ")[0]
    assert "`python benchmarks/generator.py`" in section
    assert section.index("**0.93**") < section.index("| answers |")
    assert "| answers | 0.934 (0.841 - 1.027) | 4,670 (4,203 - 5,137) |" in section


def test_the_page_tells_machine_date_versions_and_load(tmp_path: Path) -> None:
    page = written(tmp_path, generator=GENERATOR)
    assert "A CPU, 2 cores, 24.0 GiB" in page
    assert "torch 2.13.0; 2026-01-31: generator (load 0.03)" in page


def test_what_was_not_measured_is_listed_with_its_command(tmp_path: Path) -> None:
    page = written(tmp_path, generator=GENERATOR)
    missing = page.partition("## Not measured yet")[2]
    assert "`python benchmarks/overhead.py`" in missing
    assert "generator.py" not in missing


def test_runs_that_are_kept_to_go_on_are_no_result(tmp_path: Path) -> None:
    (tmp_path / "endtoend.runs.json").write_text('{"settings": {}, "runs": {}}')
    assert "## The demo from end to end" not in written(tmp_path)


def test_the_demo_and_what_asynchrony_brings(tmp_path: Path) -> None:
    run = {
        "all_samples_per_s": 620.0,
        "step_s_median": 0.82,
        "eval_before": 0.45,
        "eval_after": 0.8,
        "groups": {"dropped": {"stale": 3}},
        "cpu_s_per_step": {"trainer": 0.5, "generator": 0.4},
    }
    mode = {key: spread(30.0) for key in ("seconds", "steps", "step_s")}
    of_trl = {"trained_samples_per_s": 250.0, "step_s_median": 2.0}
    of_trl |= {"eval_before": 0.45, "eval_after": 0.7}
    trl = {"version": "1.16.0", "of_runs": spread(250.0), "runs": [of_trl]}
    endtoend = {
        "demo": {"of_runs": spread(620.0), "ratio_to_trl": 2.48, "trl": trl, "runs": [run]},
        "cases": {"slow_reward": {"speedup": 1.4, "asynchronous": mode, "synchronous": mode}},
        "level": 0.55,
        "about": ABOUT,
    }
    page = written(tmp_path, endtoend=endtoend)
    assert "**2.48 times** TRL's: 620 (558 - 682) trained samples/s" in page
    assert "TRL 1.16.0's asynchronous GRPO reached 250 (225 - 275)" in page
    assert "| TRL 1 | 250 | 2.00 | 0.450 | 0.700 |" in page
    assert "| 1 | 620 | 0.82 | 0.450 | 0.800 | 3 | 0.90 |" in page
    assert "| slow reward | 1.40 | 30.0 (27.0 - 33.0) |" in page


def weights(**more: Any) -> dict[str, Any]:
    change = {"rate": 1e-6, "scale": 0.02, "steps": "settled"}
    return {
        "seconds_by_replicas": {"1": 0.81, "4": 3.3},
        "ratio_to_tcp_by_replicas": {"1": 1.5, "4": 1.42},
        "ratio_to_copy_by_replicas": {"1": 2.1, "4": 2.0},
        "deltas": [{**change, "changed": spread(0.02), "ratio": spread(0.11)}],
        "engines": None,
        "about": ABOUT,
        **more,
    }


def test_a_publish_stands_beside_tcp_and_copy(tmp_path: Path) -> None:
    page = written(tmp_path, weights=weights())
    assert "| 4 | 1.42 | 2 | 3.3 |" in page
    change = "| 1e-06 | 0.02 | settled | 0.020 (0.018 - 0.022) | 0.110 (0.099 - 0.121) |"
    assert change in page
    assert "Pause" not in page


def test_a_join_stands_beside_one_fetch(tmp_path: Path) -> None:
    keys = ("fetched_s", "transfer_s", "load_s", "values_s", "proof_s")
    ratios = {"ratio_to_fetch": spread(1.25), "ratio_without_load": spread(1.0)}
    seconds = {key: spread(0.5) for key in keys}
    engines = {
        "megabytes": 262.4,
        "fetch_s": spread(0.6),
        "joins": {"overtaken": {**ratios, **seconds}},
        "pause_s": {"without": spread(0.2), "while one joins": spread(0.21)},
    }
    page = written(tmp_path, weights=weights(engines=engines))
    assert "| overtaken | 1.25 (1.12 - 1.38) | 1.00 (0.90 - 1.10) | 0.50 (0.45 - 0.55) |" in page
    assert "| while one joins | 0.210 (0.189 - 0.231) |" in page
    assert "a model of 262 MB" in page
