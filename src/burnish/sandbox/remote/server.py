"""A pool as an HTTP application: checks who asks, runs each request once, ends what was left."""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from burnish.core.boxes import SandboxPool
from burnish.core.clock import Clock, SystemClock
from burnish.core.records import Record
from burnish.sandbox.places import Places
from burnish.sandbox.remote import messages as m
from burnish.sandbox.remote.answers import answer, check_version, problem, reply
from burnish.sandbox.remote.bodies import Bodies, digest_of
from burnish.sandbox.remote.config import ServeConfig
from burnish.sandbox.remote.door import visit_of
from burnish.sandbox.remote.jobs import Jobs, Owner
from burnish.sandbox.remote.leases import Leases
from burnish.sandbox.remote.messages import ProblemKind
from burnish.sandbox.remote.outputs import Outputs
from burnish.sandbox.remote.problems import EXPECTED, Refused
from burnish.sandbox.remote.senders import Senders
from burnish.sandbox.remote.spool import Spool
from burnish.sandbox.remote.tenants import Owner as BoxOwner
from burnish.sandbox.remote.tenants import Tenant, Tenants, close_pool
from burnish.sandbox.remote.visitors import Visit, Visitors
from burnish.sandbox.remote.work import Worker
from burnish.telemetry import prometheus

