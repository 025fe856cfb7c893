"""Measure the cost of HTTP: the round trip of an operation that does almost nothing, and the request rate of
many clients.

    python -m scripts.bench.latency [url=URL] [ops=300] [clients=256] [requests=5120] [rounds=3]

A round trip consists of the requests that the SDK sends for one operation: the client posts the operation (an
optim_step of a model without a gradient) and waits for its result with one retrieve_future. The script also
times the post alone, the work of the engine (the mean, from a counter of `/metrics`), and `healthz`, the
cheapest route. Without `url`, the script starts a server with a random model of one layer. Other load on the
machine lengthens the times. The script therefore prints the load of each round; compare the fastest rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import numpy as np

from scripts.sdk_matrix import serving

STEP_SECONDS = 'skyrl_tx_work_seconds_total{work="step"}'
HEADERS = {"X-API-Key": "tml-dummy", "Accept": "application/json"}


class Client:
    """A client that uses HTTP directly and has one session and one model."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url = http, url
        self._model_id, self._seq_id = "", 1

    async def post(self, route: str, **body: object) -> dict:
        async with self._http.post(f"{self._url}/api/v1/{route}", json=body, headers=HEADERS) as response:
            answer = await response.json()
            if response.status != 200 or "error" in answer:
                raise SystemExit(f"latency: {route} answered {response.status}: {answer}")
            return answer

    async def open(self) -> None:
        session = await self.post(
            "create_session", tags=[], user_metadata=None, sdk_version="0.38.0", type="create_session"
        )
        async with self._http.get(f"{self._url}/api/v1/get_server_capabilities", headers=HEADERS) as response:
            base_model = (await response.json())["supported_models"][0]["model_name"]
        creation = await self.post(
            "create_model",
            session_id=session["session_id"],
            model_seq_id=0,
            base_model=base_model,
            lora_config={"rank": 1},
        )
        self._model_id = (await self.post("retrieve_future", request_id=creation["request_id"]))["model_id"]

    async def round_trip(self) -> tuple[float, float]:
        """Return (seconds until the operation is accepted, seconds until its result has arrived). Both times
        start with the post."""
        began = time.perf_counter()
        self._seq_id += 1
        accepted = await self.post(
            "optim_step", model_id=self._model_id, adam_params={"learning_rate": 0.0}, seq_id=self._seq_id
        )
        between = time.perf_counter()
        await self.post("retrieve_future", request_id=accepted["request_id"])
        return between - began, time.perf_counter() - began

    async def engine_seconds(self) -> float:
        """Return the seconds that the engine has spent on operation steps, here optimizer steps."""
        async with self._http.get(f"{self._url}/metrics", headers=HEADERS) as response:
            lines = (await response.text()).splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(STEP_SECONDS))

    async def healthz(self) -> float:
        began = time.perf_counter()
        async with self._http.get(f"{self._url}/api/v1/healthz") as response:
            await response.read()
        return time.perf_counter() - began


async def requests_per_second(client: Client, clients: int, requests: int) -> tuple[float, np.ndarray]:
    """Send `healthz` requests one after another on each of `clients` connections. Return (requests per
    second, duration of each request in seconds)."""

    async def send() -> list[float]:
        return [await client.healthz() for _ in range(requests // clients)]

    began = time.perf_counter()
    durations_s = [
        second for seconds in await asyncio.gather(*(send() for _ in range(clients))) for second in seconds
    ]
    return len(durations_s) / (time.perf_counter() - began), np.array(durations_s)


async def operation_requests_per_second(client: Client, clients: int, requests: int) -> float:
    """Run operations one after another on each of `clients` connections. Return the requests per second; an
    operation consists of two requests."""

    async def operate() -> None:
        for _ in range(max(1, requests // clients // 2)):
            await client.round_trip()

    began = time.perf_counter()
    await asyncio.gather(*(operate() for _ in range(clients)))
    return clients * max(1, requests // clients // 2) * 2 / (time.perf_counter() - began)


def percentiles(seconds: np.ndarray) -> str:
    p50, p99 = np.percentile(1e3 * seconds, (50, 99))
    return f"p50 {p50:6.2f} ms  p99 {p99:6.2f} ms"


async def measure(url: str, *, ops: int, clients: int, requests: int, rounds: int) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=clients)) as http:
        client = Client(http, url)
        await client.open()
        for _ in range(20):  # compiles programs and opens a connection
            await client.round_trip()
        for number in range(rounds):
            print(f"round {number + 1}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
            began = await client.engine_seconds()
            pairs = np.array([await client.round_trip() for _ in range(ops)])
            in_engine = (await client.engine_seconds() - began) / ops
            print(f"  operation, round trip           {percentiles(pairs[:, 1])}")
            print(f"    the post                      {percentiles(pairs[:, 0])}")
            print(f"    in the engine                 mean {1e3 * in_engine:5.2f} ms")
            healthz = np.array([await client.healthz() for _ in range(ops)])
            print(f"  healthz                         {percentiles(healthz)}")
            rate, durations_s = await requests_per_second(client, clients, requests)
            print(
                f"  {clients} clients, healthz            {rate:7.0f} requests/s  {percentiles(durations_s)}"
            )
            rate = await operation_requests_per_second(client, clients, requests)
            print(f"  {clients} clients, operations         {rate:7.0f} requests/s", flush=True)


def main(argv: list[str]) -> int:
    options = dict(argument.split("=", 1) for argument in argv)
    numbers = {
        name: int(options.get(name, default))
        for name, default in (("ops", 300), ("clients", 256), ("requests", 5120), ("rounds", 3))
    }
    with (
        tempfile.TemporaryDirectory() as directory,
        contextlib.nullcontext(options["url"]) if "url" in options else serving(Path(directory)) as url,
    ):
        asyncio.run(measure(url, **numbers))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
