"""What a new attempt makes of what the last one left: checkpoint, journal, and the groups that the
queue server still holds.

    trained behind the checkpoint         rolled back: the weights are gone, the prompt is due again
    dropped or given up behind it         stays so
    on the server, prompt not done        adopted, unless it began with weights of a dead line
    on the server, prompt done or again   dropped as duplicate
    nowhere                               dropped as attempt_ended, and due again

Example: prompts 0 to 7, two a step; at the checkpoint 0 and 1 were trained, 2 and 3 wait scored, 4
and 5 are being generated. Streams kept: 2 to 5 are adopted, 6 is dispatched next. Streams lost: 2
to 5 are dropped as attempt_ended, and 2 is dispatched next.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from services.trainer.book import Book
from services.trainer.dispatch import Dispatcher
from services.trainer.journal import Record


def replay(dispatcher: Dispatcher, records: Iterable[Record]) -> list[Record]:
    """Bring the checkpoint's book up to the end of the attempt that died; the ends of groups since
    then, as they are now: what was trained is rolled back."""
    ended: dict[str, Record] = {}
    for record in records:
        dispatcher.replay(record.kind, record.group_id, record.reason)
        if record.kind == "trained":
            ended[record.group_id] = replace(record, kind="rolled_back", reason="")
        elif record.terminal:
            ended[record.group_id] = record
        else:
            ended.pop(record.group_id, None)
    return list(ended.values())


def take_over(
    book: Book, places: Mapping[str, str], *, versions: Set[int], ended: Iterable[Record]
) -> list[str]:
    """Sort out the groups on the server (`places` by id, as the start script gives them); those to
    be taken out of it. `versions` are those of the line, `ended` what `replay` gave."""
    unwanted = []
    # Such a group may be there all the same, on a server that went back.
    over = {record.group_id for record in ended}
    for group_id, place in places.items():
        if group_id in over or not book.dispatcher.knows(group_id):
            unwanted.append(group_id)
        elif group_id in book.dispatcher.open_before and _began_dead(place, versions):
            book.closed_before(group_id, "dead_lineage")
            unwanted.append(group_id)
        elif not book.adopted(group_id):
            unwanted.append(group_id)
    for group_id in sorted(book.dispatcher.open_before):
        book.closed_before(group_id, "attempt_ended")
    book.dispatcher.make_due()
    return unwanted


def _began_dead(place: str, versions: Set[int]) -> bool:
    """Whether generation began with weights that are in no line that goes on."""
    _, began, _ = place.split("|")
    return bool(began) and int(began) not in versions
