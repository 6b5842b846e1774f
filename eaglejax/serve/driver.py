"""The thread that runs an engine, and how coroutines of a server talk to it."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from eaglejax.drafts.base import Request
from eaglejax.engine.engine import Engine, Event
from eaglejax.errors import RequestError

log = logging.getLogger("eaglejax.serve")


class StoppedError(RequestError):
    """The server is shutting down."""


class Ticket:
    """Requests that were submitted together. ``ids``, in their order; ``events`` of all of them come through
    the queue, which ends with the last result: there are at most as many as tokens."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, event: Event) -> None:
        """From the engine's thread."""
        self._loop.call_soon_threadsafe(self.events.put_nowait, event)


class Driver:
    """Steps ``engine`` in a thread of its own while it has requests; all calls to it are made there."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    async def submit(self, requests: Sequence[Request], **options: Any) -> Ticket:
        """Queue ``requests``, all of them or none; ``options`` as ``Engine.submit`` has them.

        Raises what that raises, and StoppedError during a shutdown.
        """
        if self._stopping:
            raise StoppedError("the server is shutting down; send the request elsewhere")
        ticket, done = Ticket(), Future[None]()

        def call() -> None:
            try:
                for request in requests:
                    number = self.engine.submit(request, **options)
                    ticket.ids.append(number)
                    self._tickets[number] = ticket
            except Exception as error:
                self._forget(ticket)
                done.set_exception(error)
            else:
                done.set_result(None)

        self._calls.put(call)
        try:
            await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            self.cancel(ticket)
            raise
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for these requests any more."""
        self._calls.put(lambda: self._forget(ticket))

    def stop(self, grace: float) -> int:
        """Take no more requests, let those under way go on for ``grace`` seconds at the most, and end the
        rest; how many were cut short."""
        self._stopping = True
        end = time.monotonic() + grace
        while self._thread.is_alive() and self._tickets and time.monotonic() < end:
            time.sleep(0.02)
        left = len(self._tickets)
        self._calls.put(None)
        self._thread.join(60)
        return left

    def _forget(self, ticket: Ticket) -> None:
        for number in ticket.ids:
            if self._tickets.pop(number, None) is not None:
                self.engine.cancel(number)

    def _run(self) -> None:
        while True:
            while self.engine.idle or not self._calls.empty():
                call = self._calls.get()
                if call is None:
                    self.engine.close()
                    self._hand_out(self.engine.step())
                    return
                call()
            try:
                self._hand_out(self.engine.step())
            except Exception:
                # A fault of ours: what is under way ends, and the server goes on.
                log.exception("the engine failed")
                for number in list(self._tickets):
                    self.engine.cancel(number)

    def _hand_out(self, events: Sequence[Event]) -> None:
        for event in events:
            ticket = self._tickets.get(event.id)
            if event.result is not None:
                self._tickets.pop(event.id, None)
            if ticket is not None:
                ticket.put(event)
