"""A commit whose answer never comes: it counts once, whether it was done or not."""

from urllib.parse import urlsplit, urlunsplit

import pytest

from tests.adapters.proxy import Proxy
from tests.adapters.test_projector import Replica, counts, feeder_of, stored, table
from tests.waiting import eventually

__all__ = ["table"]

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
