"""A report on loopback: this machine's browsers only, the report's files only."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from wakesight.errors import RequestError
from wakesight.report.writing import OURS, PAGE

HOST = "127.0.0.1"


def report_folder(folder: Path) -> Path:
    """The report of a run folder, or the folder itself if it is a report. Raises RequestError without one."""
    for place in (folder, folder / "report"):
        if (place / PAGE).is_file():
            return place
    if not folder.is_dir():
        raise RequestError(f"{folder} is no folder; give a run folder, or a report made by wakesight report")
    raise RequestError(f"{folder} has no report yet; type: wakesight report {folder}")


def outdated(report: Path) -> bool:
    """Whether the run that this report lies in was written to after the report was made."""
    records = report.resolve().parent / "records.jsonl"
    return records.is_file() and records.stat().st_mtime > (report / PAGE).stat().st_mtime


def server(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """Serves the report in `folder`; port 0 takes a free one. Raises RequestError for a port that is taken."""
    if not 0 <= port <= 65535:
        raise RequestError(f"--port {port} is no port; give one from 1 to 65535, or 0 for a free one")
    try:
        made = ThreadingHTTPServer((HOST, port), partial(_Handler, directory=str(folder)))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RequestError(f"port {port} cannot be used: {reason}; give another one, or --port 0") from None
    made.daemon_threads = True
    return made


def address(made: ThreadingHTTPServer) -> str:
    return f"http://{HOST}:{made.server_address[1]}/"


class _Handler(SimpleHTTPRequestHandler):
    """Files of the report, by GET and HEAD; nothing else, and no listing."""

    server_version = "wakesight"
    sys_version = ""

    def send_head(self) -> Any:
        if not self._asked_here():
            self.send_error(HTTPStatus.FORBIDDEN, "this report is served to this machine only")
            return None
        if self._file() is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return None
        return super().send_head()

    def translate_path(self, path: str) -> str:
        return str(self._file() or Path(self.directory) / PAGE)

    def _file(self) -> Path | None:
        """What the request names, if that is a file of the report itself, links resolved."""
        root = Path(self.directory).resolve()
        try:
            asked = Path(super().translate_path(self.path)).resolve()
            path = root / PAGE if asked == root else asked
            inside = path.is_relative_to(root) and path.relative_to(root).parts[0] in OURS
            return path if inside and path.is_file() else None
        except (OSError, ValueError):  # a name that no file can have
            return None

    def _asked_here(self) -> bool:
        """Not under a foreign name that was made to point here."""
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        return host in (HOST, "localhost")

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal shows the address."""
