"""Parameters under rising versions, on their way from a learner to the inferencers.

A learner packs each version once and puts it into its `Publication`. An inferencer reads the newest one there:
directly, through shared memory (`PublicationReader`), or by a call; `ParamReader` picks the way.

    Learner -> Packing                      packing.py: a tree as few arrays (`PackedParams`)
            -> Publication                  publication.py: the newest version
                 same process:   read as it is (`LocalParams`, its base)
                 same machine:   PublicationReader, through shared memory
                 elsewhere:      a call of `get_packed`
    ParamReader -> Refresher -> Inferencer  reader.py: finds one of these ways, and follows new versions

One version, from the learner to an inferencer in another process of the machine:

1. `Learner.step` ends with `Publication.publish(7, packed)`.
2. The inferencer calls `ParamReader.get_packed(6)`, which has a `PublicationReader`. The two processes copy the arrays
   through shared memory (the steps are in publication.py), and it returns (7, `PackedParams`).
3. The inferencer uploads the few arrays as they are, and unpacks the tree inside of its jitted call.

In elastic the publication is in the coordinator's `ParamStore`, a process that outlives the learner: the learner puts
each version there.
"""

from rlframe.params.packing import PackedParams
from rlframe.params.source import ParamSource

__all__ = ["PackedParams", "ParamSource"]
