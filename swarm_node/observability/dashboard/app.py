"""The HTTP side of the dashboard: its page, JSON, and server-sent events. It only reads."""

from __future__ import annotations

import hmac
import io
import mimetypes
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import anyio
import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm_node.observability.dashboard.gallery import Gallery, Told, news
from swarm_node.observability.hosts import host_of

STATIC = Path(__file__).parent / "static"
mimetypes.add_type("text/javascript", ".js")  # the system may know it by another name
FILES_CHECK_S = 0.5  # time between two looks at the files for a page
PAGE_ALIVE_S = 10.0
"""A page gets an event at least this often, and takes the connection for lost otherwise (SILENT_MS in dashboard.js). It
must be an event: the browser keeps comment lines to itself."""
COOKIE = "swarm_node_dashboard"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

CLOSE = {"Connection": "close"}
"""Headers of a refusal: otherwise strangers could keep a connection, and ask on without reading the answers."""


def make_app(
    gallery: Gallery,
    hosts: frozenset[str] | None,
    token: str | None,
    stopping: Callable[[], bool] = lambda: False,
) -> ASGIApp:
    """The application. `hosts` are the names that this machine may be called by (None: any). If there is a `token`, a
    request without it sees nothing. Streams end when `stopping` returns True."""

    async def runs(request: Request) -> Response:
        return _json({"runs": await run_in_threadpool(gallery.list)})

    async def run(request: Request) -> Response:
        id = request.path_params["id"]
        told = await run_in_threadpool(lambda: list(news(gallery, [id], Told())))
        parts = {kind: message for kind, message in told if kind not in ("list", "gone")}
        if not parts:
            return PlainTextResponse(f"no run of the name {id}\n", 404)
        curves = {name: value for name, value in parts["curves"].items() if name not in ("id", "first")}
        names = "summary", "status", "config", "events", "held_out", "samples"
        return _json({"curves": curves} | {part: parts[part][part] for part in names})

    async def stream(request: Request) -> Response:
        ids, told = request.query_params.getlist("run"), Told()

        async def messages() -> AsyncIterator[bytes]:
            quiet = 0.0
            while not stopping():
                told_now = await run_in_threadpool(lambda: b"".join(map(_sent_event, news(gallery, ids, told))))
                if told_now:
                    yield told_now
                elif quiet >= PAGE_ALIVE_S:
                    yield _sent_event(("alive", {}))
                quiet = 0.0 if told_now or quiet >= PAGE_ALIVE_S else quiet + FILES_CHECK_S
                await anyio.sleep(FILES_CHECK_S)

        return StreamingResponse(messages(), media_type="text/event-stream")

    async def qr(request: Request) -> Response:
        view = await run_in_threadpool(gallery.view, request.path_params["id"])
        link = None if view is None else view.link
        if link is None:
            return PlainTextResponse("no link\n", 404)
        return Response(await run_in_threadpool(qr_code, link), media_type="image/svg+xml")

    routes = [
        Route("/api/runs", runs),
        Route("/api/qr/{id:path}", qr),
        Route("/api/runs/{id:path}", run),
        Route("/api/stream", stream),
    ]
    page = Mount("/", StaticFiles(directory=STATIC, html=True))
    return Guard(Starlette(routes=[*routes, page]), hosts, token)


@lru_cache(16)
def qr_code(link: str) -> bytes:
    """The link as a QR code in SVG, black on white. Of several addresses it has the first: a denser code is hard to
    read from a screen."""
    import segno  # of the extra `swarm`, without which there is no link

    image = io.BytesIO()
    segno.make(link.partition("&")[0], error="m", micro=False).save(image, kind="svg", scale=4, light="#fff")
    return image.getvalue()


@dataclass
class Guard:
    """Guards an application: GET only, the token, headers, and a known host. Otherwise another site's name could be
    pointed at this machine, and its script could read the page."""

    app: ASGIApp
    hosts: frozenset[str] | None
    token: str | None = field(repr=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self._refusal(Request(scope)) or self.app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("the dashboard only shows\n", 405, {"Allow": "GET, HEAD"} | CLOSE)
        if self.hosts is not None and host_of(request.headers.get("host", "")) not in self.hosts:
            return PlainTextResponse("unknown host: open the address that `swarm-node dashboard` printed\n", 403, CLOSE)
        if self.token is None:
            return None
        name = f"{COOKIE}_{(request.scope.get('server') or ('', 0))[1]}"  # cookies do not tell ports apart
        if self._is_token(request.query_params.get("token")):  # out of the address bar, into a cookie
            response = RedirectResponse("/", 303)
            response.set_cookie(name, self.token, httponly=True, samesite="lax")
            return response
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if self._is_token(request.cookies.get(name)) or (scheme.lower() == "bearer" and self._is_token(bearer.strip())):
            return None
        return PlainTextResponse(
            "no token: open the address that `swarm-node dashboard` printed, with all that follows the ?\n", 401, CLOSE
        )

    def _is_token(self, given: str | None) -> bool:
        return bool(given and self.token) and hmac.compare_digest(str(given).encode(), str(self.token).encode())


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _sent_event(named: tuple[str, object]) -> bytes:
    kind, message = named
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(message))
