"""Keys of the measuring itself."""

from services.aggregator.declared.making import A, count, observed
from services.aggregator.metric import ALL

MEASURING = (
    count(
        "recorder/dropped_total",
        ALL,
        "partials",
        "Partials dropped because the recorder's buffer was full.",
        only_when="the aggregator was away for long",
    ),
    count(
        "recorder/merged_total",
        ALL,
        "partials",
        "Partials merged because the recorder's buffer was full.",
        only_when="the aggregator was away for long",
    ),
    count(
        "recorder/refused_total",
        ALL,
        "calls",
        "Recording calls refused: a numerator without denominator, one key by two instruments.",
        only_when="a call was refused",
    ),
    count(
        "recorder/trace_dropped/{reason}",
        ("generator", "scorer"),
        "traces",
        "Traces of conversations that are not shown, by reason: too large for `traces.max_bytes`, "
        "no room in the recorder's buffer, or refused with their batch.",
        only_when="a trace was dropped",
    ),
    count("ingest/deltas", A, "deltas", "Deltas added."),
    count(
        "ingest/duplicates",
        A,
        "batches",
        "Batches that came again and changed nothing.",
        only_when="a batch came again",
    ),
    observed(
        "ingest/gaps",
        A,
        "batches",
        "Batches that are missing in the sequences so far; a late one closes its gap.",
        default="last",
    ),
    count(
        "ingest/rejected/{reason}",
        A,
        "deltas",
        "Deltas not taken, by reason.",
        only_when="a delta was not taken",
    ),
)
