"""A worker for `src/envs/service/subprocess_pool.py` that adds numbers and fails on request.

add {episode, n, pid}    {"total": ...}, the sum of the episode's numbers so far, and the worker's process id
                         as "pid" if the optional argument `pid` is true
hang {episode}           never answers
alarm {episode}          runs until SIGALRM ends the process, as in tau2's worker
die {episode}            exits with status 3 and a message on stderr
nonsense {episode}       writes a line that is not a reply, then hangs
once {episode, how, flag}  creates the file `flag` and fails as operation `how`; adds 0 if the file exists
die_if {episode, flag}   adds 0; exits with status 3 if the file `flag` exists
forget {episode}         discards the sum of the episode
known {episode}          {"episodes": [...]}, the sorted episodes that have a sum

With the command-line argument `hang`, the worker never reports that it has started. With `refuse`, it reports
an error in place of its start and exits.
"""

import json
import os
import signal
import sys
import time

totals: dict[str, int] = {}


def misbehave(how: str) -> None:
    if how == "hang":
        time.sleep(3600)
    if how == "alarm":
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(3600)
    if how == "die":
        print("Traceback: ...\nMemoryError: out of it", file=sys.stderr, flush=True)
        os._exit(3)
    if how == "nonsense":
        print("INFO: not a reply", flush=True)
        time.sleep(3600)


def handle(request: dict) -> dict:
    op, episode = request["op"], request["episode"]
    if op == "once":
        if not os.path.exists(request["flag"]):
            open(request["flag"], "w").close()
            misbehave(request["how"])
        op, request["n"] = "add", 0
    if op == "die_if":
        if os.path.exists(request["flag"]):
            misbehave("die")
        op, request["n"] = "add", 0
    if op == "add":
        totals[episode] = totals.get(episode, 0) + request["n"]
        return {"total": totals[episode], **({"pid": os.getpid()} if request.get("pid") else {})}
    if op == "forget":
        totals.pop(episode, None)
        return {}
    if op == "known":
        return {"episodes": sorted(totals)}
    misbehave(op)
    return {"error": f"ValueError: no such thing as {op}"}


if "hang" in sys.argv:
    misbehave("hang")
if "refuse" in sys.argv:
    print(json.dumps({"id": 0, "error": "wrong tau2; run scripts/setup_tau.sh"}), flush=True)
    sys.exit()
print(json.dumps({"id": 0}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({"id": request["id"], **handle(request)}), flush=True)
