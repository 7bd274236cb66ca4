"""How the sandbox's provider misbehaves on command, and its pages under /sandbox/.

Seen through Microsoft's SDK alone, as in `test_nrp_sdk.py`.
"""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from azure.core.exceptions import (
    HttpResponseError,
    ResourceNotFoundError,
    ServiceRequestError,
    ServiceResponseError,
)
from azure.mgmt.network.aio import NetworkManagementClient

from sandbox.nrp import Fault, NrpServer, Plan
from sandbox.nrp.admin import shown_state
from sandbox.nrp.server import GATEWAY, GROUP, REGION
from tests.contracts.nrp_sdk import (
    Doc,
    at,
    code,
    held,
    inbound,
    locate,
    outbound,
    public_ip,
    put_balancer,
    put_ip,
    refused,
    register,
    registered,
    rid,
    sdk,
)
from tests.waiting import eventually


@pytest.fixture
async def server() -> AsyncIterator[NrpServer]:
    async with NrpServer(page_size=3) as running:
        yield running


@pytest.fixture
async def client(server: NrpServer) -> AsyncIterator[NetworkManagementClient]:
    async with sdk(server) as opened:
        yield opened


class TestFaults:
    """Misbehaviour, each kind as the SDK sees it."""

    @pytest.mark.parametrize("status", [400, 403, 404, 409, 412, 422, 429, 500, 503])
    async def test_errors_on_demand(
        self, server: NrpServer, client: NetworkManagementClient, status: int
    ) -> None:
        """A fault answers so many requests with its status and applies nothing; then it is over."""
        server.faults.add(Fault(kind="error", op="update_services", status=status, count=2))
        for _ in range(2):
            assert (await refused(register(client, inbound("a")))).status_code == status
        assert {"default-natgw"} == set(await registered(client))
        await register(client, inbound("a"))
        assert "a" in await registered(client)

    async def test_throttling_says_how_long(
        self, server: NrpServer, client: NetworkManagementClient
    ) -> None:
        """429 carries Retry-After in whole seconds, and holds for its time, not for a count."""
        server.faults.add(Fault(kind="error", status=429, retry_after=5, for_seconds=0.2))
        error = await refused(register(client, inbound("a")))
        assert error.response is not None
        assert error.response.headers["Retry-After"] == "5"
        assert error.status_code == 429

        async def through() -> bool:
            try:
                await register(client, inbound("a"))
            except HttpResponseError:
                return False
            return True

        await eventually(through, timeout=5)

    async def test_a_poisoned_entry_is_refused_wherever_it_is_sent(
        self, server: NrpServer, client: NetworkManagementClient
    ) -> None:
        """A fault may look for text in the body, so that only batches with that entry fail."""
        server.faults.add(Fault(kind="error", status=400, code="Poison", contains='"bad"'))
        assert code(await refused(register(client, inbound("good"), inbound("bad")))) == "Poison"
        await register(client, inbound("good"))

    async def test_200_with_left_over_headers(
        self, server: NrpServer, client: NetworkManagementClient
    ) -> None:
        """Done at once, although the headers of a long-running operation are there."""
        server.faults.add(Fault(kind="headers"))
        seen: list[Any] = []
        await client.service_gateways.update_services(
            GROUP,
            GATEWAY,
            {"serviceRequests": [inbound("a")]},
            raw_response_hook=lambda r: seen.append(r.http_response),
        )
        assert seen[0].status_code == 200
        assert "Azure-AsyncOperation" in seen[0].headers
        assert "Location" in seen[0].headers
        server.faults.set(Plan())
        assert "a" in await registered(client)

    async def test_202_is_applied_later(
        self, server: NrpServer, client: NetworkManagementClient
    ) -> None:
        """Before its end nothing is there and another change is 409; the SDK's own poller sees
        the end of a PUT and of a DELETE."""
        server.faults.add(Fault(kind="async", op="*_public_ip", seconds=0.1))
        poller = await client.public_ip_addresses.begin_create_or_update(GROUP, "a", public_ip())
        with pytest.raises(ResourceNotFoundError):
            await client.public_ip_addresses.get(GROUP, "a")
        busy = await refused(
            client.public_ip_addresses.begin_create_or_update(GROUP, "a", public_ip())
        )
        assert (busy.status_code, code(busy)) == (409, "AnotherOperationInProgress")
        made = await poller.result()
        assert made.ip_address
        await (await client.public_ip_addresses.begin_delete(GROUP, "a")).result()
        with pytest.raises(ResourceNotFoundError):
            await client.public_ip_addresses.get(GROUP, "a")

    async def test_202_of_an_action_can_be_polled(
        self, server: NrpServer, client: NetworkManagementClient
    ) -> None:
        """updateServices answers 202 with both headers; the page behind them ends in Succeeded."""
        server.faults.add(Fault(kind="async", op="update_services", seconds=0.1, count=1))
        error = await refused(register(client, inbound("a")))
        assert error.status_code == 202
        assert error.response is not None
        url = error.response.headers["Azure-AsyncOperation"]
        assert await self.poll(url) == {"status": "Succeeded"}
        assert "a" in await registered(client)

    async def test_a_failed_operation_also_ends_in_200(
        self, server: NrpServer, client: NetworkManagementClient
    ) -> None:
        """The terminal poll has status 200 and says Failed with the error; nothing was applied."""
        fault = Fault(kind="async_failed", seconds=0.05, code="Broken", message="it broke")
        server.faults.add(fault)
        error = await refused(register(client, inbound("a")))
        assert error.response is not None
        for header in ("Azure-AsyncOperation", "Location"):
            end = await self.poll(error.response.headers[header])
            assert (end["status"], end["error"]["code"]) == ("Failed", "Broken")
        poller = await client.nat_gateways.begin_create_or_update(
            GROUP, "n", {"location": REGION, "sku": {"name": "StandardV2"}}
        )
        failed = await refused(poller.result())
        assert (failed.status_code, code(failed)) == (200, "Broken")
        server.faults.set(Plan())
        assert {"default-natgw"} == set(await registered(client))

    async def poll(self, url: str) -> Doc:
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer x"}) as session:
            async with asyncio.timeout(10):
                while True:
                    async with session.get(url) as response:
                        doc: Doc = await response.json()
                        if doc["status"] != "InProgress":
                            assert response.status == 200
                            return {k: v for k, v in doc.items() if k in ("status", "error")}
                    await asyncio.sleep(0.02)

    async def test_an_error_inside_of_200(
        self, server: NrpServer, client: NetworkManagementClient
    ) -> None:
        """The status says success, the body says failure, and nothing was applied."""
        server.faults.add(Fault(kind="error_in_200", code="Sorry", count=1))
        answer = await register(client, inbound("a"))
        assert answer["error"]["code"] == "Sorry"
        assert "a" not in await registered(client)

    @pytest.mark.parametrize(
        ("kind", "applied"),
        [
            ("drop", False),
            ("applied_drop", True),
            ("truncate", True),
            ("applied_error", True),
        ],
    )
    async def test_lost_answers(
        self, server: NrpServer, client: NetworkManagementClient, kind: Any, applied: bool
    ) -> None:
        """The client sees a failure in each case; whether it was applied differs."""
        server.faults.add(Fault(kind=kind, op="update_services", status=503, count=1))
        with pytest.raises((ServiceRequestError, ServiceResponseError, HttpResponseError)):
            await register(client, inbound("a"))
        assert applied is ("a" in await registered(client))

    @pytest.mark.parametrize(("kind", "applied"), [("hang", False), ("applied_hang", True)])
    async def test_timeouts(
        self, server: NrpServer, client: NetworkManagementClient, kind: Any, applied: bool
    ) -> None:
        """The server never answers; whether it was applied differs; it still stops promptly."""
        server.faults.add(Fault(kind=kind, op="update_services", count=1))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await register(client, inbound("a"))
        assert applied is ("a" in await registered(client))

    async def test_a_seed_repeats_the_same_faults(
        self, server: NrpServer, client: NetworkManagementClient
    ) -> None:
        """With one seed, the same requests fail on every run."""

        async def run(seed: int) -> list[bool]:
            server.faults.set(Plan(seed=seed, faults=[Fault(kind="error", probability=0.5)]))
            failed = []
            for _ in range(20):
                try:
                    await client.service_gateways.get(GROUP, GATEWAY)
                    failed.append(False)
                except HttpResponseError:
                    failed.append(True)
            return failed

        first = await run(7)
        assert first == await run(7)
        assert first != await run(8)
        assert {True, False} == set(first)

    async def test_a_public_ip_without_an_address(
        self, server: NrpServer, client: NetworkManagementClient
    ) -> None:
        """It exists by name; the next PUT gives it an address."""
        server.faults.add(Fault(kind="no_address", count=1))
        put = client.public_ip_addresses.begin_create_or_update
        first = await (await put(GROUP, "a", public_ip())).result()
        assert first.ip_address is None
        second = await (await put(GROUP, "a", public_ip())).result()
        assert second.ip_address is not None

    async def test_latency(self, server: NrpServer, client: NetworkManagementClient) -> None:
        """A slow provider keeps requests in flight, and two that touch one service are noticed."""
        server.faults.set(Plan(latency=0.05))
        await asyncio.gather(register(client, inbound("a")), register(client, inbound("a")))
        assert [entry["key"] for entry in server.journal.overlaps] == ["service/a"]


