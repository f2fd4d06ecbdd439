"""What the deploy test makes of its figures."""

import json
from pathlib import Path

from tests.deploy.containers import engine, report
from tests.deploy.containers.cluster import Ended
from tests.deploy.containers.course import Outcome
from tests.deploy.containers.images import LIGHT_MB, SLIM_MB, Size


def sizes(scorer_mb: float) -> dict[str, Size]:
    base_mb = 150.0
    layers = {"scorer": scorer_mb, "aggregator": 200.0, "trainer": 1400.0}
    return {name: Size(total=base_mb + mb, layers=mb) for name, mb in layers.items()}


def test_small_images_are_weighed_on_the_slim_base() -> None:
    room = float(LIGHT_MB - SLIM_MB)
    assert report.too_big(sizes(room)) == [], "the base made here is heavier, and does not count"
    (problem,) = report.too_big(sizes(room + 1))
    assert problem.startswith("the scorer's image weighs 351 MB")


def test_images_with_torch_may_be_big() -> None:
    assert report.too_big(sizes(200.0)) == []


def test_who_was_killed_has_not_ended_well() -> None:
    assert Ended("scorer-1", status=0, seconds=3.0, grace_s=30).well
    assert not Ended("scorer-1", status=137, seconds=30.0, grace_s=30).well
    assert not Ended("scorer-1", status=1, seconds=3.0, grace_s=30).well


def test_figures_can_be_read_again(tmp_path: Path) -> None:
    outcome = Outcome(steps=7, trained_by_hand=224)
    report.write(tmp_path / "results" / "deploy.json", sizes(210.0), outcome, ["a problem"])
    found = json.loads((tmp_path / "results" / "deploy.json").read_text())
    assert (found["steps"], found["trained_by_hand"], found["problems"]) == (7, 224, ["a problem"])
    assert found["images_mb"]["scorer"] == {"total": 360, "layers": 210, "on_slim": 340}


def test_what_is_not_installed_is_named_by_its_package() -> None:
    needed = {"sh": "dash", "no-such-program": "no-such-package", "/no/such/file": "another"}
    assert engine.missing(needed) == ["another", "no-such-package"]
