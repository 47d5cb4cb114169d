"""`millrace board`: shows a recorded or simulated run in the browser."""

from __future__ import annotations

import json
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from millrace.core.board.events import BoardError
from millrace.core.board.files import check_head, read_objects, read_text
from millrace.core.errors import reason_of
from millrace.proxy.board.page import content_security_policy, with_recording
from millrace.sim.board import board_of_recording

HOST = "127.0.0.1"


def page_of(path: Path) -> str:
    """Returns the board's page with the run of a file: lines of the board, or a recording of
    `millrace scheduler --record`.

    Raises MillraceError for another file.
    """
    first = next(read_objects(path), {})
    if "millrace_recording" in first:
        lines: list[str] = []
        board_of_recording(path, lambda line: lines.append(json.dumps(line)))
        return with_recording("\n".join(lines))
    if "millrace_board" in first:
        check_head(path)
        return with_recording(read_text(path))
    raise BoardError(
        f"{path}: its first line names neither millrace_board (millrace sim run --board) nor "
        "millrace_recording (millrace scheduler --record)"
    )


def write_page(page: str, path: Path) -> None:
    """Writes the page as one file that needs no server. Raises BoardError for a bad path."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise BoardError(f"--html {path}: {reason_of(error)}") from error


def server_of(page: str, port: int) -> ThreadingHTTPServer:
    """Returns a server on loopback that answers every GET of / with the page.

    Raises BoardError if the port is taken.
    """
    body = page.encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            self.send_response(HTTPStatus.OK)
            self.send_header("content-type", "text/html; charset=utf-8")
            self.send_header("content-length", str(len(body)))
            self.send_header("content-security-policy", content_security_policy())
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing: one reader looks at one page."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise BoardError(f"--port {port}: {error.strerror}") from error


def serve(page: str, port: int) -> None:
    """Serves the page until Ctrl-C, and says where. Raises BoardError."""
    with server_of(page, port) as server:
        print(f"http://{HOST}:{server.server_port}/ shows the run; Ctrl-C ends", flush=True)
        server.serve_forever()
