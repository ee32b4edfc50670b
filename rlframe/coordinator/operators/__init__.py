"""Where a coordinator's workers come from: processes of this machine, Ray."""
