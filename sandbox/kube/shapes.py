"""The shapes of the built-in kinds, as structural schemas.

Only what the sandbox serves is here, and of a Pod or Node only the fields whose lists have keys;
the rest of those two is kept as sent. `x-kubernetes-*` marks carry the merge rules that
server-side apply, strategic merge and `kubectl` go by.
"""

from __future__ import annotations

from typing import Any

Raw = dict[str, Any]

STRING: Raw = {"type": "string"}
INT: Raw = {"type": "integer", "format": "int32"}
INT64: Raw = {"type": "integer", "format": "int64"}
BOOL: Raw = {"type": "boolean"}
TIME: Raw = {"type": "string", "format": "date-time", "nullable": True}
PORT: Raw = {"x-kubernetes-int-or-string": True}
ANYTHING: Raw = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
STRINGS: Raw = {"type": "object", "additionalProperties": STRING}


def struct(**properties: Raw) -> Raw:
    return {"type": "object", "properties": properties}


def open_struct(**properties: Raw) -> Raw:
    """An object of which only some fields are described; the others are kept as they are."""
    return struct(**properties) | {"x-kubernetes-preserve-unknown-fields": True}


def atomic(item: Raw) -> Raw:
    return {"type": "array", "items": item, "x-kubernetes-list-type": "atomic"}


def unique(item: Raw) -> Raw:
    return {
        "type": "array",
        "items": item,
        "x-kubernetes-list-type": "set",
        "x-kubernetes-patch-strategy": "merge",
    }


def keyed(item: Raw, *keys: str, merge_key: str = "") -> Raw:
    """A list whose items are told apart by `keys`; strategic merge goes by one key."""
    return {
        "type": "array",
        "items": item,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": list(keys),
        "x-kubernetes-patch-strategy": "merge",
        "x-kubernetes-patch-merge-key": merge_key or keys[0],
    }


def whole(raw: Raw) -> Raw:
    """A map that has one owner."""
    return raw | {"x-kubernetes-map-type": "atomic"}


def defaulted(raw: Raw, value: Any) -> Raw:
    return raw | {"default": value}


PROTOCOL = defaulted(STRING, "TCP")

OWNER = whole(
    struct(
        apiVersion=STRING,
        kind=STRING,
        name=STRING,
        uid=STRING,
        controller=BOOL,
        blockOwnerDeletion=BOOL,
    )
)
_MANAGED = struct(
    manager=STRING,
    operation=STRING,
    apiVersion=STRING,
    time=TIME,
    fieldsType=STRING,
    fieldsV1=ANYTHING,
    subresource=STRING,
)
METADATA = struct(
    name=STRING,
    generateName=STRING,
    namespace=STRING,
    selfLink=STRING,
    uid=STRING,
    resourceVersion=STRING,
    generation=INT64,
    creationTimestamp=TIME,
    deletionTimestamp=TIME,
    deletionGracePeriodSeconds=INT64,
    labels=STRINGS,
    annotations=STRINGS,
    ownerReferences=keyed(OWNER, "uid"),
    finalizers=unique(STRING),
    managedFields=atomic(_MANAGED),
)

REFERENCE = whole(
    struct(
        kind=STRING,
        namespace=STRING,
        name=STRING,
        uid=STRING,
        apiVersion=STRING,
        resourceVersion=STRING,
        fieldPath=STRING,
    )
)
CONDITION = struct(
    type=STRING,
    status=STRING,
    observedGeneration=INT64,
    lastTransitionTime=TIME,
    reason=STRING,
    message=STRING,
)


def kind(**properties: Raw) -> Raw:
    return struct(apiVersion=STRING, kind=STRING, metadata=METADATA, **properties)


NAMESPACE = kind(
    spec=struct(finalizers=atomic(STRING)),
    status=struct(phase=STRING, conditions=keyed(CONDITION, "type")),
)
CONFIG_MAP = kind(data=STRINGS, binaryData=STRINGS, immutable=BOOL)
SECRET = kind(data=STRINGS, stringData=STRINGS, type=STRING, immutable=BOOL)
SERVICE_ACCOUNT = kind(
    secrets=keyed(REFERENCE, "name"),
    imagePullSecrets=keyed(whole(struct(name=STRING)), "name"),
    automountServiceAccountToken=BOOL,
)
LEASE = kind(
    spec=struct(
        holderIdentity=STRING,
        leaseDurationSeconds=INT,
        acquireTime=TIME,
        renewTime=TIME,
        leaseTransitions=INT,
        strategy=STRING,
        preferredHolder=STRING,
    )
)

SERVICE_PORT = struct(
    name=STRING,
    protocol=PROTOCOL,
    appProtocol=STRING,
    port=INT,
    targetPort=PORT,
    nodePort=INT,
)
INGRESS = struct(
    ip=STRING,
    hostname=STRING,
    ipMode=STRING,
    ports=atomic(struct(port=INT, protocol=STRING, error=STRING)),
)
SERVICE = kind(
    spec=struct(
        ports=keyed(SERVICE_PORT, "port", "protocol", merge_key="port"),
        selector=whole(STRINGS),
        clusterIP=STRING,
        clusterIPs=atomic(STRING),
        type=STRING,
        externalIPs=atomic(STRING),
        sessionAffinity=STRING,
        loadBalancerIP=STRING,
        loadBalancerSourceRanges=atomic(STRING),
        externalName=STRING,
        externalTrafficPolicy=STRING,
        healthCheckNodePort=INT,
        publishNotReadyAddresses=BOOL,
        sessionAffinityConfig=struct(clientIP=struct(timeoutSeconds=INT)),
        ipFamilies=atomic(STRING),
        ipFamilyPolicy=STRING,
        allocateLoadBalancerNodePorts=BOOL,
        loadBalancerClass=STRING,
        internalTrafficPolicy=STRING,
        trafficDistribution=STRING,
    ),
    status=struct(
        conditions=keyed(CONDITION, "type"),
        loadBalancer=struct(ingress=atomic(INGRESS)),
    ),
)