class TestAdministration:
    """The pages under /sandbox/."""

    async def call(self, server: NrpServer, method: str, page: str, body: Any = None) -> Any:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"{server.url}/sandbox/{page}", json=body) as answer,
        ):
            return answer.status, await answer.json()

    async def test_faults_are_switched_over_http(
        self, server: NrpServer, client: NetworkManagementClient
    ) -> None:
        """PUT sets a plan, GET shows how often it was used, DELETE ends it; nonsense is 400."""
        plan = {"seed": 1, "faults": [{"kind": "error", "status": 429, "op": "get_*"}]}
        assert (await self.call(server, "PUT", "faults", plan))[0] == 200
        assert (await refused(client.service_gateways.get(GROUP, GATEWAY))).status_code == 429
        _, shown = await self.call(server, "GET", "faults")
        assert shown["faults"][0]["used"] == 1
        status, wrong = await self.call(server, "PUT", "faults", {"faults": [{"kind": "nice"}]})
        assert status == 400
        assert "nice" in wrong["error"]
        await self.call(server, "DELETE", "faults")
        await client.service_gateways.get(GROUP, GATEWAY)

    async def test_requests_are_counted_and_logged(
        self, server: NrpServer, client: NetworkManagementClient
    ) -> None:
        """Each with operation, hash, size, status and the id that the client gave it."""
        await register(client, inbound("a"))
        await register(client, inbound("a"))
        await refused(register(client, outbound("default-natgw")))
        _, shown = await self.call(server, "GET", "requests?limit=3")
        assert shown["counts"] == {"update_services": 3}
        assert shown["statuses"] == {"200": 2, "400": 1}
        first, second, third = shown["requests"]
        assert first["hash"] == second["hash"] != third["hash"]
        assert first["size"] > 50
        assert third["code"] == "MultipleDefaultServicesNotAllowedInServiceGateway"
        assert first["client_request_id"] != second["client_request_id"] != ""
        assert first["keys"] == ["service/a"]

    async def test_edits_behind_the_clients_back(
        self, server: NrpServer, client: NetworkManagementClient
    ) -> None:
        """Anything can be changed without a check: drift for those who look for it."""
        await register(client, inbound("a"))
        await locate(client, at("10.0.0.1", {"10.1.0.1": ["a"]}))
        edit = {
            "services": {"a": None, "b": {"kind": "Sideways"}},
            "locations": {"10.0.0.1": None, "10.0.0.2": {"10.1.0.2": ["ghost"]}},
            "resources": {rid("publicIPAddresses", "default-natgw-pip"): None},
        }
        assert (await self.call(server, "POST", "edit", edit))[0] == 200
        assert await registered(client) == {"b": "Sideways", "default-natgw": "Outbound"}
        assert await held(client) == {"10.0.0.2": {"10.1.0.2": ["ghost"]}}
        assert (await self.call(server, "POST", "edit", {"toasters": 1}))[0] == 400

    async def test_state_shows_everything_and_reset_forgets_it(
        self, server: NrpServer, client: NetworkManagementClient
    ) -> None:
        """The whole state is one page; a reset leaves the default service only."""
        await register(client, inbound("a"))
        _, state = await self.call(server, "GET", "state")
        gateway = state["gateways"][server.gateway_id.lower()]
        assert [entry["name"] for entry in gateway["services"]] == ["a", "default-natgw"]
        await self.call(server, "POST", "reset")
        assert {"default-natgw"} == set(await registered(client))

    async def test_state_outlives_a_restart(self, tmp_path: Any) -> None:
        """With a folder, a new process finds services, locations, addresses and their users."""
        async with NrpServer(state=tmp_path) as server, sdk(server) as client:
            await put_balancer(client, "web")
            await register(client, inbound("web", pool="web"))
            await locate(client, at("10.0.0.1", {"10.1.0.1": ["web"]}))
            before = shown_state(server)
        async with NrpServer(state=tmp_path) as server, sdk(server) as client:
            after = shown_state(server)
            assert {k: v for k, v in before.items() if k != "operations"} == {
                k: v for k, v in after.items() if k != "operations"
            }
            error = await refused(register(client, inbound("web", delete=True)))
            assert code(error) == "ServiceWithOverlayMappingsCannotBeDeleted"
            error = await refused(client.public_ip_addresses.begin_delete(GROUP, "web-pip"))
            assert code(error) == "PublicIPAddressCannotBeDeleted"
            other = await put_ip(client, "other")
            seen = await client.public_ip_addresses.get(GROUP, "web-pip")
            assert other.ip_address != seen.ip_address


