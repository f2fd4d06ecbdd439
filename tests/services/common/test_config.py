"""The recipe: what is accepted, what is refused with which line, and what survives a round trip."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common import recipe_text
from services.common.config import Recipe, RecipeError, dump_toml, load
from services.common.generation_config import Generation
from services.common.training_config import Loss

BASE = """
run = "demo"
[data.reasoning_gym]
task = "chain_sum"
[trainer]
max_steps = 80
"""

TWO_REWARDS = """
[[rewards.functions]]
function = "exact_match"
[[rewards.functions]]
function = "mine:brevity"
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(BASE)
    return path


def read(path: Path, *overrides: str, **environ: str) -> Recipe:
    return load(path, overrides=overrides, environ=environ)


def refused(path: Path, *overrides: str, **environ: str) -> str:
    with pytest.raises(RecipeError) as caught:
        read(path, *overrides, **environ)
    return str(caught.value)


def refused_text(path: Path, text: str) -> str:
    path.write_text(text)
    return refused(path)


def test_defaults_are_filled_in_and_derived(recipe_file: Path) -> None:
    recipe = read(recipe_file)
    assert (recipe.token_budget, recipe.trained_token_budget) == (2048, 2048)
    assert recipe.samples_capacity == 4 * 32
    assert recipe.max_outstanding == (4 * 1 + 1) * 32
    assert recipe.run_folder == Path("runs/demo")


# Overrides


def test_the_command_line_beats_the_environment_beats_the_file_beats_the_default(
    recipe_file: Path,
) -> None:
    environ = {"HEADRACE_TRAINER__MAX_STEPS": "7", "HEADRACE_TRAINER__SEED": "3", "OTHER": "x"}
    recipe = read(recipe_file, "trainer.max_steps=9", **environ)
    assert (recipe.trainer.max_steps, recipe.trainer.seed) == (9, 3)
    assert recipe.trainer.groups_per_step == 32


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run=123", "123"),
        ("run=2026-11-01", "2026-11-01"),
        ("run=true", "true"),
        ('run="quoted"', "quoted"),
        ("run=plain", "plain"),
    ],
)
def test_an_override_of_a_text_needs_no_quotes(
    recipe_file: Path, override: str, expected: str
) -> None:
    assert read(recipe_file, override).run == expected


def test_overrides_reach_lists_and_free_parameters(recipe_file: Path) -> None:
    recipe_file.write_text(BASE + TWO_REWARDS)
    recipe = read(
        recipe_file,
        "rewards.functions.1.weight=0.5",
        "rewards.functions.0.params.words=[1, {a = 2}]",
        HEADRACE_DATA__REASONING_GYM__PARAMS="{min_terms = 2}",
    )
    assert recipe.rewards.functions[1].weight == 0.5
    assert recipe.rewards.functions[0].params == {"words": [1, {"a": 2}]}
    assert recipe.data.reasoning_gym is not None
    assert recipe.data.reasoning_gym.params == {"min_terms": 2}


def test_an_override_where_nothing_can_be_is_refused(recipe_file: Path) -> None:
    assert "--set max_steps: write it as --set" in refused(recipe_file, "max_steps")
    assert "--set run.x: run is neither a section nor a list" in refused(recipe_file, "run.x=1")
    recipe_file.write_text(BASE + TWO_REWARDS)
    assert "has 2 elements" in refused(recipe_file, "rewards.functions.2=x")
    assert "rewards.functions.2 is neither" in refused(recipe_file, "rewards.functions.2.weight=1")


def test_a_wrong_override_is_blamed_on_who_gave_it(recipe_file: Path) -> None:
    line = refused(recipe_file, "trainer.max_steps=ten")
    assert line == (
        "--set trainer.max_steps: trainer.max_steps = 'ten': input should be a valid integer"
    )
    assert refused(recipe_file, HEADRACE_TRAINER__MAX_STEPS="0").startswith(
        "environment variable HEADRACE_TRAINER__MAX_STEPS: trainer.max_steps = 0: "
    )
    assert refused(recipe_file, HEADRACE_NONSENSE="1").startswith(
        "environment variable HEADRACE_NONSENSE: unknown key nonsense"
    )


