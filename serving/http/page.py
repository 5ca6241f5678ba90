"""The page at `/`: a chat and the state of the engine, in one file that needs no network."""

import secrets
from importlib import resources

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from serving.http.context import ServerContext


def page_routes(context: ServerContext) -> list[Route]:
    """The route of the page, or none where it is switched off."""
    if not context.settings.ui:
        return []
    text = resources.files("serving.http").joinpath("page.html").read_text(encoding="utf-8")

    async def page(request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; "
            f"script-src 'nonce-{nonce}'; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'"
        )
        headers = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-store",
        }
        return HTMLResponse(text.replace("NONCE", nonce, 1), headers=headers)

    return [Route("/", page, methods=["GET"])]
