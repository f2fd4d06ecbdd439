"""Random schedules of the delivery scripts, on each kind of server.

`HEADRACE_MODEL_SEEDS=2000` runs that many instead of a few. Every fourth schedule also loses data
of the server, which comes back empty or as it was before.
"""

import os
from collections import Counter

import pytest

from services.common.queue import SCRIPTS
from tests.services.common.delivery_model import Broken, Model, Server

SEEDS = int(os.environ.get("HEADRACE_MODEL_SEEDS", "40"))

SEEN = (
    *("trainer kills", "second trainers", "worker kills", "stalls", "lost answers", "takeovers"),
    *(
        "rollbacks",
        "empty restarts",
        "forgotten",
        "trained",
        "adopted",
        "duplicates",
        "discarded",
        "lost",
    ),
    *("begin lost", "begin void", "renew lost", "give_back ends", "refuse done", "refuse lost"),
    *("hand_off done", "hand_off lost", "hand_off void", "hand_off full", "given up"),
    *("requeue done", "requeue settled"),
)
"""What a set of schedules must contain to say anything."""


def run_all(server: Server, num_schedules: int) -> Counter[str]:
    """So many schedules; what happened in them."""
    told = Counter[str]()
    for seed in range(num_schedules):
        model = Model(server, seed, data_loss=seed % 4 == 0)
        model.run()
        told += model.told
    return told


@pytest.mark.timeout(7200)
def test_nothing_is_lost_and_nothing_is_trained_twice(queue_url: str) -> None:
    told = run_all(Server(queue_url), SEEDS)
    print(f"\n{SEEDS} schedules: {dict(told)}")
    assert [what for what in SEEN if not told[what]] == []


OWNS = "if not owns(KEYS[1], ARGV[2], ARGV[1], ARGV[3])"

FENCED = "if fenced(KEYS[1], ARGV[1])"

MUTANTS = {
    "a hand-off of what another holds": ("hand_off", OWNS, "if false"),
    "a hand-off of what was settled": ("hand_off", "if tracked and not place", "if false"),
    "a hand-off that leaves its entry": ("hand_off", "remove(KEYS[1], ARGV[2])\nreturn", "return"),
    "a hand-off that leaves the place": (
        "hand_off",
        "if tracked then redis",
        "if false then redis",
    ),
    "a hand-off without capacity": ("hand_off", "return 'full'", "do end"),
    "a dispatch that is not noted": ("dispatch", "ARGV[4] == '1'", "false"),
    "a dispatch by a replaced trainer": ("dispatch", FENCED, "if false"),
    "a settlement by a replaced trainer": ("settle", FENCED, "if false"),
    "a settlement that is not repeatable": ("settle", "== ARGV[3]", "== ''"),
    "a settlement that leaves its entry": ("settle", "redis.call('XDEL', KEYS[2], entry)", ""),
    "a refusal without a tombstone": ("refuse", "if ARGV[11] == '1'", "if false"),
    "a refusal by whoever lost it": ("refuse", OWNS, "if false"),
    "a reclaim of nothing": ("reclaim", "found[2] ~= mine", "false"),
    "a requeue that leaves the tombstone": (
        "requeue",
        "redis.call('XDEL', KEYS[2], tombstone)",
        "",
    ),
    "a requeue of what the trainer has": ("requeue", "#pending > 0", "false"),
    "bytes that are not counted": ("discard", "'HINCRBY'", "'HEXISTS'"),
}
"""Rules taken out of a script. A blind renewal is not among them, nor a claim without its delivery
count: they cost work, and nothing that is promised here."""


@pytest.mark.parametrize("what", MUTANTS)
def test_a_broken_rule_is_found(valkey_url: str, what: str) -> None:
    server = Server(valkey_url, scripts=without(*MUTANTS[what]))
    with pytest.raises(Broken):
        run_all(server, 100)


@pytest.mark.timeout(7200)
@pytest.mark.skipif(SEEDS < 1000, reason="takes minutes: HEADRACE_MODEL_SEEDS=1000")
def test_a_return_that_drops_what_is_pending_is_found(valkey_url: str) -> None:
    """By about one schedule in a hundred: an answer must be lost just before."""
    server = Server(valkey_url, scripts=without("give_back", " and #left == 0", ""))
    with pytest.raises(Broken):
        run_all(server, SEEDS)


def without(name: str, rule: str, instead: str) -> dict[str, str]:
    """The scripts with one rule replaced."""
    changed = {
        script: text.replace(rule, instead) if name == script else text
        for script, text in SCRIPTS.items()
    }
    assert changed != SCRIPTS
    return changed
