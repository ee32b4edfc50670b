"""The files and modules that a user names: `my_agent.py:Mine`, `my_package.maze:Maze`.

`files.py` loads them, `directories.py` the modules that they import from their own directory. The names themselves are
read by `programs/options/object_names.py`.

`rlframe.train("my_agent.py:Mine", "my_package.maze:Maze")` in a notebook, step by step:

1. `forget_changed` forgets the loaded files that have been edited since the run before.
2. `load_file("my_agent.py")` executes the file as a module whose name has the path. `import_module` imports
   `my_package.maze` from the working directory. `directories.loading` gives each of them the modules of its own
   directory: two directories may both have a `helpers.py`.
3. `keep_files` keeps these versions until the run ends. `module_directories` says where `my_package` is, for
   `config.json` and for other processes, which call `restore_module_directories` before they load it.
"""
