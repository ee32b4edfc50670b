"""What a coordinator decides, as pure code: events and the time come in, effects go out."""
