"""Reports about an epoch: status, refused groups, and reasons for waiting. The functions do not change the epoch."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from rlframe.trajectories.messages import EnvStatus, RunStatus
from rlframe.trajectories.queue.batching import MinimumShare, missing_shares
from rlframe.trajectories.queue.environments import Env, EnvSummary
from rlframe.trajectories.queue.leases import AddResult
from rlframe.trajectories.queue.unit_queues import QueuedGroup, UnitQueue, can_fill, usable_sizes

if TYPE_CHECKING:
    from rlframe.trajectories.queue.epoch import Epoch

# An environment that should start no new group gets a queue length of at least these values. atroposlib's client pauses
# if `max_batches_offpolicy` batches (3 by default) are queued. It stops forever if current_step plus the queued batches
# exceed the number of steps. The client in rlframe's design document (see tests/design/README.md) pauses if more than
# HOLD_GROUPS * batch_size groups are queued.
HOLD_BATCHES = 64
HOLD_GROUPS = 3
MAX_WAITING = 100  # maximum number of reasons for waiting in one answer


@dataclass(kw_only=True)
class Counters:
    """Counters of an epoch. They count groups unless the name has another unit. `*_served` counts each batch once."""

    groups_added: int = 0
    sequences_added: int = 0
    tokens_added: int = 0
    batches_served: int = 0
    groups_served: int = 0
    sequences_served: int = 0
    redelivered: int = 0  # batches that were delivered again
    discarded: int = 0  # groups that were too old when they could be served
    refused: int = 0
    duplicates: int = 0


@dataclass(kw_only=True)
class EpochCounters(Counters):
    """The counters of an epoch, with the staleness of served groups."""

    aged: int = 0  # number of served groups whose staleness is known
    staleness_sum: float = 0.0  # a float, because MessagePack limits integers to 64 bits
    staleness_largest: int = 0

    def count_served(self, sequences: int, staleness: Iterable[int | None]) -> None:
        """Update the counters for one served batch and the staleness of its groups."""
        self.batches_served += 1
        self.sequences_served += sequences
        for age in staleness:
            self.groups_served += 1
            if age is not None:
                self.aged += 1
                self.staleness_sum += age
                self.staleness_largest = max(self.staleness_largest, age)


@dataclass(kw_only=True)
class EnvReport(EnvSummary):
    """An environment on the live page. `weight` is the fraction of all weights, as in EnvStatus."""

    served_share: float  # fraction of all sequences served in this epoch
    wanted_share: float | None  # fraction according to the weights; None unless the registration has mix="weight"
    queued_groups: int
    queued_sequences: int
    buffered_groups: int
    oldest_age: float | None  # waiting time of the oldest queued unit, in seconds
    unheard: float  # seconds since the last heartbeat


@dataclass(frozen=True)
class Waiting:
    """A reason why groups or batches wait.

    Attributes:
        env_id: The environment whose groups wait, or for which a batch waits. None for unregistered senders, or if the
            reason concerns the whole run.
        groups: Number of groups that wait. 0 if a batch or the run waits.
    """

    env_id: int | None
    size: int
    groups: int
    why: str


@dataclass(frozen=True)
class Staleness:
    """Staleness of the groups served in this epoch, in policy versions. Groups of unknown staleness do not count."""

    groups: int = 0
    mean: float = 0.0
    largest: int = 0


@dataclass(kw_only=True)
class Report(Counters):
    """The queue on the live page. `oldest_age` is the longest wait in seconds, or None if the queue is empty."""

    envs: list[EnvReport]  # sorted by id; limited to the requested number
    registered_envs: int
    oldest_age: float | None
    waiting: list[Waiting]
    queued_sequences: int
    batches_out: int
    batches_returned: int
    batches_kept: int  # number of batches without a lease that are kept for repeated requests
    staleness: Staleness


def minimum_share(epoch: Epoch, env: Env) -> int:
    """Return the number of sequences in each batch that are reserved for an environment."""
    return int(epoch.settings.batch_size * (env.min_batch_allocation or 0))


def minimum_shares(epoch: Epoch) -> list[MinimumShare]:
    """Return the minimum shares of the live environments. If they exceed a batch, scale them down in proportion."""
    batch_size = epoch.settings.batch_size
    envs = (epoch.envs.all[env_id] for env_id in sorted(epoch.envs.with_minimum_share))
    shares = [MinimumShare(env.env_id, env.group_size, minimum_share(epoch, env)) for env in envs]
    total = max(batch_size, sum(share.sequences for share in shares))
    return [share._replace(sequences=share.sequences * batch_size // total) for share in shares]


def staleness_of(epoch: Epoch, group: QueuedGroup) -> int | None:
    """Return the number of policy versions by which a group is older than the trainer's policy. None if unknown."""
    if epoch.policy_version is None or group.policy_version is None:
        return None
    return epoch.policy_version - group.policy_version


def can_form_batch(epoch: Epoch) -> bool:
    """Return True if the queued units can fill a batch exactly. Ignore minimum shares and staleness."""
    return epoch.registration is not None and can_fill(epoch.registration.batch_size, epoch.unit_queues.counts)


