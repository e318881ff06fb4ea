"""A small OpenAI-compatible server that fails on demand."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """Answers the last token of a prompt, plus `error`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.busy = 0
        self.dies_after = 10**9
        self.error = 0
        self.info: dict[str, Any] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer({"data": [{"id": "tiny", "max_model_len": 100}]})
        elif self.path == "/server_info" and self.server.info:
            self.answer(self.server.info)
        else:
            self.answer({"error": "no such page"}, 404)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        if len(server.asked) >= server.dies_after:
            self.close_connection = True
            return
        if server.busy:
            server.busy -= 1
            self.answer({"error": "busy"}, 503)
            return
        server.asked.append(request)
        if server.info:
            state = server.info["internal_states"][0]["sparse"]
            state["decode_rows"] += 1
        prompt = request["prompt"]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 1}
        text = str(prompt[-1] + server.error)
        self.answer({"choices": [{"text": text, "finish_reason": "stop"}], "usage": usage})