class TestProcess:
    """`python -m sandbox.nrp`, as `lbledger up` starts it."""

    @contextlib.asynccontextmanager
    async def running(self, folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
        ready = folder / "ready.json"
        ready.unlink(missing_ok=True)
        argv = ["-m", "sandbox.nrp", "--ready-file", str(ready), "--state", str(folder / "state")]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *argv, stdout=asyncio.subprocess.DEVNULL
        )
        try:
            await eventually(ready.exists, message="the ready file")
            yield process, json.loads(ready.read_text())["url"]
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def page(self, url: str, name: str) -> Any:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/sandbox/{name}") as answer:
                return await answer.json()

    async def test_it_stops_on_sigterm(self, tmp_path: Path) -> None:
        """Exit 0 within 10 s, also while a request hangs; the state is written."""
        async with self.running(tmp_path) as (process, url):
            plan = {"faults": [{"kind": "hang"}]}
            async with aiohttp.ClientSession() as session:
                async with session.put(f"{url}/sandbox/faults", json=plan) as answer:
                    assert answer.status == 200
                path = f"{rid('natGateways', 'x')}?api-version=1"
                headers = {"Authorization": "Bearer x"}
                hanging = asyncio.create_task(session.get(url + path, headers=headers))
                await eventually(lambda: self.hangs(url))
                process.terminate()
                assert await asyncio.wait_for(process.wait(), 10) == 0
                await asyncio.gather(hanging, return_exceptions=True)
        assert (tmp_path / "state" / "nrp.json").exists()

    async def hangs(self, url: str) -> bool:
        counts = (await self.page(url, "requests"))["counts"]
        return bool(counts.get("get_nat_gateway"))

    def holds(self, file: Path, text: str) -> bool:
        return file.exists() and text.encode() in file.read_bytes()

    async def test_sigkill_leaves_a_whole_state(self, tmp_path: Path) -> None:
        """Killed again and again under writes: every start finds a readable state that only
        grows."""
        known: set[str] = set()
        for turn in range(3):
            async with self.running(tmp_path) as (process, url):
                state = await self.page(url, "state")
                (gateway,) = state["gateways"].values()
                there = {entry["name"] for entry in gateway["services"]}
                assert known <= there
                body = {"serviceRequests": [inbound(f"s{turn}-{n}") for n in range(200)]}
                link = f"{url}{rid('serviceGateways', GATEWAY)}/updateServices?api-version=1"
                headers = {"Authorization": "Bearer x"}
                async with aiohttp.ClientSession(headers=headers) as session:
                    async with session.post(link, json=body) as answer:
                        assert answer.status == 200
                file = tmp_path / "state" / "nrp.json"
                await eventually(lambda: self.holds(file, f"s{turn}-199"))  # noqa: B023
                known = there | {f"s{turn}-{n}" for n in range(200)}
                process.send_signal(signal.SIGKILL)
                await process.wait()

    @pytest.mark.parametrize(
        ("argv", "expected"),
        [
            (["--page-size", "0"], "--page-size is 0, it must be at least 1"),
            (["--faults", "/nonexistent"], "/nonexistent"),
            (["--port", "many"], "invalid int value"),
        ],
    )
    def test_wrong_use(self, argv: list[str], expected: str) -> None:
        """Exit 2 with the reason."""
        done = subprocess.run(
            [sys.executable, "-m", "sandbox.nrp", *argv], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2
        assert expected in done.stderr
