"""Parameters under rising versions, on their way from a learner to the inferencers.

A learner packs each version once and puts it into its `Publication`. An inferencer reads the newest one there:
directly, through shared memory (`SharedParams`), or by a call; `ParamReader` picks the way. In elastic the publication
is in a `ParamStore`, a process that outlives the learner, and keeps pinned versions.

    Learner -> Packing                      packing.py: a tree as few arrays (`PackedParams`)
            -> Publication                  publication.py: the newest version
                 same process:   read as it is (`LocalParams`, its base)
                 same machine:   SharedParams, the reader of its memory
                 elsewhere:      a call of `get_packed`
            -> ParamStore                   store.py: in elastic, between the learner and the publication
    ParamReader -> Refresher -> Inferencer  reader.py: finds one of these ways, and follows new versions

One version, from the learner to an inferencer in another process of the machine:

1. `Learner.step` ends with `Publication.publish(7, packed)`.
2. The inferencer calls `ParamReader.get_packed(6)`, which has a `SharedParams` of that publication. The two processes
   copy the arrays through shared memory (steps at `SharedParams`), and it returns (7, `PackedParams`).
3. The inferencer uploads the few arrays as they are, and unpacks the tree inside of its jitted call.
"""

from rlframe.params.packing import PackedParams
from rlframe.params.source import ParamSource
from rlframe.params.store import Attempt, ParamStore

__all__ = ["Attempt", "PackedParams", "ParamSource", "ParamStore"]
