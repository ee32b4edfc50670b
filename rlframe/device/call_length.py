"""The length of jitted calls: how many rounds a call makes, so that it takes about half a second."""

from __future__ import annotations

_CALL_SECONDS = 0.5  # intended duration of a call: signals and progress wait for its end

MOST_PER_CALL = 2**30  # limit of all counts of one call, which are int32. The last round may pass it.

# Limit of the growth from one call to the next. The first calls are so short that they measure little but their fixed
# costs. With this limit, a call takes at most a few seconds if the next rounds are slower than those measured.
_MOST_GROWTH = 10.0


class CallLength:
    """The number K of rounds of the next call, or of steps in an evaluation.

    K is an argument of the jitted function, so one compilation is enough. The results do not depend on K.

    Rounds with updates can take a thousand times as long as the rounds before the first update. So the call in which a
    session makes its first update must end after `enough_updates`, and `choose` then starts again from K = 1.

    Attributes:
        count: K.
    """

    def __init__(self) -> None:
        self.count = 1  # the first call also compiles
        self._has_compiled = self._has_learned = False

    @property
    def enough_updates(self) -> int:
        """The number of updates after which the next call must end with its round. See `CallLimits`."""
        return MOST_PER_CALL if self._has_learned else 1

    def choose(self, count: int, seconds: float, updates: int = 0) -> None:
        """Choose K from the newest call: its number of rounds, its duration, and its number of updates."""
        is_first_to_learn = updates > 0 and not self._has_learned
        self._has_learned |= is_first_to_learn
        if not self._has_compiled:  # this call compiled, so its duration says nothing
            self._has_compiled = True
        elif is_first_to_learn:
            self.count = 1
        elif count:
            wanted = count * _CALL_SECONDS / max(seconds, 1e-6)
            # A call can end after a few of its rounds, so the limit of the growth is relative to K.
            self.count = int(min(max(1.0, wanted), _MOST_GROWTH * self.count, MOST_PER_CALL))
