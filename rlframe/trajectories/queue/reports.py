"""What a queue tells of itself, and what follows from it. Nothing here changes it but `Tally`."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from rlframe.trajectories.messages import EnvStatus, RunStatus
from rlframe.trajectories.queue.batching import MinimumShare, awaited, scaled
from rlframe.trajectories.queue.environments import Env, EnvSummary
from rlframe.trajectories.queue.leases import AddResult
from rlframe.trajectories.queue.unit_queues import QueuedGroup, UnitQueue, can_fill, usable_sizes

if TYPE_CHECKING:
    from rlframe.trajectories.queue.epoch import Epoch

# Batches that are queued, as an environment is told that should hold. The published client pauses at its
# `max_batches_offpolicy` (3 unless configured), and quits for good where current_step and these exceed its steps. The
# interaction document has one pause where more groups are queued than so many times a batch has sequences.
HOLD_BATCHES = 64
HOLD_GROUPS = 3
MAX_WAITING = 100  # sentences about what waits, in one answer


@dataclass(kw_only=True)
class Counts:
    """Of this epoch: groups, where the name does not say it. What is served counts the first time."""

    groups_added: int = 0
    sequences_added: int = 0
    tokens_added: int = 0
    batches_served: int = 0
    groups_served: int = 0
    sequences_served: int = 0
    redelivered: int = 0  # batches
    discarded: int = 0  # too old at their turn
    refused: int = 0
    duplicates: int = 0


@dataclass(kw_only=True)
class Tally(Counts):
    """The counts as they are kept."""

    aged: int = 0  # served, of which the staleness was known
    staleness_sum: float = 0.0  # which, unlike an integer, a snapshot can carry whatever it is
    staleness_largest: int = 0

    def count_served(self, sequences: int, staleness: Iterable[int | None]) -> None:
        """Count a batch, by the staleness of its groups."""
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
    """`weight` is its part, as in EnvStatus."""

    served_share: float  # of all sequences served in this epoch
    wanted_share: float | None  # by its weight; None where the registration does not mix by weight
    queued_groups: int
    queued_sequences: int
    buffered_groups: int
    oldest_age: float | None  # seconds that its oldest queued unit has waited
    unheard: float  # seconds


@dataclass(frozen=True)
class Waiting:
    """Something that waits, and for what, as a sentence.

    Attributes:
        env_id: whose groups wait, or whom a batch waits for; None: of senders that did not say who they are.
        groups: that wait; 0 where a batch does, or everybody.
    """

    env_id: int | None
    size: int
    groups: int
    why: str


@dataclass(frozen=True)
class Staleness:
    """Over the groups served in this epoch whose version and the trainer's were known."""

    groups: int = 0
    mean: float = 0.0
    largest: int = 0


@dataclass(kw_only=True)
class Report(Counts):
    """`oldest_age` is in seconds, of what waits longest; None where nothing waits."""

    envs: list[EnvReport]  # of `registered_envs`, as many as were asked for, by id
    registered_envs: int
    oldest_age: float | None
    waiting: list[Waiting]
    queued_sequences: int
    batches_out: int
    batches_returned: int
    batches_kept: int  # without a lease, for the same request again
    staleness: Staleness


def share_of(epoch: Epoch, env: Env) -> int:
    """The sequences of each batch that an environment asked for."""
    return int(epoch.settings.batch_size * (env.min_batch_allocation or 0))


def shares(epoch: Epoch) -> list[MinimumShare]:
    """The minimum shares of the live environments, as they asked for them."""
    envs = (epoch.envs.all[env_id] for env_id in sorted(epoch.envs.sharing))
    return [MinimumShare(env.env_id, env.group_size, share_of(epoch, env)) for env in envs]


def age(epoch: Epoch, group: QueuedGroup) -> int | None:
    """Policy versions by which a group is older than the trainer's, None where either is unknown."""
    if epoch.policy_version is None or group.policy_version is None:
        return None
    return epoch.policy_version - group.policy_version


def can_form_batch(epoch: Epoch) -> bool:
    """Whether the units that are queued can fill a batch, minimum shares and staleness aside."""
    return epoch.registration is not None and can_fill(epoch.registration.batch_size, epoch.lanes.counts)


