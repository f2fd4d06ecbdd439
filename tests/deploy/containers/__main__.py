"""`python -m tests.deploy.containers` (`make deploy-test`): prints what happens, then a table, and
writes benchmarks/results/deploy.json. The exit status is 1 when something did not hold.

Where containers cannot run it says why and ends with 0. `--images` stops after the images;
`--no-images` takes those of the last time. Images, wheels and layers are kept in .cache/deploy for
the next time; containers, networks and volumes are removed.
"""

import asyncio
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from services.common import config
from tests.deploy.containers import conversion, images, report
from tests.deploy.containers.cluster import Cluster
from tests.deploy.containers.course import Outcome, course
from tests.deploy.containers.engine import NETWORK, Engine, why_not
from tests.deploy.manifests import ROOT, SERVICES, render

RESULTS = ROOT / "benchmarks" / "results" / "deploy.json"
FOLDER = ROOT / ".cache" / "deploy"
OVERLAY = ROOT / "deploy" / "k8s" / "overlays" / "cpu"
RECIPE = OVERLAY / "recipe.toml"


def main(
    folder: Annotated[Path, typer.Option(help="For images and all else.")] = FOLDER,
    results: Annotated[Path, typer.Option(help="The figures, as JSON.")] = RESULTS,
    only_images: Annotated[bool, typer.Option("--images", help="Build and weigh them.")] = False,
    build: Annotated[bool, typer.Option("--build/--no-build", help="Build first.")] = True,
) -> None:
    """Build, play, judge, and tell."""
    begin_s = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begin_s:6.0f} s  {line}", flush=True)

    engine = Engine(folder)
    why = why_not(engine) or images.why_not_here(engine, say)
    if why is not None:
        print(f"skipped: {why}")
        return
    workloads = conversion.workloads(render(OVERLAY))
    tag = workloads["trainer"].container["image"].rpartition(":")[2]
    if build:
        images.build(engine, tag, say)
        images.build_queue(engine, workloads["queue"].container["image"], say)
    sizes = {name: images.size(engine, f"localhost/headrace/{name}:{tag}") for name in SERVICES}
    print(report.image_table(sizes))
    problems = report.too_big(sizes)
    outcome = Outcome()
    if not only_images:
        logs = folder / "logs"
        shutil.rmtree(logs, ignore_errors=True)
        run = config.load(RECIPE).run

        async def lived() -> Outcome:
            async with Cluster(engine, workloads, logs=logs, say=say) as cluster:
                return await course(cluster, run=run, say=say)

        try:
            outcome = asyncio.run(lived())
        finally:
            engine.podman("network", "rm", "--force", NETWORK)
        print(report.course_table(outcome))
        problems += outcome.problems
        report.write(results, sizes, outcome, problems)
    for problem in problems:
        print(f"PROBLEM {problem}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    typer.run(main)
