"""A prefill and a decode server (P and D) on two GPUs, beside two plain engines on the same GPUs.

    python -m tests.load.pair recipes/qwen3-8b.yaml --set load.format=dummy --results-dir results

Each rate of --rates is a load of its own, whose requests the client sends as a router does: to P,
then with P's answer to D. The same prompts are then sent to D alone, which has their pages. So this
run is decoding without arrivals. Last, `parallel.dp: 2` gets the same loads.

A record of each run is written. The table has the gaps between tokens, the first token, and the
requests per second, then the gap at p99 of D beside that of decoding alone. --plot draws it. With
--records nothing is measured, and the table and the plot are those of records:

    python -m tests.load.pair recipes/qwen3-8b.yaml --records ID,ID,... --plot FILE.svg
"""

from __future__ import annotations

import argparse
import contextlib
import re
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import msgspec

from nanovllm.bench import online, record, store, sweep
from nanovllm.bench.measure import Advance
from nanovllm.bench.record import Record
from nanovllm.bench.report import by_label, samples_of
from nanovllm.bench.started import LiveServer, started
from nanovllm.bench.workload import Workload
from nanovllm.config import Config, load_config
from nanovllm.transfer.tickets import ENVIRONMENT

CONNECTED_S = 60.0
PORTS = ("server.port", "transfer.listen", "transfer.peers")
COLUMNS = {
    "req/s": "requests_per_s",
    "cached": "cached_tokens",
    "TTFT p50": "ttft_p50_ms",
    "p99": "ttft_p99_ms",
    "gap p50": "icl_p50_ms",
    "gap p99": "icl_p99_ms",
    "gap max": "icl_max_ms",
    "E2E p50": "e2e_p50_ms",
}
PLOTTED = {
    "ttft_p50_ms": "first token (p50)",
    "icl_p99_ms": "gap between tokens (p99)",
    "e2e_p50_ms": "whole answer (p50)",
}
Runs = dict[tuple[str, float], Record]  # by kind of server and rate


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--rates", default="1,2,3", help="requests per second of the loads")
    parser.add_argument("--seconds", type=float, default=15.0, help="of arrivals of each load")
    parser.add_argument("--input-len", type=int, default=8000)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--host-gib", type=float, default=16.0, help="host memory of D for pages")
    parser.add_argument("--backend", default="auto", help="transfer.backend")
    parser.add_argument("--kinds", default="pair,plain", help="pair, plain, or both")
    parser.add_argument("--devices", default="0,1", help="GPUs of P and D; empty: CPUs")
    parser.add_argument("--processes", type=int, default=4, help="of the client")
    parser.add_argument("--results-dir", type=Path, help="write records there")
    parser.add_argument("--commit", help="of the records, where there is no .git")
    parser.add_argument("--records", help="ids of earlier runs, in place of measuring")
    parser.add_argument("--plot", type=Path, help="SVG file to write")
    return parser.parse_args(arguments)


