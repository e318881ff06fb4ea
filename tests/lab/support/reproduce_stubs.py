"""Stand-ins for the commands and servers of ``eval.lab.reproduce``."""

import sys
from pathlib import Path

from launch.server import ServerProcess

STUB = """
import argparse, json, sys, urllib.request
parser = argparse.ArgumentParser()
for name in ("out", "revision", "get", "reads"):
    parser.add_argument(f"--{name}")
parser.add_argument("--status", type=int, default=0)
args = parser.parse_args()
print("measures", args.out)
if args.get:
    print(urllib.request.urlopen(args.get).read().decode())
if args.reads:
    open(args.reads)
with open(args.out, "w") as file:
    print(json.dumps({"kind": "header", "command": "stub", "revision": args.revision}), file=file)
    print(json.dumps({"kind": "summary"}), file=file)
print("no luck" if args.status else "done", file=sys.stderr)
sys.exit(args.status)
"""
SERVER = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
if "--broken" in sys.argv:
    print("loading\\ntorch.OutOfMemoryError: CUDA out of memory\\nReceived sigquit", flush=True)
    sys.exit(3)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/end":
            print("RuntimeError: no more pages\\nbye", flush=True)
            os._exit(1)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"a stub answers")
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class StubServer(ServerProcess):
    """A process that answers, in place of SGLang."""

    started: list["StubServer"] = []

    def __init__(self, model_path: Path, *args: str, log_path: Path, env: dict[str, str], timeout: float) -> None:
        super().__init__(model_path, *args, log_path=log_path, env=env, timeout=timeout)
        self.meant = self.command
        self.command = [sys.executable, str(log_path.parent.parent / "stub_server.py"), str(self.port), *args]
        StubServer.started.append(self)
