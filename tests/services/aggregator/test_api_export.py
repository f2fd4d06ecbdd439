"""Export as CSV and Parquet."""

import csv
import io
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.aggregator.api import export, tables
from services.aggregator.ingest import Ingest
from services.aggregator.store import Store
from tests.services.aggregator.asking import problem
from tests.services.aggregator.making import INF, NAN, NOW_S, Producer, count, observed, ratio

EXPORT = "/api/v1/runs/demo/export"


@pytest.fixture
def recorded(ingest: Ingest) -> None:
    """Steps 0 to 6: a loss whose step 1 is NaN and whose step 2 is infinite, and a ratio."""
    producer = Producer("trainer-0")
    for step, loss in enumerate([0.5, NAN, INF, -3.0, 4.0, 5.0, 1e300]):
        producer.send(
            ingest,
            [("loss", observed([loss])), ("kl", ratio(step, 4))],
            step=step,
            now_s=NOW_S + 10 * step,
        )


async def table(client: httpx.AsyncClient, query: str) -> list[dict[str, str]]:
    """The rows of a CSV."""
    response = await client.get(f"{EXPORT}?{query}")
    assert response.status_code == 200, response.text
    return list(csv.DictReader(io.StringIO(response.text, newline=""), strict=True))


def column(rows: list[dict[str, str]], *names: str) -> list[tuple[str, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


@pytest.mark.usefixtures("recorded")
async def test_csv_has_a_row_a_step_and_empty_cells_for_what_is_absent(
    client: httpx.AsyncClient,
) -> None:
    response = await client.get(f"{EXPORT}?key=loss&key=kl&until=4")
    assert response.headers["content-type"] == "text/csv; charset=utf-8"
    assert response.headers["content-disposition"] == 'attachment; filename="demo.csv"'
    assert response.text.split("\r\n") == [
        "run,key,axis,x,time,reduce,value,low,high,nan,pos_inf,neg_inf,producer",
        "demo,loss,step,0,,mean,0.5,,,0,0,0,",
        "demo,loss,step,1,,mean,,,,1,0,0,",
        "demo,loss,step,2,,mean,,,,0,1,0,",
        "demo,loss,step,3,,mean,-3.0,,,0,0,0,",
        "demo,kl,step,0,,ratio,0.0,,,0,0,0,",
        "demo,kl,step,1,,ratio,0.25,,,0,0,0,",
        "demo,kl,step,2,,ratio,0.5,,,0,0,0,",
        "demo,kl,step,3,,ratio,0.75,,,0,0,0,",
        "",
    ]


@pytest.mark.usefixtures("recorded")
async def test_by_time_with_producers_and_wider_rows(client: httpx.AsyncClient) -> None:
    rows = await table(client, "key=kl&axis=time&since=2027-01-15T08:00:10&group_by=producer")
    assert column(rows, "x", "time", "producer")[:2] == [
        (str(int(NOW_S) + 10), "2027-01-15T08:00:10Z", ""),
        (str(int(NOW_S) + 20), "2027-01-15T08:00:20Z", ""),
    ]
    assert column(rows, "value", "producer")[-1] == ("1.5", "trainer-0")
    rows = await table(client, "key=kl&width=4")
    assert column(rows, "x", "value", "low", "high") == [
        ("0", "0.375", "0.0", "0.75"),
        ("4", "1.25", "1.0", "1.5"),
    ]
    rows = await table(client, "key=loss&reduce=max&attempt=2")
    assert rows == []


@pytest.mark.usefixtures("recorded")
async def test_without_a_key_all_of_the_run_are_exported(client: httpx.AsyncClient) -> None:
    rows = await table(client, "")
    assert {"loss", "kl", "ingest/deltas"} <= {row["key"] for row in rows}
    rows = await table(client, "reduce=rate")
    assert {row["key"] for row in rows} == {"ingest/deltas"}


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("kind", ["csv", "parquet"])
async def test_small_pages_make_the_same_table(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    query = f"{EXPORT}?format={kind}&group_by=producer&axis=time"
    whole = await client.get(query)
    monkeypatch.setattr(export, "PAGE_WINDOWS", 2)
    paged = await client.get(query)

    def sorted_rows(response: httpx.Response) -> list[Any]:
        if kind == "csv":
            return sorted(response.text.splitlines())
        rows: list[Any] = pq.read_table(pa.BufferReader(response.content)).to_pylist()
        return sorted(rows, key=str)

    assert sorted_rows(paged) == sorted_rows(whole)


@pytest.mark.usefixtures("recorded")
async def test_parquet_has_types_and_nulls(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "ROW_GROUP_ROWS", 5)
    monkeypatch.setattr(export, "PAGE_WINDOWS", 3)
    response = await client.get(f"{EXPORT}?key=loss&key=kl&format=parquet")
    assert response.headers["content-type"] == "application/vnd.apache.parquet"
    assert response.headers["content-disposition"] == 'attachment; filename="demo.parquet"'
    file = pq.ParquetFile(pa.BufferReader(response.content))
    groups = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
    assert groups == [6, 7, 1]
    found = file.read()
    assert found.schema.equals(tables.SCHEMA)
    assert found.column("value").to_pylist() == [
        0.5,
        None,
        None,
        -3.0,
        4.0,
        5.0,
        1e300,
        *(step / 4 for step in range(7)),
    ]
    assert found.column("pos_inf").to_pylist()[:4] == [0, 0, 1, 0]
    by_time = await client.get(f"{EXPORT}?key=loss&format=parquet&axis=time")
    times = pq.read_table(pa.BufferReader(by_time.content)).column("time").to_pylist()
    assert times[0].isoformat() == "2027-01-15T08:00:00+00:00"


async def test_no_cell_is_a_formula(client: httpx.AsyncClient, ingest: Ingest) -> None:
    names = ["=HYPERLINK(1)", "+1", "-1", "@x", "\tx", "\rx", "\nx", 'a,"b"', "trainer-0"]
    for name in names:
        Producer(name).send(ingest, [("rollout/failed_total", count(1))])
    rows = await table(client, "key=rollout/failed_total&group_by=producer")
    shown = [row["producer"] for row in rows if row["producer"]]
    assert sorted(shown) == sorted([f"'{name}" for name in names[:7]] + names[7:])
    parquet = await client.get(
        f"{EXPORT}?key=rollout/failed_total&group_by=producer&format=parquet"
    )
    read = pq.read_table(pa.BufferReader(parquet.content)).column("producer").to_pylist()
    assert sorted(name for name in read if name) == sorted(names)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
async def test_nothing_recorded_is_a_table_without_rows(
    client: httpx.AsyncClient, ingest: Ingest, kind: str
) -> None:
    Producer("p").send(ingest, [("loss", observed([1.0]))])
    response = await client.get(f"{EXPORT}?key=perf/step_s&format={kind}")
    assert response.status_code == 200
    if kind == "csv":
        assert response.text.count("\n") == 1
    else:
        read = pq.read_table(pa.BufferReader(response.content))
        assert read.schema.equals(tables.SCHEMA)
        assert read.num_rows == 0


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("none/export", 404, "no run 'none'"),
        ("demo/export?key=loss&key=lost", 404, "no metric 'lost'"),
        ("demo/export?key=iteration_time_s", 404, "is called perf/step_s here"),
        ("demo/export?format=xlsx", 422, "format"),
        ("demo/export?key=loss&reduce=sum", 422, "choose one of mean"),
        ("demo/export?axis=time&width=15", 422, "not a multiple of 10 s"),
        ("demo/export?width=0", 422, "width"),
        ("demo/export?since=2&until=1", 422, "since"),
    ],
)
async def test_what_cannot_be_exported_says_why(
    client: httpx.AsyncClient, path: str, status: int, says: str
) -> None:
    assert says in await problem(client, f"/api/v1/runs/{path}", status)


@pytest.mark.usefixtures("recorded")
async def test_a_run_deleted_meanwhile_breaks_the_transfer_off(
    client: httpx.AsyncClient, store: Store, ingest: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "PAGE_WINDOWS", 2)
    sent: list[bytes] = []

    def delete_meanwhile(pages: Iterable[list[tables.Row]]) -> Iterator[bytes]:
        for piece in tables.to_csv(pages):
            yield piece
            sent.append(piece)
            if len(sent) == 2:  # the header and the first page
                store.delete_run("demo")
                # Another run of this name, as a producer that goes on makes it.
                Producer("trainer-0").send(
                    ingest, [("loss", observed([1.0]))], step=50, now_s=NOW_S + 1000
                )

    monkeypatch.setattr(export, "to_csv", delete_meanwhile)
    with pytest.raises(export.RunGoneError, match="demo was deleted"):
        await client.get(f"{EXPORT}?key=loss")
    assert len(sent) == 2