class Servers:
    """Starts servers of one recipe, and measures them. The records are in `runs`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rates = [float(rate) for rate in options.rates.split(",")]
        self.devices = [device for device in options.devices.split(",") if device]
        self.runs: Runs = {}
        self._secret = secrets.token_hex(16)

    @contextlib.contextmanager
    def serving(
        self, devices: Sequence[str], *keys: str
    ) -> Iterator[tuple[str, Config, LiveServer]]:
        """Serve the recipe with more keys on some devices. Yield address, recipe and process."""
        port = free_port()
        sets = [*self.options.sets, *keys, f"server.port={port}"]
        variables = [f"{ENVIRONMENT}={self._secret}"]
        if devices:
            variables.append(f"CUDA_VISIBLE_DEVICES={','.join(devices)}")
        changes = [word for text in sets for word in ("--set", text)]
        own = [sys.executable, "-m", "nanovllm", "serve", self.options.recipe, *changes]
        url = f"http://127.0.0.1:{port}"
        with started(["env", *variables, *own], url) as process:
            say(f"ready after {process.ready_s:.0f} s: {' '.join(keys)}")
            yield url, load_config(self.options.recipe, sets), process

    def measure_pair(self) -> None:
        """Measure P and D, and then D with the same prompts."""
        address = f"127.0.0.1:{free_port()}"
        backend = f"transfer.backend={self.options.backend}"
        of_p = "transfer.role=prefill", f"transfer.listen={address}", backend
        of_d = (
            *("transfer.role=decode", f"transfer.peers=[{address}]", backend),
            f"cache.host_gib={self.options.host_gib}",
        )
        with (
            self.serving(self.devices[:1], *of_p) as (p, _, _),
            self.serving(self.devices[1:], *of_d) as (d, config, process),
        ):
            wait_until_connected(p, d)
            for rate in self.rates:
                self.run("pair", rate, url=d, config=config, server=process, prefill_url=p)
                self.run("decode alone", rate, url=d, config=config, server=process)
            show_reads(d)

    def measure_plain(self) -> None:
        """Measure two engines of one server."""
        with self.serving(self.devices, "parallel.dp=2") as (url, config, process):
            for rate in self.rates:
                self.run("plain", rate, url=url, config=config, server=process)

    def run(
        self,
        kind: str,
        rate: float,
        *,
        url: str,
        config: Config | None = None,
        server: LiveServer | None = None,
        prefill_url: str = "",
    ) -> None:
        """Send one load, and keep its record."""
        options = self.options
        load = Workload(
            num_prompts=max(2, round(rate * options.seconds)),
            input_len=options.input_len,
            output_len=options.output_len,
            request_rate=rate,
            seed=round(1000 * rate),
        )
        is_repeated = kind == "decode alone"
        outcome = online.measure_server(
            load,
            config,
            url=url,
            api_key=None,
            goals_ms={},
            warmup=0 if is_repeated else 2,
            processes=options.processes,
            bar=silent,
            server=server,
            prefill_url=prefill_url,
        )
        if outcome.errors:
            say(f"errors of {kind} at {rate}: {outcome.errors}")
        made = self.runs[kind, rate] = self.described(kind, outcome.record)
        say(row(kind, rate, made))
        if options.results_dir is not None:
            say(f"record: {store.write(made, options.results_dir)}")

    def described(self, kind: str, made: Record) -> Record:
        """Return a record with the kind of servers and this command. Ports are left out."""
        workload = {**made.workload, "name": f"{kind.replace(' ', '-')}-{made.workload['name']}"}
        if kind == "decode alone":
            workload["prompts"] = "random words, all of which an earlier run has sent"
        tree = record.commit(stated=self.options.commit)
        return msgspec.structs.replace(
            made,
            workload=workload,
            changed={key: value for key, value in made.changed.items() if key not in PORTS},
            argv=record.without_secrets(["python", "-m", "tests.load.pair", *sys.argv[1:]]),
            commit=tree.hash,
            dirty=tree.is_dirty,
        )


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until_connected(p: str, d: str) -> None:
    """Send short prompts through P and D until pages arrive. Raise RuntimeError after a minute."""
    deadline = time.monotonic() + CONNECTED_S
    model = httpx.get(f"{d}/v1/models").json()["data"][0]["id"]
    while time.monotonic() < deadline:
        text = f"{secrets.token_hex(8)} " + "pages " * 600
        asked = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
        leg = asked | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        params = post(p, leg).get("kv_transfer_params")
        answer = post(d, asked | {"kv_transfer_params": params})
        if answer["usage"]["prompt_tokens_details"]["cached_tokens"]:
            return
        time.sleep(0.5)
    raise RuntimeError("no page of P arrived at D")


def post(url: str, body: dict[str, object]) -> dict[str, dict[str, dict[str, int]]]:
    found = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
    found.raise_for_status()
    answer: dict[str, dict[str, dict[str, int]]] = found.json()
    return answer


def show_reads(url: str) -> None:
    """Print D's counters of transfers."""
    page = httpx.get(f"{url}/metrics", trust_env=False).text
    found = samples_of(page)
    say(f"prompt tokens by tier: {by_label(found, 'nanovllm:tier_hit_tokens_total', 'tier')}")
    for line in page.splitlines():
        if re.match(r"(vllm|nanovllm):\w*(nixl|transfer)\w*(total|sum|count)\b", line):
            say(line)


@contextlib.contextmanager
def silent(total: int, label: str) -> Iterator[Advance]:
    yield lambda requests, tokens: None


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def row(kind: str, rate: float, made: Record) -> str:
    """Return a row of the table. Times are in milliseconds."""
    values = [made.metrics.get(name, float("nan")) for name in COLUMNS.values()]
    numbers = " ".join(f"{value:9.1f}" for value in values)
    return f"{kind:14} {rate:6g} {numbers}"


def table(runs: Runs) -> str:
    """Return all rows, then D's gap at p99 beside that of decoding alone."""
    head = f"{'':14} {'rate':>6} " + " ".join(f"{name:>9}" for name in COLUMNS)
    rows = [head, *(row(kind, rate, made) for (kind, rate), made in runs.items())]
    for (kind, rate), made in runs.items():
        alone = runs.get(("decode alone", rate))
        if kind == "pair" and alone is not None:
            ratio = made.metrics["icl_p99_ms"] / alone.metrics["icl_p99_ms"]
            rows.append(f"gap p99 of D at rate {rate:g}: {ratio:.2f} of decoding alone")
    return "\n".join(rows)


def recorded(ids: str, results_dir: Path) -> Runs:
    """Return the runs of records. A record's load has the kind and the rate in its name."""
    runs: Runs = {}
    for name in ids.split(","):
        one = store.find(name, results_dir)
        kind, _, rate = one.workload["name"].rpartition("-rate")
        runs[kind.replace("-", " "), float(rate)] = one
    return runs


def draw(runs: Runs, path: Path) -> None:
    """Draw the first token, the gaps at p99 and whole answers over the rate, by kind of server."""
    figure = sweep.new_figure(11, 3.5)
    for axes, (name, label) in zip(figure.subplots(1, 3), PLOTTED.items(), strict=True):
        for kind in dict.fromkeys(kind for kind, _ in runs):
            points = {
                rate: made.metrics[name] for (each, rate), made in runs.items() if each == kind
            }
            axes.plot([*points], [*points.values()], "o-", label=kind)
        axes.set(xlabel="requests per second", ylabel=f"{label}, ms", ylim=(0, None))
        axes.legend()
    sweep.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> Runs:
    options = parsed(arguments)
    if options.records:
        runs = recorded(options.records, options.results_dir or Path("results"))
    else:
        runs = measured(options)
    say(table(runs))
    if options.plot is not None:
        draw(runs, options.plot)
        say(f"plot: {options.plot}")
    return runs


def measured(options: argparse.Namespace) -> Runs:
    servers, kinds = Servers(options), options.kinds.split(",")
    if "pair" in kinds:
        servers.measure_pair()
    if "plain" in kinds:
        servers.measure_plain()
    return servers.runs


if __name__ == "__main__":
    main()
