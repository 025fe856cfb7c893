"""How long from starting the server to its first sample, with an empty and with a filled compilation cache.

    python -m scripts.bench.second_start [model=DIR] [starts=3]

Each line: seconds until healthz says ok and until the first sample is back, and how many programs were compiled or read from the cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

import httpx
import tinker
from tinker import types

from scripts.run_skyrl_tx import QUICKSTART, QUICKSTART_SERVER, free_port, healthy


def main(argv: list[str]) -> int:
    given = dict(argument.split("=", 1) for argument in argv)
    model = given.get("model", str(QUICKSTART / "model"))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(int(given.get("starts", "3"))):
            start(Path(folder), model, "empty cache" if number == 0 else "filled cache")
    return 0


def start(folder: Path, model: str, label: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    arguments = (f"base_model={model}", "model_alias=local/quickstart", f"port={httpx.URL(url).port}", *QUICKSTART_SERVER)
    directories = (f"checkpoints_dir={folder / 'checkpoints'}", f"compilation_cache_dir={folder / 'xla'}", "log_level=warning")
    started = time.monotonic()
    server = subprocess.Popen([sys.executable, "-m", "skyrl_tx_server", *arguments, *directories], stdout=subprocess.DEVNULL)
    try:
        while not healthy(url):
            if server.poll() is not None:
                raise SystemExit(f"the server stopped with status {server.returncode}")
            time.sleep(0.05)
        ready_s = time.monotonic() - started
        with tinker.ServiceClient(base_url=url, api_key="tml-dummy") as service:
            sampler = service.create_sampling_client(base_model="local/quickstart").result()
            prompt, settings = types.ModelInput.from_ints(list(range(1, 65))), types.SamplingParams(max_tokens=16, seed=1, stop=[])
            sampler.sample(prompt, 1, settings).result()
        first_s = time.monotonic() - started
        engine = httpx.get(f"{url}/api/v1/stats").json()["engine"]
        programs = f"{sum(engine['programs'].values())} programs, {engine['programs_from_cache']} from the cache"
        print(f"{label:12}  ready {ready_s:5.2f} s  first sample {first_s:5.2f} s  {programs}", flush=True)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
