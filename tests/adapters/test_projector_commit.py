"""A commit whose answer never comes: it counts once, whether it was done or not."""

from urllib.parse import urlsplit, urlunsplit

import pytest

from schema import events
from tests.adapters.proxy import Proxy
from tests.adapters.test_projector import (
    Replica,
    counts,
    decisions,
    feeder_of,
    namespace,
    pace,
    stored,
    table,
)
from tests.waiting import eventually

__all__ = ["pace", "table"]

# Runs inside COMMIT: the server finishes it although nobody is there any more.
SLOW = """
create function prober.wait() returns trigger language plpgsql as $$
begin
  perform pg_sleep(1.5);
  return null;
end $$;
create constraint trigger wait after insert on prober.tally deferrable initially deferred
  for each row when (new.name = 'local-a') execute function prober.wait();
"""
COMMITTING = "select count(*) = 1 from pg_stat_activity where wait_event = 'PgSleep'"
UNDO = "select pg_terminate_backend(pid) from pg_stat_activity where wait_event = 'PgSleep'"


@pytest.mark.parametrize("done", [True, False], ids=["done", "undone"])
async def test_own_input_counts_once_when_the_answer_to_its_commit_is_lost(
    nats_url, database_url, table, done
):
    """The connection breaks inside COMMIT: what the server did in spite of that is not repeated,
    what it undid is; and what is submitted after it is taken."""
    await table.execute(SLOW)
    async with feeder_of(nats_url), Proxy(database_url) as proxy:
        parts = urlsplit(database_url)
        user = parts.netloc.rpartition("@")[0]
        through = f"{user}@127.0.0.1:{urlsplit(proxy.url).port}"
        async with Replica(nats_url, urlunsplit(parts._replace(netloc=through))) as replica:
            await replica.projector.until_active()
            replica.projector.submit("a")
            await eventually(lambda: table.fetchval(COMMITTING))
            if done:
                proxy.cut()
            else:
                await table.execute(UNDO)
            await stored(table, **{"local-a": 1})
            await eventually(lambda: replica.projector.active)
            replica.projector.submit("b")
            await stored(table, **{"local-b": 1})

    assert {"local-a": 1, "local-b": 1} == await counts(table)


async def test_what_was_applied_behind_a_failing_batch_is_applied_again(
    nats_url, database_url, table, pace
):
    """A batch that the database refuses is taken apart while others were applied after it: one dead
    letter, and every other fact counts once, those of our own too."""
    async with feeder_of(nats_url) as feeder, Replica(nats_url, database_url) as replica:
        await replica.projector.until_active()
        async with table.transaction():
            await table.execute("lock table prober.tally")
            bad = await feeder.seen(namespace("overflow-1"))
            await feeder.seen(namespace("n0"))
            applied = "n0" if pace == "ahead" else "overflow-1"
            await eventually(lambda: applied in replica.tally.counts)
            for number in range(1, 5):
                replica.projector.submit("a")
                await feeder.seen(namespace(f"n{number}"))
        wanted = {**{f"n{number}": 1 for number in range(5)}, "local-a": 4}
        await stored(table, **wanted)

    assert wanted == await counts(table)
    assert [bad] == [row["seq"] for row in await table.fetch("select seq from prober.dead_letter")]
    said = [events.decode(m.data) for m in await decisions(nats_url)]
    told = [event.owner.name for event in said if isinstance(event, events.LeaseRefused)]
    assert sorted(told) == [f"n{number}" for number in range(5)]
