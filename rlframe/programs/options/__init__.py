"""Convert the user's arguments to the options of an experiment, and to the values in `config.json`.

`rlframe.train("dqn", MyEnv, head="categorical", head_num_atoms=21)`, step by step:

- `registry.name_of` replaces the class by its name, `/home/me/my_env.py:MyEnv`, because an `Experiment` contains only
  names. `object_names.load_object` loads the class by this name, in this process or in another one.
  `registry.agent_class` looks up `dqn`.
- `make_experiment.apply_preset` creates the defaults, and `change_options` applies the user's options:
  `fields.resolve_names` converts `head_num_atoms` to `head.num_atoms`. `fields.convert` checks each value against the
  annotation of its field. `fields.with_options` sets the value in the agent's config.
- `make_experiment.from_flat` creates the `Experiment` from flat options: the fields of the experiment and of its
  topology.
- `saved_experiment.save_experiment` writes the experiment with `fields.to_jsonable`, and `load_experiment` reads it.
- `resume_experiment` compares the options of a resumed run with the saved options.

A value can come from five places. For example, `agent.batch_size` in `rlframe.train("dqn", batch_size=128)`:

1. `api.base_experiment` returns the saved experiment if `config` or `resume` is given. Otherwise it calls
   `default_experiment`:
2. `from_flat` uses the defaults of `Experiment` and of the topology's config. A topology may override a few defaults of
   `Experiment` (`TopologyConfig.defaults`: language models use `num_envs=1`).
3. `fill_configs` creates the configs of the agent and its network. The default of `DQNConfig` is 32.
4. `find_preset` finds `dqn/cartpole`, and `apply_preset` applies its values with `change_options`: 64.
5. `change_options` applies the user's options: 128. On the command line, tyro parses the arguments, with the values of
   step 4 as defaults.
"""
