"""Names that we put on Kubernetes objects or look for there: classes, finalizers, labels.

More than one service speaks them (nrp_sync asks for a finalizer, applier writes it), so they stand
in the contract. Changing one orphans what carries the old name.
"""

from __future__ import annotations

from typing import Final

POOL_CLASS: Final = "lbledger.io/pool"
"""Class of a Service whose address comes from one of our pools."""
NRP_CLASS: Final = "lbledger.io/nrp"
"""Class of a Service whose address and front end are the provider's."""
NRP_FINALIZER: Final = "lbledger.io/nrp"
"""On a Service, or on an egress Pod, while the provider may still hold something for it."""
EGRESS_LABEL: Final = "kubernetes.azure.com/service-egress-gateway"
"""On a Pod: its value names the egress gateway that the Pod leaves by."""
SERVICE_NAME_LABEL: Final = "kubernetes.io/service-name"
"""On an EndpointSlice: the Service that it belongs to."""
FIELD_MANAGER: Final = "lbledger"
"""Of every server-side apply of ours."""
SERVICELB_LABEL: Final = "loadbalancer.harvesterhci.io/servicelb"
"""On the Service and the EndpointSlices of a LoadBalancer, with the value "true" (Harvester's)."""
DUMMY_UID: Final = "dummy347-546a-4642-9da6-5608endpoint"
"""targetRef.uid of the dummy endpoint (Harvester's): by it the dummy is told from a backend."""