# Unknown keys


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        (BASE + "max_stalness = 3", "trainer.max_stalness", "trainer.max_staleness"),
        ("max_steps = 3" + BASE, "max_steps", "trainer.max_steps"),
        (BASE + "[queue]\nmax_steps = 3", "queue.max_steps", "trainer.max_steps"),
        (BASE + "[trainr]\nseed = 3", "trainr", "trainer"),
        (
            BASE + '[[rewards.functions]]\nfuncton = "exact_match"',
            "rewards.functions.0.functon",
            "rewards.functions.0.function",
        ),
        (
            BASE.replace('task = "chain_sum"', 'task = "chain_sum"\nsede = 1'),
            "data.reasoning_gym.sede",
            "data.reasoning_gym.seed",
        ),
    ],
)
def test_an_unknown_key_names_file_key_and_nearest_valid_key(
    recipe_file: Path, text: str, key: str, nearest: str
) -> None:
    lines = refused_text(recipe_file, text).split("\n")
    assert f"{recipe_file}: unknown key {key}; did you mean {nearest}?" in lines


def test_an_unknown_key_like_no_other_lists_what_is_valid(recipe_file: Path) -> None:
    line = refused_text(recipe_file, BASE + "[scorer]\nxyzzy = 1")
    assert line == f"{recipe_file}: unknown key scorer.xyzzy; valid here: max_groups, replicas"


# Values


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("trainer.max_steps=true", "trainer.max_steps = True: input should be a valid integer"),
        ("trainer.max_steps=4.5", "trainer.max_steps = 4.5: input should be a valid integer"),
        ("model.dtype=fp8", "model.dtype = 'fp8': input should be 'float32' or 'bfloat16'"),
        ("optimizer.learning_rate=inf", "input should be a finite number"),
        ("loss.dual_clip=nan", "loss.dual_clip = nan: "),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas.1 = 1.0: input should be less than 1"),
        ("optimizer.betas=0.9", "optimizer.betas = 0.9: must be a list"),
        ("trainer=3", "trainer = 3: must be a table of keys"),
        ("network.grpc_port=70000", "network.grpc_port = 70000: input should be less than"),
        ("generation.temperature=0.001", "input should be greater than or equal to 0.01"),
        ("generation.temperature=0", "input should be greater than or equal to 0.01"),
    ],
)
def test_a_wrong_value_is_one_line_with_key_and_value(
    recipe_file: Path, override: str, fragment: str
) -> None:
    line = refused(recipe_file, override)
    assert fragment in line
    assert "\n" not in line


def test_a_dual_clip_of_infinity_turns_it_off(recipe_file: Path) -> None:
    assert read(recipe_file, "loss.dual_clip=inf").loss.dual_clip == float("inf")


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("generation.top_p=0.9", "log-probabilities would be over the truncated support"),
        ("generation.top_k=20", "log-probabilities would be over the truncated support"),
        ("generation.min_p=0.05", "log-probabilities would be over the truncated support"),
        ("generation.repetition_penalty=1.1", "would be of the penalised distribution"),
    ],
)
def test_sampling_that_the_trainer_cannot_follow_is_refused_with_the_reason(
    recipe_file: Path, override: str, why: str
) -> None:
    line = refused(recipe_file, override)
    assert why in line
    assert "is allowed (off)" in line


def test_sampling_parameters_may_be_written_out_at_their_only_value(recipe_file: Path) -> None:
    recipe = read(recipe_file, "generation.top_p=1", "generation.top_k=0", "generation.min_p=0.0")
    assert recipe.generation == Generation()


