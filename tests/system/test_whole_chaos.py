"""Everything dies at random while a client works: afterwards an independent checker finds the world
as it must be, and nothing in its history that must not have been.

What the client does, when what is killed and which faults come follows from the seed of the case;
where it meets the system does not, so a failure may take several runs to come again.
"""

import asyncio
import contextlib
import random
from functools import partial

import aiohttp
import pytest

from sandbox.stack import SERVICES
from tests.system.checker import Checker
from tests.system.whole import Recorder, Refused, Space, gather, space_of
from tests.waiting import eventually

WORK_S = 18.0
APPS = ("a", "b", "c")
UNREACHABLE = (aiohttp.ClientError, OSError, Refused, TimeoutError)


class Client:
    """Creates, edits and deletes objects of one space, and its listeners."""

    def __init__(self, space: Space, seed: int) -> None:
        self.space, self.random = space, random.Random(seed)
        self.machines: dict[str, str] = {}

    async def start(self) -> None:
        self.pools = [
            await self.space.pool(10, 14, name="p1"),
            await self.space.pool(30, 36, name="p2", selector={"priority": 1}),
        ]
        for node in ("n1", "n2"):
            await self.space.node(node)
        for _ in range(4):
            await self.add_machine()

    async def work(self, stop: asyncio.Event) -> None:
        acts = [
            *[self.add_balancer] * 5,
            *[self.drop_balancer] * 3,
            *[self.replace_balancer] * 2,
            *[self.edit_balancer] * 5,
            *[self.add_machine] * 3,
            *[self.drop_machine] * 2,
            *[self.label_machine] * 2,
            *[self.toggle] * 4,
            *[self.add_service] * 3,
            *[self.drop_service] * 2,
            *[self.flip_service] * 2,
            *[self.move_pods] * 4,
            self.edit_by_hand,
        ]
        while not stop.is_set():
            # The API server may be away, the object too: a client goes on.
            with contextlib.suppress(*UNREACHABLE):
                await self.random.choice(acts)()
            await asyncio.sleep(self.random.uniform(0.0, 0.06))

    # --- load balancers ---

    def name(self) -> str:
        return f"lb{self.random.randrange(9)}"

    async def add_balancer(self) -> None:
        spec = {"backendServerSelector": {"app": [self.random.choice(APPS)]}}
        if self.random.random() < 0.6:
            spec["healthCheck"] = self.space.check()
        if self.random.random() < 0.5:
            spec["ipPool"] = self.random.choice(self.pools)
        elif self.random.random() < 0.2:
            spec["ipam"] = "dhcp"
        elif self.random.random() < 0.2:
            spec["address"] = self.space.pooled(self.random.choice((11, 12, 31)))
        await self.space.balancer(self.name(), **spec)

    async def drop_balancer(self) -> None:
        await self.space.delete(self.name())

    async def replace_balancer(self) -> None:
        name = self.name()
        await self.space.delete(name)
        await self.space.balancer(name, backendServerSelector={"app": [self.random.choice(APPS)]})

    async def edit_balancer(self) -> None:
        spec = self.random.choice(
            (
                {"backendServerSelector": {"app": [self.random.choice(APPS)]}},
                {"healthCheck": None},
                {"healthCheck": self.space.check()},
                {"ipPool": self.random.choice(self.pools)},
                {"listeners": [self.space.listener(port=self.random.choice((80, 81)))]},
            )
        )
        await self.space.edit(self.name(), **spec)

    async def edit_by_hand(self) -> None:
        name = self.name()
        if self.random.random() < 0.5:
            await self.space.delete(name, self.random.choice(("Service", "EndpointSlice")))
        else:
            patch = {"spec": {"loadBalancerIP": "198.18.255.9"}}
            await self.space.api.merge("Service", name, self.space.name, patch)

    # --- machines ---

    async def add_machine(self) -> None:
        name = f"vm{len(self.machines) + 1}"
        address = self.space.address(len(self.machines) + 1)
        if len(self.machines) >= 9:
            return
        self.machines[name] = address
        await self.space.vm(
            self.random.choice(APPS),
            name=name,
            address=address,
            answers=self.random.random() < 0.7,
        )

    async def drop_machine(self) -> None:
        if self.machines:
            await self.space.stop_vm(self.random.choice(sorted(self.machines)))

    async def label_machine(self) -> None:
        if self.machines:
            patch = {"metadata": {"labels": {"app": self.random.choice(APPS)}}}
            name = self.random.choice(sorted(self.machines))
            await self.space.api.merge("VirtualMachineInstance", name, self.space.name, patch)

    async def toggle(self) -> None:
        """A backend stops answering, or answers again."""
        if not self.machines:
            return
        address = self.machines[self.random.choice(sorted(self.machines))]
        if self.space.backends.answers(self.space.dialled(address), self.space.port):
            await self.space.refuse(address)
        else:
            await self.space.answer(address)

    # --- Services ---

    async def add_service(self) -> None:
        number = self.random.randrange(4)
        if number < 2:
            await self.space.service(f"pool{number}")
        else:
            await self.space.service(f"nrp{number}", "lbledger.io/nrp")

    async def drop_service(self) -> None:
        number = self.random.randrange(4)
        await self.space.delete(f"pool{number}" if number < 2 else f"nrp{number}", "Service")

    async def flip_service(self) -> None:
        """[report-11] To a cluster-internal Service, or back."""
        name = f"pool{self.random.randrange(2)}"
        found = await self.space.api.get("Service", name, self.space.name)
        if found is None:
            return
        external = found["spec"]["type"] == "LoadBalancer"
        spec = {
            "type": "ClusterIP" if external else "LoadBalancer",
            "loadBalancerClass": None if external else "lbledger.io/pool",
        }
        if external:
            spec |= {"allocateLoadBalancerNodePorts": None, "externalTrafficPolicy": None}
        await self.space.api.merge("Service", name, self.space.name, {"spec": spec})

    async def move_pods(self) -> None:
        name = f"nrp{self.random.randrange(2, 4)}"
        # A pod has its address for itself: each Service draws from its own.
        low = 1 if name == "nrp2" else 101
        numbers = self.random.sample(range(low, low + 20), self.random.randrange(5))
        await self.space.pods(name, *numbers, node=self.random.choice(("n1", "n2")))


