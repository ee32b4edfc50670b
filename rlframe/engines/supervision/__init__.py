"""Nodes that are processes: started, watched, started again and ended by a supervisor."""
