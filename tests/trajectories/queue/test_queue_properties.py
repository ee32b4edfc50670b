"""Test the queue with random commands. No group is lost or served twice, the order is kept, and batches are full."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import msgpack

from rlframe.trajectories.queue import reports
from rlframe.trajectories.queue.leases import ANSWER_TTL, KEY_TTL
from rlframe.trajectories.queue.queue import Queue
from tests.trajectories.queues import SETTINGS

LAPSE = 30.0


def copied(value):
    return msgpack.decode(msgpack.encode(value))


def sums_of(sizes):
    sums = {0}
    for size in sizes:
        sums |= {total + size for total in sums}
    return sums


def ids_in(unit):
    return [part[0] for part in unit[5]] or [unit[0]]


class Twin:
    """A simple, slow model of the queue for checks. To find a batch, it tries every subset of units."""

    def __init__(self, queue):
        epoch = copied(queue.get_state())["epoch"]
        self.unit_queues = {
            (env_id, size): [msgpack.decode(unit) for unit in units] for env_id, size, units in epoch["lanes"]
        }
        self.buffers = dict(epoch["odd"])
        self.envs = epoch["envs"][0]
        out, returned, answered = epoch["leases"]
        self.out = [batch for batch, _ in out]
        self.returned = returned
        self.answered = [batch for _, _, batch, _ in answered if batch["lease_until"] is None]
        self.sharing = [env for env in self.envs if env["live"] and env["min_batch_allocation"]]

    def queued(self):
        return [group_id for units in self.unit_queues.values() for unit in units for group_id in ids_in(unit)]

    def needed_group_ids(self):
        """Return the ids of all groups whose payloads a consumer can still request."""
        buffered = [group[0] for groups in self.buffers.values() for group in groups]
        batches = [group_id for batch in self.out + self.returned + self.answered for group_id in batch["group_ids"]]
        return sorted(self.queued() + buffered + batches)

    def sizes(self):
        return [size for (_, size), units in self.unit_queues.items() for _ in units]

    def oldest_first(self, batch_size):
        """Return the ids of the groups in the next batch, or None. The method ignores minimum shares."""
        unit_queues = {key: list(units) for key, units in self.unit_queues.items()}
        taken, left = [], batch_size
        while left:
            for key in sorted((key for key in unit_queues if unit_queues[key]), key=lambda key: unit_queues[key][0][0]):
                unit = unit_queues[key].pop(0)
                if left - key[1] in sums_of(size for (_, size), units in unit_queues.items() for _ in units):
                    taken.append(unit)
                    left -= key[1]
                    break
                unit_queues[key].insert(0, unit)
            else:
                return None
        return [group_id for unit in sorted(taken, key=lambda unit: unit[0]) for group_id in ids_in(unit)]


class RandomCommands(RuleBasedStateMachine):
    @initialize(
        batch_size=st.sampled_from([4, 6, 8, 9]),
        stale=st.sampled_from(["keep", "discard"]),
        mix=st.sampled_from(["arrival", "arrival", "weight"]),
        first_envs=st.lists(st.tuples(st.sampled_from([2, 3, 4]), st.sampled_from([None, None, 0.5])), max_size=3),
    )
    def start(self, batch_size, stale, mix, first_envs):
        self.batch_size = batch_size
        self.queue = Queue()
        self.log = []
        self.now = 0.0
        self.tokens = 0
        self.sizes = {}  # group id -> number of sequences, for every accepted group
        self.forgotten = set()
        self.whole = set()  # ids of the groups that are large enough without other groups
        self.last_served = {}  # (env_id, size) -> id of the group in `whole` that was served last
        self.delivered = {}  # batch_id -> ids of the groups in the batch
        self.given = {}  # consumer -> (id of the last request, received batch, time of the request)
        self.accepted = {}  # idempotency key -> time at which a group with the key was accepted
        self.registration = {
            **SETTINGS,
            "batch_size": batch_size,
            "max_staleness": 2,
            "stale": stale,
            "mix": mix,
            "lapse_after": LAPSE,
        }
        self.senders = {}
        self.do("register", settings=self.registration, uuid="uuid", now=0.0)
        self.do("note_trainer")
        for size, minimum in first_envs:
            self.register_env(size, minimum)

    def do(self, command, **arguments):
        answer = getattr(self.queue, command)(**arguments)
        forgotten = self.queue.epoch.released
        for group_id in forgotten:
            assert group_id in self.sizes and group_id not in self.forgotten
            self.forgotten.add(group_id)
        self.log.append((command, copied(arguments), answer, list(forgotten)))
        return answer

    @rule(seconds=st.sampled_from([0.5, 5.0, 20.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def an_hour_later(self):
        self.now += ANSWER_TTL
        self.do("expire", now=self.now)
        assert Twin(self.queue).answered == []

    @rule(
        size=st.sampled_from([1, 1, 2, 2, 3, 4, 5, 10]),
        env_id=st.sampled_from([None, 0, 0, 1, 1, 2, 7]),
        version=st.sampled_from([None, None, 0, 1, 2]),
        key=st.sampled_from([None, None, "a", "b"]),
        times=st.integers(1, 4),
    )
    def add(self, size, env_id, version, key, times):
        for _ in range(times):
            answer = self.do(
                "add",
                group_id=self.queue.next_group,
                sequences=size,
                tokens=size,
                size_bytes=size,
                env_id=env_id,
                policy_version=version,
                key=key,
                now=self.now,
            )
            if answer.duplicate:
                assert key in self.accepted
            elif answer.status != "refused":
                assert key is None or self.now >= self.accepted.get(key, -KEY_TTL) + KEY_TTL
                self.accepted[key] = self.now
                self.sizes[answer.group_id] = size
                self.senders[answer.group_id] = env_id
                if answer.status == "received":
                    self.whole.add(answer.group_id)
            assert answer.too_large == (answer.status == "refused" and size > self.batch_size)

    @rule(
        groups=st.lists(
            st.tuples(
                st.sampled_from([1, 2, 2, 3, 4, 4]), st.sampled_from([0, 0, 1, 2, None]), st.sampled_from([None, 1])
            ),
            min_size=4,
            max_size=12,
        ),
        lease=st.sampled_from([None, 3.0]),
        consumer=st.sampled_from([None, "a"]),
    )
    def work(self, groups, lease, consumer):
        """Send groups and take up to four batches, as in normal operation."""
        for size, env_id, version in groups:
            self.add(size, env_id, version, None, 1)
        for number in range(4):
            self.take(lease, consumer, f"work {number}")

    @rule(size=st.sampled_from([1, 2, 3, 4, 6]), minimum=st.sampled_from([None, None, 0.25, 0.5]))
    def another_env(self, size, minimum):
        self.register_env(size, minimum)

    def register_env(self, size, minimum):
        self.tokens += 1
        self.join(size, minimum, None)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), size=st.sampled_from([2, 3, 4]), minimum=st.sampled_from([None, 0.5]))
    def come_back(self, data, size, minimum):
        self.join(size, minimum, f"token {data.draw(st.integers(1, self.tokens))}")

    def join(self, size, minimum, resume_token):
        self.do(
            "register_env",
            desired_name="env",
            max_token_length=8,
            weight=1.0,
            group_size=size,
            min_batch_allocation=minimum,
            resume_token=resume_token,
            token=f"token {self.tokens}",
            now=self.now,
        )

    @rule(env_id=st.integers(0, 2))
    def disconnect_env(self, env_id):
        self.do("disconnect_env", env_id=env_id)

    @rule(env_id=st.integers(0, 2))
    def heartbeat(self, env_id):
        self.do("heartbeat", env_id=env_id, now=self.now)

    @rule(
        lease=st.sampled_from([None, 3.0, 15.0]),
        consumer=st.sampled_from([None, "a", "b"]),
        request=st.sampled_from([None, "1", "2"]),
    )
    def take(self, lease, consumer, request):
        worth_it = self.queue.may_take(self.now)
        self.do("expire", now=self.now)
        before = Twin(self.queue)
        given = self.given.get(consumer) if request is not None else None
        step = self.queue.status().current_step
        again = given is not None and given[0] == request and given[1] is not None and self.known(before, given[1])
        again = again and self.now < given[2] + ANSWER_TTL
        batch = self.do("take", now=self.now, lease_seconds=lease, consumer=consumer, request=request)
        came_back = again and any(kept["batch_id"] == given[1].batch_id for kept in before.returned)
        # The queue records a new request even if it got no batch.
        if consumer is not None and (not again or came_back):
            self.given[consumer] = (request, batch, self.now)
        if again:
            assert (batch.batch_id, batch.group_ids) == (given[1].batch_id, given[1].group_ids)
        elif before.returned:
            assert batch.batch_id == before.returned[0]["batch_id"]
        elif batch is None:
            self.nothing_fits()
        else:
            assert worth_it
            self.check_new(batch, before)
        if batch is None or batch.batch_id in self.delivered:
            assert self.queue.status().current_step == step
        if batch is not None:
            groups = self.delivered.setdefault(batch.batch_id, batch.group_ids)
            assert groups == batch.group_ids

    def known(self, before, batch):
        """Return True if the queue still has the batch and has not delivered it to another consumer."""
        kept_batches = before.answered if batch.lease_until is None else before.out + before.returned
        return any(kept["batch_id"] == batch.batch_id for kept in kept_batches) and not self.taken_over(batch)

    def taken_over(self, batch):
        return any(other.batch_id == batch.batch_id and other.delivery > batch.delivery for other in self.latest())

    def latest(self):
        return [answer for command, _, answer, _ in self.log if command == "take" and answer is not None]

    def check_new(self, batch, before):
        assert batch.sequences == sum(self.sizes[group_id] for group_id in batch.group_ids) == self.batch_size
        served = {group_id for groups in self.delivered.values() for group_id in groups}
        assert served.isdisjoint(batch.group_ids) and len(set(batch.group_ids)) == len(batch.group_ids)
        for group_id in batch.group_ids:
            if group_id in self.whole:
                key = self.senders[group_id], self.sizes[group_id]
                assert self.last_served.get(key, -1) < group_id
                self.last_served[key] = group_id
        discarded = before.queued() and set(before.queued()) - set(Twin(self.queue).queued()) - set(batch.group_ids)
        if not before.sharing and not discarded and self.registration["mix"] == "arrival":
            assert list(batch.group_ids) == before.oldest_first(self.batch_size)
        assert self.queue.status().current_step == len(self.delivered) + 1

    def nothing_fits(self):
        """Check that the queued groups cannot fill a batch, or that the next batch waits for a minimum share."""
        after = Twin(self.queue)
        assert not self.queue.may_take(self.now)
        if self.batch_size in sums_of(after.sizes()):
            for env in after.sharing:
                sizes = after.sizes()
                own = {size for (env_id, size), units in after.unit_queues.items() if env_id == env["env_id"] and units}
                for size in own:
                    sizes.remove(size)
                    if self.batch_size - size in sums_of(sizes):
                        break
                    sizes.append(size)
                else:
                    return
            raise AssertionError(f"the queue is stuck: {after.unit_queues}")

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def ack(self, data):
        self.do("ack", batch_id=data.draw(st.sampled_from(sorted(self.delivered))))

    @precondition(lambda self: self.delivered)
    @rule(data=st.data(), consumer=st.sampled_from([None, "a", "b"]))
    def nack(self, data, consumer):
        self.do("nack", batch_id=data.draw(st.sampled_from(sorted(self.delivered))), consumer=consumer)

    @precondition(lambda self: self.delivered)
    @rule(data=st.data(), consumer=st.sampled_from([None, "a", "b"]))
    def renew(self, data, consumer):
        batch_id = data.draw(st.sampled_from(sorted(self.delivered)))
        leased = any(batch["batch_id"] == batch_id for batch in Twin(self.queue).out)
        renewed = self.do("renew", batch_id=batch_id, lease_seconds=10.0, now=self.now, consumer=consumer)
        assert leased or not renewed

    @rule(version=st.integers(0, 4))
    def set_policy_version(self, version):
        self.do("set_policy_version", version=version)

    @rule(paused=st.booleans())
    def pause(self, paused):
        self.do("pause" if paused else "resume")

    @rule()
    def restore(self):
        """Restore the queue from its state, as after a kill of the service process."""
        restored = Queue()
        restored.set_state(copied(self.queue.get_state()))
        for env_id in range(3):
            assert restored.env_status(env_id) == self.queue.env_status(env_id)
        assert restored.report(self.now) == self.queue.report(self.now)
        assert restored.may_take(self.now) == self.queue.may_take(self.now)
        self.queue = restored

    @invariant()
    def no_group_is_lost_or_duplicated(self):
        if not hasattr(self, "queue"):
            return
        twin = Twin(self.queue)
        needed_group_ids = sorted(set(self.sizes) - self.forgotten)
        assert twin.needed_group_ids() == needed_group_ids == sorted(self.queue.epoch.needed_group_ids())
        status = self.queue.status()
        assert status.stored_bytes == sum(self.sizes[group_id] for group_id in needed_group_ids)
        assert status.queue_size + status.buffered + status.leased == len(needed_group_ids) - sum(
            len(batch["group_ids"]) for batch in twin.answered
        )

    @invariant()
    def sums_match_the_units(self):
        if not hasattr(self, "queue"):
            return
        twin = Twin(self.queue)
        for env_id, groups in twin.buffers.items():
            assert twin.envs[env_id]["group_size"] not in sums_of(group[1] for group in groups)
        batchable_sizes = set(reports.batchable_sizes(self.queue.epoch))
        aside = sum(
            len(ids_in(unit))
            for (_, size), units in twin.unit_queues.items()
            for unit in units
            if size not in batchable_sizes
        )
        assert self.queue.status().set_aside == aside
        largest = max(batchable_sizes, default=1)
        total = sum(size for size in twin.sizes() if size in batchable_sizes)
        count_others = total < self.batch_size or self.batch_size in sums_of(twin.sizes())
        for env in twin.envs:
            own = others = 0
            for (env_id, size), units in twin.unit_queues.items():
                if env_id == env["env_id"]:
                    own += size * len(units)
                elif size in batchable_sizes:
                    other = twin.envs[env_id] if env_id is not None and env_id < len(twin.envs) else None
                    minimum = 0
                    if other is not None and other["live"] and other["group_size"] == size:
                        minimum = int(self.batch_size * (other["min_batch_allocation"] or 0))
                    others += max(0, -(-size * len(units) // largest) * largest - minimum)
            status = self.queue.env_status(env["env_id"])
            if not status.hold:
                assert status.max_group_size == largest
                assert status.queue_size == (own + others * count_others) // env["largest_group"]
                assert status.self_queue_size == own // env["largest_group"]

    def teardown(self):
        """Check that a second queue gives the same answers to the same commands and ends in the same state."""
        if not hasattr(self, "queue"):
            return
        replica = Queue()
        for command, arguments, answer, forgotten in self.log:
            assert replica.apply(command, arguments) == answer
            assert replica.epoch.released == forgotten
        assert replica.get_state() == self.queue.get_state()


TestRandomCommands = RandomCommands.TestCase
TestRandomCommands.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
