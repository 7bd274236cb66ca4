"""The prober's rows: facts (a mirror) and one image for each load balancer."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.ext.asyncio import AsyncConnection

from schema import objects
from schema.events import BackendsResolved
from schema.tables.prober import image as image_table
from schema.tables.prober import mirror as mirror_table
from services.kit.mirror import Mirror
from services.prober.images import BALANCERS
from services.prober.members import PODS, VMIS
from services.prober.plan import ANNOTATION

NODES = "nodes"
SERVICE_CIDRS = "servicecidrs"
CHUNK = 1_000


def facts() -> Mirror:
    """The objects that images are made of, without what the prober does not read."""
    return Mirror(
        mirror_table,
        {
            BALANCERS: _balancer,
            VMIS: _vmi,
            PODS: _pod,
            NODES: _node,
            SERVICE_CIDRS: _service_cidr,
        },
    )


async def load_images(conn: AsyncConnection) -> list[BackendsResolved]:
    result = await conn.execute(sa.select(image_table.c.image))
    return [msgspec.convert(image, BackendsResolved) for image in result.scalars()]


async def save_images(
    conn: AsyncConnection, images: Iterable[BackendsResolved], gone: Iterable[str]
) -> None:
    """Write images and remove those of owners that are gone, which first frees their names."""
    left = sorted(gone)
    if left:
        await conn.execute(
            sa.delete(image_table).where(
                image_table.c.owner_uid
                == sa.func.any(sa.bindparam("uids", type_=pg.ARRAY(sa.Text)))
            ),
            {"uids": left},
        )
    rows = [
        {
            "owner_uid": image.owner.uid,
            "namespace": image.owner.namespace,
            "name": image.owner.name,
            "revision": image.revision,
            "image": msgspec.to_builtins(image),
        }
        for image in sorted(images, key=lambda image: image.owner.uid)
    ]
    insert = pg.insert(image_table)
    upsert = insert.on_conflict_do_update(
        index_elements=["owner_uid"],
        set_={name: insert.excluded[name] for name in ("namespace", "name", "revision", "image")},
    )
    for start in range(0, len(rows), CHUNK):
        await conn.execute(upsert, rows[start : start + CHUNK])


def _balancer(view: objects.LoadBalancer) -> objects.LoadBalancer:
    notes = view.metadata.annotations or {}
    meta = objects.ObjectMeta(
        name=view.metadata.name,
        namespace=view.metadata.namespace,
        uid=view.metadata.uid,
        generation=view.metadata.generation,
        deletion_timestamp=view.metadata.deletion_timestamp,
        annotations={k: v for k, v in notes.items() if k.startswith(ANNOTATION)} or None,
    )
    return objects.LoadBalancer(metadata=meta, spec=view.spec)


def _vmi(view: objects.VirtualMachineInstance) -> objects.VirtualMachineInstance:
    return msgspec.structs.replace(view, metadata=_labelled(view.metadata))


def _pod(view: objects.Pod) -> objects.Pod:
    return msgspec.structs.replace(view, metadata=_labelled(view.metadata))


def _node(view: objects.Node) -> objects.Node:
    """Only where its pods' addresses come from: the dummy must not be one of them."""
    meta = objects.ObjectMeta(name=view.metadata.name, uid=view.metadata.uid)
    return objects.Node(metadata=meta, spec=view.spec)


def _service_cidr(view: objects.ServiceCIDR) -> objects.ServiceCIDR:
    """Likewise, of Services."""
    meta = objects.ObjectMeta(name=view.metadata.name, uid=view.metadata.uid)
    return objects.ServiceCIDR(metadata=meta, spec=view.spec)


def _labelled(meta: objects.ObjectMeta) -> objects.ObjectMeta:
    return objects.ObjectMeta(
        name=meta.name,
        namespace=meta.namespace,
        uid=meta.uid,
        deletion_timestamp=meta.deletion_timestamp,
        labels=meta.labels,
    )
