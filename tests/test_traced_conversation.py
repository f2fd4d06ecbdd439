"""A conversation from the engine to the page: generated, marked, scored, sent, stored, shown. All
but the engine and the queue between the services are real.
"""

import asyncio
from pathlib import Path

import pytest

from services.common import config, grpc_kit
from services.common.recorder import Recorder
from services.common.traces_config import Traces
from services.generator.conversation import Setting
from services.generator.group import GroupRunner
from services.generator.slots import Slots
from services.generator.template import ChatTemplate
from services.generator.traces import Tracing
from services.generator.types import Generated
from services.generator.wire import write_group
from services.launcher import tiny_tokenizer
from services.scorer import traces
from services.scorer.rewards import Verdict
from services.scorer.wire import write_scored
from tests.services.aggregator.making import Producer, event
from tests.services.aggregator.test_service import serving
from tests.services.generator.fakes import FakeEngine, generated, recipe_of, recorder, request_of
from tests.services.scorer.test_scoring import judged

TOKENIZER = tiny_tokenizer.build_tokenizer()


async def says_four(_: int) -> Generated:
    ids = [*TOKENIZER.convert_tokens_to_ids(["4", "2"]), TOKENIZER.eos_token_id]
    return generated(ids, versions=(1,))


async def test_what_was_said_can_be_read(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "model")
    template, measured = ChatTemplate(tmp_path / "model"), recorder()
    setting = Setting(FakeEngine(says_four), template, recipe_of())
    request = request_of("0.0.1.1", content="17+25=", num=2)
    group = await GroupRunner(setting, Slots(4), measured).run(request)
    assert group.versions is not None
    message = write_group(
        request, group.conversations, failed={}, versions=group.versions, producer="generator-0"
    )
    tracing = Tracing(Traces(per_version=1), groups_per_version=1, spell=template.spell)
    await tracing.mark(message, group, measured)
    [number] = [n for n, rollout in enumerate(message.rollouts) if rollout.HasField("marks")]
    scored = write_scored(
        message, judged(Verdict(name="exact", rewards=[1, 0]), totals=[1.0, 0.0]), scorer="scorer-0"
    )
    async with serving(tmp_path) as aggregator:
        await aggregator.push(
            Producer("trainer-0").request(events=[event("0.0.1.1", "trained", step=7)])
        )
        with grpc_kit.sync_channel(aggregator.grpc, aggregator.network) as channel:
            sending = Recorder(
                run="demo",
                producer="scorer-0",
                service="scorer",
                settings=config.Recorder(flush_s=0.05),
                channel=channel,
            )
            traces.send(message, scored, settings=Traces(), recorder=sending)
            assert await asyncio.to_thread(sending.close, 30)
        listed = await aggregator.get("/api/v1/runs/demo/rollouts?step=7")
        [summary] = listed["rollouts"]
        whole = await aggregator.get(f"/api/v1/runs/demo/rollouts/{summary['rollout_id']}")
    assert summary["rollout_id"] == f"0.0.1.1/{number}"
    assert summary["reward"] == [1.0, 0.0][number]
    assert summary["advantage"] == pytest.approx([1.0, -1.0][number])
    assert (summary["version"], summary["state"], summary["step"]) == (1, "trained", 7)
    assert [each["content"] for each in whole["prompt"]] == ["17+25="]
    assert [each["content"] for each in whole["completion"]] == ["42"]
    assert whole["turns"][0]["text"] == "42"
    [tokens] = whole["sequences"]
    assert "".join(tokens["texts"]) == template.spell(tokens["token_ids"])
    shown = list(zip(tokens["texts"], tokens["trained"], tokens["logprobs"], strict=True))
    end = template.spell([TOKENIZER.eos_token_id])
    assert shown[-3:] == [("4", True, -0.125), ("2", True, -0.25), (end, True, -0.375)]
    assert {trained for _, trained, _ in shown[:-3]} == {False}
