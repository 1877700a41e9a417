"""Requests of the editor to ComfyUI's server, and the graphs that clients send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

from server import PromptServer

from ...errors import UserError

# Seconds after which a request is answered without a result.
_LONGEST_ANSWER = 20


def serve(path: str, answer: Callable[[bytes], tuple[int, Any]], most: int) -> None:
    """Answer POST requests to a path of the server, in a thread, since the event loop serves everything else.

    Args:
        path: of the requests.
        answer: from the request's content to a status and what is sent as JSON.
        most: bytes of a request.

    Raises:
        UserError: another pack has the path; the server would not start with two.
    """
    routes = PromptServer.instance.routes
    if any(getattr(route, "path", None) == path for route in routes):
        raise UserError(f"another node pack already uses the address {path}")

    # One request at a time: a folder may be slow.
    worker = ThreadPoolExecutor(1, "fastar")

    async def handle(request: Any) -> Any:
        from aiohttp import web  # noqa: TID251  ComfyUI itself runs on it

        body = bytearray()
        async for part in request.content.iter_chunked(most):
            body += part
            if len(body) > most:
                return web.json_response({"error": f"the request has more than {most} bytes."}, status=400)

        work = asyncio.get_running_loop().run_in_executor(worker, answer, bytes(body))
        try:
            status, content = await asyncio.wait_for(work, _LONGEST_ANSWER)
        except asyncio.TimeoutError:
            status = 400
            content = {"error": f"the file was not read within {_LONGEST_ANSWER} seconds; try again."}
        return web.json_response(content, status=status)

    routes.post(path)(handle)


# The graph of the request that the server works on.
_sent: ContextVar[Any] = ContextVar("fastar_sent", default=None)


def watch_prompts(prepare: Callable[[Any], None]) -> None:
    """Let ``prepare`` change what a client sends to /prompt, and keep the graph in it for ``validate_inputs``, to which
    ComfyUI passes none.
    """

    def keep(request: Any) -> Any:
        _sent.set(request.get("prompt") if isinstance(request, Mapping) else None)
        prepare(request)
        return request

    PromptServer.instance.add_on_prompt_handler(keep)


def sent_graph() -> Any:
    """The graph that the server checks, as the client sent it; None outside of a check."""
    return _sent.get()
