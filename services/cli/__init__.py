"""`lbledger`: one command per service, and the commands to look at what they did.

Everything is imported where it is needed: `lbledger --help` must not pay for a Kubernetes client.
Exit codes: 0 fine, 1 found a problem, 2 wrong use or wrong settings.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from typing import Annotated

import typer

app = typer.Typer(
    name="lbledger",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="A load-balancer control plane for Kubernetes whose truth is an event log.",
)
lb_app = typer.Typer(no_args_is_help=True, help="Load balancers: list, show, explain.")
pool_app = typer.Typer(no_args_is_help=True, help="Address pools: list, show, simulate.")
nrp_app = typer.Typer(no_args_is_help=True, help="What the network resource provider holds.")
app.add_typer(lb_app, name="lb")
app.add_typer(pool_app, name="pool")
app.add_typer(nrp_app, name="nrp")

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def _call(module: str, function: str, *args: object, **kwargs: object) -> None:
    """Run a function of a module that is loaded now; what it returns is the exit code."""
    from services.cli.printing import Trouble
    from services.kit import garbage, log
    from services.kit.config import ConfigError, LogSettings

    # What a person must know is the message of the command, not the log of its attempts.
    log.setup(LogSettings(level="error"), "cli")
    try:
        with garbage.importing():
            loaded = importlib.import_module(module)
        code = getattr(loaded, function)(*args, **kwargs)
        sys.stdout.flush()
    except ConfigError as error:
        code = _failed(error, 2)
    except Trouble as error:
        code = _failed(error, 1)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    raise typer.Exit(int(code or 0))


def _failed(error: Exception, code: int) -> int:
    print(f"lbledger: {error}", file=sys.stderr)
    return code


# --- running ---


def _service(command: str, text: str) -> None:
    def run() -> None:
        _call("services.cli.running", "service", command.replace("-", "_"))

    run.__doc__ = text
    app.command(command)(run)


_service("watcher", "Publish Kubernetes changes as facts.")
_service("allocator", "Lease addresses from pools.")
_service("prober", "Resolve backends and check them.")
_service("nrp-sync", "Keep the network resource provider in step with the cluster.")
_service("applier", "Write the decisions back to Kubernetes.")


@app.command()
def up(
    kubeconfig: Annotated[
        str, typer.Option(help="Use this cluster instead of the sandbox's API.")
    ] = "",
    state: Annotated[str, typer.Option(help="Keep the state here (default: temporary).")] = "",
    nats_port: Annotated[int, typer.Option(help="Port of the sandbox's NATS; 0: any.")] = 4222,
    crds: Annotated[bool, typer.Option(help="Install our CRDs into the cluster.")] = True,
) -> None:
    """Run everything in this terminal: servers from wheels, and every service. Development only."""
    _call("services.cli.running", "up", kubeconfig, state, nats_port, crds)


@app.command()
def migrate() -> None:
    """Bring the database to the revision that this version needs."""
    _call("services.cli.running", "migrate")


@app.command()
def crds() -> None:
    """Print the CustomResourceDefinitions, for `kubectl apply -f -`."""
    _call("services.cli.running", "crds")


@app.command()
def config(as_json: Json = False) -> None:
    """Print the effective settings, secrets masked."""
    _call("services.cli.running", "config", as_json)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check settings, NATS, Postgres, the API server, and that each service keeps up."""
    _call("services.cli.doctor", "doctor", as_json)


# --- looking ---


@lb_app.command("list")
def lb_list(
    namespace: Annotated[str, typer.Option("-n", "--namespace", help="Only this one.")] = "",
    as_json: Json = False,
) -> None:
    """Every load balancer with address, backends, health and reason."""
    _call("services.cli.looking", "lb_list", namespace, as_json)


@lb_app.command("show")
def lb_show(name: str, as_json: Json = False) -> None:
    """One load balancer, NAMESPACE/NAME or services/NAMESPACE/NAME, with its backends."""
    _call("services.cli.looking", "lb_show", name, as_json)


@lb_app.command("explain")
def lb_explain(
    name: str,
    at: Annotated[str, typer.Option(help="As it was then, RFC 3339 (default: now).")] = "",
    as_json: Json = False,
) -> None:
    """The chain of facts, decisions and writes of one load balancer, with sequences and times."""
    _call("services.cli.explain", "lb_explain", name, at, as_json)


@pool_app.command("list")
def pool_list(as_json: Json = False) -> None:
    """Every pool with its use."""
    _call("services.cli.looking", "pool_list", as_json)


@pool_app.command("show")
def pool_show(name: str, as_json: Json = False) -> None:
    """One pool: use, holders, waiting owners."""
    _call("services.cli.ledgers", "pool_show", name, as_json)


@pool_app.command("simulate")
def pool_simulate(
    file: Annotated[str, typer.Option("-f", "--filename", help="An edited IPPool; - reads stdin.")],
    as_json: Json = False,
) -> None:
    """Who would be stranded, served or still waiting with an edited pool; changes nothing."""
    _call("services.cli.simulating", "simulate", file, as_json)


@app.command()
def leases(
    at: Annotated[str, typer.Option(help="The moment to look at, RFC 3339 (default: now).")] = "",
    address: Annotated[str, typer.Option(help="The history of this address.")] = "",
    owner: Annotated[str, typer.Option(help="The history of this owner, NAMESPACE/NAME.")] = "",
    as_json: Json = False,
) -> None:
    """Which address was held by whom, now or at any past moment."""
    _call("services.cli.ledgers", "leases", at, address, owner, as_json)


@app.command()
def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they come.")] = False,
    subject: Annotated[
        str, typer.Option(help="Subjects, with * and > (default: everything).")
    ] = "",
    last: Annotated[int, typer.Option(help="How many of the newest, 0 for all.")] = 50,
    as_json: Json = False,
) -> None:
    """The event log, oldest first."""
    _call("services.cli.explain", "tail", follow, subject, last, as_json)


@nrp_app.command("status")
def nrp_status(as_json: Json = False) -> None:
    """Whether the provider is in step; what is pending, parked, quarantined or unknown."""
    _call("services.cli.provider", "status", as_json)


@nrp_app.command("diff")
def nrp_diff(as_json: Json = False) -> None:
    """Read the provider back and print what differs from what it should hold."""
    _call("services.cli.provider", "diff", as_json)


@nrp_app.command("explain")
def nrp_explain(service: str, as_json: Json = False) -> None:
    """One service (NAMESPACE/NAME, uid or egress name): state, backends, requests."""
    _call("services.cli.provider", "explain", service, as_json)


@nrp_app.command("repair")
def nrp_repair(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be done.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Have nrp_sync read the provider back now and repair what differs."""
    _call("services.cli.provider", "repair", dry_run, as_json)


def main() -> None:
    try:
        app()
    finally:
        gc.freeze()  # what goes with the process needs no last search for cycles
