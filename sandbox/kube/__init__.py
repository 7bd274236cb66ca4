"""A small Kubernetes API for development, tests and demonstrations. Not for anything else.

    python -m sandbox.kube --kubeconfig FILE        a server of its own
    async with KubeServer() as server: ...          one inside a test

It stores any object of a CRD and the built-in kinds that a load balancer needs, and answers as
a kube-apiserver 1.36 does: a suite replays exchanges recorded from a real one. It listens on
loopback only and knows one token. There are no admission webhooks, no RBAC, no kubelet and no
controllers but garbage collection.

`server` speaks HTTP, `reads`, `watches`, `writes` and `deletes` do what it is asked, `store`
keeps the objects, `resources`, `builtin`, `services`, `events` and `crds` know the kinds,
`ownership` and `fields` do server-side apply, `faults` makes trouble on order.
"""

from sandbox.kube.faults import Fault, Faults
from sandbox.kube.server import KubeServer

__all__ = ["Fault", "Faults", "KubeServer"]
