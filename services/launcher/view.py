"""The run on the terminal: one quiet screen where there is one, plain lines elsewhere.

Both draw a `Picture` and know nothing of where it comes from.
"""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.launcher.figures import ABSENT, clock, fraction, number, percent, sparkline, whole
from services.launcher.picture import Picture

PLAIN_EVERY_S = 5.0
"""Seconds between two plain lines at least, each about another step."""

SPARKLINE_COLUMNS = 16
BAR_COLUMNS = 28
NARROW_BAR_COLUMNS = 10
WIDE_COLUMNS = 100
"""Terminals with fewer columns get the narrow bar."""


class View(Protocol):
    """Shows pictures until it is left."""

    def show(self, picture: Picture) -> None:
        """Draw a picture."""
        ...

    def note(self, text: str) -> None:
        """Say something once: a restart, a shutdown."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def choose(console: Console) -> View:
    """The screen on a terminal, plain lines elsewhere."""
    return LiveView(console) if console.is_terminal else PlainView(console)


class LiveView:
    """One screen, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def show(self, picture: Picture) -> None:
        """Redraw; pictures come about once a second."""
        self._live.update(screen(picture, width=self._console.width), refresh=True)

    def note(self, text: str) -> None:
        """A line above the screen."""
        self._console.print(text, style="dim", markup=False, highlight=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()


class PlainView:
    """A line per phase and restart of each process; of steps at most one in PLAIN_EVERY_S."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phases: dict[str, tuple[str, bool]] = {}
        self._restarts: dict[str, int] = {}
        self._step = 0
        self._told_s = float("-inf")
        self._page_told = False

    def show(self, picture: Picture) -> None:
        """Say what is new."""
        for process in picture.processes:
            if process.restarts > self._restarts.get(process.name, 0):
                self._restarts[process.name] = process.restarts
                self.note(f"{process.name}  {process.last_death}; started again")
            state = (process.phase, process.ready)
            if self._phases.get(process.name) != state:
                self._phases[process.name] = state
                self.note(f"{process.name}  {process.phase}{'  (ready)' if process.ready else ''}")
            if process.ready and process.name.startswith("aggregator") and not self._page_told:
                self._page_told = True
                self.note(f"page  {picture.page}")
        now = time.monotonic()
        step = picture.step or 0
        last = picture.max_steps is not None and step >= picture.max_steps
        if step > self._step and (last or now - self._told_s >= PLAIN_EVERY_S):
            self._step, self._told_s = step, now
            self.note(line(picture))

    def note(self, text: str) -> None:
        """One line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None


def line(picture: Picture) -> str:
    """A whole picture in one plain line."""
    return "  ".join(
        [
            f"step {_steps(picture)}",
            f"reward {fraction(picture.reward)}",
            f"kl {number(picture.kl)}",
            f"entropy {number(picture.entropy)}",
            f"grad {number(picture.grad_norm)}",
            f"staleness {number(picture.staleness_mean)} (max {number(picture.staleness_max)})",
            f"waiting {'/'.join(number(depth) for depth in _depths(picture))}",
            f"{number(picture.inflight)} in flight",
            f"{number(picture.generated_tok_s)} tok/s",
            _version(picture),
            f"{number(picture.step_s)} s/step",
            f"eta {clock(picture.eta_s)}",
        ]
    )


def screen(picture: Picture, *, width: int) -> RenderableType:
    """The screen: a title with the bar, then what is waited for, or the numbers and the river."""
    bar_columns = BAR_COLUMNS if width >= WIDE_COLUMNS else NARROW_BAR_COLUMNS
    parts: list[RenderableType] = [_title(picture, bar_columns=bar_columns)]
    if picture.training:
        parts += [_numbers(picture), _river(picture, width=width)]
    waiting = picture.waiting_for()
    if waiting:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column()
        table.add_column(justify="right", no_wrap=True)
        for process in waiting:
            restarts = f" (restarted {process.restarts}x)" if process.restarts else ""
            table.add_row(process.name, f"{process.phase}{restarts}", clock(process.phase_s))
        parts.append(Padding(table, (0, 0, 0, 1)))
    parts.append(_foot(picture))
    return Group(*parts)


def _title(picture: Picture, *, bar_columns: int) -> RenderableType:
    attempt = "" if picture.attempt is None else f" · attempt {picture.attempt}"
    left = Text.assemble((" headrace", "bold"), f" · {picture.run}{attempt}")
    done = picture.step or 0
    total = picture.max_steps
    bar = ProgressBar(total=total or 1, completed=done if total else 0, width=bar_columns)
    share = ABSENT if not total else percent(done / total)
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(ratio=1, no_wrap=True)
    for _ in range(4):
        table.add_column(justify="right", no_wrap=True)
    table.add_row(left, f"step {_steps(picture)}", bar, share, f"eta {clock(picture.eta_s)}")
    return table


def _numbers(picture: Picture) -> RenderableType:
    evaluation = fraction(picture.eval_before)
    if picture.eval_after is not None:
        evaluation = f"{evaluation} → {fraction(picture.eval_after)}"
    text = Text(" ")
    text.append("reward ", "dim").append(fraction(picture.reward), "bold")
    text.append(f" {sparkline(picture.rewards, width=SPARKLINE_COLUMNS)}", "cyan")
    for name, value in (
        ("eval", evaluation),
        ("kl", number(picture.kl)),
        ("entropy", number(picture.entropy)),
        ("grad", number(picture.grad_norm)),
    ):
        text.append(f"   {name} ", "dim").append(value)
    return text


def _river(picture: Picture, *, width: int) -> RenderableType:
    generators, scorers = picture.count("generator"), picture.count("scorer")
    requests, groups, samples = _depths(picture)
    flow = f"{number(picture.inflight)} in flight, {number(picture.generated_tok_s)} tok/s"
    stages = [
        f"requests {number(requests)}",
        f"generators {generators} ({flow})",
        f"groups {number(groups)}/{whole(picture.groups_capacity)}",
        f"scorers {scorers} ({percent(picture.scorer_busy_frac)} busy)",
        f"samples {number(samples)}/{whole(picture.samples_capacity)}",
        f"trainer {_version(picture)} ({number(picture.step_s)} s/step)",
    ]
    return Text("\n".join(_broken(stages, width=width)))


def _broken(stages: Sequence[str], *, width: int) -> list[str]:
    """The stages in a row, in as many lines as it takes; a line is broken between two stages."""
    lines = [f" {stages[0]}"]
    for stage in stages[1:]:
        longer = f"{lines[-1]} ▸ {stage}"
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(f" ▸ {stage}")
    return lines


def _foot(picture: Picture) -> RenderableType:
    table = Table.grid(expand=True)
    table.add_column(ratio=1)
    table.add_column(justify="right", no_wrap=True)
    staleness = Text(" ")
    if picture.training:
        staleness.append("staleness ", "dim")
        staleness.append(
            f"{number(picture.staleness_mean)} (max {number(picture.staleness_max)}) versions"
        )
    page = Text.assemble(("page ", "dim"), (picture.page, f"link {picture.page}"), "  ")
    table.add_row(staleness, page)
    return table


def _steps(picture: Picture) -> str:
    return f"{whole(picture.step)}/{whole(picture.max_steps)}"


def _depths(picture: Picture) -> tuple[float | None, float | None, float | None]:
    return picture.requests_waiting, picture.groups_waiting, picture.samples_waiting


def _version(picture: Picture) -> str:
    return ABSENT if picture.version is None else f"v{picture.version}"
