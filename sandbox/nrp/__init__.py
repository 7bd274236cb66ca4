"""A small network resource provider on loopback: A DEVELOPMENT SERVER, never a cloud.

Why: nrp_sync, its tests and the demonstration need something that speaks Azure's REST API for
service gateways, public IPs, load balancers and NAT gateways, keeps its rules, and misbehaves on
command. It holds its state in memory (and in one file, when told where), moves no packet, checks
no credential beyond "a bearer token is there", and gives out addresses of documentation ranges.

Map: `gateway.py` services and address locations; `resources.py` the ARM resources and their
rules; `arm.py` ids and errors; `operations.py` long-running answers; `faults.py` misbehaviour;
`journal.py` what was asked; `server.py` HTTP; `admin.py` the pages under `/sandbox/`.
"""

from sandbox.nrp.faults import Fault, Plan
from sandbox.nrp.server import NrpServer

__all__ = ["Fault", "NrpServer", "Plan"]
