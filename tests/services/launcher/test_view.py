import io
from dataclasses import replace

from rich.console import Console

from services.launcher import view
from services.launcher.picture import Picture, Process

WARMING_UP = Picture(
    run="demo",
    page="http://127.0.0.1:8080",
    processes=(
        Process("aggregator-0", "aggregator", "serving", 4.0, ready=True),
        Process("scorer-0", "scorer", "scoring", 3.0, ready=True),
        Process("trainer-0", "trainer", "evaluating before the first step", 2.0, ready=True),
        Process("generator-0", "generator", "compiling the first request", 18.0, ready=False),
        Process(
            "generator-1", "generator", "loading the model", 9.4, False, 2, "exited with status 1"
        ),
    ),
    attempt=1,
    step=0,
    max_steps=150,
    groups_capacity=16,
    samples_capacity=128,
)

UNDER_WAY = replace(
    WARMING_UP,
    processes=tuple(
        replace(process, ready=True, phase="working") for process in WARMING_UP.processes
    ),
    step=42,
    version=43,
    eval_before=0.5,
    reward=0.4712,
    rewards=(0.3, 0.32, 0.35, 0.37, 0.36, 0.41, 0.45, 0.47),
    kl=0.00312,
    entropy=1.2099,
    grad_norm=0.84,
    staleness_mean=1.02,
    staleness_max=2.0,
    step_s=1.204,
    inflight=31.0,
    generated_tok_s=4912.0,
    scorer_busy_frac=0.091,
    requests_waiting=12.0,
    groups_waiting=1.0,
    samples_waiting=33.0,
)


def drawn(picture: Picture, *, width: int = 140) -> list[str]:
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(view.screen(picture, width=width))
    return console.export_text().splitlines()


def test_warming_up_says_what_is_waited_for_and_how_long() -> None:
    lines = drawn(WARMING_UP)
    text = "\n".join(lines)
    title = " ".join(lines[0].replace("━", "").split())
    assert title == "headrace · demo · attempt 1 step 0/150 0 % eta —"
    assert ["generator-0", "compiling", "the", "first", "request", "0:18"] in [
        line.split() for line in lines
    ]
    assert "loading the model (restarted 2x)" in text
    assert "evaluating before the first step" in text
    assert "aggregator-0" not in text
    assert "requests" not in text
    assert "http://127.0.0.1:8080" in text


def test_under_way_shows_the_numbers_and_the_river() -> None:
    lines = drawn(UNDER_WAY)
    assert len(lines) == 4
    assert "step 42/150" in lines[0]
    assert "28 %" in lines[0]
    assert "eta 2:10" in lines[0]
    assert lines[1].strip() == (
        "reward 0.47 ▁▂▃▄▃▆▇█   eval 0.50   kl 0.00312   entropy 1.21   grad 0.84"
    )
    assert lines[2].strip() == (
        "requests 12 ▸ generators 2 (31 in flight, 4.91k tok/s) ▸ groups 1/16 ▸ "
        "scorers 1 (9 % busy) ▸ samples 33/128 ▸ trainer v43 (1.2 s/step)"
    )
    assert "staleness 1.02 (max 2) versions" in lines[3]
    assert lines[3].rstrip().endswith("page http://127.0.0.1:8080")


def test_evaluation_after_stands_beside_the_one_before() -> None:
    assert "eval 0.50 → 0.66" in "\n".join(drawn(replace(UNDER_WAY, eval_after=0.66)))


def test_a_process_that_comes_back_is_shown_during_training() -> None:
    *others, last = UNDER_WAY.processes
    fallen = replace(last, ready=False, phase="was killed by SIGKILL; starting again")
    text = "\n".join(drawn(replace(UNDER_WAY, processes=(*others, fallen))))
    assert "generator-1" in text
    assert "was killed by SIGKILL; starting again" in text
    assert "generators 1 " in text


def test_what_is_not_known_is_a_dash_and_never_0() -> None:
    bare = Picture(run="demo", page="http://127.0.0.1:1", step=1)
    text = "\n".join(drawn(bare))
    assert "reward —" in text
    assert "requests —" in text
    assert "step 1/—" in text
    assert "reward —" in view.line(bare)


def test_a_narrow_terminal_loses_nothing() -> None:
    lines = drawn(UNDER_WAY, width=60)
    assert " ▸ groups 1/16 ▸ scorers 1 (9 % busy) ▸ samples 33/128" in map(str.rstrip, lines)
    text = "\n".join(lines)
    for part in ("trainer v43", "grad 0.84", "samples 33/128", "http://127.0.0.1:8080"):
        assert part in text


def plain(*pictures: Picture) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    assert isinstance(view.choose(console), view.PlainView)
    with view.choose(console) as shown:
        for picture in pictures:
            shown.show(picture)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_plain_lines_tell_each_phase_once() -> None:
    lines = plain(WARMING_UP, WARMING_UP)
    assert lines[0] == "aggregator-0  serving  (ready)"
    assert lines[1] == "page  http://127.0.0.1:8080"
    assert lines[4] == "generator-0  compiling the first request"
    assert len(lines) == 7


def test_plain_lines_tell_each_restart_once() -> None:
    *others, last = UNDER_WAY.processes
    again = replace(last, restarts=last.restarts + 1, last_death="was killed by SIGKILL")
    restarted = replace(UNDER_WAY, processes=(*others, again))
    lines = plain(UNDER_WAY, restarted, restarted)
    assert lines.count("generator-1  was killed by SIGKILL; started again") == 1


def test_plain_lines_tell_a_step_at_a_time_and_always_the_last() -> None:
    quiet = replace(UNDER_WAY, processes=())
    lines = plain(quiet, quiet, replace(quiet, step=43), replace(quiet, step=150))
    assert [line.split("  ")[0] for line in lines] == ["step 42/150", "step 150/150"]
    assert lines[0] == (
        "step 42/150  reward 0.47  kl 0.00312  entropy 1.21  grad 0.84  staleness 1.02 (max 2)  "
        "waiting 12/1/33  31 in flight  4.91k tok/s  v43  1.2 s/step  eta 2:10"
    )


def test_the_screen_is_drawn_on_a_terminal_without_colour_where_asked() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, no_color=True, width=140)
    with view.choose(console) as shown:
        assert isinstance(shown, view.LiveView)
        shown.show(UNDER_WAY)
        shown.note("scorer-0 was killed by SIGKILL; starting again")
    text = output.getvalue()
    assert "trainer v43" in text
    assert "scorer-0 was killed" in text
    assert "\x1b[36m" not in text
