"""Sends groups to the chain workers. A group whose worker died is run again by another one.

verl's trainer submits groups with `generate_sequences` and waits until the queue has them all. A call of a worker ends
when its group does, so a dead worker shows as an error of its calls.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import Any

import ray
import transfer_queue as tq
from ray.exceptions import RayActorError, RayTaskError

from agentfly.errors import RankError, describe
from agentfly.integrations.verl.config import JobSpec
from agentfly.integrations.verl.recorder import GroupRequest
from agentfly.integrations.verl.worker import ChainWorker
from agentfly.trajectory import Trajectory

_LOG = logging.getLogger(__name__)
MAX_ATTEMPTS = 8
"""Times a group is started before the death of its worker ends the job."""
_WAIT_SECONDS = 0.5
"""Interval at which calls that have ended are looked for."""


class RolloutManager:
    """The chain workers of a run, in the process of verl's trainer."""

    def __init__(self, spec: JobSpec, client: Any) -> None:
        """`client`: verl's client of the servers."""
        # Ray restarts a dead worker on a node that is alive; it makes its agent again. Its arguments are serialized
        # here: Ray warns about handles of actors among those of an actor that it restarts.
        worker: Any = ray.remote(ChainWorker).options(
            num_cpus=1, max_restarts=-1, max_concurrency=10_000, scheduling_strategy="SPREAD"
        )
        arguments = ray.cloudpickle.dumps((spec, client))  # type: ignore[no-untyped-call]
        self.workers: list[Any] = [worker.remote(arguments) for _ in range(spec.workers)]
        ray.get([each.ready.remote() for each in self.workers])
        self.reruns = 0
        """Groups that were started again after the death of their worker."""
        self._error: BaseException | None = None
        self._running: dict[Any, tuple[GroupRequest, int, int]] = {}
        """Call of a worker → its group, the number of the worker, and the attempt."""
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="agentfly-rollout-manager", daemon=True).start()

    def generate_sequences(self, prompts: Any) -> None:
        """Start the groups of a batch of positions, without waiting for them: what verl's trainer calls."""
        self.raise_error()  # verl would replace failed groups by others

        def unwrap(value: Any) -> Any:  # tensordict wraps some values, depending on what the others are
            return getattr(value, "data", value)

        step = int(unwrap(prompts["global_steps"]))
        for uid, position in zip(prompts["uid"], prompts["position"], strict=True):
            request = GroupRequest(uid=str(unwrap(uid)), position=int(unwrap(position)), step=step)
            self._start(request, attempt=1)

    def raise_error(self) -> None:
        """Raise what made a group fail, if one did."""
        if self._error is not None:
            raise self._error

    def evaluate(self, num_tasks: int, label: str) -> list[Trajectory]:
        """Run the evaluation's chains on all workers; the share of a worker that died is run again by another one."""
        count = len(self.workers)
        shares = [share for start in range(count) if (share := list(range(start, num_tasks, count)))]
        chains: list[Trajectory] = []
        attempt = 0
        while shares:
            # A share goes to another worker than before.
            calls = [
                (share, self.workers[(number + attempt) % count].run_evaluation.remote(share, label))
                for number, share in enumerate(shares)
            ]
            shares = []
            attempt += 1
            for share, call in calls:
                try:
                    chains += ray.get(call)
                except RayTaskError as error:  # before RayActorError: it is also an instance of its cause's class
                    raise error.cause from error
                except RayActorError as error:
                    if attempt == MAX_ATTEMPTS:
                        raise RankError(f"a chain worker died in all {attempt} attempts: {describe(error)}") from error
                    _LOG.warning("a chain worker died in the evaluation: its tasks are run again by another one")
                    shares.append(share)
            if shares:
                time.sleep(5 * attempt)  # a dead worker takes seconds to restart, and refuses calls until then
        return sorted(chains, key=lambda each: (each.group, each.chain))

    def _start(self, request: GroupRequest, attempt: int, avoid: int | None = None) -> None:
        """Start a group on the worker with the fewest groups."""
        with self._lock:
            load = Counter(number for _, number, _ in self._running.values())
            numbers = [each for each in range(len(self.workers)) if each != avoid] or [0]
            number = min(numbers, key=lambda each: (load[each], each))
            call = self.workers[number].run_group.remote(request)
            self._running[call] = (request, number, attempt)

    def _watch(self) -> None:
        """Look at calls that have ended; runs in a thread for as long as the process."""
        while True:
            with self._lock:
                calls = list(self._running)
            if not calls:
                time.sleep(_WAIT_SECONDS)
                continue
            try:
                for call in ray.wait(calls, num_returns=1, timeout=_WAIT_SECONDS)[0]:
                    self._handle_end(call)
                    with self._lock:
                        del self._running[call]
            except Exception as error:  # verl would wait for these groups for ever
                with self._lock:
                    lost = [request for request, _, _ in self._running.values()]
                    self._running.clear()
                for request in lost:
                    self._fail(request, error)

    def _handle_end(self, call: Any) -> None:
        """Run the group of a call that ended with the death of its worker again; remember another error."""
        request, number, attempt = self._running[call]
        try:
            ray.get(call)
            return
        except RayTaskError as error:  # before RayActorError: it is also an instance of its cause's class
            self._fail(request, error.cause)
            return
        except RayActorError as error:
            death = describe(error)
        if attempt == MAX_ATTEMPTS:
            message = f"the group at position {request.position} ended {attempt} workers: {death}"
            self._fail(request, RankError(message))
            return
        tags = (tq.kv_list("train") or {}).get("train", {})
        if tags.get(request.uid, {}).get("status") == "finished":
            return  # it died after its last row: verl may be training on the group
        _LOG.warning("a chain worker died: the group at position %d is run again elsewhere", request.position)
        time.sleep(5 * (attempt - 1))  # with a single worker, until it has restarted
        self.reruns += 1
        rows = [key for key in tags if key.startswith(f"{request.uid}_")]
        if rows:
            tq.kv_clear(keys=rows, partition_id="train")
        self._start(request, attempt + 1, avoid=number)

    def _fail(self, request: GroupRequest, error: BaseException) -> None:
        """Remember the error, and end verl's waiting for the group; the trainer then raises it."""
        self._error = self._error or error
        tq.kv_put(key=request.uid, partition_id="train", tag={"status": "failure"})
