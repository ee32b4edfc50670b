"""Where a coordinator's workers come from: given addresses, processes of this machine, Kubernetes, Ray."""
