"""What a refusal for a wrong last sequence means: our own message, or somebody else's.

The server checks the sequence before it looks for a repeated id, so a message that an earlier try
stored, and whose acknowledgement was lost, is refused when it is sent again.
"""

from services.kit import bus_streams
from services.kit.bus_item import Item
from services.kit.bus_link import Link
from services.kit.bus_types import MSG_ID, Message


async def look(link: Link, stream: str, item: Item) -> tuple[Message | None, int]:
    """The stored message with our id, if there is one, and the last sequence of the subject."""
    subject = item.subject
    newest = await bus_streams.last(link, stream, subject)
    if newest is None or newest.seq <= item.used:
        # A replica that is behind, or a stream that began anew: ask the one that decides.
        newest = await bus_streams.from_leader(link, stream, {"last_by_subj": subject})
    if newest is None:
        return None, 0
    if newest.headers.get(MSG_ID) == item.msg_id:
        return newest, newest.seq
    if newest.seq > item.used:
        # Ours could only have been stored right after what it expected.
        query = {"seq": item.used + 1, "next_by_subj": subject}
        first = await bus_streams.next_after(link, stream, subject, item.used)
        first = first or await bus_streams.from_leader(link, stream, query)
        if first is not None and first.headers.get(MSG_ID) == item.msg_id:
            return first, newest.seq
    return None, newest.seq
