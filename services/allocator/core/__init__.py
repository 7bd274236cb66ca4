"""The allocator's decisions, pure: no clock, no I/O, no logging.

model.py     owners, requests, pools, leases
request.py   what an object asks for
space.py     the addresses of one pool: held, free, never used
state.py     memory, and the few ways in which it changes
observe.py   facts in
adopt.py     what the cluster shows already
place.py     which address an owner gets
wake.py      who is served next when something becomes free
decide.py    one fact from beginning to end
evolve.py    recorded decisions back into memory
"""

from services.allocator.core.decide import Tick, account, decide, next_deadline, tick
from services.allocator.core.state import Rules, State

__all__ = ["Rules", "State", "Tick", "account", "decide", "next_deadline", "tick"]
