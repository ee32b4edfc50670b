"""Loading of user code: `my_agent.py:Mine`, `my_package.maze:Maze`.

`files.py` loads the files and modules that the user names. `directories.py` loads the modules that these files and
modules import from their own directories.
`programs/options/object_names.py` parses the names.

`rlframe.train("my_agent.py:Mine", "my_package.maze:Maze")` in a notebook, step by step:

1. `forget_changed` removes loaded files that have changed since the previous run.
2. `load_file("my_agent.py")` executes the file as a module with a name that depends on the path. `import_module`
   imports `my_package.maze` from the working directory. `directories.loading` lets each file or module import from its
   own directory, since two directories may both have a `helpers.py`.
3. `keep_files` keeps the loaded versions until the run ends. `module_directories` returns the directory of `my_package`
   for `config.json` and for other processes. These call `restore_module_directories` before they load the module.
"""
