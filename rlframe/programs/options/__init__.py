"""Options of an experiment: from what a user gives to values that `config.json` keeps.

`rlframe.train("dqn", MyEnv, head="categorical", head_num_atoms=21)`, step by step:

- `registry.name_of` names the class, as `/home/me/my_env.py:MyEnv`: an `Experiment` holds names.
  `object_names.load_object` finds the class again by that name, in this process or in another one;
  `registry.agent_class` finds the agent that `dqn` means.
- `make_experiment.apply_preset` makes the defaults, and `change_options` puts the user's options into them:
  `fields.resolve_names` finds the option that `head_num_atoms` means: `head.num_atoms`. `fields.with_options` puts the
  value into the agent's config, once `fields.convert` has checked it against the annotation of the field.
- `make_experiment.from_flat` makes the `Experiment`. Its flat options are the fields of the experiment and of its
  topology.
- `config_file.save_experiment` writes it by `fields.to_jsonable`, and `load_experiment` reads it.
- `resume.continue_experiment` checks the options of a resumed run against those that were saved.
"""
