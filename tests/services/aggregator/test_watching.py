"""The whole aggregator watches the run of its recipe: an alert rings, and event files grow."""

from pathlib import Path
from typing import Any

import pytest

from services.aggregator import alerts
from services.aggregator.mirrors import feeding
from services.common.errors import UserError
from tests.services.aggregator.making import Producer, observed
from tests.services.aggregator.mirrors.reading import scalars
from tests.services.aggregator.receiving import receiving
from tests.services.aggregator.test_service import Serving, serving
from tests.waiting import until

RULE = '[{name = "low-reward", key = "reward", compare = "below", threshold = 0.5, for_steps = 2}]'


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "START_S", 0.0)
    monkeypatch.setattr(feeding, "EVERY_S", 0.05)


async def train(aggregator: Serving, *, steps: int) -> None:
    producer = Producer("trainer-0")
    for step in range(steps):
        values = [("perf/step_s", observed([1.0])), ("reward", observed([step / 100]))]
        await aggregator.push(producer.request(values, step=step))


async def test_an_alert_rings_and_event_files_grow(tmp_path: Path) -> None:
    with receiving() as receiver:
        hook = tmp_path / "hook"
        hook.write_text(receiver.url)
        settings = (
            f"alerts.rules={RULE}",
            f"alerts.webhook_file={hook}",
            "alerts.every_s=1",
            "mirrors.tensorboard=true",
            "mirrors.settle_s=0",
        )
        folder = tmp_path / "runs" / "demo" / "tensorboard"
        async with serving(tmp_path, *settings) as aggregator:
            await train(aggregator, steps=5)
            await until(lambda: receiver.bodies)
            answer: dict[str, Any] = await aggregator.get("/api/v1/runs/demo/alerts")
            assert [each["name"] for each in answer["firing"]] == ["low-reward"]
            assert "secret" not in str(answer)
            await until(lambda: folder.is_dir() and len(scalars(folder).get("reward", {})) == 5)
    assert receiver.bodies[0]["alert"] == "low-reward"
    assert scalars(folder)["reward"] == pytest.approx({step: step / 100 for step in range(5)})


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (f"alerts.rules={RULE.replace('reward', 'rewrd')}", "there is no metric 'rewrd'"),
        ("alerts.webhook_file=/no/such/file", r"alerts\.webhook_file: /no/such/file cannot be"),
    ],
)
async def test_it_does_not_start_with_what_cannot_work(
    tmp_path: Path, setting: str, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        async with serving(tmp_path, setting):
            pass
