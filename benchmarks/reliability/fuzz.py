"""Bars 12 and 13: what the API fuzzer makes of the OpenAPI document, and the hostile corpus."""

import asyncio
import collections
import json
import re
import subprocess
import sys
import tempfile
import time

from benchmarks.reliability.harness import GREEDY, ROOT, Check, Options, bar, request, running
from tests.serving.hostile_corpus import corpus


@bar("12", "schemathesis over /openapi.json")
def schemathesis(options: Options) -> list[Check]:
    with running("--max-num-seqs=16", "--max-num-queued-reqs=64") as server:
        url = "http://{}:{}/openapi.json".format(*server.address)
        text = json.loads(server.get("/openapi.json").body)
        per_operation = max(1, options.cases // len(text["paths"]))
        # It leaves a folder of its own where it runs.
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "schemathesis.cli", "run", url),
                    "--checks=not_a_server_error,status_code_conformance,content_type_conformance,"
                    "response_schema_conformance",
                    f"--max-examples={per_operation}",
                    # It takes as long as it is told to.
                    "--exclude-path=/diagnose",
                    "--phases=examples,coverage,fuzzing",
                    "--mode=all",
                    "--continue-on-failure",
                    "--request-timeout=20",
                    "--suppress-health-check=all",
                    "--no-color",
                ],
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )
        (ROOT / "build").mkdir(exist_ok=True)
        (ROOT / "build/schemathesis.txt").write_text(done.stdout + done.stderr)
        counted = re.search(r"(\d+) generated", done.stdout)
        failures = re.search(r"(\d+) (?:unique )?failures?", done.stdout)
        answer = server.complete(max_tokens=2, **GREEDY)["usage"]["completion_tokens"]
        return [
            Check("requests", _number(counted), "", options.cases, at_least=True),
            Check("kinds of failures", _number(failures), "", 0),
            Check("exit code", done.returncode, "", 0),
            Check("tokens of the next request", answer, "", 2, at_least=True),
            server.idle_check(),
        ]


def _number(found: "re.Match[str] | None") -> float:
    return float(found[1]) if found else 0.0


@bar("13", "the corpus of hostile requests")
def hostile(options: Options) -> list[Check]:
    with running("--max-num-seqs=8") as server:

        def text() -> str:
            found: str = server.complete(max_tokens=8, **GREEDY)["choices"][0]["text"]
            return found

        usual = text()
        wrong: collections.Counter[str] = collections.Counter()
        slowest, count = (0.0, ""), 0
        for each in corpus():
            body = each.body()
            began = time.monotonic()
            reply = asyncio.run(
                request(server.address, each.method, each.path, body, headers=dict(each.headers))
            )
            slowest = max(slowest, (time.monotonic() - began, each.name))
            count += 1
            wrong["status"] += reply.status not in each.statuses
            wrong["text"] += text() != usual
        return [
            Check("requests", count, "", 100, at_least=True),
            Check("wrong statuses", wrong["status"], "", 0),
            Check("changed texts of the request after", wrong["text"], "", 0),
            Check(f"slowest answer ({slowest[1]})", slowest[0], "s", 1),
            server.idle_check(),
        ]
