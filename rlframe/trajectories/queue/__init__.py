"""The queue of a run: what environments send becomes batches. Pure: no input or output, no clock, no randomness."""