def batchable_sizes(epoch: Epoch) -> list[int]:
    """Return the sizes of queued units that could be part of an exact batch if enough units of each size existed."""
    counts = epoch.unit_queues.counts
    if epoch.registration is None:
        return list(counts)
    batch_size = epoch.registration.batch_size
    coming = usable_sizes(batch_size, dict.fromkeys([*counts, *epoch.envs.sizes], batch_size))
    return [size for size in counts if size in coming]


def refusal(epoch: Epoch, env_id: int | None, sequences: int, policy_version: int | None) -> AddResult | None:
    """Return a refusal with its reason, or None if the group may be queued.

    The future staleness of a group is estimated with one new policy version for each batch.
    """
    registration = epoch.registration
    if registration is None:
        return None
    if sequences > registration.batch_size:
        reason = (
            f"The group has {sequences} sequences, but a batch has {registration.batch_size}, so no batch can hold it."
        )
        return AddResult("refused", reason=reason, too_large=True)
    if registration.max_staleness is None or policy_version is None or epoch.policy_version is None:
        return None
    limit = f"the trainer accepts at most {registration.max_staleness}"
    versions = epoch.policy_version - policy_version
    if versions > registration.max_staleness:
        return AddResult("refused", reason=f"The group is {versions} policy versions old; {limit}.", too_old=True)
    versions += _batches_ahead(epoch, env_id)
    if versions <= registration.max_staleness:
        return None
    return AddResult("refused", reason=f"By its turn the group would be {versions} policy versions old; {limit}.")


def status(epoch: Epoch) -> RunStatus:
    sizes = set(batchable_sizes(epoch))
    groups = epoch.unit_queues.groups
    return RunStatus(
        current_step=epoch.step,
        queue_size=sum(groups.values()),
        set_aside=sum(groups[size] for size in groups if size not in sizes),
        waiting_for=[_sentence(epoch, one) for one in waiting(epoch)],
        buffered=sum(map(len, epoch.undersized.values())),
        leased=sum(len(batch.group_ids) for batch in epoch.leases.unacknowledged),
        epoch=epoch.number,
        paused=epoch.paused,
        policy_version=epoch.policy_version,
        stored_bytes=epoch.stored_bytes,
        live_envs=epoch.envs.num_live,
    )


