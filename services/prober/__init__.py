"""Which backends answer.

plan.py       what a load balancer's spec asks for, and what is wrong with it
members.py    which objects are behind which load balancer
images.py     facts and verdicts into images; core.py the state around it
verdicts.py   thresholds, several checks of one backend, a fault of our own
targets.py, checks.py, dialogues.py, grpc_health.py   checks on the wire
driving.py    the engine on the event loop; dialling.py which address is dialled
monitor.py    committed images -> targets, results -> verdicts; watched.py a backend under watch
replicas.py, placing.py   who is alive, who checks what, and second opinions
leader.py, follower.py, shares.py, sharing.py   checks made by other replicas, and what is said
projection.py, store.py, main.py   facts in, decisions out, and the wiring
"""
