"""Options of an experiment: fields of dataclasses, names of classes, and their JSON in `config.json`."""