def env_status(epoch: Epoch, env_id: int, hold: bool) -> EnvStatus | None:
    env = epoch.envs.get(env_id)
    registration = epoch.registration
    if env is None or registration is None:
        return None
    batch_size = registration.batch_size
    sizes = batchable_sizes(epoch)
    total = _sequences(epoch, sizes)
    full = can_form_batch(epoch)
    largest = max(sizes, default=1)
    own = sum(queue.sequences for queue in epoch.unit_queues.of_env(env_id))
    # If enough sequences are queued but cannot form a batch, the batch may be waiting for this environment. Then groups
    # of other environments do not count.
    others = epoch.unit_queues.packed_sequences(largest, sizes, without=env_id) if full or total < batch_size else 0
    queue_size = (own + others) // env.largest_group
    self_queue_size = own // env.largest_group
    hold = hold or epoch.paused or _ahead_of_trainer(epoch, env, own, total if full else 0)
    if hold:
        steps_left = registration.num_steps - epoch.step
        held = max(HOLD_BATCHES * batch_size // env.largest_group, HOLD_GROUPS * batch_size + 1)
        if steps_left > 0:
            held = min(held, steps_left * batch_size // env.largest_group)
        queue_size, self_queue_size = max(queue_size, held), max(self_queue_size, held)
    return EnvStatus(
        current_step=epoch.step,
        queue_size=queue_size,
        env_weight=epoch.envs.weight_of(env),
        unallocated_fraction=epoch.envs.unallocated_fraction,
        self_queue_size=self_queue_size,
        max_group_size=largest,
        hold=hold,
    )


def report(epoch: Epoch, now: float, envs: int) -> Report:
    counters = epoch.counters
    oldest = min((epoch.unit_queues.oldest(size).head.added_at for size in epoch.unit_queues.counts), default=None)
    shown = sorted(epoch.envs.latest(envs), key=lambda env: env.env_id)
    return Report(
        **{count.name: getattr(counters, count.name) for count in fields(Counters)},
        envs=[_env_report(epoch, env, now) for env in shown],
        registered_envs=len(epoch.envs.all),
        oldest_age=None if oldest is None else now - oldest,
        waiting=waiting(epoch),
        queued_sequences=_sequences(epoch, list(epoch.unit_queues.counts)),
        batches_out=len(epoch.leases.out),
        batches_returned=len(epoch.leases.returned),
        batches_kept=len(epoch.leases.kept),
        staleness=Staleness(counters.aged, counters.staleness_sum / max(1, counters.aged), counters.staleness_largest),
    )


def _sequences(epoch: Epoch, sizes: list[int]) -> int:
    return sum(size * epoch.unit_queues.counts[size] for size in sizes)


def _batches_ahead(epoch: Epoch, env_id: int | None) -> int:
    """Estimate the number of batches that are formed before a new group of this sender is served.

    If a batch may be waiting for this sender, groups of other senders do not count. A batch may wait if the queued
    units cannot form a batch. A batch may also wait for a sender with a minimum share, which may have to send more than
    the share to make the batch exact.
    """
    batch_size = epoch.settings.batch_size
    sizes = batchable_sizes(epoch)
    own = sum(queue.sequences for queue in epoch.unit_queues.of_env(env_id) if queue.size in sizes)
    total = _sequences(epoch, sizes) if can_form_batch(epoch) else 0
    ahead = max(own, total) // batch_size
    share = minimum_share(epoch, epoch.envs.all[env_id]) if env_id in epoch.envs.with_minimum_share else 0
    return min(ahead, own // share if own >= batch_size else 0) if share else ahead


def _ahead_of_trainer(epoch: Epoch, env: Env, own: int, total: int) -> bool:
    """Return True if a group that this environment starts now would be too old when it could be served."""
    registration = epoch.settings
    if registration.max_staleness is None:
        return False
    batches = registration.max_staleness + 1
    if env.env_id in epoch.envs.with_minimum_share:  # batches wait for this environment: other groups do not count
        return own >= max(registration.batch_size, batches * minimum_share(epoch, env))
    return max(own, total) >= batches * registration.batch_size


def _env_report(epoch: Epoch, env: Env, now: float) -> EnvReport:
    unit_queues = epoch.unit_queues.of_env(env.env_id)
    undersized = epoch.undersized.get(env.env_id)
    facts = {fact.name: getattr(env, fact.name) for fact in fields(EnvSummary)}
    return EnvReport(
        **{**facts, "weight": epoch.envs.weight_of(env)},
        served_share=env.served_sequences / max(1, epoch.counters.sequences_served),
        wanted_share=epoch.envs.weight_of(env) if epoch.registration and epoch.registration.mix == "weight" else None,
        queued_groups=sum(queue.groups for queue in unit_queues),
        queued_sequences=sum(queue.sequences for queue in unit_queues),
        buffered_groups=len(undersized) if undersized else 0,
        oldest_age=max((now - queue.head.added_at for queue in unit_queues), default=None),
        unheard=now - env.last_heard,
    )


def waiting(epoch: Epoch) -> list[Waiting]:
    """Return at most `MAX_WAITING` reasons: first the reasons why batches wait, then the reasons why groups wait."""
    if epoch.registration is None:
        return [Waiting(None, 0, 0, "every batch waits for a trainer: none has registered (POST /register)")]
    found = [Waiting(None, 0, 0, why) for why in _batch_blockers(epoch)]
    batch_size = epoch.registration.batch_size
    for share in missing_shares(batch_size, epoch.unit_queues, minimum_shares(epoch)):
        why = f"every batch waits for its minimum share of {share.sequences} sequences, but no queued group fits"
        found.append(Waiting(share.env_id, share.unit_size, 0, why))
    aside = epoch.unit_queues.of_sizes(sorted(set(epoch.unit_queues.counts) - set(batchable_sizes(epoch))))
    for queue in heapq.nsmallest(MAX_WAITING, aside, key=UnitQueue.key):
        why = f"groups of {queue.size} are set aside: no sum of the sizes in use is batch_size {batch_size}"
        if queue.size > batch_size:
            why = f"groups of {queue.size} are set aside: they are larger than batch_size {batch_size}"
        found.append(Waiting(queue.env_id, queue.size, queue.groups, why))
    for env_id in heapq.nsmallest(
        MAX_WAITING, (env_id for env_id, undersized in epoch.undersized.items() if undersized)
    ):
        undersized, size = epoch.undersized[env_id], epoch.envs.all[env_id].group_size
        why = f"{undersized.sequences} sequences in undersized groups wait for others that complete a group of {size}"
        found.append(Waiting(env_id, size, len(undersized), why))
    return found[:MAX_WAITING]


def _batch_blockers(epoch: Epoch) -> Iterator[str]:
    """Yield the reasons why there is no batch or no new groups. A missing minimum share is not among the reasons."""
    if epoch.paused:
        yield "the run is paused: environments start no new groups (POST /resume)"
    if not epoch.started:
        yield "environments wait to register: the trainer has not requested a batch yet (GET /batch)"
    if epoch.leases.returned or can_form_batch(epoch):
        return
    batch_size, queued = epoch.settings.batch_size, _sequences(epoch, batchable_sizes(epoch))
    if queued < batch_size:
        yield f"the next batch waits for sequences: {queued} of {batch_size} are in the queue"
    else:
        yield f"the next batch waits for other sizes: the {queued} queued sequences cannot fill exactly {batch_size}"


def _sentence(epoch: Epoch, one: Waiting) -> str:
    """Return a reason as a sentence that begins with the environment's name, as on the live page."""
    if one.env_id is None:
        return f"{one.why}."
    env = epoch.envs.get(one.env_id)
    return f"{env.wandb_name if env else 'not registered'} (environment {one.env_id}): {one.why}."
