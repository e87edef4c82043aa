"""One file a verb: parse, call one function below, hand its report to the output.

    commands/command.py   what every command has: common options, examples, exit codes, errors as messages
    commands/root.py      the tree of commands; each is imported when it is used
    commands/<verb>.py    a function `<verb>(session, …)` under `@command(…)`

A command module imports only the command line's own modules at the top; numpy, torch, the store and the engines are
imported inside its function, so that `lmcache --help` stays quick.
"""