_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9_-]{8,64}")
_TEND_S = 5.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SandboxServer:
    """Serves one pool. Make it inside the event loop that it will run on."""

    def __init__(
        self,
        pool: SandboxPool,
        config: ServeConfig,
        *,
        max_boxes: int,
        tokens: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """The pool becomes the server's: it is closed with it.

        Args:
            pool: where boxes come from.
            config: what is granted.
            max_boxes: how many the pool can have, for clients that choose between hosts.
            tokens: see `Senders`.
            clock: where the time comes from.
        """
        self._clock = clock or SystemClock()
        self._pool = pool
        self._config = config
        self._max_boxes = max_boxes
        self._senders = Senders(tokens)
        self._instance = secrets.token_hex(8)
        self._started_s = self._busy_s = self._clock.now_s()
        self._stopping = False
        self._num_expired = 0
        self._tenants = Tenants(
            pool,
            self._clock,
            Places(
                max_boxes,
                max_waiting=config.max_waiting,
                max_waiting_per_client=config.max_waiting_per_client,
            ),
        )
        self.visitors = Visitors(self._clock, head_s=config.head_s, stall_s=config.stall_s)
        """Its connections."""
        self._leases = Leases(self._clock, config.lease_s)
        self._jobs = Jobs(
            self._clock,
            grace_s=config.grace_s,
            keep_s=config.keep_s,
            keep_bytes=config.keep_bytes,
            hang_up_ends=config.hang_up_ends,
        )
        self._bodies = Bodies(config.max_bodies_bytes, config.max_request_bytes)
        self._spool = Spool(self._clock, config.max_file_bytes, config.max_files_bytes)
        outputs = Outputs(config.max_stdout_bytes, config.max_outputs_bytes)
        self._worker = Worker(self._tenants, self._spool, outputs, self._info)
        self.idle = asyncio.Event()
        """Set when there was no box for `idle_exit_s`."""

    def application(self) -> web.Application:
        """What an aiohttp runner serves."""
        app = web.Application(
            middlewares=[self._guard], client_max_size=self._config.max_request_bytes
        )
        box = "/v4/boxes/{box}"
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v4/pool", self._show_pool),
                web.get("/v4/stats", self._show_stats),
                web.get("/v4/boxes", self._list),
                web.post("/v4/boxes", self._create),
                web.post("/v4/batches", self._create_many),
                web.delete(box, self._destroy),
                web.post(box + "/{verb}", self._use),
                web.put("/v4/files", self._upload),
                web.get("/v4/files/{file}", self._download),
                web.delete("/v4/files/{file}", self._remove_file),
                web.get("/v4/requests/{request}", self._poll),
                web.delete("/v4/requests/{request}", self._cancel),
                web.post("/v4/sessions/heartbeat", self._heartbeat),
                web.delete("/v4/sessions", self._end_session),
            ]
        )
        app.cleanup_ctx.append(self._live)
        app.on_shutdown.append(self._stop)
        return app

    async def tend(self) -> None:
        """What must happen regularly: leases, left jobs, unclaimed files."""
        for session in self._leases.expired():
            gone = self._tenants.of(session)
            if gone:
                _LOG.warning("a client vanished: %d of its boxes are destroyed", len(gone))
            self._num_expired += len(gone)
            await self._destroy_all(session)
        self._jobs.tend()
        self.visitors.tend()
        self._spool.tend()
        if len(self._tenants) or self._jobs.num_running:
            self._busy_s = self._clock.now_s()
        limit = self._config.idle_exit_s
        if limit is not None and self._clock.now_s() - self._busy_s >= limit:
            self.idle.set()

    @asynccontextmanager
    async def _tending(self) -> AsyncIterator[None]:
        config = self._config
        pause_s = min(_TEND_S, config.lease_s / 4, config.grace_s / 2, config.keep_s / 2)

        async def tend_for_ever() -> None:
            while True:
                await asyncio.sleep(pause_s)
                await self.tend()

        task = asyncio.create_task(tend_for_ever())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))

    async def _live(self, _: web.Application) -> AsyncIterator[None]:
        async with self._tending():
            yield
        await self._jobs.cancel_all()
        await self._tenants.destroy_all(self._tenants.all())
        self._spool.close()
        await close_pool(self._pool)

    async def _stop(self, _: web.Application) -> None:
        """Those who wait are told at once; they would hold up the end."""
        self._stopping = True
        await self._jobs.cancel_all()

    # Who asks

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        visit = visit_of(request)
        if visit is None:
            raise web.HTTPBadRequest(reason="the client is gone")
        with self.visitors.asking(visit, lambda: _may_send(request)):
            return await self._respond(request, handler, visit)

    async def _respond(
        self, request: web.Request, handler: Handler, visit: Visit
    ) -> web.StreamResponse:
        try:
            if request.path != "/health":
                self.visitors.know(visit, self._user(request))
            check_version(request)
            response = await handler(request)
        except web.HTTPRequestEntityTooLarge:
            most = self._config.max_request_bytes
            what = f"the request has more than {most} bytes, the most that this server takes"
            response = problem(request, Refused(ProblemKind.TOO_LARGE, what))
        except web.RequestPayloadError:
            response = problem(request, m.Malformed("the body is not encoded as its head says"))
        except web.HTTPException as error:
            what = f"{request.method} {request.path[:100]}: {error.reason}"
            response = problem(request, Refused(ProblemKind.MALFORMED, what))
        except EXPECTED as error:
            response = problem(request, error)
        finally:
            self._bodies.let_go(request)
        response.headers[m.API_HEADER] = str(m.API_VERSION)
        return response

    def _owner(self, request: web.Request) -> BoxOwner:
        user, name = self._user(request), request.headers.get(m.SESSION_HEADER, "")
        if not _NAME.fullmatch(name):
            raise m.Malformed(f"{m.SESSION_HEADER} must have 8 to 64 letters, digits, - or _")
        # Nobody is in a session of another user, whatever it is called.
        owner = BoxOwner(f"{user} {name}" if user else name, user)
        self._leases.renew(owner.session)
        return owner

    def _session(self, request: web.Request) -> str:
        return self._owner(request).session

    def _user(self, request: web.Request) -> str:
        return self._senders.user_of(request)

    # Jobs

    async def _body(self, request: web.Request) -> bytes:
        if request.content_type != m.CONTENT_TYPE:
            raise m.Malformed(f"the body must be {m.CONTENT_TYPE}")
        return await self._bodies.receive(request, self._user(request))

    async def _run(
        self,
        request: web.Request,
        box: str | None,
        digest: bytes,
        work: Callable[[], Coroutine[Any, Any, Record]],
    ) -> web.StreamResponse:
        session = self._session(request)
        request_id = request.headers.get(m.REQUEST_HEADER, "")
        if not _NAME.fullmatch(request_id):
            raise m.Malformed(f"{m.REQUEST_HEADER} must have 8 to 64 letters, digits, - or _")
        if self._stopping:
            raise Refused(ProblemKind.NO_REQUEST, "the server is stopping")
        job = self._jobs.start(request_id, digest, Owner(session, box), work)
        self._bodies.keep_until(request, job.task)
        return reply(await self._jobs.wait(job, self._config.poll_s))

    async def _create(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        wanted = m.decode(body, m.CreateBox)
        work = self._creation(request, wanted, 1)

        async def one() -> m.BoxInfo:
            return (await work()).boxes[0]

        return await self._run(request, None, digest_of(request.path, body), one)

    async def _create_many(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        wanted = m.decode(body, m.CreateBoxes)
        work = self._creation(request, wanted.box, wanted.count)
        return await self._run(request, None, digest_of(request.path, body), work)

    def _creation(
        self, request: web.Request, wanted: m.CreateBox, count: int
    ) -> Callable[[], Coroutine[Any, Any, m.Boxes]]:
        if wanted.detached and not self._config.allow_detached:
            raise Refused(
                ProblemKind.USER,
                "boxes of this server go with their client.",
                fix="leave detached out",
            )
        owner = self._owner(request)

        async def work() -> m.Boxes:
            begun_s = time.perf_counter()
            made = await self._tenants.create(owner, wanted, count)
            self._worker.observed.box_wait_s.add(time.perf_counter() - begun_s)
            return m.Boxes(boxes=tuple(map(self._info, made)))

        return work

    async def _use(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        box, verb = request.match_info["box"], request.match_info["verb"]
        work = self._worker.prepare(box, self._owner(request), verb, body)
        digest = digest_of(request.path, body)
        # The work has its own copy: both would be twice what is counted.
        del body
        return await self._run(request, box, digest, work)

    async def _poll(self, request: web.Request) -> web.StreamResponse:
        job = self._jobs.find(request.match_info["request"], self._session(request))
        return reply(await self._jobs.wait(job, self._config.poll_s))

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        request_id = request.match_info["request"]
        if not _NAME.fullmatch(request_id):
            raise m.Malformed("no request id")
        job = self._jobs.cancel(request_id, self._session(request))
        # It may be done already, and then nobody will know of the boxes that it made.
        for box in job.made if job is not None else ():
            await asyncio.shield(self._destroy_one(box))
        return answer(request, m.Done())

    # Boxes and sessions

    async def _destroy(self, request: web.Request) -> web.StreamResponse:
        box, user = request.match_info["box"], self._user(request)
        if "strict" in request.query or self._tenants.has(box, user):
            self._tenants.get(box, user)
            # Not to be stopped by a client that leaves.
            await asyncio.shield(self._destroy_one(box))
        return answer(request, m.Done())

    async def _destroy_one(self, box: str) -> None:
        await self._jobs.cancel_all(box=box)
        await self._tenants.destroy(box)

    async def _destroy_all(self, session: str) -> None:
        await self._jobs.cancel_all(session=session)
        await self._tenants.end_session(session)
        self._spool.release(session)

    async def _end_session(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        await asyncio.shield(self._destroy_all(session))
        self._leases.drop(session)
        return answer(request, m.Done())

    async def _heartbeat(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        return answer(request, self._stats())

    # Files

    async def _upload(self, request: web.Request) -> web.StreamResponse:
        owner = self._owner(request)
        name = await self._spool.receive(owner, request.content.iter_chunked(2**20))
        return answer(request, m.Uploaded(file=name))

    async def _download(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        return web.FileResponse(self._spool.find(request.match_info["file"]), chunk_size=2**20)

    async def _remove_file(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        self._spool.remove(request.match_info["file"])
        return answer(request, m.Done())

    # What it tells of itself

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return answer(request, m.Health(api=m.API_VERSION))

    async def _metrics(self, _: web.Request) -> web.StreamResponse:
        families = self._worker.observed.families(self._stats(), self._pool)
        body = prometheus.render(families).encode()
        return web.Response(body=body, headers={"Content-Type": prometheus.CONTENT_TYPE})

    async def _show_pool(self, request: web.Request) -> web.StreamResponse:
        info = m.PoolInfo(
            instance=self._instance,
            capabilities=self._pool.capabilities,
            max_boxes=self._max_boxes,
            lease_s=self._config.lease_s,
            max_request_bytes=self._config.max_request_bytes,
        )
        return answer(request, info)

    async def _show_stats(self, request: web.Request) -> web.StreamResponse:
        return answer(request, self._stats())

    async def _list(self, request: web.Request) -> web.StreamResponse:
        infos = tuple(map(self._info, self._tenants.seen_by(self._user(request))))
        return answer(request, m.Boxes(boxes=infos))

    def _info(self, tenant: Tenant) -> m.BoxInfo:
        left_s = self._leases.left_s(tenant.owner.session)
        return tenant.info(busy=tenant.id in self._jobs.busy_boxes(), lease_left_s=left_s)

    def _stats(self) -> m.Stats:
        return self._worker.stats(
            instance=self._instance,
            backend=self._pool.capabilities.backend,
            uptime_s=self._clock.now_s() - self._started_s,
            max_boxes=self._max_boxes,
            num_expired=self._num_expired,
            num_refused=self._senders.num_refused,
        )


def _may_send(request: web.Request) -> bool:
    """A part of the body is still to come, and we do not keep the client from sending it."""
    transport = request.transport
    return transport is not None and transport.is_reading() and not request.content.is_eof()
