from benchmarks.levels import SMOOTHED_STEPS, reached_step


def test_one_lucky_step_reaches_nothing() -> None:
    rewards = dict.fromkeys(range(1, 40), 0.3) | {20: 1.0}
    assert reached_step(rewards, level=0.5) is None


def test_reached_is_the_step_that_ends_the_window() -> None:
    rewards = {step: 0.0 if step < 10 else 0.6 for step in range(1, 30)}
    assert reached_step(rewards, level=0.6) == 10 + SMOOTHED_STEPS - 1


def test_a_window_with_a_step_that_is_not_known_yet_does_not_count() -> None:
    rewards = {step: 0.6 for step in range(1, 30) if step % 7}
    assert reached_step(rewards, level=0.5) is None
