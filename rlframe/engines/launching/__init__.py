"""Programs of several processes: started, watched, restarted and ended together."""
