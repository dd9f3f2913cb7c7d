"""`SandboxPool` over a keeper."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from functools import partial

import msgspec

from burnish.core.boxes import (
    Capabilities,
    ExecResult,
    Feature,
    Limits,
    Policy,
    Sandbox,
)
from burnish.core.errors import ClassifiedFailure, UserError
from burnish.sandbox.batches import Batches
from burnish.sandbox.commands import WORK, check_argv
from burnish.sandbox.config import SandboxConfig
from burnish.sandbox.files import check_limit, split_path
from burnish.sandbox.images.base import ImageRoot, Images
from burnish.sandbox.images.running import check_workdir, image_user
from burnish.sandbox.keeper.box_network import BoxNetwork
from burnish.sandbox.keeper.client import KeeperClient, failure
from burnish.sandbox.keeper.protocol import (
    CreateBox,
    DestroyBox,
    Done,
    Exec,
    ReadFile,
    Request,
    WriteFile,
)
from burnish.sandbox.lease import leased
from burnish.sandbox.limits import check_enforced, check_limits, check_policy
from burnish.sandbox.network.base import PROXY_PORT, NetworkProvider
from burnish.sandbox.outcome import infra_error


class KeptBox:
    """A box as its user sees it."""

    def __init__(
        self,
        client: KeeperClient,
        number: int,
        provider: NetworkProvider | None,
        policy: Policy,
        image: ImageRoot | None,
    ) -> None:
        """Wrap a box that the keeper made.

        Args:
            client: of the keeper.
            number: which one.
            provider: who serves its network, if the policy allows one.
            policy: what it may touch.
            image: what it was made from; says where commands start, and with what variables.
        """
        self._client = client
        self._number = number
        self._image_env = {} if image is None else image.env
        self._workdir = (image.workdir if image else "") or WORK
        self.id = f"{client.pid}-{number}"
        self._gone = ""
        self._network: BoxNetwork | None = None
        if policy.allow:
            assert provider is not None
            self._network = BoxNetwork(
                provider, policy, self.id, lambda: client.ask_listener(number)
            )

    async def open(self) -> None:
        """Serve the network of the first command.

        Raises:
            UserError: the policy has a malformed entry.
            ClassifiedFailure: the box does not work.
        """
        if self._network is not None:
            await self._network.open()

    def end(self, reason: str) -> None:
        """What is asked of it from now on fails and says why."""
        self._gone = self._gone or reason

    async def close(self) -> None:
        """Cut the network. May be called again."""
        if self._network is not None:
            await self._network.close()

    async def set_allow(self, allow: tuple[str, ...]) -> None:
        """Replace the allow-list of a box that was made with one; see `NetworkedSandbox`.

        Raises:
            UserError: a malformed entry, or the box was made without a network.
            ClassifiedFailure: the box is gone.
        """
        if self._gone:
            raise failure(self._gone)
        if self._network is not None:
            await self._network.set_allow(allow)
        elif allow:
            raise UserError(
                "this box was made without a network.",
                fix="make it with an allow-list, which can then be changed, or use the native "
                "sandbox",
            )

    async def write_file(self, path: str, data: bytes) -> None:
        """Create or replace a file under `/work`, with missing directories.

        Raises:
            ValueError: `path` is absolute, empty or climbs out.
            OSError: no space left, or something in the way is not a directory.
            ClassifiedFailure: the box is gone.
        """
        split_path(path)
        client = self._client
        await self._ask(
            WriteFile(id=client.next_id(), box=self._number, path=os.fsencode(path), data=data)
        )

    async def read_file(self, path: str, limit_bytes: int = 1 << 20) -> bytes:
        """See `Sandbox.read_file`.

        Raises:
            ValueError: `path` is absolute, empty or climbs out, or the limit is no number of bytes.
            FileTooLargeError: it has more than `limit_bytes`.
            FileNotFoundError: absent, not a regular file, or reached through a link.
            ClassifiedFailure: the box is gone.
        """
        split_path(path)
        check_limit(limit_bytes)
        client = self._client
        done = await self._ask(
            ReadFile(
                id=client.next_id(),
                box=self._number,
                path=os.fsencode(path),
                limit_bytes=limit_bytes,
            )
        )
        return done.data

    async def exec(
        self,
        argv: tuple[str, ...],
        *,
        stdin: bytes = b"",
        limits: Limits | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        keep: bool = False,
    ) -> ExecResult:
        """Run a command; unless `keep`, when it returns nothing of the command is alive.

        Commands of one box run one after another; files in `/work`, `/tmp` and `/dev/shm` stay. A
        program that cannot be found exits with 127. Never raises for what the program did, nor for
        a broken box: that is `ExecStatus.INFRA_ERROR`.

        Raises:
            ValueError: the command, environment or limits could not run on any machine.
            UserError: a limit, or `keep`, that this backend does not have.
        """
        limits = limits or Limits()
        env = {**self._image_env, **(env or {})}
        cwd = self._workdir if cwd is None else cwd
        client = self._client
        check_argv(argv, env, cwd)
        check_limits(limits)
        check_enforced(limits, client.capabilities)
        if keep and Feature.BACKGROUND not in client.capabilities.features:
            raise _keeps_nothing(client)
        request = Exec(
            id=client.next_id(),
            box=self._number,
            argv=tuple(os.fsencode(arg) for arg in argv),
            stdin=stdin,
            env=_encoded(env),
            cwd=os.fsencode(cwd),
            limits=limits,
            keep=keep,
        )
        try:
            if self._network is None or self._gone:
                done = await self._ask(request)
            else:
                async with self._network.command() as extra:
                    request = msgspec.structs.replace(request, env=_encoded({**extra, **env}))
                    done = await self._ask(request)
        except (OSError, ClassifiedFailure) as error:
            return infra_error(self._gone or str(error))
        assert done.result is not None
        return done.result

    async def _ask(self, request: Request) -> Done:
        """Of the keeper; what became of a box that is gone is what made it go."""
        if not self._gone:
            try:
                return await self._client.ask(request)
            except (OSError, ClassifiedFailure):
                if not self._gone:
                    raise
        raise failure(self._gone)


class KeeperPool:
    """Boxes on this machine, kept by one keeper process.

    Start-up removes what killed owners left. `close` must be called; if the owner is killed
    instead, the keeper notices and removes everything itself.
    """

    def __init__(
        self,
        start_keeper: Callable[[], KeeperClient],
        images: Images | None = None,
        network: NetworkProvider | None = None,
        *,
        config: SandboxConfig,
    ) -> None:
        """Start the keeper and try one box.

        Args:
            start_keeper: also called for a new keeper when the first was killed.
            images: where images come from; without, boxes have this host's programs only.
            network: carries out `Policy.allow`; without, boxes have no network. Closed with the
                pool.
            config: how many boxes, and how long they live at most.

        Raises:
            UserError: boxes cannot run here; says what to do.
        """
        self._lease_s = config.lease_s
        self._max_boxes = config.max_boxes
        self._batches = Batches()
        self._start_keeper = start_keeper
        self._images = images
        self._network = network
        self._start_lock = threading.Lock()
        self._closed = False
        self._client = start_keeper()

    @property
    def capabilities(self) -> Capabilities:
        """What boxes can do here, as found by running one."""
        found = self._client.capabilities
        absent = {
            feature
            for feature, part in (
                (Feature.IMAGES, self._images),
                (Feature.ALLOW_LIST, self._network),
            )
            if part is None
        }
        return msgspec.structs.replace(found, features=found.features - absent)

    @property
    def keeper_pid(self) -> int:
        """The process that holds the boxes now."""
        return self._client.pid

    def acquire(
        self, image: str | None = None, policy: Policy | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """A fresh box, destroyed on exit. Waits while `max_boxes` are in use.

        Raises:
            UserError: the policy cannot be enforced, or there is no such image, here.
            ClassifiedFailure: of kind `sandbox`, if the box cannot start.
        """
        policy = policy or Policy()
        check_policy(image, policy, self.capabilities)
        return self._box(image, policy)

    def acquire_many(
        self, count: int, image: str | None = None, policy: Policy | None = None
    ) -> AbstractAsyncContextManager[tuple[Sandbox, ...]]:
        """See `SandboxPool.acquire_many`."""
        return self._batches.take(count, self._max_boxes, lambda: self.acquire(image, policy))

    def check_root(self, image: ImageRoot, policy: Policy) -> None:
        """Refuse an image that cannot run, or cannot carry out a policy.

        Raises:
            UserError: names what it lacks.
        """

    @asynccontextmanager
    async def _box(self, name: str | None, policy: Policy) -> AsyncIterator[Sandbox]:
        with ExitStack() as lease:
            image = None
            if name is not None:
                assert self._images is not None
                image = lease.enter_context(self._images.lease(name))
            async with self._box_of(image, policy) as box:
                yield box

    @asynccontextmanager
    async def _box_of(
        self, image: ImageRoot | None, policy: Policy, state: int = 0
    ) -> AsyncIterator[KeptBox]:
        client = await asyncio.to_thread(self._live_client)
        request = CreateBox(
            id=client.next_id(), proxy_port=PROXY_PORT if policy.allow else 0, state=state
        )
        if image is not None:
            root = str(image.root.resolve())
            self.check_root(image, policy)
            check_workdir(image)
            user = image_user(image)
            request = msgspec.structs.replace(request, root=root, digest=image.digest, user=user)
        try:
            made = await client.ask(request)
        except OSError as error:
            raise failure(f"a box could not be made: {error}") from error
        box = self._wrap(client, made.box, policy, image)
        try:
            await box.open()
            async with leased(self._lease_s, partial(self._end, box, client, made.box)):
                yield box
        finally:
            await self._end(box, client, made.box, "the box was destroyed")

    async def _end(self, box: KeptBox, client: KeeperClient, number: int, reason: str) -> None:
        """May be called again."""
        box.end(reason)
        try:
            await self._destroy(client, number)
        finally:
            await box.close()

    def _wrap(
        self, client: KeeperClient, number: int, policy: Policy, image: ImageRoot | None
    ) -> KeptBox:
        """A box that the keeper made, as its user sees it."""
        return KeptBox(client, number, self._network, policy, image)

    async def _destroy(self, client: KeeperClient, number: int) -> None:
        """Also when cancelled, and then without waiting."""
        request = DestroyBox(id=client.next_id(), box=number)
        try:
            await asyncio.shield(client.ask(request))
        except ClassifiedFailure:
            if client.alive:
                raise

    def _live_client(self) -> KeeperClient:
        """A keeper that died is replaced; its boxes died with it."""
        with self._start_lock:
            if self._closed:
                raise failure("the pool is closed")
            if not self._client.alive:
                self._client.close()
                self._client = self._start_keeper()
            return self._client

    async def close(self) -> None:
        """Destroy all boxes and end the keeper. May be called twice."""
        with self._start_lock:
            if self._closed:
                return
            self._closed = True
        await asyncio.to_thread(self._client.close)
        if self._network is not None:
            await self._network.close()


def _keeps_nothing(client: KeeperClient) -> UserError:
    return UserError(
        f"the {client.capabilities.backend} sandbox ends every process with its command.",
        fix="leave keep out, or use the native sandbox, or runc as root with CRIU 4 or later in "
        "PATH",
    )


def _encoded(env: Mapping[str, str]) -> dict[str, bytes]:
    return {name: os.fsencode(value) for name, value in env.items()}
