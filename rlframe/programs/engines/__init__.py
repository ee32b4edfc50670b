"""What runs the nodes of a program: see `rlframe.programs.topologies.Engine`."""