class Trouble:
    """Kills, restarts and faults."""

    def __init__(self, space: Space, seed: int, *, wipe: bool) -> None:
        self.whole, self.api = space.whole, space.api
        self.random, self.wipe = random.Random(seed), wipe
        self.done: list[str] = []

    async def work(self) -> None:
        """Everything on the plan in an order by the seed, spread over the time."""
        plan = [
            self.nats,
            self.postgres,
            self.kube,
            self.provider,
            *[self.cut] * 3,
            *[self.api_faults] * 3,
            *[self.provider_faults] * 2,
            *[partial(self.service, name) for name in (*SERVICES, *SERVICES)],
        ]
        self.random.shuffle(plan)
        loop = asyncio.get_running_loop()
        began = loop.time()
        moments = sorted(self.random.uniform(0.0, WORK_S) for _ in plan)
        for moment, act in zip(moments, plan, strict=True):
            await asyncio.sleep(max(0.0, began + moment - loop.time()))
            self.done.append(getattr(act, "__name__", None) or act.args[0])
            with contextlib.suppress(*UNREACHABLE):
                await act()

    async def service(self, name: str) -> None:
        await self.whole.kill(name)
        await self.whole.respawn(name)

    async def nats(self) -> None:
        await self.whole.nats.kill()
        await asyncio.sleep(self.random.uniform(0.0, 0.5))
        if self.wipe:
            await self.whole.nats.wipe()
        await self.whole.nats.start()

    async def postgres(self) -> None:
        await self.whole.postgres.kill()
        await asyncio.sleep(self.random.uniform(0.0, 0.5))
        await self.whole.postgres.start()

    async def kube(self) -> None:
        await self.whole.kill("kube")
        await self.whole.stack.restart_kube()

    async def provider(self) -> None:
        await self.whole.end("nrp")
        await asyncio.sleep(0.3)
        await self.whole.stack.restart_provider()

    async def cut(self) -> None:
        how = self.random.choice(("clean", "midline", "hang", "error"))
        await self.api.sandbox("POST", "watches/cut", {"how": how})

    async def api_faults(self) -> None:
        fault = self.random.choice(
            (
                {"verb": "patch", "times": 5, "status": 429, "retry_after": 1},
                {"verb": "patch", "times": 3, "status": 500},
                {"verb": "patch", "times": 3, "drop": "after"},
                {"verb": "patch", "times": 3, "drop": "before"},
                {"verb": "patch", "path": "/status", "times": 3, "status": 409},
                {"verb": "watch", "times": 3, "status": 410},
                {"verb": "list", "times": 3, "status": 503},
            )
        )
        await self.api.sandbox("POST", "faults", fault)

    async def provider_faults(self) -> None:
        fault = self.random.choice(
            (
                {"kind": "error", "status": 429, "retry_after": 1, "count": 2},
                {"kind": "error", "status": 503, "count": 3},
                {"kind": "applied_error", "status": 500, "count": 2},
                {"kind": "applied_drop", "count": 2},
                {"kind": "drop", "count": 2},
            )
        )
        await self.api.provider("POST", "faults", fault)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("seed", "wipe"), [(1, False), (2, True)], ids=["log-kept", "log-lost"])
async def test_chaos(whole, seed, wipe):
    """Two clients work while services, servers and connections die. Afterwards: no address was held
    or shown by two owners at any instant; every owner has what the ledger says, and no lease is
    without one; slices always had a ready endpoint; the provider holds what is wanted; every
    decision is published, once, and everybody has read to the end; nothing is a dead letter."""
    dead = "select count(*) from {}.dead_letter"
    tables = [schema.replace("-", "_") for schema in SERVICES if schema != "watcher"]
    before = [(await whole.rows(dead.format(table)))[0][0] for table in tables]
    async with space_of(whole) as one, space_of(whole) as two:
        clients = [Client(one, seed), Client(two, seed + 100)]
        trouble = Trouble(one, seed, wipe=wipe)
        stop = asyncio.Event()
        kinds = ("LoadBalancer", "Service", "EndpointSlice")
        async with Recorder(one.api, "", *kinds) as seen, Checker(whole, (one, two)) as checker:
            for client in clients:
                await client.start()
            working = [asyncio.create_task(client.work(stop)) for client in clients]
            await trouble.work()
            stop.set()
            await gather(*working)
            await whole.heal()
            await eventually(checker.settled, 90, interval=0.25, message=f"{trouble.done}")
            problems = await checker.history(seen)
            if not wipe:
                problems += await checker.told_once()
        after = [(await whole.rows(dead.format(table)))[0][0] for table in tables]
        assert not problems, "\n".join(problems)
        assert after == before