ENDPOINT = struct(
    addresses=unique(STRING),
    conditions=struct(ready=BOOL, serving=BOOL, terminating=BOOL),
    hostname=STRING,
    targetRef=REFERENCE,
    deprecatedTopology=STRINGS,
    nodeName=STRING,
    zone=STRING,
    hints=struct(forZones=atomic(struct(name=STRING)), forNodes=atomic(struct(name=STRING))),
)
ENDPOINT_SLICE = kind(
    addressType=STRING,
    endpoints=atomic(ENDPOINT),
    ports=atomic(
        struct(name=defaulted(STRING, ""), protocol=PROTOCOL, port=INT, appProtocol=STRING)
    ),
)

_SOURCE = struct(component=STRING, host=STRING)
_SERIES = struct(count=INT, lastObservedTime=TIME)
CORE_EVENT = kind(
    involvedObject=REFERENCE,
    reason=STRING,
    message=STRING,
    source=_SOURCE,
    firstTimestamp=TIME,
    lastTimestamp=TIME,
    count=INT,
    type=STRING,
    eventTime=TIME,
    series=_SERIES,
    action=STRING,
    related=REFERENCE,
    reportingComponent=STRING,
    reportingInstance=STRING,
)
EVENT = kind(
    regarding=REFERENCE,
    reason=STRING,
    note=STRING,
    deprecatedSource=_SOURCE,
    deprecatedFirstTimestamp=TIME,
    deprecatedLastTimestamp=TIME,
    deprecatedCount=INT,
    type=STRING,
    eventTime=TIME,
    series=_SERIES,
    action=STRING,
    related=REFERENCE,
    reportingController=STRING,
    reportingInstance=STRING,
)

_CONTAINER = open_struct(
    name=STRING,
    image=STRING,
    command=atomic(STRING),
    args=atomic(STRING),
    ports=keyed(
        struct(name=STRING, hostPort=INT, containerPort=INT, protocol=PROTOCOL, hostIP=STRING),
        "containerPort",
        "protocol",
        merge_key="containerPort",
    ),
    env=keyed(open_struct(name=STRING, value=STRING), "name"),
    volumeMounts=keyed(open_struct(name=STRING, mountPath=STRING), "mountPath"),
)
_CONTAINERS = keyed(_CONTAINER, "name")
POD = kind(
    spec=open_struct(
        nodeName=STRING,
        hostNetwork=BOOL,
        containers=_CONTAINERS,
        initContainers=_CONTAINERS,
        volumes=keyed(open_struct(name=STRING), "name"),
        imagePullSecrets=keyed(whole(struct(name=STRING)), "name"),
        nodeSelector=whole(STRINGS),
        tolerations=atomic(ANYTHING),
        hostAliases=keyed(struct(ip=STRING, hostnames=atomic(STRING)), "ip"),
    ),
    status=open_struct(
        phase=STRING,
        podIP=STRING,
        hostIP=STRING,
        podIPs=keyed(struct(ip=STRING), "ip"),
        hostIPs=atomic(struct(ip=STRING)),
        conditions=keyed(open_struct(type=STRING, status=STRING), "type"),
        containerStatuses=atomic(ANYTHING),
    ),
)
NODE = kind(
    spec=open_struct(
        podCIDR=STRING,
        podCIDRs=unique(STRING),
        providerID=STRING,
        unschedulable=BOOL,
        taints=atomic(struct(key=STRING, value=STRING, effect=STRING, timeAdded=TIME)),
    ),
    status=open_struct(
        addresses=keyed(struct(type=STRING, address=STRING), "type"),
        conditions=keyed(open_struct(type=STRING, status=STRING), "type"),
        capacity=ANYTHING,
        allocatable=ANYTHING,
    ),
)
SERVICE_CIDR = kind(
    spec=struct(cidrs=atomic(STRING)),
    status=struct(conditions=keyed(CONDITION, "type")),
)

_CRD_VERSION = open_struct(
    name=STRING,
    served=BOOL,
    storage=BOOL,
    schema=struct(openAPIV3Schema=ANYTHING),
    subresources=ANYTHING,
    additionalPrinterColumns=atomic(
        struct(
            name=STRING,
            type=STRING,
            format=STRING,
            description=STRING,
            priority=INT,
            jsonPath=STRING,
        )
    ),
    selectableFields=atomic(struct(jsonPath=STRING)),
)
CRD = kind(
    spec=open_struct(
        group=STRING,
        scope=STRING,
        names=struct(
            plural=STRING,
            singular=STRING,
            shortNames=atomic(STRING),
            kind=STRING,
            listKind=STRING,
            categories=atomic(STRING),
        ),
        versions=atomic(_CRD_VERSION),
        preserveUnknownFields=BOOL,
    ),
    status=struct(
        conditions=keyed(CONDITION, "type"),
        acceptedNames=ANYTHING,
        storedVersions=atomic(STRING),
        observedGeneration=INT64,
    ),
)
