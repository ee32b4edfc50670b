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
- `resume.resume_experiment` checks the options of a resumed run against those that were saved.

Where a value is from, with `agent.batch_size` after each step of `rlframe.train("dqn", batch_size=128)`:

1. `api.base_experiment` returns the saved experiment, with `config` or `resume`. Else `default_experiment` makes one:
2. `from_flat` makes it of the defaults of the classes `Experiment` and the topology's config. A few fields have other
   defaults for a topology (`TopologyConfig.defaults`: a language model has `num_envs=1`).
3. `fill_configs` makes the configs of the agent and of its network: 32, the default of `DQNConfig`.
4. `find_preset` finds `dqn/cartpole`, and `apply_preset` puts its values over these, by `change_options`: 64.
5. `change_options` puts the user's options over all: 128. On the command line, tyro finds these in the arguments; its
   defaults are the values of step 4.
"""
