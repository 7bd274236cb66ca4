"""The allocator's decisions, pure: no clock, no I/O, no logging.

model.py     owners, requests, pools, leases
request.py   what an object asks for
space.py     the addresses of one pool: held, free, never used
holdings.py  who holds what; state.py: all that is remembered; changes.py: what is to be stored
observe.py   facts in
adopt.py     what the cluster shows already
pick.py      which address an owner would get; place.py: what it gets, keeps and lets go
sharing.py, quota.py  rules of their own for pick.py
wake.py      who is served next when something becomes free; queue.py: in which order
manual.py, guests.py, legacy.py  requests of operators, guest clusters, the old ConfigMap
express.py   the usual case in one step: a new owner, a never used address
decide.py    one fact from beginning to end
evolve.py    recorded decisions back into memory; restore.py: stored rows
"""

from services.allocator.core.decide import Tick, account, decide, next_deadline, tick
from services.allocator.core.state import Rules, State

__all__ = ["Rules", "State", "Tick", "account", "decide", "next_deadline", "tick"]