def batchable_sizes(epoch: Epoch) -> list[int]:
    """The unit sizes in the queue that can be part of an exact batch, with as many as may come of what is sent."""
    counts = epoch.lanes.counts
    if epoch.registration is None:
        return list(counts)
    batch_size = epoch.registration.batch_size
    coming = usable_sizes(batch_size, dict.fromkeys([*counts, *epoch.envs.sizes], batch_size))
    return [size for size in counts if size in coming]


def refusal(epoch: Epoch, env_id: int | None, sequences: int, policy_version: int | None) -> AddResult | None:
    """Why a group should not be queued, or None. Staleness is foreseen with one new version per batch."""
    registration = epoch.registration
    if registration is None:
        return None
    if sequences > registration.batch_size:
        reason = f"The group has {sequences} sequences, a batch {registration.batch_size}: it can never be served."
        return AddResult("refused", reason=reason, too_large=True)
    if registration.max_staleness is None or policy_version is None or epoch.policy_version is None:
        return None
    limit = f"the trainer takes at most {registration.max_staleness}"
    versions = epoch.policy_version - policy_version
    if versions > registration.max_staleness:
        return AddResult("refused", reason=f"The group is {versions} policy versions old; {limit}.", too_old=True)
    versions += _batches_ahead(epoch, env_id)
    if versions <= registration.max_staleness:
        return None
    return AddResult("refused", reason=f"By its turn the group would be {versions} policy versions old; {limit}.")


