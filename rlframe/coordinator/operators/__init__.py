"""Operators start a coordinator's workers: as processes of this machine, or on Ray."""