def test_all_mistakes_are_told_at_once(recipe_file: Path) -> None:
    lines = refused(recipe_file, "trainer.seed=x", "queue.max_tries=0", "model.pth=y").split("\n")
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("overrides", "fragment"),
    [
        (["queue.samples_capacity=31"], "31 is below trainer.groups_per_step (32); a step could"),
        (["trainer.rows=samples"], "trainer.samples_per_row: say how many, since trainer.rows ="),
        (["trainer.samples_per_row=8"], "trainer.samples_per_row: 8 has no meaning with trainer."),
        (["data.file=a.jsonl"], "give exactly one of data.reasoning_gym, data.file and"),
        (["generator.max_num_seqs=65"], "generator.max_num_seqs: 65 is above generator.max_infl"),
        (["trainer.token_budget=100"], "trainer.token_budget: 100 is below generator.max_model"),
        (["generation.max_completion_tokens=2048"], "no room is left for a prompt"),
        (["run=Demo_1"], "run = 'Demo_1': use lower-case letters, digits and hyphens"),
        (
            ["evaluation.every_expression=true", "data.reasoning_gym.task=basic_arithmetic"],
            "evaluation.every_expression: only for",
        ),
        (["rewards.functions=[]"], "rewards.functions: give at least one"),
        (["loss.tis_cap=3"], "loss.tis_cap: has no meaning for loss.kind = 'clip', whose keys are"),
        (["loss.kind=tis", "loss.clip_low=0.2"], "leave it out, or take kind = clip or gspo"),
        (["loss.kind=gspo"], 'set normalise = "sequence"'),
        (
            ["loss.kind=gspo", "loss.normalise=sequence", "loss.clip_high=0.2"],
            "loss.clip_high: 0.2 is a distance for tokens; gspo clips the geometric mean",
        ),
        (["loss.reference=/models/base"], "loss.reference: /models/base would not be used"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(
    recipe_file: Path, overrides: list[str], fragment: str
) -> None:
    assert fragment in refused(recipe_file, *overrides)


def test_a_run_needs_an_end(recipe_file: Path) -> None:
    text = BASE.replace("max_steps = 80", "")
    assert "must say when the run ends" in refused_text(recipe_file, text)
    recipe_file.write_text(text + "[data]\nepochs = 0.5")
    assert read(recipe_file).data.epochs == 0.5


def test_contradictions_are_one_line_each(recipe_file: Path) -> None:
    lines = refused(recipe_file, "run=A", "queue.samples_capacity=1", "data.file=x").split("\n")
    assert len(lines) == 3
    assert all(line.startswith(f"{recipe_file}: ") for line in lines)


def test_limits_of_a_loss_are_those_of_its_kind(recipe_file: Path) -> None:
    assert read(recipe_file).loss == Loss(clip_low=0.2, clip_high=0.28, dual_clip=10.0)
    gspo = read(recipe_file, "loss.kind=gspo", "loss.normalise=sequence", "loss.clip_low=1e-3").loss
    assert (gspo.clip_low, gspo.clip_high, gspo.dual_clip) == (1e-3, 4e-4, None)
    icepop = read(recipe_file, "loss.kind=icepop", "loss.icepop_high=3").loss
    assert (icepop.icepop_low, icepop.icepop_high, icepop.clip_low) == (0.5, 3.0, None)
    line = refused(recipe_file, "loss.kind=ppo")
    assert "loss.kind = 'ppo': input should be 'clip', 'tis', 'icepop' or 'gspo'" in line


def test_a_kl_to_a_reference_is_a_signal_of_its_own(recipe_file: Path) -> None:
    assert read(recipe_file).zero_signal == "skip"
    assert read(recipe_file, "loss.kl_coefficient=0.01").zero_signal == "keep"
    both = read(recipe_file, "loss.kl_coefficient=0.01", "trainer.zero_signal=skip")
    assert both.zero_signal == "skip"
    # Written out or not, a default is the same experiment.
    same = ("trainer.zero_signal=skip", "loss.clip_low=0.2", "loss.dual_clip=10")
    assert {read(recipe_file, key).identity() for key in same} == {read(recipe_file).identity()}
    other = read(recipe_file, "trainer.zero_signal=keep").identity()
    assert other != read(recipe_file).identity()


# The file


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    assert refused(missing) == f"{missing}: no such recipe file"
    assert refused(tmp_path) == f"{tmp_path}: cannot be read: Is a directory"
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b'run = "caf\xe9"')
    assert "not a UTF-8 text" in refused(latin)


def test_bad_toml_names_line_and_column(recipe_file: Path) -> None:
    line = refused_text(recipe_file, BASE + "seed = \n")
    assert line == f"{recipe_file}: not valid TOML: Invalid value (at line 7, column 8)"


# Identity


def test_identity_is_of_the_experiment_and_not_of_how_it_is_run(recipe_file: Path) -> None:
    identity = read(recipe_file).identity()
    assert identity == read(recipe_file).identity()
    for same in (
        *("generator.replicas=4", "queue.url=redis://q", "network.grpc_port=1", "run=b"),
        *("data.epochs=2", "trainer.max_steps=7", "checkpoint.every_steps=1"),  # longer is no other
    ):
        assert read(recipe_file, same).identity() == identity, same
    changed = [
        "model.path=other",
        "data.reasoning_gym.params.max_terms=3",
        "data.seed=1",
        "generation.temperature=0.9",
        "optimizer.learning_rate=1e-4",
        "loss.clip_high=0.2",
        "trainer.groups_per_step=16",
        "rewards.functions=[{function = 'exact_match'}]",
    ]
    assert len({identity} | {read(recipe_file, c).identity() for c in changed}) == len(changed) + 1


def test_identity_takes_dates_in_free_parameters(recipe_file: Path) -> None:
    recipe = read(recipe_file, "data.reasoning_gym.params.start=2026-11-01")
    assert recipe.identity() != read(recipe_file).identity()


# Writing it

keys = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
values = st.recursive(
    st.one_of(
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        st.text(st.characters(exclude_categories=["Cs"])),
        st.datetimes(),
        st.dates(),
        st.times(),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(keys, values, max_size=4))
def test_what_is_written_is_read_back(params: dict[str, Any]) -> None:
    text = recipe_text.write({"plain": 1, "section": {"params": params}, "empty": {}})
    assert tomllib.loads(text) == {
        "plain": 1,
        "section": {"params": params},
        "empty": {},
    }


def test_a_dumped_loss_loads_as_the_same_loss(recipe_file: Path) -> None:
    keys = ("kind=gspo", "normalise=sequence", "reference=r/", "kl_coefficient=0.1")
    recipe = read(recipe_file, *(f"loss.{key}" for key in keys))
    again = recipe_file.with_name("again.toml")
    again.write_text(dump_toml(recipe), encoding="utf-8")
    assert read(again).loss == recipe.loss


def test_a_dumped_recipe_loads_as_the_same_recipe(recipe_file: Path) -> None:
    recipe_file.write_text(BASE + TWO_REWARDS)
    recipe = read(
        recipe_file,
        "loss.dual_clip=inf",
        'data.reasoning_gym.params={a = \'x"y\', "b c" = [1.5, true, 2026-11-01]}',
        "trainer.token_budget=4096",
        "optimizer.betas=[0.8, 0.99]",
    )
    again = recipe_file.with_name("again.toml")
    again.write_text(dump_toml(recipe), encoding="utf-8")
    assert read(again) == recipe
    assert read(again).identity() == recipe.identity()


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("queue.url=redis://me:p@ss:w@host:1/0", 'url = "redis://me:***@host:1/0"'),
        ("queue.url=redis://:secret@host", 'url = "redis://:***@host"'),
        (
            "queue.url=redis+sentinel://a:1,b:2/m?sentinel_password=s@cret",
            'url = "redis+sentinel://a:1,b:2/m?sentinel_password=***"',
        ),
        ("queue.url=redis://host:1/0", 'url = "redis://host:1/0"'),
        ("aggregator.database=postgresql://h/d?password=secret", 'd?password=***"'),
    ],
)
def test_passwords_are_not_shown(recipe_file: Path, override: str, shown: str) -> None:
    recipe = read(recipe_file, override)
    assert shown in dump_toml(recipe, hide_passwords=True)
    assert override.split("=", 1)[1] in dump_toml(recipe)