def status(epoch: Epoch) -> RunStatus:
    sizes = set(batchable_sizes(epoch))
    groups = epoch.lanes.groups
    return RunStatus(
        current_step=epoch.step,
        queue_size=sum(groups.values()),
        set_aside=sum(groups[size] for size in groups if size not in sizes),
        waiting_for=[_sentence(epoch, one) for one in waiting(epoch)],
        buffered=sum(map(len, epoch.odd.values())),
        leased=sum(len(batch.group_ids) for batch in epoch.leases.unacknowledged),
        epoch=epoch.number,
        paused=epoch.paused,
        policy_version=epoch.policy_version,
        stored_bytes=epoch.stored_bytes,
        live_envs=epoch.envs.live,
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
    own = sum(lane.sequences for lane in epoch.lanes.of_env(env_id))
    # What others sent does not make this environment wait where, for all that is there, no batch can be formed: the
    # batch may be waiting for this very environment.
    others = epoch.lanes.packed(largest, sizes, without=env_id) if full or total < batch_size else 0
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
    tally = epoch.tally
    oldest = min((epoch.lanes.oldest(size).head.added_at for size in epoch.lanes.counts), default=None)
    shown = sorted(epoch.envs.latest(envs), key=lambda env: env.env_id)
    return Report(
        **{count.name: getattr(tally, count.name) for count in fields(Counts)},
        envs=[_env_report(epoch, env, now) for env in shown],
        registered_envs=len(epoch.envs.all),
        oldest_age=None if oldest is None else now - oldest,
        waiting=waiting(epoch),
        queued_sequences=_sequences(epoch, list(epoch.lanes.counts)),
        batches_out=len(epoch.leases.out),
        batches_returned=len(epoch.leases.returned),
        batches_kept=len(epoch.leases.kept),
        staleness=Staleness(tally.aged, tally.staleness_sum / max(1, tally.aged), tally.staleness_largest),
    )


def _sequences(epoch: Epoch, sizes: list[int]) -> int:
    return sum(size * epoch.lanes.counts[size] for size in sizes)


def _batches_ahead(epoch: Epoch, env_id: int | None) -> int:
    """The batches before that of a group which comes now. What others sent does not count where a batch may be waiting
    for this very sender: none can be formed of all that is there, or it has a minimum share (and may have to send more
    than that, for the batch to be exact)."""
    batch_size = epoch.settings.batch_size
    sizes = batchable_sizes(epoch)
    own = sum(lane.sequences for lane in epoch.lanes.of_env(env_id) if lane.size in sizes)
    total = _sequences(epoch, sizes) if can_form_batch(epoch) else 0
    ahead = max(own, total) // batch_size
    share = share_of(epoch, epoch.envs.all[env_id]) if env_id in epoch.envs.sharing else 0
    return min(ahead, own // share if own >= batch_size else 0) if share else ahead


def _ahead_of_trainer(epoch: Epoch, env: Env, own: int, total: int) -> bool:
    """Whether a group that this environment starts now would be too old by its turn, with the trainer's bound."""
    registration = epoch.settings
    if registration.max_staleness is None:
        return False
    batches = registration.max_staleness + 1
    if env.env_id in epoch.envs.sharing:  # batches wait for it, so only what it has itself may make it wait
        return own >= max(registration.batch_size, batches * share_of(epoch, env))
    return max(own, total) >= batches * registration.batch_size


def _env_report(epoch: Epoch, env: Env, now: float) -> EnvReport:
    lanes = epoch.lanes.of_env(env.env_id)
    odd = epoch.odd.get(env.env_id)
    facts = {fact.name: getattr(env, fact.name) for fact in fields(EnvSummary)}
    return EnvReport(
        **{**facts, "weight": epoch.envs.weight_of(env)},
        served_share=env.served_sequences / max(1, epoch.tally.sequences_served),
        wanted_share=epoch.envs.weight_of(env) if epoch.registration and epoch.registration.mix == "weight" else None,
        queued_groups=sum(lane.groups for lane in lanes),
        queued_sequences=sum(lane.sequences for lane in lanes),
        buffered_groups=len(odd) if odd else 0,
        oldest_age=max((now - lane.head.added_at for lane in lanes), default=None),
        unheard=now - env.last_heard,
    )


def waiting(epoch: Epoch) -> list[Waiting]:
    """What holds back a batch, then what holds back a group; the first 100."""
    if epoch.registration is None:
        return [Waiting(None, 0, 0, "every batch waits for a trainer: none has registered (POST /register)")]
    found = [Waiting(None, 0, 0, why) for why in _holding_back(epoch)]
    batch_size = epoch.registration.batch_size
    for share in awaited(batch_size, epoch.lanes, scaled(batch_size, shares(epoch))):
        why = f"every batch waits for its minimum share of {share.sequences} sequences: it has none queued that fit"
        found.append(Waiting(share.env_id, share.unit_size, 0, why))
    aside = epoch.lanes.of_sizes(sorted(set(epoch.lanes.counts) - set(batchable_sizes(epoch))))
    for lane in heapq.nsmallest(MAX_WAITING, aside, key=UnitQueue.key):
        why = f"groups of {lane.size} are set aside: with the sizes that are sent, no sum is batch_size {batch_size}"
        if lane.size > batch_size:
            why = f"groups of {lane.size} are set aside: they are larger than batch_size {batch_size}"
        found.append(Waiting(lane.env_id, lane.size, lane.groups, why))
    for env_id in heapq.nsmallest(MAX_WAITING, (env_id for env_id, odd in epoch.odd.items() if odd)):
        odd, size = epoch.odd[env_id], epoch.envs.all[env_id].group_size
        why = f"{odd.sequences} sequences in groups of odd sizes wait for others that complete a group of {size}"
        found.append(Waiting(env_id, size, len(odd), why))
    return found[:MAX_WAITING]


def _holding_back(epoch: Epoch) -> Iterator[str]:
    """Why there is no batch, or nobody who sends groups for one; nothing about minimum shares."""
    if epoch.paused:
        yield "the run is paused: every environment holds (POST /resume)"
    if not epoch.started:
        yield "environments wait to register: the trainer has not asked for a batch yet (GET /batch)"
    if epoch.leases.returned or can_form_batch(epoch):
        return
    batch_size, queued = epoch.settings.batch_size, _sequences(epoch, batchable_sizes(epoch))
    if queued < batch_size:
        yield f"the next batch waits for sequences: {queued} of {batch_size} are in the queue"
    else:
        yield f"the next batch waits for other sizes: of the {queued} sequences no groups sum to exactly {batch_size}"


def _sentence(epoch: Epoch, one: Waiting) -> str:
    """What waits, with the environment's name, as the page has it."""
    if one.env_id is None:
        return f"{one.why}."
    env = epoch.envs.get(one.env_id)
    return f"{env.wandb_name if env else 'not registered'} (environment {one.env_id}): {one.why}."
